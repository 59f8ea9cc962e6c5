"""The output itself.

Claim: every element is a rounding of a value within its derived radius of the float64 truth.
Why: bounds.py derives the radius from the declared numerics, the lengths and the case's own data.
Exact or bounded: bounded, element by element; NaN only where the truth is NaN.
Kills: wrong scale, lost or foreign keys, wrong masks, pages and heads, undeclared roundings.
"""

from dataclasses import replace

from oracles.bounds import ADMISSIBLE
from oracles.compare import within, worst_of
from oracles.oracle import Oracle, Trial
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Judge every field but ``lse``."""
    output, shapes = trial.run(trial.inputs), trial.problem.output_shapes
    judged = {name: expected for name, expected in trial.expected().items() if name != "lse"}
    worst = worst_of(
        [
            within(name, getattr(output, name), expected, shapes[name], trial.inputs)
            for name, expected in judged.items()
        ]
    )
    ill = sum(expected.ill for expected in judged.values())
    if worst.ok and ill:
        return replace(worst, detail=f"of {ill} ill-conditioned rows only the hull is claimed")
    return worst


ORACLE = Oracle(name="value", check=check, problems=tuple(ADMISSIBLE), kills=())
