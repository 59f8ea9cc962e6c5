"""A constant added to every score.

Claim: where every key has the same number in one channel, a query's number in it moves lse by exactly scale
    times their product, and leaves out as it is.
Why: softmax does not see a constant, lse sees nothing else. So the scale shows alone, to the last digits, and
    so does a score of low precision.
Exact or bounded: within both radii.
Kills: wrong scales, logarithms in the wrong base, scores in low precision.
"""

import math
from typing import Any

import torch

from mla_ref.case import Case
from oracles.compare import told, worst_of
from oracles.oracle import Oracle, Trial
from oracles.probes import (
    LATENT,
    admissible,
    agree,
    decoded,
    encoded,
    exactly_scaled,
    made,
    materialized,
    moved_truth,
    nothing,
    restored,
    runnable,
)
from oracles.verdict import Finding

# What is added to every score, up to a power of two.
SHIFT = 12.0


def check(trial: Trial) -> Finding:
    """Run with the query's number in that channel 0, and a power of two."""
    case = exactly_scaled(trial.case)
    if not case.config.qk_rope_head_dim:
        return nothing("without rope channels no channel is the same in every key")
    if not runnable(trial, case):
        return nothing("the backend does not take the probe")
    before, after = (made(make, case, trial.device) for make in (level, raised))
    if not bool((decoded(before)[1][:, -1] == 1.0).all()):
        return nothing("the format keeps no channel the same in every key")
    first, again = trial.run(before), trial.run(after)
    there, here = (admissible(make, trial, case) for make in (level, raised))
    findings = []
    for name, letters in trial.problem.output_shapes.items():
        moved = (
            added(case) * after.softmax_scale
            if name == "lse"
            else moved_truth(trial, here[name], there[name])
        )
        got, want = getattr(again, name), getattr(first, name)
        findings.append(agree(name, got, want, here[name], there[name], letters, after, moved))
    return told(f"with {added(case) * after.softmax_scale:.9g} more on every score", worst_of(findings))


def added(case: Case) -> float:
    """The query's number in the channel in which every key has 1."""
    return 2.0 ** math.ceil(math.log2(SHIFT / case.config.softmax_scale))


def level(case: Case, device: str) -> Any:
    """The case's inputs with 1 in the last rope channel of every key, and 0 in that of every query."""
    inputs = materialized(case, device)
    kv_c, k_pe = decoded(inputs)
    k_pe = torch.cat([k_pe[:, :-1], torch.ones_like(k_pe[:, -1:])], dim=1)
    q_pe = inputs.q_pe.clone()
    q_pe[..., -1] = 0.0
    return restored(inputs, encoded(inputs, kv_c, k_pe))._replace(q_pe=q_pe)


def raised(case: Case, device: str) -> Any:
    """The same with the added number in the last rope channel of every query."""
    inputs = level(case, device)
    inputs.q_pe[..., -1] = added(case)
    return inputs


ORACLE = Oracle(
    name="shift",
    check=check,
    problems=LATENT,
    kills=(
        "scale_one_percent",
        "scale_of_latent_width",
        "scale_without_mscale",
        "exp2_of_natural_scores",
        "lse_base_2",
        "rope_part_dropped",
        "scores_in_bf16",
        "scores_in_fp16",
        "products_added_in_bf16",
        "scale_in_bf16",
    ),
)
