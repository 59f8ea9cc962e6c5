"""Only distances matter.

Claim: the product of two rotated vectors is the same when both positions are smaller by the same number.
Why: it is what a rotary embedding is for: a cached key is rotated once, by its own position, and every later
    query finds it by the distance. An error of the angle that grows with the position breaks it.
Exact or bounded: within what the radii of both vectors, in both runs, do to their product.
Kills: positions or angles in low precision, frequencies that depend on the position.
"""

from typing import Any

import torch

from mla_ref.case import Case
from oracles.bounds import Admissible, spacing
from oracles.compare import within
from oracles.oracle import Oracle, Trial
from oracles.probes import admissible, made, materialized, nothing
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with every pair of neighbouring tokens moved to the beginning."""
    count = trial.inputs.x.shape[0] // 2 * 2
    if not count:
        return nothing("there are no two tokens")
    far = _dots(trial.run(trial.inputs).x[:count], trial.expected()["x"], count)
    near = _dots(
        trial.run(made(near_zero, trial.case, trial.device)).x[:count],
        admissible(near_zero, trial)["x"],
        count,
    )
    want = Admissible(near.mid, near.radius + far.radius, torch.float64)
    return within("product of two tokens", far.mid, want)


def near_zero(case: Case, device: str) -> Any:
    """The case's inputs, both positions of tokens 2i and 2i + 1 smaller by the smaller one."""
    inputs = materialized(case, device)
    count = len(inputs.positions) // 2 * 2
    positions = inputs.positions.clone()
    two = positions[:count].reshape(-1, 2)
    positions[:count] = (two - two.amin(1, keepdim=True)).flatten()
    return inputs._replace(positions=positions)


def _dots(x: torch.Tensor, expected: Admissible, count: int) -> Admissible:
    """[t/2 h] products of neighbours, and what the errors of both do to them."""
    size = expected.mid[:count].abs() + expected.radius[:count]
    error = expected.radius[:count] + 0.5 * spacing(size, expected.dtype)
    a, b = x.double()[0::2], x.double()[1::2]
    radius = a.abs() * error[1::2] + b.abs() * error[0::2] + error[0::2] * error[1::2]
    exact = 2.0**-50 * (a.abs() * b.abs()).sum(-1)
    return Admissible((a * b).sum(-1), radius.sum(-1) + exact, torch.float64)


ORACLE = Oracle(
    name="rope_relative",
    check=check,
    problems=("rope",),
    kills=(
        "rope_positions_in_bf16",
        "rope_angle_in_float32",
    ),
)
