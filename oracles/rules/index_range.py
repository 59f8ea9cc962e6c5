"""Addresses beyond 32 bits.

Claim: with pages so far apart that every one of them begins more than 2³¹ elements into the pool, the output
    is the same, and what is written arrives there.
Why: block · stride leaves 32 bits in any pool of some gigabytes: it wraps, and reads or overwrites another
    request. On a CPU the pool is a mapping of which only the pages in use are ever touched, so nothing large
    is allocated; on a GPU it is real memory.
Exact or bounded: bit for bit where the backend repeats itself, else within both radii. Left out where the
    backend declines such strides, where there are no pages, or where there is no such memory.
Kills: offsets of pages and slots in 32 bits, in readers and in writers.
"""

import mmap
import sys
from dataclasses import replace
from typing import Any

import torch

from oracles.compare import identical
from oracles.oracle import Oracle, Trial, private_copy
from oracles.probes import nothing, pools, runnable, same
from oracles.verdict import Finding

FAR = 2**31

# Elements; a multiple of what any copy engine asks for.
ALIGNMENT = 4096

# Linux's MAP_NORESERVE, which older Pythons do not name: memory that is never touched counts for nothing.
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


def check(trial: Trial) -> Finding:
    """Run over the same pages, far apart."""
    if trial.runs_on not in ("", trial.device):
        return nothing(f"memory this large is not sent to {trial.runs_on}: judge there")
    inputs = trial.inputs
    caches = {name: getattr(inputs, name) for name in pools(inputs)}
    first = next(iter(caches.values()))
    num_blocks, itemsize = first.shape[0], first.element_size()
    stride = -(-FAR // (num_blocks * ALIGNMENT)) * ALIGNMENT
    gap = (stride - first[0].numel()) * itemsize
    if gap < 0 or not runnable(trial, replace(trial.case, layout=replace(trial.case.layout, block_gap=gap))):
        return nothing("the backend does not take pages this far apart")
    try:
        far = {name: _far(cache, stride) for name, cache in caches.items()}
    except (OSError, torch.OutOfMemoryError) as error:
        return nothing(f"no memory for pages this far apart: {str(error).splitlines()[0]}")
    private = private_copy(inputs)
    output = trial.call(private._replace(**far, **_moved(private, num_blocks, first.shape[1])))
    if not trial.problem.writes:
        return same(trial, output, "with pages beyond 2³¹ elements", exact=True)
    left = trial.left()
    for name in trial.problem.writes:
        finding = identical(name, far[name][num_blocks:], getattr(left, name), "n k e", inputs)
        if not finding.ok:
            return replace(finding, detail=f"with pages beyond 2³¹ elements: {finding.detail}")
    return Finding(ok=True, num_checked=far[trial.problem.writes[0]][num_blocks:].numel())


def _far(cache: torch.Tensor, stride: int) -> torch.Tensor:
    """The same pages behind as many that nobody owns, ``stride`` elements apart."""
    num_blocks = cache.shape[0]
    size = (2 * num_blocks * stride + cache[0].numel()) * cache.element_size()
    if cache.device.type == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    else:
        memory = torch.empty(size, dtype=torch.uint8, device=cache.device)
    inner = cache[0].contiguous().stride()
    far = memory.view(cache.dtype).as_strided((2 * num_blocks, *cache.shape[1:]), (stride, *inner))
    far[num_blocks:] = cache
    return far


def _moved(inputs: Any, num_blocks: int, block_size: int) -> dict[str, torch.Tensor]:
    """The fields that name pages, each live name larger by ``num_blocks`` pages."""
    if hasattr(inputs, "block_table"):
        table = inputs.block_table
        return {"block_table": torch.where(table < num_blocks, table + num_blocks, table)}
    slot = inputs.slot_mapping
    return {"slot_mapping": torch.where(slot >= 0, slot + num_blocks * block_size, slot)}


ORACLE = Oracle(
    name="index_range",
    check=check,
    problems=("latent_attention", "attention", "paged_attention", "cache_gather", "cache_write"),
    kills=(
        "read_in_32_bits",
        "paged_read_in_32_bits",
        "gather_in_32_bits",
        "write_in_32_bits",
    ),
)
