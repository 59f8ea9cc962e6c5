"""Every key twice.

Claim: with all keys twice, a row that sees them all has the same out, and an lse larger by ln 2.
Why: every weight is halved and counted twice.
Exact or bounded: within both radii. It is the newest row of each request that sees every key.
Kills: keys lost or doubled at the edges of splits, merges in the wrong base, weights of low precision.
"""

import math
from itertools import pairwise
from typing import Any

import torch

from mla_ref.case import Case
from oracles.compare import told, worst_of
from oracles.oracle import Oracle, Trial
from oracles.probes import (
    ATTENTION,
    admissible,
    agree,
    alone,
    batch,
    cached_anew,
    first_keys,
    last_rows,
    made,
    materialized,
    moved_truth,
    nothing,
    picked,
    rows_of,
    runnable,
    stored,
    with_parts,
)
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run the newest rows over doubled keys, and compare them with those of the case."""
    case = _case(trial.case, trial.inputs)
    if not runnable(trial, case):
        return nothing("the backend does not take lengths twice as long")
    inputs = made(doubled, trial.case, trial.device)
    again, first = trial.run(inputs), trial.run(trial.inputs)
    rows = rows_of(trial.inputs, alone(trial.inputs, last_rows))
    here, findings = admissible(doubled, trial), []
    for name, letters in trial.problem.output_shapes.items():
        there = picked(trial.expected()[name], rows)
        moved = math.log(2.0) if name == "lse" else moved_truth(trial, here[name], there)
        got, other = getattr(again, name), getattr(first, name)[rows]
        findings.append(agree(name, got, other, here[name], there, letters, inputs, moved))
    return told("with every key twice", worst_of(findings))


def _case(case: Case, inputs: Any) -> Case:
    parts = alone(inputs, last_rows)
    return with_parts(case, [part._replace(kv_len=2 * part.kv_len) for part in parts])


def doubled(case: Case, device: str) -> Any:
    """The newest row of each request, over its keys and once more its keys."""
    inputs = materialized(case, device)
    parts, starts = alone(inputs, last_rows), list(pairwise(first_keys(inputs)))
    pieces = [torch.arange(*starts[part.request], device=device).repeat(2) for part in parts]
    order = torch.cat([torch.arange(0, device=device), *pieces])
    entries = {name: x[order] for name, x in stored(inputs).items()}
    return cached_anew(batch(inputs, parts), _case(case, inputs), entries)


ORACLE = Oracle(
    name="duplication",
    check=check,
    problems=ATTENTION,
    kills=(
        "key_dropped",
        "key_twice",
        "lse_base_2",
        "lse_of_unscaled_maximum",
        "merge_average",
        "sum_not_rescaled",
        "paged_key_dropped",
        "sum_in_bf16_in_the_noise",
        "exponential_to_a_hundredth",
    ),
)
