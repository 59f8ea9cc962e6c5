"""Ordinary attention over pages of keys and values in plain Triton: any layout, any GPU, and the interpreter.

Contract: bf16 or fp16 queries; a cache of that or another float type, e4m3 included; any order of the pool's
axes, any strides and offsets, since each key's address is formed from its own block, slot and head; any block
size; up to 256 channels of a key and of a value. Nothing is copied, and lengths stay on the device.

Keys are shared by the query heads of a group, and split over programs where a batch is too small to fill the
machine. The order of the sums depends on shapes and lengths alone, so every layout gives the same bits.
"""

from collections.abc import Callable

import torch

from mla_fast._split_keys import (
    LOG2_E,
    MAX_SPLITS,
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
from mla_ref.numerics import FLOAT32, INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.paged_attention import PROBLEM, PagedAttentionInputs

DTYPES = (torch.bfloat16, torch.float16)
MAX_CHANNELS = 256
E4M3 = torch.float8_e4m3fn

# The interpreter's time goes by operations, not by elements.
INTERPRETED = Tile(64, 128, 1, 1)


def why_not(query: torch.dtype, x: int, v: int) -> str | None:
    """Why queries of this type, or so many channels, are refused; or None."""
    if query not in DTYPES:
        return f"queries are {str(query).removeprefix('torch.')}; tensor cores take bfloat16 or float16"
    if max(x, v) > MAX_CHANNELS:
        return f"keys have {x} and values {v} channels, of which {MAX_CHANNELS} fit"
    return None


def choose_tile(major: int, num_rows: int, x: int, v: int, fp8: bool) -> Tile:
    """16 rows where they hold a request's, else 64, for a compute capability.

    Chosen so that next to no register spills: wide heads get fewer keys a step, and a dequantised tile, which
    passes through registers, gets few rows where these also hold both operands of a product (mma).
    """
    wide, mma = max(x, v) > 128, major not in (9, 10, 11)
    if num_rows <= 16 or (fp8 and wide and mma):
        return Tile(16, 32 if wide or fp8 else 64, 4, 2)
    return Tile(64, 32 if wide else 64, 8 if mma or v > 128 else 4, 2)


def parts_of(x: int) -> tuple[int, int]:
    """Key channels in two powers of two, neither below a tensor core's 16: 192 is (128, 64), 128 (128, 0)."""
    head = max(1 << (x.bit_length() - 1), 16)
    rest = max(x - head, 0)
    return head, max(1 << (rest - 1).bit_length(), 16) if rest else 0


def _launch(inputs: PagedAttentionInputs, schedule: Schedule) -> AttentionOutput:
    query = inputs.query
    t, h, x = query.shape
    _, block_size, g, v = inputs.value_cache.shape
    if reason := why_not(query.dtype, x, v):
        raise ValueError(reason)
    from mla_fast._triton_paged_kernel import _paged_attention_kernel

    out = torch.empty((t, h, v), dtype=query.dtype, device=query.device)
    lse = torch.empty((t, h), dtype=torch.float32, device=query.device)
    if t == 0:
        return AttentionOutput(out, lse)
    group, (batch, width) = h // g, inputs.block_table.shape
    num_rows = inputs.max_seqlen_q * group
    fp8 = inputs.key_cache.dtype == E4M3
    tile = schedule.tile or INTERPRETED
    if schedule.tile is None and query.device.type == "cuda":
        tile = choose_tile(torch.cuda.get_device_capability(query.device)[0], num_rows, x, v, fp8)
    row_blocks = -(-num_rows // tile.rows)
    num_splits = schedule.num_splits or choose_splits(
        batch * g * row_blocks, -(-width * block_size // tile.keys), device_of(query.device).num_units
    )
    caches = inputs.key_cache, inputs.value_cache
    key, value = (cache.view(torch.uint8) if fp8 else cache for cache in caches)
    partial = partial_results(num_splits, t * h, v, query.device)
    x_head, x_rest = parts_of(x)
    with launching(query.device):
        _paged_attention_kernel[(row_blocks, g * num_splits, batch)](
            query,
            key,
            value,
            inputs.k_scale,
            inputs.v_scale,
            inputs.block_table,
            inputs.cu_seqlens_q.contiguous(),
            inputs.cache_seqlens.contiguous(),
            out,
            lse,
            *partial,
            inputs.softmax_scale * LOG2_E,
            t * h,
            num_splits,
            *query.stride(),
            *key.stride()[:3],
            *value.stride()[:3],
            *inputs.block_table.stride(),
            GROUP=group,
            X=x,
            X_HEAD=x_head,
            X_REST=x_rest,
            V=v,
            V_PADDED=max(1 << (v - 1).bit_length(), 16),
            BLOCK_SIZE=block_size,
            SCALING="tensor" if fp8 else "none",
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
    def triton_paged_attention(
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cache_seqlens: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
    ) -> AttentionOutput:
        """Multi-head or grouped-query attention over pages in any layout, keys in parallel splits.

        score[s h j] = softmax_scale · query[s h] · key[j g],   g = h // (heads / key-value heads)

        Raises: ValueError for what ``supports`` declines. Lengths and block ids are the caller's promise.
        Error: scores, softmax and sums in float32; dequantised keys and values and softmax weights rounded to
        the query's type; the denominator sums the unrounded weights; partial results stay float32.
        Source: FlashAttention-2, arXiv 2307.08691, with base-2 softmax and Flash-Decoding's split keys.
        """
        return _launch(
            PagedAttentionInputs(
                query,
                key_cache,
                value_cache,
                block_table,
                cu_seqlens_q,
                cache_seqlens,
                max_seqlen_q,
                softmax_scale,
                k_scale,
                v_scale,
            ),
            schedule,
        )

    return triton_paged_attention


def supports(case: Case) -> str | None:
    """Why a case is outside what the kernel computes."""
    return why_not(getattr(torch, case.dtype), case.config.qk_head_dim, case.config.v_head_dim)


triton_paged_attention = scheduled(Schedule())

BACKEND = Backend(
    "mla_fast.triton_paged_attention",
    "paged_attention",
    triton_paged_attention,
    Numerics(
        kv=INPUT,
        p=INPUT,
        sum_rounded_p=False,
        partial=FLOAT32,
        max_splits=MAX_SPLITS,
        merge_depth=1,
        min_tile=16,
        dot_roundings=1.5,  # Ampere's tensor cores; later ones need 1
    ),
    requires=requires,
    supports=supports,
    variants={
        "one_split": scheduled(Schedule(num_splits=1)),
        "splits_3": scheduled(Schedule(num_splits=3)),
        "tile_16x16": scheduled(Schedule(tile=Tile(16, 16, 4, 2))),
    },
)
