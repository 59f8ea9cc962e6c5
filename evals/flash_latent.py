"""Right attention over the latent that rounds wherever a 16-bit kernel does: what a limit may not reject.

The references round their inputs and their output. A kernel also rounds the softmax weights, relative to the
largest score that it has seen so far, and it sums them unrounded. A running maximum makes a weight that
outweighs all others exactly 1. A lazy one moves only when a score exceeds it by a power of two; such a weight
is then any number, and its rounding scales the whole row by up to half a unit in the last place.
"""

from collections.abc import Callable

import torch

from mla_ref.backend import Backend
from mla_ref.formats import CacheFormat
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.latent_attention import PROBLEM
from mla_ref.rows import causal_mask, compute_dtype, keys, requests

BLOCK = 64  # keys between two looks at the maximum
SLACK = 8.0  # powers of two by which a lazy maximum may be exceeded
LOG2_E = 1.4426950408889634


def held(before: torch.Tensor, top: torch.Tensor, slack: float) -> torch.Tensor:
    """The maximum once a block's largest score is ``top``: the one before it, unless that is exceeded."""
    return torch.where(top > before + slack, top, before)


def _maxima(scores: torch.Tensor, slack: float) -> torch.Tensor:
    """The maximum that each key's weight is relative to: [h s j] of scores [h s j]; -inf before any key."""
    last = scores.new_full((*scores.shape[:2], 1), -torch.inf)
    parts = []
    for block in scores.split(BLOCK, dim=-1):  # type: ignore[no-untyped-call]
        last = held(last, block.amax(-1, keepdim=True), slack)
        parts.append(last.expand_as(block))
    return torch.cat(parts, dim=-1)


def with_slack(slack: float) -> Callable[..., AttentionOutput]:
    """The implementation whose maximum moves when it is exceeded by more than ``slack`` powers of two."""

    @implements(PROBLEM)
    def flash_latent(
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
        """Multi-query attention over the latent cache, block by block as far as rounding goes.

        Error: weights rounded to the query's type, relative to the maximum of their block; scores and sums
        float32 (float64 for float64 queries); ``out`` rounded to the query's type.
        Source: FlashAttention-2, arXiv 2307.08691, algorithm 1; the lazy maximum is FlashAttention-4's.
        """
        wide, narrow = compute_dtype(ql_nope), ql_nope.dtype
        dims = ql_nope.shape[2], q_pe.shape[2]
        out = torch.zeros_like(ql_nope)
        lse = torch.full(ql_nope.shape[:2], -torch.inf, dtype=torch.float32, device=ql_nope.device)
        for request in requests(block_table, cu_seqlens_q, cache_seqlens):
            if not request.q_len or not request.kv_len:
                continue
            kv_c, k_pe = keys(kv_cache, request, 0, request.kv_len, dims, cache_format, kv_scale, wide)
            scores = torch.einsum("shc,jc->hsj", ql_nope[request.rows].to(wide), kv_c)
            scores += torch.einsum("shr,jr->hsj", q_pe[request.rows].to(wide), k_pe)
            mask = causal_mask(request, 0, request.kv_len, scores.device)
            scores = (scores * (softmax_scale * LOG2_E)).masked_fill(~mask, -torch.inf)
            maxima = _maxima(scores, slack)
            last = maxima[..., -1:]
            weights = torch.exp2(scores - maxima.nan_to_num(neginf=0.0))
            # What a block was given for an older maximum is brought to the newest, as accumulators are.
            factors = torch.exp2(maxima - last.nan_to_num(neginf=0.0))
            total = (weights * factors).sum(-1)
            row = (weights.to(narrow).to(wide) * factors) @ kv_c / total[..., None]
            sees = mask.any(-1)
            out[request.rows][sees] = row.transpose(0, 1)[sees].to(narrow)
            row_lse = (last[..., 0] + torch.log2(total)) / LOG2_E
            lse[request.rows][sees] = row_lse.T[sees].to(torch.float32)
        return AttentionOutput(out, lse)

    return flash_latent


BACKEND = Backend(
    "evals.flash_latent",
    "latent_attention",
    with_slack(0.0),
    Numerics(p=INPUT, sum_rounded_p=False, min_tile=BLOCK, slack=SLACK),
    variants={"lazy maximum": with_slack(SLACK)},
)
