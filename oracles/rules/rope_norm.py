"""A rotation keeps lengths.

Claim: every pair of channels is as long as before, times the magnitude of the table.
Why: whatever the angle, cos² + sin² = 1. A pair that is formed of the wrong channels, a table of low
    precision and a magnitude that is forgotten or applied twice all change a length.
Exact or bounded: within what the radii of a pair's two channels do to its length.
Kills: pairs taken half a width apart, tables in low precision, magnitudes forgotten.
"""

import torch

from oracles.bounds import Admissible, spacing
from oracles.compare import within
from oracles.exact import pairs
from oracles.oracle import Oracle, Trial
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Compare the lengths of pairs."""
    rope, expected = trial.inputs.rope, trial.expected()["x"]
    got = trial.run(trial.inputs).x.double()
    length, before, radius = (
        torch.hypot(*pairs(x, rope.interleaved)) for x in (got, trial.inputs.x.double(), expected.radius)
    )
    right = before * abs(rope.table_scale if rope.rotate else 1.0)
    # Two roundings by half a spacing each, of channels that are no longer than the pair.
    radius = radius + spacing(right + radius, expected.dtype)
    want = Admissible(right, radius, torch.float64)
    return within("length of a pair", length, want, "t h r", trial.inputs)


ORACLE = Oracle(
    name="rope_norm",
    check=check,
    problems=("rope",),
    kills=(
        "rope_half_split",
        "rope_table_in_bf16",
        "rope_yarn_without_magnitude",
    ),
)
