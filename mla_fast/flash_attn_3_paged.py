"""Adapter to FlashAttention-3 over pages of keys and values, ``flash_attn_with_kvcache(page_table=…)``.

Version: the modules that ``mla_fast.flash_attn_3`` calls. Where only the wheel without pages is installed,
every request's live keys and values are copied into one contiguous, zeroed cache first, waiting for the
lengths; the copy is part of what is judged and timed.
Conversions: ``lse`` comes as [h t]. Rows without a key already give 0 and -inf.
Not supported: keys and values of different widths other than 192 and 128, more than 256 channels, widths
that are no multiple of 8, e4m3 pages (they want e4m3 queries), caches of another type than the query's,
strides that are no multiple of 16 bytes, GPUs other than Hopper.
"""

from collections.abc import Callable

import torch

from mla_fast.flash_attn_3 import (
    ALIGNMENT,
    CONTIGUOUS,
    FORMATS,
    NUMERICS,
    PAGED,
    attend,
    contiguous,
    installed,
    requires,
)
from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.formats import cache_format
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.paged_attention import PROBLEM

UNEQUAL = (192, 128)


def supports(case: Case) -> str | None:
    """Widths that its kernels have, in the query's own type, and for pages aligned."""
    x, v, fmt = case.config.qk_head_dim, case.config.v_head_dim, cache_format(case.cache_format)
    if x % 8 or v % 8 or x > 256 or (x != v and (x, v) != UNEQUAL):
        return f"x={x}, v={v}; FlashAttention-3 takes equal multiples of 8 up to 256, or {UNEQUAL}"
    if FORMATS.get(fmt.name) != case.dtype:
        return f"{case.dtype} queries over a {fmt.name} cache; FlashAttention-3 takes bf16 or fp16 throughout"
    if installed() == PAGED:
        return _why_not_aligned(case, fmt.dtype.itemsize)
    return f"{CONTIGUOUS} is built without float16" if case.dtype == "float16" else None


def _why_not_aligned(case: Case, itemsize: int) -> str | None:
    sizes = {"l": 2, "n": 2, "k": case.block_size, "g": case.num_kv_heads}
    widths = case.config.qk_head_dim, case.config.v_head_dim
    for view in case.layout.place(case.kv_layout, sizes, widths, itemsize).views:
        for name, step in zip([*view.axes[:-1], "offset"], [*view.strides[:-1], view.offset], strict=True):
            if step % ALIGNMENT:
                return f"{name} has a step of {step} bytes, which is no multiple of {ALIGNMENT}"
    return None


def with_splits(num_splits: int) -> Callable[..., AttentionOutput]:
    """The implementation with so many splits; 0 leaves it to FlashAttention."""

    @implements(PROBLEM, values=False)
    def flash_attn_3_paged(
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
        """Attention over pages of keys and values by FlashAttention-3.

        Error: float32 scores, sums and partial results; weights rounded to the query's type.
        Source: Dao-AILab/flash-attention, hopper/flash_api.cpp and hopper/softmax.h.
        """
        key, value = key_cache, value_cache
        if installed() == CONTIGUOUS:
            key, value = (contiguous(x, block_table, cache_seqlens) for x in (key, value))
        return attend(
            query,
            key,
            value,
            block_table,
            cu_seqlens_q,
            cache_seqlens,
            max_seqlen_q=max_seqlen_q,
            softmax_scale=softmax_scale,
            num_splits=num_splits,
        )

    return flash_attn_3_paged


flash_attn_3_paged = with_splits(0)

BACKEND = Backend(
    "mla_fast.flash_attn_3_paged",
    "paged_attention",
    flash_attn_3_paged,
    NUMERICS,
    requires=requires,
    supports=supports,
    variants={"splits_1": with_splits(1), "splits_5": with_splits(5)},
)
