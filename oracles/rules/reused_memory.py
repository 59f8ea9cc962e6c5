"""The same memory, other contents.

Claim: where every input's memory holds other values, the output is that of these values; the output of the
    call before is still what it was; and after a call in other memory nobody keeps what the call before was
    given.
Why: a CUDA graph is replayed over the same addresses, weights are loaded into the same parameters, a page is
    handed to another request. What is kept by address is stale at the next step, an output buffer that is
    shared between calls is gone before it was read, and a pool that somebody has a view of is never freed.
Exact or bounded: the earlier output bit for bit; the new one as a run on the same values in fresh memory, or
    within the bounds of the truth. What is kept is counted by references to storages: workspaces and copies
    are the implementation's own, and the last call's inputs may belong to a plan until the next one. Judged
    from another device, only the judge's side of the memory is counted.
Kills: results, weights, dequantised caches and tables that are kept by address; outputs that share memory;
    views of inputs that are never let go.
"""

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mla_ref.case import Case
from oracles.compare import identical, worst_of
from oracles.oracle import Oracle, Trial, named_tensors, private_copy, storage_bytes
from oracles.probes import OF_TENSORS, made, materialized
from oracles.rejudge import rejudged
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run in memory that is given up, in other memory, and there again with the values of another seed."""
    other = made(another, trial.case, trial.device)
    # Before other memory is given up, which would come back under this one's addresses.
    memory = private_copy(trial.inputs)
    want, given_up = _in_memory_of_its_own(trial, other)
    first = trial.call(memory)
    kept = _alive(given_up)
    given = {storage_bytes(x).data_ptr() for x in named_tensors(memory).values()}
    before = {
        name: getattr(first, name).clone()
        for name in trial.problem.output_shapes
        if storage_bytes(getattr(first, name)).data_ptr() not in given  # an input that is returned as it is
    }
    overwrite(memory, other)
    output = trial.call(memory)
    still = worst_of(
        [
            identical(
                f"{name} of the call before", getattr(first, name), x, trial.problem.output_shapes[name]
            )
            for name, x in before.items()
        ]
        or [Finding(ok=True)]
    )
    if not still.ok:
        return still
    what = "with other values in the same memory"
    finding = rejudged(trial, other, output, memory, want, what)
    if not finding.ok or not kept:
        return finding
    detail = f"{kept[0]}: a call keeps its memory, after another one in other memory too"
    return Finding(ok=False, detail=detail, num_bad=len(kept), num_checked=len(given_up))


def _in_memory_of_its_own(trial: Trial, inputs: Any) -> tuple[Any, dict[str, StorageWeakRef]]:
    """A copy of the output, and the storages of memory that nobody has from here on."""
    memory = private_copy(inputs)
    storages = {name: _weakly(x) for name, x in named_tensors(memory).items()}
    output = trial.call(memory)
    return type(output)(*(x.detach().clone() for x in output)), storages


def _weakly(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _alive(storages: Mapping[str, StorageWeakRef]) -> list[str]:
    """Whose memory somebody has; what only a cycle of objects holds is let go first."""

    def alive() -> list[str]:
        return [name for name, storage in storages.items() if not storage.expired()]  # type: ignore[no-untyped-call]

    if alive():
        gc.collect()
    return alive()


def another(case: Case, device: str) -> Any:
    """The case's inputs of another seed: of the same shapes and strides."""
    return materialized(replace(case, seed=case.seed + 1), device)


def overwrite(memory: Any, other: Any) -> None:
    """Every byte of the storages of ``memory`` becomes that of the inputs ``other``."""
    new = named_tensors(other)
    for name, old in named_tensors(memory).items():
        storage_bytes(old).copy_(storage_bytes(new[name]))


ORACLE = Oracle(
    name="reused_memory",
    check=check,
    problems=OF_TENSORS,
    kills=(
        "output_buffer_shared",
        "cache_decoded_once",
        "weights_kept_by_address",
        "rope_table_kept_by_address",
        "layer_weights_kept_by_address",
        "cache_views_kept",
    ),
)
