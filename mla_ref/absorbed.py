"""MLA without expanding its cache: projections move from the keys and values to the query and the output."""

import torch

from mla_ref.backend import Backend
from mla_ref.formats import CacheFormat
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM
from mla_ref.rows import causal_mask, compute_dtype, keys, requests, softmax_values


def fold_query(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """ql_nope [t h c]: w_uk[h]ᵀ q_nope[t h], so that ql_nope · kv_c = q_nope · (w_uk kv_c)."""
    return torch.einsum("thp,hpc->thc", q_nope, w_uk)


def expand_output(out_latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """out [t h v]: w_uv[h] out_latent[t h], the values of a mixture being the mixture of the values."""
    return torch.einsum("thc,hvc->thv", out_latent, w_uv)


@implements(PROBLEM)
def absorbed(
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
    """Multi-query attention over the latent, between two projections of each head's own.

    score[s h j] = softmax_scale · (w_uk[h]ᵀ q_nope[s h] · kv_c[j]  +  q_pe[s h] · k_pe[j])
    out[s h] = w_uv[h] Σ softmax(score)[j] kv_c[j]

    Error: float32 throughout (float64 for float64 queries); only ``out`` is rounded further.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2: W_UK absorbed into W_UQ, and W_UV into W_O.
    """
    dtype = compute_dtype(q_nope)
    dims = w_uk.shape[-1], q_pe.shape[-1]
    ql_nope = fold_query(q_nope.to(dtype), w_uk.to(dtype))
    out_latent = torch.empty_like(ql_nope)
    lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
    for request in requests(block_table, cu_seqlens_q, cache_seqlens):
        kv_c, k_pe = keys(kv_cache, request, 0, request.kv_len, dims, cache_format, kv_scale, dtype)
        scores = softmax_scale * (
            torch.einsum("shc,jc->hsj", ql_nope[request.rows], kv_c)
            + torch.einsum("shr,jr->hsj", q_pe[request.rows].to(dtype), k_pe)
        )
        mask = causal_mask(request, 0, request.kv_len, q_nope.device)
        row_out, row_lse = softmax_values(scores, mask, kv_c[None])
        out_latent[request.rows], lse[request.rows] = row_out, row_lse.to(torch.float32)
    return AttentionOutput(expand_output(out_latent, w_uv.to(dtype)).to(q_nope.dtype), lse)


BACKEND = Backend("mla_ref.absorbed", "attention", absorbed, Numerics(form="absorbed"))
