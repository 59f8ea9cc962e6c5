"""Scores are scale times queries.

Claim: with queries four times as large and a quarter of the scale, the output is the same, bit for bit.
Why: powers of two pass through every rounding, so a kernel that uses the scale that it is given cannot tell,
    nor can one that spreads its square root over queries and keys; one that has a scale of its own, from a
    width or from another model, can.
Exact or bounded: bit for bit where the backend repeats itself and rounds to no narrow type, whose smallest
    numbers are near, and from the magnitude on that ``oracles.scaling`` derives; else within both radii. Not
    claimed where four times as much is near the largest numbers.
Kills: scales built in, taken from the width of an entry, or without the rotary magnitude.
"""

from typing import Any

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial
from oracles.probes import ATTENTION, made, materialized, nothing, queries, same, wide
from oracles.scaling import as_claimed, kept_by_scores, why_not_scaled
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with the factor of four moved from the scale to the queries."""
    what = "with queries times 4 and the scale over 4"
    if not wide(trial):
        return same(trial, trial.run(made(moved, trial.case, trial.device)), what, exact=False)
    if reason := why_not_scaled(trial):
        return nothing(reason)
    first, again = trial.run(trial.inputs), trial.run(made(moved, trial.case, trial.device))
    expected = trial.expected()
    return as_claimed(trial, again, first, lambda: (expected, expected), kept_by_scores(trial), what)


def moved(case: Case, device: str) -> Any:
    """The case's inputs, queries times 4, scale over 4."""
    inputs = materialized(case, device)
    larger = {name: getattr(inputs, name) * 4.0 for name in queries(inputs)}
    return inputs._replace(**larger, softmax_scale=inputs.softmax_scale / 4.0)


ORACLE = Oracle(
    name="query_scale",
    check=check,
    problems=ATTENTION,
    kills=(
        "scale_of_latent_width",
        "scale_without_mscale",
        "scale_built_in",
    ),
)
