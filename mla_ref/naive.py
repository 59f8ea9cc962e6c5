"""The definition of MLA: expand the latent to per-head keys and values, then multi-head attention."""

import torch

from mla_ref.backend import Backend
from mla_ref.formats import CacheFormat
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM
from mla_ref.rows import causal_mask, compute_dtype, keys, requests, softmax_values


@implements(PROBLEM)
def naive(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    cache_format: CacheFormat,
    kv_scale: torch.Tensor,
) -> AttentionOutput:
    """Attention over keys and values expanded from the latent.

    k_nope[j h] = w_uk[h] kv_c[j],   value[j h] = w_uv[h] kv_c[j]
    score[s h j] = softmax_scale · (q_nope[s h] · k_nope[j h]  +  q_pe[s h] · k_pe[j])

    Error: float32 throughout (float64 for float64 queries); only ``out`` is rounded further.
    Source: DeepSeek-V2, arXiv 2405.04434, equations 9 to 19.
    """
    dtype = compute_dtype(q_nope)
    dims = w_uk.shape[-1], q_pe.shape[-1]
    out = q_nope.new_empty(*q_nope.shape[:2], w_uv.shape[1])
    lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
    for request in requests(block_table, cu_seqlens_q, cache_seqlens):
        kv_c, k_pe = keys(kv_cache, request, 0, request.kv_len, dims, cache_format, kv_scale, dtype)
        k_nope = torch.einsum("hpc,jc->hjp", w_uk.to(dtype), kv_c)
        value = torch.einsum("hvc,jc->hjv", w_uv.to(dtype), kv_c)
        scores = softmax_scale * (
            torch.einsum("shp,hjp->hsj", q_nope[request.rows].to(dtype), k_nope)
            + torch.einsum("shr,jr->hsj", q_pe[request.rows].to(dtype), k_pe)
        )
        mask = causal_mask(request, 0, request.kv_len, q_nope.device)
        row_out, row_lse = softmax_values(scores, mask, value)
        out[request.rows], lse[request.rows] = row_out.to(out.dtype), row_lse.to(torch.float32)
    return AttentionOutput(out, lse)


BACKEND = Backend("mla_ref.naive", "attention", naive, Numerics(form="expanded"))
