"""Attention over the latent cache itself: one shared key and value per token, every head a query."""

import torch

from mla_ref.backend import Backend
from mla_ref.formats import CacheFormat
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.latent_attention import PROBLEM
from mla_ref.rows import causal_mask, compute_dtype, keys, requests, softmax_values


@implements(PROBLEM)
def latent(
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
    """Multi-query attention over the latent cache.

    score[s h j] = softmax_scale · (ql_nope[s h] · kv_c[j]  +  q_pe[s h] · k_pe[j])

    Error: float32 scores and sums (float64 for float64 queries); only ``out`` is rounded further.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2, after absorption.
    """
    dtype = compute_dtype(ql_nope)
    dims = ql_nope.shape[-1], q_pe.shape[-1]
    out = torch.empty_like(ql_nope)
    lse = torch.empty(ql_nope.shape[:2], dtype=torch.float32, device=ql_nope.device)
    for request in requests(block_table, cu_seqlens_q, cache_seqlens):
        kv_c, k_pe = keys(kv_cache, request, 0, request.kv_len, dims, cache_format, kv_scale, dtype)
        q_nope_rows, q_pe_rows = ql_nope[request.rows].to(dtype), q_pe[request.rows].to(dtype)
        scores = softmax_scale * (
            torch.einsum("shc,jc->hsj", q_nope_rows, kv_c) + torch.einsum("shr,jr->hsj", q_pe_rows, k_pe)
        )
        mask = causal_mask(request, 0, request.kv_len, ql_nope.device)
        row_out, row_lse = softmax_values(scores, mask, kv_c[None])
        out[request.rows], lse[request.rows] = row_out.to(out.dtype), row_lse.to(torch.float32)
    return AttentionOutput(out, lse)


BACKEND = Backend("mla_ref.latent", "latent_attention", latent, Numerics())
