"""Late tokens.

Claim: where the new tokens are at the last positions that the model has, the output is what it may be on
    these inputs, and so is what is cached.
Why: a cache that a test fills holds hundreds of tokens, and a model's context a hundred thousand: a table
    that is too short or clamped, positions in 16 bits, angles in float32 and a scaling that begins beyond the
    original context are all right at the beginning.
Exact or bounded: within the bounds of the truth; keys that were cached before stay as they are.
Kills: positions that are clamped, wrapped or rounded.
"""

from dataclasses import replace
from typing import Any

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial, private_copy
from oracles.probes import made, materialized, nothing
from oracles.rejudge import admitted_by_truth
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with every position moved on, and judge both outputs."""
    inputs = made(late, trial.case, trial.device)
    if not len(inputs.positions):
        return nothing("there are no new tokens")
    left = private_copy(inputs)
    finding = admitted_by_truth(trial, inputs, trial.call(left), left)
    return finding if finding.ok else replace(finding, detail=f"at late positions: {finding.detail}")


def late(case: Case, device: str) -> Any:
    """The case's inputs, the newest token at the model's last position."""
    inputs = materialized(case, device)
    if not len(inputs.positions):
        return inputs
    step = max(case.config.max_position - 1 - int(inputs.positions.max()), 0)
    return inputs._replace(positions=inputs.positions + step)


ORACLE = Oracle(
    name="far_positions",
    check=check,
    problems=("layer",),
    kills=("layer_positions_clamped",),
)
