"""Memory around the inputs.

Claim: with every input between bands of NaN, the output is the same, and the bands are untouched.
Why: a vector load that begins early, a store past the last row, a table read for a request that is not there:
    in a pool they meet memory that is mapped, and nothing is reported.
Exact or bounded: exact for the bands; the output bit for bit where the backend repeats itself, else within
    both radii.
Kills: reads and stores before the first and behind the last element.
"""

from collections.abc import Mapping
from typing import Any

import torch

from oracles.compare import identical
from oracles.oracle import Oracle, Trial, storage_bytes
from oracles.probes import ATTENTION, same
from oracles.verdict import Finding

# A page of a GPU's cache on either side, and a multiple of every alignment.
BAND = 4096


def check(trial: Trial) -> Finding:
    """Run between bands, then look at them."""
    inputs, storages = guarded(trial.inputs)
    before = [storage.clone() for storage in storages]
    output = trial.call(inputs)
    for storage, band in zip(storages, before, strict=True):
        finding = identical("memory around an input", storage, band)
        if not finding.ok:
            return finding
    return same(trial, output, "between bands of NaN", exact=True)


def guarded(inputs: Any) -> tuple[Any, list[torch.Tensor]]:
    """(the inputs in larger storages, the storages as bytes)."""
    storages: dict[int, torch.Tensor] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: moved(x) for name, x in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        whole = storage_bytes(value)
        if whole.data_ptr() not in storages or not whole.numel():
            band = torch.full((BAND,), 0xFF, dtype=torch.uint8, device=value.device)
            storages[whole.data_ptr()] = torch.cat([band, whole, band])
        storage = storages[whole.data_ptr()].untyped_storage()
        offset = value.storage_offset() + BAND // value.element_size()
        empty = torch.tensor([], dtype=value.dtype, device=value.device)
        return empty.set_(storage, offset, value.shape, value.stride())

    return type(inputs)(*map(moved, inputs)), list(storages.values())


ORACLE = Oracle(
    name="guard_bands",
    check=check,
    problems=ATTENTION,
    kills=(
        "read_before_the_queries",
        "store_before_the_queries",
        "query_scaled_in_place",
        "store_past_the_end",
    ),
)
