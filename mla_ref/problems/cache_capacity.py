"""How many blocks of a latent cache fit in a budget, and how many bytes one block takes."""

from typing import NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.formats import cache_format
from mla_ref.layout import CacheLayout
from mla_ref.problem import Problem
from mla_ref.values import integers

# Bytes that a process can address on the machines of today.
ADDRESSABLE = 1 << 47


class CacheCapacityInputs(NamedTuple):
    """What every planner is called with, in this order.

    num_layers: layers of this rank that have a cache, each a pool of its own.
    entry_width: elements of one token in one layer.
    cache_dtype: type of an element.
    model_dtype: type of activations, on which no byte of the cache depends.
    block_size: tokens of a block.
    layout: alignments, gaps and the offset of each pool, in bytes.
    budget: bytes that all pools together may take.
    """

    num_layers: int
    entry_width: int
    cache_dtype: torch.dtype
    model_dtype: torch.dtype
    block_size: int
    layout: CacheLayout
    budget: int


class CacheCapacityOutput(NamedTuple):
    """block_bytes: [] int64 on the CPU. Bytes that one more block takes, in all layers.

    num_blocks: [] int64 on the CPU. The most blocks whose pools fit.
    """

    block_bytes: torch.Tensor
    num_blocks: torch.Tensor


def check(inputs: CacheCapacityInputs) -> None:
    """Raises: ValueError on a count that is not positive."""
    for name in ("num_layers", "entry_width", "block_size"):
        if getattr(inputs, name) < 1:
            raise ValueError(f"{name}: is {getattr(inputs, name)}, must be at least 1")
    if inputs.budget < 0:
        raise ValueError(f"budget: is {inputs.budget}, must not be negative")


def check_values(inputs: CacheCapacityInputs) -> None:
    """There is nothing on a device to read back."""


def materialize(case: Case, device: torch.device) -> CacheCapacityInputs:
    """The counts of a case. The budget is some one to five times what a block's entries take.

    Raises: ValueError where that is more than a process can address.
    """
    config, fmt = case.config, cache_format(case.cache_format)
    entries = (
        case.block_size * config.num_layers * fmt.entry_bytes(config.kv_lora_rank, config.qk_rope_head_dim)
    )
    if entries > ADDRESSABLE:
        raise ValueError(
            f"block_size is {case.block_size}: its entries take {entries} bytes, "
            f"but a process can address {ADDRESSABLE}"
        )
    return CacheCapacityInputs(
        num_layers=config.num_layers,
        entry_width=fmt.entry_width(config.kv_lora_rank, config.qk_rope_head_dim),
        cache_dtype=fmt.dtype,
        model_dtype=getattr(torch, case.dtype),
        block_size=case.block_size,
        layout=case.layout,
        budget=entries + int(integers(case.seed, "budget", 4 * entries, 1)),
    )


PROBLEM = Problem(
    name="cache_capacity",
    inputs=CacheCapacityInputs,
    output=CacheCapacityOutput,
    shapes={},
    output_shapes={"block_bytes": "", "num_blocks": ""},
    check=check,
    check_values=check_values,
    materialize=materialize,
)
