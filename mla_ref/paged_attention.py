"""Attention over pages of keys and values, one request at a time."""

import torch

from mla_ref.backend import Backend
from mla_ref.formats._e4m3 import E4M3, dequantize
from mla_ref.numerics import Numerics
from mla_ref.pages import gather
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.paged_attention import PROBLEM
from mla_ref.rows import causal_mask, compute_dtype, requests, softmax_values


@implements(PROBLEM)
def paged_attention(
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
    """Multi-head or grouped-query attention over the cached keys and values.

    score[s h j] = softmax_scale · query[s h] · key[j g],   g = h // (heads / key-value heads)

    Error: float32 scores and sums (float64 for float64 queries); only ``out`` is rounded further.
    Source: Attention Is All You Need, arXiv 1706.03762, equation 1; GQA, arXiv 2305.13245.
    """
    dtype = compute_dtype(query)
    group = query.shape[1] // key_cache.shape[2]
    out = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    for request in requests(block_table, cu_seqlens_q, cache_seqlens):
        key, value = (
            channels(gather(cache, request.table_row, 0, request.kv_len), scale, dtype)
            .repeat_interleave(group, dim=1)
            .transpose(0, 1)
            for cache, scale in ((key_cache, k_scale), (value_cache, v_scale))
        )
        scores = softmax_scale * torch.einsum("shx,hjx->hsj", query[request.rows].to(dtype), key)
        mask = causal_mask(request, 0, request.kv_len, query.device)
        row_out, row_lse = softmax_values(scores, mask, value)
        out[request.rows], lse[request.rows] = row_out.to(out.dtype), row_lse.to(torch.float32)
    return AttentionOutput(out, lse)


def channels(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stored channels in ``dtype``: code · scale for e4m3, and themselves for every other type."""
    return dequantize(stored, scale, dtype) if stored.dtype == E4M3 else stored.to(dtype)


BACKEND = Backend("mla_ref.paged_attention", "paged_attention", paged_attention, Numerics())
