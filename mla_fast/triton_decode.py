"""Attention over the latent cache in plain Triton: keys split among programs, partial results merged.

Compiled on CUDA devices of compute capability 8.0 and up; interpreted on the CPU where TRITON_INTERPRET=1 was
set before triton was imported. Any number of heads, any mixture of query lengths, any block size and stride.

The launch depends on shapes alone, never on a value on the device, so it can be captured in a CUDA graph:
- rows: heads of a request's new tokens, packed; the smallest tile of the device's list that holds them all,
  or the largest tile and several programs.
- splits: the fewest that keep the device at least nine tenths as busy as any number of splits would, if every
  request filled its row of the block table, and no split were shorter than ``MIN_TILES`` tiles. Each request
  then divides its true length evenly; short ones leave splits empty.

A request's result depends on its batch through both choices. The variant ``batch_invariant`` fixes them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from mla_fast import _stored_entries
from mla_fast._split_keys import (
    LOG2_E,
    MAX_SPLITS,
    MIN_TILES,
    Schedule,
    Tile,
    choose_splits,
    device_of,
    launching,
    merge,
    partial_results,
    requires,
)
from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.formats import CacheFormat, cache_format
from mla_ref.numerics import FLOAT32, INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.latent_attention import PROBLEM, LatentAttentionInputs

# Channels of one entry, padded to powers of two, that fit in shared memory with the tiles below.
MAX_CHANNELS = 512 + 64

# Tensor cores take no fp32.
FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_ds_mla", "fp8_ds_mla_pow2")


class Tiles(NamedTuple):
    """What one kind of device is given: for 16-bit caches and for quantised ones, fewest rows first."""

    plain: tuple[Tile, ...]
    quantised: tuple[Tile, ...]


# Chosen for no spilled registers at c = 512, r = 64. A dequantised tile passes through registers, so it gets
# few rows.
HOPPER = Tiles((Tile(16, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 64, 8, 2, 32)), (Tile(16, 64, 8, 2, 32),))
BLACKWELL = Tiles((Tile(16, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)), (Tile(16, 64, 8, 2, 32),))
AMPERE = Tiles((Tile(16, 64, 8, 2), Tile(32, 32, 8, 2)), (Tile(16, 32, 8, 2),))
SMALL = Tiles((Tile(16, 64, 8, 2), Tile(32, 32, 8, 2)), (Tile(16, 16, 8, 2),))  # 99 KiB of shared memory
# Few, large steps: the interpreter's time goes by operations, not by elements.
INTERPRETED = Tiles(*2 * ((Tile(16, 128, 1, 1), Tile(64, 128, 1, 1)),))


def tiles_of(major: int, minor: int) -> Tiles:
    """The tiles for a compute capability."""
    if major == 9:
        return HOPPER
    if major in (10, 11):
        return BLACKWELL
    return AMPERE if (major, minor) in ((8, 0), (8, 7)) else SMALL


def supports(case: Case) -> str | None:
    """Why a case is outside what the kernel computes."""
    fmt, config = cache_format(case.cache_format), case.config
    c, r = config.kv_lora_rank, config.qk_rope_head_dim
    if reason := _why_not(getattr(torch, case.dtype), fmt, c, r):
        return reason
    return _stored_entries.supports(case)


def _why_not(query: torch.dtype, fmt: CacheFormat, c: int, r: int) -> str | None:
    if query not in (torch.bfloat16, torch.float16):
        return f"queries are {str(query).removeprefix('torch.')}; tensor cores take bfloat16 or float16"
    if fmt.name not in FORMATS:
        return f"cache format {fmt.name} is not one of {', '.join(FORMATS)}"
    if _padded(c) + (_padded(r) if r else 0) > MAX_CHANNELS:
        return f"c={c} and r={r} are padded to powers of two, of which {MAX_CHANNELS} channels fit"
    return None


def _padded(channels: int) -> int:
    """The power of two that ``tl.arange`` needs, and the 16 that a tensor core multiplies at least."""
    return max(16, 1 << (channels - 1).bit_length())


@functools.cache
def _tiles(device: torch.device) -> Tiles:
    if device.type == "cpu":
        return INTERPRETED
    return tiles_of(*torch.cuda.get_device_capability(device))


def choose_tile(tiles: tuple[Tile, ...], num_rows: int, block_size: int) -> Tile:
    """The smallest tile that holds ``num_rows``, or the largest."""
    tile = next((tile for tile in tiles if tile.rows >= num_rows), tiles[-1])
    if tile.scattered and block_size % tile.keys:
        return tile._replace(keys=tile.scattered)
    return tile


def _launch(inputs: LatentAttentionInputs, schedule: Schedule) -> AttentionOutput:
    query = inputs.ql_nope
    num_tokens, num_heads, c = query.shape
    r = inputs.q_pe.shape[2]
    if reason := _why_not(query.dtype, inputs.cache_format, c, r):
        raise ValueError(reason)
    from mla_fast import _triton_decode_kernel as kernels

    num_rows = num_tokens * num_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    if num_rows == 0:
        return AttentionOutput(out, lse)

    parts = _stored_entries.entries(inputs.kv_cache, inputs.cache_format, c, r)
    scaling = _stored_entries.SCALINGS[inputs.cache_format.name].kind
    batch, width = inputs.block_table.shape
    block_size = inputs.kv_cache.shape[1]
    plain, quantised = _tiles(query.device)
    tiles = plain if scaling == "none" else quantised
    longest_rows = inputs.max_seqlen_q * num_heads
    tile = schedule.tile or choose_tile(
        tiles, num_heads if schedule.rows_by_heads else longest_rows, block_size
    )
    num_row_blocks = -(-longest_rows // tile.rows)
    num_splits = schedule.num_splits or choose_splits(
        batch * num_row_blocks, -(-width * block_size // tile.keys), device_of(query.device).num_units
    )

    partial = partial_results(num_splits, num_rows, c, query.device)
    with launching(query.device):
        kernels._mla_decode_kernel[(batch * num_splits * num_row_blocks,)](
            query,
            inputs.q_pe,
            parts.latent,
            parts.rope,
            parts.scales,
            inputs.kv_scale,
            inputs.block_table,
            inputs.cu_seqlens_q.contiguous(),
            inputs.cache_seqlens.contiguous(),
            out,
            lse,
            *partial,
            inputs.softmax_scale * LOG2_E,
            num_heads,
            num_rows,
            num_row_blocks,
            num_splits,
            MIN_TILES if schedule.num_splits is None else 1,
            *query.stride(),
            *inputs.q_pe.stride(),
            *parts.latent.stride()[:2],
            *parts.rope.stride()[:2],
            *parts.scales.stride()[:2],
            *inputs.block_table.stride(),
            C=c,
            C_PADDED=_padded(c),
            R=r,
            R_PADDED=_padded(max(r, 1)),
            BLOCK_SIZE=block_size,
            SCALING=scaling,
            TILE_CHANNELS=_stored_entries.TILE,
            SPLIT=num_splits > 1,
            ROWS=tile.rows,
            KEYS=tile.keys,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        merge(out, lse, partial)
    return AttentionOutput(out, lse)


def scheduled(schedule: Schedule) -> Callable[..., AttentionOutput]:
    """The implementation under one schedule."""

    @implements(PROBLEM, values=False)
    def triton_decode(
        ql_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cache_seqlens: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        cache_format: CacheFormat,
        kv_scale: torch.Tensor,
    ) -> AttentionOutput:
        """Multi-query attention over the latent cache, keys in parallel splits.

        score[s h j] = softmax_scale · (ql_nope[s h] · kv_c[j]  +  q_pe[s h] · k_pe[j])

        Raises: ValueError for what ``supports`` declines. Lengths and block ids are the caller's promise.
        Error: scores, softmax, sums and partial results in float32; dequantised keys and softmax weights
        rounded to the query's type; the denominator sums the unrounded weights.
        Source: split keys from Flash-Decoding (pytorch.org/blog/flash-decoding), base-2 online softmax from
        FlashAttention-2, arXiv 2307.08691.
        """
        return _launch(
            LatentAttentionInputs(
                ql_nope,
                q_pe,
                kv_cache,
                block_table,
                cu_seqlens_q,
                cache_seqlens,
                max_seqlen_q,
                softmax_scale,
                cache_format,
                kv_scale,
            ),
            schedule,
        )

    return triton_decode


triton_decode = scheduled(Schedule())

BACKEND = Backend(
    "mla_fast.triton_decode",
    "latent_attention",
    triton_decode,
    Numerics(
        kv=INPUT,
        p=INPUT,
        sum_rounded_p=False,
        partial=FLOAT32,
        max_splits=MAX_SPLITS,
        merge_depth=1,
        min_tile=16,
        dot_roundings=1.5,  # Ampere's tensor cores; later ones need 1
        exp_error=4.0,
        log_error=4.0,
    ),
    requires=requires,
    supports=supports,
    variants={
        "batch_invariant": scheduled(Schedule(num_splits=1, rows_by_heads=True)),
        "splits_3": scheduled(Schedule(num_splits=3)),
        "splits_16": scheduled(Schedule(num_splits=16)),
        "tile_16x16": scheduled(Schedule(tile=Tile(16, 16, 4, 2))),
    },
)
