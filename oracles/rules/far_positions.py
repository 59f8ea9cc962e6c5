"""Late tokens.

Claim: where the new tokens are at the last positions that the model has, the output is what it may be on
    these inputs, and so is what is cached.
Why: a cache that a test fills holds hundreds of tokens, and a model's context a hundred thousand: a table
    that is too short or clamped, positions in 16 bits, angles in float32 and a scaling that begins beyond the
    original context are all right at the beginning.
Exact or bounded: within the bounds of the truth; keys that were cached before stay as they are.
Kills: positions that are clamped, wrapped or rounded.
"""

from typing import Any

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial
from oracles.probes import made, materialized, nothing
from oracles.rejudge import admitted_instead
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with every position moved on, and judge both outputs."""
    if not len(trial.inputs.positions):
        return nothing("there are no new tokens")
    return admitted_instead(trial, made(late, trial.case, trial.device), "at late positions")


def late(case: Case, device: str) -> Any:
    """The case's inputs, the newest token at the model's last position."""
    inputs = materialized(case, device)
    step = max(case.config.max_position - 1 - int(inputs.positions.max()), 0)
    return inputs._replace(positions=inputs.positions + step)


ORACLE = Oracle(
    name="far_positions",
    check=check,
    problems=("layer",),
    kills=("layer_positions_clamped",),
)
