"""No rotation at the beginning.

Claim: at position 0 every channel is as it was, times the magnitude of the table.
Why: the angle is 0 whatever the frequencies, so what else is done to a channel shows alone: an offset of the
    positions, an order of the channels, a sign.
Exact or bounded: within the roundings of a product with 1 and a sum with 0.
Kills: positions counted from 1, magnitudes forgotten, channels that are moved.
"""

from typing import Any

import torch

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial
from oracles.probes import Probe, materialized, shows
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with every token at position 0."""
    return shows(trial, plant, trial.case, "with every token at position 0")


def plant(case: Case, device: str) -> Probe:
    """The case's inputs at position 0, and themselves."""
    inputs: Any = materialized(case, device)
    magnitude = inputs.rope.table_scale if inputs.rope.rotate else 1.0
    still = inputs._replace(positions=torch.zeros_like(inputs.positions))
    return Probe(still, {"x": inputs.x.double() * magnitude})


ORACLE = Oracle(
    name="rope_zero",
    check=check,
    problems=("rope",),
    kills=(
        "rope_position_late",
        "rope_second_token_late",
        "rope_yarn_without_magnitude",
    ),
)
