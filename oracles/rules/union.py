"""Attention over a union.

Claim: attention over all keys is the merge of attention over two parts of them, by the log-sum-exps returned.
Why: it is how chunked prefill, split keys and context parallelism put their parts together, so out and lse
    have to fit each other, in natural units, for every part, one without keys included.
Exact or bounded: within the radius of the whole and what the parts' radii do to a merge in float64.
Kills: log-sum-exps in the wrong base or without their maximum, keys lost at the edges of splits, a
    denominator of low precision.
"""

from typing import Any

import torch

from mla_ref.case import Case
from oracles.bounds import merge_of
from oracles.compare import told, worst_of
from oracles.oracle import Oracle, Trial
from oracles.probes import (
    ATTENTION,
    Part,
    admissible,
    agree,
    alone,
    batch,
    last_rows,
    made,
    materialized,
    moved_truth,
    nothing,
    picked,
    pools,
    rows_of,
    runnable,
    with_parts,
)
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run the newest rows over the first and the second half of their pages, and merge."""
    parts = halves(trial.inputs)
    if not runnable(trial, with_parts(trial.case, parts)):
        return nothing("the backend does not take halves of these lengths")
    inputs = made(halved, trial.case, trial.device)
    output, known = trial.run(inputs), admissible(halved, trial)
    outs, lses = (_in_halves(getattr(output, name)) for name in ("out", "lse"))
    out, lse = (
        known[name]._replace(mid=_in_halves(known[name].mid), radius=_in_halves(known[name].radius))
        for name in ("out", "lse")
    )
    got, truth = merge_of(outs, lses, out, lse), merge_of(out.mid, lse.mid, out, lse)
    rows = rows_of(trial.inputs, alone(trial.inputs, last_rows))
    findings = []
    for name, letters in trial.problem.output_shapes.items():
        here, there = picked(trial.expected()[name], rows), getattr(got, name)
        moved = moved_truth(trial, here, getattr(truth, name)) if name == "out" else 0.0
        whole = getattr(trial.run(trial.inputs), name)[rows]
        findings.append(agree(name, whole, there.mid, here, there, letters, inputs, moved))
    return told("beside the merge of two halves", worst_of(findings))


def _in_halves(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(2, x.shape[0] // 2, *x.shape[1:])


def halves(inputs: Any) -> list[Part]:
    """The newest row of each request over its first pages, then all of them over the others."""
    block_size = getattr(inputs, pools(inputs)[0]).shape[1]
    newest = alone(inputs, last_rows)
    cuts = [-(-part.kv_len // block_size) // 2 for part in newest]
    first = [part._replace(kv_len=cut * block_size) for part, cut in zip(newest, cuts, strict=True)]
    second = [
        part._replace(kv_len=part.kv_len - cut * block_size, first=cut)
        for part, cut in zip(newest, cuts, strict=True)
    ]
    return first + second


def halved(case: Case, device: str) -> Any:
    """The case's inputs as a batch of halves."""
    inputs = materialized(case, device)
    return batch(inputs, halves(inputs))


ORACLE = Oracle(
    name="union",
    check=check,
    problems=ATTENTION,
    kills=(
        "lse_base_2",
        "lse_of_unscaled_maximum",
        "sum_not_rescaled",
        "merge_average",
        "paged_key_dropped",
        "sum_in_bf16_in_the_noise",
        "splits_exchanged",
    ),
)
