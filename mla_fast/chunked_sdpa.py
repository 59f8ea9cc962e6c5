"""Prefill in bounded memory on torch's flash attention: the context is expanded one workspace at a time.

What an engine does, and what its memory is planned for (``mla_ref.capacity``, "padded"): gather a chunk of
context, up-project all of it in one product, join each head's nope and rope channels into keys, pad values to
their width, attend without a mask, and merge; the new tokens come last, causal among themselves.

Version: torch 2.11 to 2.13, ``aten::_scaled_dot_product_flash_attention`` on CUDA and its ``_for_cpu``, the
calls under SDPA that return the log-sum-exp. Lengths are read back to plan the chunks.
Not supported: queries that are not bf16 or fp16, values wider than keys, more than 256 key channels, widths
that are no multiple of 8.
"""

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch

from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.chunk_plan import CAP, packed
from mla_ref.formats import CacheFormat
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM
from mla_ref.rows import keys, requests

DTYPES = (torch.bfloat16, torch.float16)
MAX_CHANNELS = 256

# The most partial results of one request that the declared numerics cover, its new tokens' included.
MAX_PARTS = 64


def flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [s h x] and lse [s h] of query [s h x] over key [j h x] and value [j h x], which have one width."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    aten = torch.ops.aten
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal, scale=scale)
    else:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal, scale=scale)[:2]
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def fold(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A state of no keys or more and a part of some, as one: in float32, ``out`` rounded to its type."""
    top = torch.maximum(lse, part_lse)
    old, new = torch.exp(lse - top), torch.exp(part_lse - top)
    total = old + new
    merged = ((old / total)[..., None] * out.float()).addcmul_((new / total)[..., None], part.float())
    return merged.to(out.dtype), top + torch.log(total)


@contextlib.contextmanager
def float32_sums() -> Iterator[None]:
    """Products of 16-bit matrices are summed in float32 and rounded once, partial sums never."""
    flags = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(flags, name) for name in names}
    try:
        for name in names:
            setattr(flags, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(flags, name, value)


def chunked_by(rows_of: Callable[[list[int], int], int]) -> Callable[..., AttentionOutput]:
    """The implementation with a workspace of ``rows_of(contexts, block_size)``."""

    @implements(PROBLEM)
    def chunked_sdpa(
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

        Raises: ValueError for what ``supports`` declines.
        Error: latents, expanded keys and values, weights, and every partial output in the query's type;
        scores, sums and merges in float32.
        Source: vLLM, the "compute friendly" prefill of its MLA backend, with a chunked context.
        """
        if reason := why_not(q_nope.dtype, w_uk.shape[1] + q_pe.shape[2], w_uv.shape[1]):
            raise ValueError(reason)
        (t, h, p), r, (v, c) = q_nope.shape, q_pe.shape[2], w_uv.shape[1:]
        dtype, device, block_size = q_nope.dtype, q_nope.device, kv_cache.shape[1]
        batch = list(requests(block_table, cu_seqlens_q, cache_seqlens))
        contexts = [request.context_len if request.q_len else 0 for request in batch]
        chunks = packed(contexts, rows_of(contexts, block_size), block_size)
        kv_b = torch.cat([w_uk, w_uv], dim=1).reshape(h * (p + v), c)
        query = torch.cat([q_nope, q_pe], dim=-1)
        out = torch.zeros(t, h, v, dtype=dtype, device=device)
        lse = torch.full((t, h), -torch.inf, dtype=torch.float32, device=device)

        def gather(i: int, start: int, stop: int, into: torch.Tensor) -> None:
            parts = keys(kv_cache, batch[i], start, stop, (c, r), cache_format, kv_scale, dtype)
            torch.cat(parts, dim=-1, out=into)

        def expand(latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Joined keys and padded values [j h p+r] of rows [j c+r]."""
            with float32_sums():
                expanded = (latent[:, :c] @ kv_b.T).view(-1, h, p + v)
            key = torch.cat([expanded[..., :p], latent[:, None, c:].expand(-1, h, -1)], dim=-1)
            return key, torch.nn.functional.pad(expanded[..., p:], (0, p + r - v))

        def attend(rows: slice, key: torch.Tensor, value: torch.Tensor, causal: bool) -> None:
            part, part_lse = flash(query[rows], key, value, softmax_scale, causal)
            out[rows], lse[rows] = fold(out[rows], lse[rows], part[..., :v], part_lse)

        num_rows = max((sum(span.num_tokens for span in chunk) for chunk in chunks), default=0)
        workspace = torch.empty(num_rows, c + r, dtype=dtype, device=device)
        for chunk in chunks:
            ends = list(accumulate(span.num_tokens for span in chunk))
            places = [slice(end - span.num_tokens, end) for span, end in zip(chunk, ends, strict=True)]
            for span, place in zip(chunk, places, strict=True):
                gather(*span, into=workspace[place])
            key, value = expand(workspace[: ends[-1]])
            for span, place in zip(chunk, places, strict=True):
                attend(batch[span.request].rows, key[place], value[place], causal=False)
            del key, value
        for i, request in enumerate(batch):
            seeing = min(request.q_len, request.kv_len)
            if seeing:
                new = torch.empty(seeing, c + r, dtype=dtype, device=device)
                gather(i, request.kv_len - seeing, request.kv_len, into=new)
                attend(slice(request.rows.stop - seeing, request.rows.stop), *expand(new), causal=True)
        return AttentionOutput(out, lse)

    return chunked_sdpa


def roomy(contexts: list[int], block_size: int) -> int:
    """What an engine has."""
    return max(CAP, block_size)


def cramped(contexts: list[int], block_size: int) -> int:
    """A third of the longest context, in whole blocks: four chunks or so."""
    return max(-(-max(contexts, default=0) // 3 // block_size), 1) * block_size


def why_not(query: torch.dtype, x: int, v: int) -> str | None:
    """Why queries of this type, or keys and values of these widths, are refused; or None."""
    if query not in DTYPES:
        return f"queries are {str(query).removeprefix('torch.')}; flash attention takes bfloat16 or float16"
    if x % 8 or x > MAX_CHANNELS or v > x:
        return f"keys have {x} and values {v} channels; flash attention takes one multiple of 8 up to 256"
    return None


def supports(case: Case) -> str | None:
    """Why a case is outside what flash attention computes, or has too many chunks for the numerics."""
    pairs = zip(case.q_lens, case.kv_lens, strict=True)
    contexts = [max(kv_len - q_len, 0) if q_len else 0 for q_len, kv_len in pairs]
    if reason := why_not(getattr(torch, case.dtype), case.config.qk_head_dim, case.config.v_head_dim):
        return reason
    chunks = len(packed(contexts, cramped(contexts, case.block_size), case.block_size))
    return f"{chunks} chunks and the new tokens, of at most {MAX_PARTS}" if chunks >= MAX_PARTS else None


BACKEND = Backend(
    "mla_fast.chunked_sdpa",
    "attention",
    chunked_by(roomy),
    Numerics(
        form="expanded",
        kv=INPUT,
        operand=INPUT,
        p=INPUT,
        partial=INPUT,
        max_splits=MAX_PARTS,
        merge_depth=MAX_PARTS - 1,
        min_tile=32,
        dot_roundings=1.5,
        exp_error=2048.0,  # torch's vectorised exponential on the CPU; see ``mla_fast.sdpa``
    ),
    supports=supports,
    variants={"small_workspace": chunked_by(cramped)},
)
