"""MLA with the keys of each request in parts: attention over each, then one merge. The shape of split-KV."""

from collections.abc import Callable
from itertools import pairwise

import torch

from mla_ref.absorbed import expand_output, fold_query
from mla_ref.backend import Backend
from mla_ref.formats import CacheFormat
from mla_ref.merge_states import merge
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM
from mla_ref.rows import causal_mask, compute_dtype, keys, requests, softmax_values

# One part is no split at all; 7 never fall on blocks; 64 leave parts of short requests without a key.
NUM_SPLITS = (1, 2, 7, 64)


def with_splits(num_splits: int) -> Callable[..., AttentionOutput]:
    """The implementation that cuts each request's keys into ``num_splits`` parts, as equal as they can be."""

    @implements(PROBLEM)
    def split(
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
        """Absorbed attention over parts of the keys, merged by their log-sum-exps.

        (out_i, lse_i) = attention over keys ⌊i·kv_len/n⌋ … ⌊(i+1)·kv_len/n⌋ - 1
        (out_latent, lse) = merge of all i,   out[s h] = w_uv[h] out_latent[s h]

        Error: partial results are float32 (float64 for float64 queries); only ``out`` is rounded further.
        Source: Flash-Decoding (PyTorch blog, 2023); FlashAttention, arXiv 2205.14135, section 3.1.
        """
        dtype = compute_dtype(q_nope)
        dims = w_uk.shape[-1], q_pe.shape[-1]
        ql_nope = fold_query(q_nope.to(dtype), w_uk.to(dtype))
        out_latent = torch.empty_like(ql_nope)
        lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
        for request in requests(block_table, cu_seqlens_q, cache_seqlens):
            bounds = [i * request.kv_len // num_splits for i in range(num_splits + 1)]
            states = []
            for start, stop in pairwise(bounds):
                kv_c, k_pe = keys(kv_cache, request, start, stop, dims, cache_format, kv_scale, dtype)
                scores = softmax_scale * (
                    torch.einsum("shc,jc->hsj", ql_nope[request.rows], kv_c)
                    + torch.einsum("shr,jr->hsj", q_pe[request.rows].to(dtype), k_pe)
                )
                mask = causal_mask(request, start, stop, q_nope.device)
                states.append(softmax_values(scores, mask, kv_c[None]))
            outs, lses = (torch.stack(parts) for parts in zip(*states, strict=True))
            row_out, row_lse = merge(outs, lses)
            out_latent[request.rows], lse[request.rows] = row_out, row_lse.to(torch.float32)
        return AttentionOutput(expand_output(out_latent, w_uv.to(dtype)).to(q_nope.dtype), lse)

    return split


BACKEND = Backend(
    "mla_ref.split",
    "attention",
    with_splits(2),
    Numerics(form="absorbed", max_splits=max(NUM_SPLITS)),
    variants={f"num_splits={n}": with_splits(n) for n in NUM_SPLITS if n != 2},
)
