"""MLA prefill in bounded memory: the context is expanded chunk by chunk, and merged with the new tokens."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.chunk_plan import CAP, Chunk, equal_share, packed, places, whole_blocks
from mla_ref.formats import CacheFormat
from mla_ref.merge_states import merge
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM
from mla_ref.rows import Request, causal_mask, compute_dtype, keys, requests, softmax_values

Planner = Callable[[Sequence[int], int, int], list[Chunk]]
Rows = Callable[[Sequence[int], int], int]

# The most partial results of one request that the declared numerics cover, its new tokens' included.
MAX_PARTS = 64


def roomy(context_lens: Sequence[int], block_size: int) -> int:
    """What an engine has."""
    return max(CAP, sum(length > 0 for length in context_lens) * block_size)


def quarter(context_lens: Sequence[int], block_size: int) -> int:
    """A quarter of the longest context: three chunks or four, if that has three blocks or more."""
    return whole_blocks(-(-max(context_lens, default=0) // 4), block_size)


def quarter_each(context_lens: Sequence[int], block_size: int) -> int:
    """A quarter of the longest context for each request that has any."""
    return quarter(context_lens, block_size) * sum(length > 0 for length in context_lens)


def chunked_by(plan: Planner, rows_of: Rows) -> Callable[..., AttentionOutput]:
    """The implementation that plans its chunks so, for a workspace of ``rows_of(contexts, block_size)``."""

    @implements(PROBLEM)
    def chunked(
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
        """Expanded attention over each chunk of context and over the new tokens, folded into one state.

        state = no keys
        state = merge(state, attention over a span of the context, unmasked)   for every span of a request
        state = merge(state, attention over its new tokens, causal)

        Error: partial results are float32 (float64 for float64 queries); only ``out`` is rounded further.
        Source: vLLM, the "compute friendly" prefill of its MLA backend, with a chunked context.
        """
        dtype, device, block_size = compute_dtype(q_nope), q_nope.device, kv_cache.shape[1]
        dims = w_uk.shape[-1], q_pe.shape[-1]
        batch = list(requests(block_table, cu_seqlens_q, cache_seqlens))
        contexts = [request.context_len if request.q_len else 0 for request in batch]
        out = torch.zeros(*q_nope.shape[:2], w_uv.shape[1], dtype=dtype, device=device)
        lse = torch.full(q_nope.shape[:2], -torch.inf, dtype=dtype, device=device)

        def latent(request: Request, start: int, stop: int) -> torch.Tensor:
            return torch.cat(
                keys(kv_cache, request, start, stop, dims, cache_format, kv_scale, dtype), dim=-1
            )

        def fold(rows: slice, entries: torch.Tensor, mask: torch.Tensor) -> None:
            kv_c, k_pe = entries[:, : dims[0]], entries[:, dims[0] :]
            k_nope = torch.einsum("hpc,jc->hjp", w_uk.to(dtype), kv_c)
            value = torch.einsum("hvc,jc->hjv", w_uv.to(dtype), kv_c)
            scores = softmax_scale * (
                torch.einsum("shp,hjp->hsj", q_nope[rows].to(dtype), k_nope)
                + torch.einsum("shr,jr->hsj", q_pe[rows].to(dtype), k_pe)
            )
            state, part = (out[rows], lse[rows]), softmax_values(scores, mask, value)
            out[rows], lse[rows] = merge(*(torch.stack(pair) for pair in zip(state, part, strict=True)))

        chunks = plan(contexts, rows_of(contexts, block_size), block_size)
        num_rows = max((places(chunk)[-1].stop for chunk in chunks), default=0)
        workspace = torch.empty(num_rows, sum(dims), dtype=dtype, device=device)
        for chunk in chunks:
            for (i, start, stop), place in zip(chunk, places(chunk), strict=True):
                workspace[place] = latent(batch[i], start, stop)
            for (i, start, stop), place in zip(chunk, places(chunk), strict=True):
                unmasked = torch.ones(batch[i].q_len, stop - start, dtype=torch.bool, device=device)
                fold(batch[i].rows, workspace[place], unmasked)
        for request in batch:
            start, stop = request.context_len, request.kv_len
            fold(request.rows, latent(request, start, stop), causal_mask(request, start, stop, device))
        return AttentionOutput(out.to(q_nope.dtype), lse.to(torch.float32))

    return chunked


PLANS: dict[str, tuple[Planner, Rows]] = {
    "packed": (packed, roomy),
    "equal_share": (equal_share, roomy),
    "packed, small workspace": (packed, quarter),
    "equal_share, small workspace": (equal_share, quarter_each),
}


def supports(case: Case) -> str | None:
    """Cases whose every request is cut into no more parts than the numerics declare."""
    pairs = zip(case.q_lens, case.kv_lens, strict=True)
    contexts = [max(kv_len - q_len, 0) if q_len else 0 for q_len, kv_len in pairs]
    for name, (plan, rows_of) in PLANS.items():
        chunks = plan(contexts, rows_of(contexts, case.block_size), case.block_size)
        spans = Counter(span.request for chunk in chunks for span in chunk if span.num_tokens)
        parts = 1 + max(spans.values(), default=0)
        if parts > MAX_PARTS:
            return f"{name} would merge {parts} parts of one request, and {MAX_PARTS} are declared"
    return None


BACKEND = Backend(
    "mla_ref.chunked",
    "attention",
    chunked_by(*PLANS["packed"]),
    Numerics(form="expanded", max_splits=MAX_PARTS, merge_depth=MAX_PARTS - 1),
    supports=supports,
    variants={name: chunked_by(*arguments) for name, arguments in PLANS.items() if name != "packed"},
)
