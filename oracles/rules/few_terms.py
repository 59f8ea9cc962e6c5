"""Projections of few terms.

Claim: where every row of every projection has four weights that are not 0, spread over all columns, the
    output is what it may be on these weights, and so is what is cached.
Why: what a sum of thousands of terms may be off, each time in the worst direction, is more than it is worth
    once it went through four projections: at the width of a model the bound of a whole layer admits anything.
    A weight of 0 rounds nothing, so here the bound is a few roundings wide at any width.
Exact or bounded: within the bounds of the truth.
Kills: channels that are never read, at a width that no smaller case has.
"""

import math
from typing import Any

import torch

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial
from oracles.probes import made, materialized, nothing
from oracles.rejudge import admitted_instead
from oracles.verdict import Finding

TERMS = 4


def check(trial: Trial) -> Finding:
    """Run with sparse weights, and judge both outputs."""
    if not len(trial.inputs.positions):
        return nothing("there are no new tokens")
    return admitted_instead(trial, made(sparse, trial.case, trial.device), "with few terms")


def sparse(case: Case, device: str) -> Any:
    """The case's inputs, most weights 0, the others as much larger as keeps every projection's variance."""
    inputs = materialized(case, device)
    weights = {name: few(x) if x.dim() == 2 else x for name, x in inputs.weights.items()}
    return inputs._replace(weights=weights)


def few(weight: torch.Tensor) -> torch.Tensor:
    """TERMS weights of each row, in columns far from each other; every column has its turn."""
    rows, columns = weight.shape
    terms, step = min(TERMS, columns), max(1, round(0.618 * columns))
    while math.gcd(step, columns) > 1:
        step += 1
    turn = torch.arange(rows * terms, device=weight.device).view(rows, terms)
    kept = turn % columns * step % columns
    factor = math.sqrt(columns / terms)
    return torch.zeros_like(weight).scatter(1, kept, weight.gather(1, kept) * factor)


ORACLE = Oracle(
    name="few_terms",
    check=check,
    problems=("layer",),
    kills=("layer_channels_not_read",),
)
