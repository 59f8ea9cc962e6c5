"""The output itself.

Claim: every element is a rounding of a value within its derived radius of the float64 truth.
Why: bounds.py derives the radius from the declared numerics, the lengths and the case's own data.
Exact or bounded: bounded, element by element; NaN only where the truth is NaN.
Kills: wrong scale, lost or foreign keys, wrong masks, pages and heads, undeclared roundings.
"""

from dataclasses import replace

from oracles.bounds import ADMISSIBLE
from oracles.compare import within
from oracles.oracle import Oracle, Trial
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Judge the first field of the output."""
    name, letters = next(iter(trial.problem.output_shapes.items()))
    expected = trial.expected()[name]
    finding = within(name, getattr(trial.run(trial.inputs), name), expected, letters, trial.inputs)
    if finding.ok and expected.ill:
        return replace(finding, detail=f"of {expected.ill} ill-conditioned rows only the hull is claimed")
    return finding


ORACLE = Oracle(name="value", check=check, problems=tuple(ADMISSIBLE), kills=())
