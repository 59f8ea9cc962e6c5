"""What is planned and what is taken.

Claim: as many blocks as were planned take, in the allocator, exactly the bytes that were planned; they fit in
    the budget, and one more would not.
Why: an engine allocates once, at start, and whatever the planner forgot is an out-of-memory error; whatever
    it counted twice is lost tokens.
Exact or bounded: exact, against the storages of pools that are really allocated, and on a GPU against the
    bytes that torch's allocator says were requested.
Kills: entries aligned by the model's element size, padding or gaps forgotten, blocks rounded up, a cache
    counted for keys and again for values.
"""

import gc

import torch

from mla_ref.layout import allocate
from mla_ref.problems.cache_capacity import CacheCapacityInputs
from oracles.compare import identical
from oracles.oracle import Oracle, Trial, storage_bytes
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Allocate nothing, one block, and what was planned; measure each."""
    planned, inputs = trial.run(trial.inputs), trial.inputs
    device = torch.device(trial.runs_on or trial.device)
    nothing, one = (taken(inputs, num_blocks, device) for num_blocks in (0, 1))
    block_bytes = torch.tensor(one - nothing)
    num_blocks = torch.tensor(max(inputs.budget - nothing, 0) // (one - nothing))
    for name, want in (("block_bytes", block_bytes), ("num_blocks", num_blocks)):
        finding = identical(name, getattr(planned, name), want)
        if not finding.ok:
            return finding
    count = int(planned.num_blocks)
    total = taken(inputs, count, device)
    if total != nothing + count * (one - nothing):
        return Finding(ok=False, detail=f"{count} blocks take {total} bytes, but one takes {one - nothing}")
    if count and total > inputs.budget:
        return Finding(ok=False, detail=f"{count} blocks take {total} bytes of a budget of {inputs.budget}")
    return Finding(ok=True, num_checked=4)


def taken(inputs: CacheCapacityInputs, num_blocks: int, device: torch.device) -> int:
    """Bytes of the pools of all layers: of their storages, or on a GPU as torch's allocator counts them."""
    before = _requested(device)
    pools = [
        allocate(
            inputs.layout,
            num_blocks=num_blocks,
            block_size=inputs.block_size,
            entry_width=inputs.entry_width,
            dtype=inputs.cache_dtype,
            device=device,
        )
        for _ in range(inputs.num_layers)
    ]
    if device.type == "cuda":
        return _requested(device) - before
    return sum(storage_bytes(pool).numel() for pool in pools)


def _requested(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()  # tensors that only a cycle still holds would be freed between two readings
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])


ORACLE = Oracle(
    name="allocation",
    check=check,
    problems=("cache_capacity",),
    kills=(
        "capacity_aligned_by_model_dtype",
        "capacity_padding_forgotten",
        "capacity_gap_forgotten",
        "capacity_keys_and_values",
        "capacity_blocks_rounded_up",
    ),
)
