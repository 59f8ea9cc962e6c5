"""How long the error of a whole row is.

Claim: over the channels of a row, each divided by its own noise, the error is no longer than independent
    roundings of the declared types make it but for one case in 10⁹.
Why: an element's bound leaves room for the rarest of many thousand elements. A row has hundreds, and the sum
    of their squares hardly varies: one more rounding in every element shows there.
Exact or bounded: bounded by the tail of a quadratic form (``directions.py``); rows are left out whose noise
    the output's own rounding hides.
Kills: weights in a narrower type than declared, splits with each other's weights.
"""

from oracles.directions import finding, lengths, sampled
from oracles.oracle import Oracle, Trial
from oracles.probes import ATTENTION, nothing
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Judge the sampled rows of ``out``."""
    numerics, query = trial.backend.numerics, trial.inputs[0].dtype
    found = sampled(trial.case, trial.device, numerics)
    if not found:
        return nothing("no row has noise above the output's grid")
    reading = lengths(found, trial.run(trial.inputs).out, numerics, query)
    return finding([reading], trial.inputs, "{effect:.3g} times what independent roundings give on average")


ORACLE = Oracle(
    name="row_norm",
    check=check,
    problems=ATTENTION,
    kills=("key_dropped_among_many", "splits_exchanged"),
)
