"""What an implementation must not touch.

Claim: every input is byte for byte what it was, with the gaps and padding around it; so is whatever an
    implementation writes in place, outside of the elements that its problem lets it write.
Why: caches and weights are shared by every later call.
Exact or bounded: exact.
Kills: a kernel that rescales its queries in place, or stores past the end of its rows.
"""

from typing import Any

import torch

from oracles.compare import identical
from oracles.oracle import Oracle, Trial
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Compare values with their places, then whole storages."""
    fields: dict[str, Any] = trial.inputs._asdict()
    left: dict[str, Any] = trial.left()._asdict()
    tensors = {name: x for name, x in fields.items() if isinstance(x, torch.Tensor)}
    checked = 0
    for name, before in tensors.items():
        if name in trial.problem.writes:
            continue
        finding = identical(name, left[name], before, trial.problem.shapes[name], trial.inputs)
        if not finding.ok:
            return finding
        storage = identical(f"{name}'s storage", _bytes(left[name]), _bytes(before))
        if not storage.ok:
            return storage
        checked += finding.num_checked
    return Finding(ok=True, num_checked=checked)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


ORACLE = Oracle(name="inputs_unchanged", check=check, kills=())
