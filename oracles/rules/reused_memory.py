"""The same memory, other contents.

Claim: where every input's memory holds other values, the output is that of these values; and the output of
    the call before is still what it was.
Why: a CUDA graph is replayed over the same addresses, weights are loaded into the same parameters, a page is
    handed to another request. What is kept by address is stale at the next step, and an output buffer that is
    shared between calls is gone before it was read.
Exact or bounded: the earlier output bit for bit; the new one as a run on the same values in fresh memory, or
    within the bounds of the truth.
Kills: results, weights, dequantised caches and tables that are kept by address; outputs that share memory.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mla_ref.case import Case
from oracles.compare import identical, worst_of
from oracles.oracle import Oracle, Trial, private_copy, storage_bytes
from oracles.probes import made, materialized
from oracles.rejudge import rejudged
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run, put the values of another seed into the same memory, and run again."""
    other = made(another, trial.case, trial.device)
    want, memory = trial.run(other), private_copy(trial.inputs)
    first = trial.call(memory)
    given = {storage_bytes(x).data_ptr() for x in _tensors(memory)}
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
    return rejudged(trial, other, output, memory, want, what)


def another(case: Case, device: str) -> Any:
    """The case's inputs of another seed: of the same shapes and strides."""
    return materialized(replace(case, seed=case.seed + 1), device)


def overwrite(memory: Any, other: Any) -> None:
    """Every byte of the storages of ``memory`` becomes that of the inputs ``other``."""
    for old, new in zip(_tensors(memory), _tensors(other), strict=True):
        storage_bytes(old).copy_(storage_bytes(new))


def _tensors(inputs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in inputs:
        found += value.values() if isinstance(value, Mapping) else [value]
    return [x for x in found if isinstance(x, torch.Tensor)]


ORACLE = Oracle(
    name="reused_memory",
    check=check,
    problems=(
        "latent_attention",
        "attention",
        "paged_attention",
        "merge_states",
        "rope",
        "cache_write",
        "cache_gather",
        "layer",
    ),
    kills=(
        "output_buffer_shared",
        "cache_decoded_once",
        "weights_kept_by_address",
        "rope_table_kept_by_address",
        "layer_weights_kept_by_address",
    ),
)
