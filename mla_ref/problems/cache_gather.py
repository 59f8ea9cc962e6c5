"""Ranges of tokens out of the paged latent cache, dequantised and packed: how a prefill chunk begins."""

from itertools import pairwise
from typing import NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.formats import CacheFormat
from mla_ref.pages import DEAD_BLOCK, num_blocks_of
from mla_ref.problem import Problem, bind_shapes
from mla_ref.problems._paged import (
    QUERY_DTYPES,
    check_blocks,
    check_cache,
    check_device,
    check_dtype,
    check_offsets,
    check_scale,
    paged,
    raw_values,
)
from mla_ref.values import integers


class CacheGatherInputs(NamedTuple):
    """What every implementation of ``cache_gather`` is called with, in this order.

    kv_cache: [n k e]. Pages as written by ``cache_format``; any strides but the last, which is 1. Slots
        outside the ranges may hold anything, NaN included.
    block_table: [b m] int32, any row stride. Logical block → page; entries outside a range's blocks are
        never followed.
    cu_seqlens: [b+1] int32. The range of request i goes to rows cu_seqlens[i] … cu_seqlens[i+1]-1.
    seq_starts: [b] int32. First token of each range, anywhere in a block; not read where the range is empty.
    num_tokens: cu_seqlens[b], known to the host.
    kv_lora_rank: c. qk_rope_head_dim: r. The width of an entry alone does not tell them.
    dtype: of the result.
    cache_format: how entries are stored.
    kv_scale: [] float32. Read only by formats with a per-tensor scale.
    """

    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_starts: torch.Tensor
    num_tokens: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype
    cache_format: CacheFormat
    kv_scale: torch.Tensor


class CacheGatherOutput(NamedTuple):
    """kv_c: [t c], k_pe: [t r] in the dtype asked for; t is num_tokens.

    Exactly what the format's ``decode`` gives: code · scale is rounded to float32 before a narrower dtype.
    """

    kv_c: torch.Tensor
    k_pe: torch.Tensor


SHAPES = {
    "kv_cache": "n k e",
    "block_table": "b m",
    "cu_seqlens": "b+1",
    "seq_starts": "b",
    "kv_scale": "",
}


def check(inputs: CacheGatherInputs) -> None:
    """Raises: ValueError on a shape, dtype or device that breaks the contract."""
    bind_shapes(SHAPES, inputs._asdict())
    check_cache(inputs.kv_cache, inputs.cache_format, inputs.kv_lora_rank, inputs.qk_rope_head_dim)
    for name in ("block_table", "cu_seqlens", "seq_starts"):
        check_dtype(name, getattr(inputs, name), torch.int32)
    check_dtype("kv_scale", inputs.kv_scale, torch.float32)
    if inputs.dtype not in QUERY_DTYPES:
        raise ValueError(f"dtype: is {inputs.dtype}, must be one of {', '.join(map(str, QUERY_DTYPES))}")
    check_device(inputs)


def check_values(inputs: CacheGatherInputs) -> None:
    """Raises: ValueError on ranges that the table does not cover, and on blocks outside the pool."""
    offsets, table = inputs.cu_seqlens.tolist(), inputs.block_table.tolist()
    check_offsets("cu_seqlens", offsets, inputs.num_tokens)
    num_blocks, block_size = inputs.kv_cache.shape[:2]
    for i, (start, (first, last)) in enumerate(
        zip(inputs.seq_starts.tolist(), pairwise(offsets), strict=True)
    ):
        if first == last:
            continue
        if start < 0:
            raise ValueError(f"seq_starts[{i}]: is {start}, must not be negative")
        stop = start + last - first
        needed = num_blocks_of(stop, block_size)
        if needed > len(table[i]):
            raise ValueError(
                f"block_table: has {len(table[i])} columns, but {stop} tokens of request {i} need {needed}"
            )
        check_blocks(table[i], i, range(start // block_size, needed), num_blocks)
    check_scale(inputs.cache_format, inputs.kv_scale)


def materialize(case: Case, device: torch.device) -> CacheGatherInputs:
    """The tensors of a case: q_lens[i] of the kv_lens[i] cached tokens of request i, or all if it has fewer.

    A range starts anywhere that leaves room for it. Table entries outside its blocks, and the start of an
    empty range, are out of bounds.
    """
    raw = raw_values(case, 0)
    cache = paged(case, raw, device)
    lengths = [min(q_len, kv_len) for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)]
    starts = []
    table = torch.full_like(cache.block_table, DEAD_BLOCK)
    for i, (length, kv_len) in enumerate(zip(lengths, case.kv_lens, strict=True)):
        start = int(integers(case.seed, f"seq_starts/{i}", kv_len - length + 1))
        blocks = slice(start // case.block_size, num_blocks_of(start + length, case.block_size))
        if length:
            table[i, blocks] = cache.block_table[i, blocks]
        starts.append(start if length else DEAD_BLOCK)
    return CacheGatherInputs(
        kv_cache=cache.kv_cache,
        block_table=table,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device),
        seq_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        num_tokens=sum(lengths),
        kv_lora_rank=case.config.kv_lora_rank,
        qk_rope_head_dim=case.config.qk_rope_head_dim,
        dtype=getattr(torch, case.dtype),
        cache_format=cache.cache_format,
        kv_scale=cache.kv_scale,
    )


PROBLEM = Problem(
    name="cache_gather",
    inputs=CacheGatherInputs,
    output=CacheGatherOutput,
    shapes=SHAPES,
    output_shapes={"kv_c": "t c", "k_pe": "t r"},
    check=check,
    check_values=check_values,
    materialize=materialize,
)
