"""Truth in float64, written independently of ``mla_ref``'s maths: its own gather, sums and softmax.

Only the input types and the formats' decode are shared. Where the numerics name the type that dequantised
keys and values take, that type's values are the operands (the stage cut); otherwise code · scale, exact in
float64.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from mla_ref.numerics import EXACT, INPUT, Numerics

# Scores of one chunk of rows; about ten temporaries of this size are alive in the bounds.
CHUNK_ELEMENTS = 2**23


class Rows(NamedTuple):
    """Some query rows and heads of one request, and what float64 knows about them.

    tokens, heads: which part of the packed output they are.
    q_latent [s h c], q_pe [s h r]: queries in latent space.
    kv_c [j c], k_pe [j r]: the keys that the last of these queries sees.
    seen [s j]: which key each query sees.
    scores [h s j]: scaled, -inf where unseen. top, lse [h s]: their maximum and log-sum-exp.
    weights [h s j]: softmax of the scores; 0 on a row without a key.
    values [h j x] or [1 j x]; out [h s x].
    """

    tokens: slice
    heads: slice
    q_latent: torch.Tensor
    q_pe: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    seen: torch.Tensor
    scores: torch.Tensor
    top: torch.Tensor
    lse: torch.Tensor
    weights: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor


def operand_dtype(name: str, query: torch.dtype) -> torch.dtype:
    """The type that a field of ``Numerics`` names; float64 for "exact"."""
    if name == EXACT:
        return torch.float64
    dtype = query if name == INPUT else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"numerics: {name!r} is no torch dtype, nor {INPUT!r} or {EXACT!r}")
    return dtype


def entries(kv_cache: torch.Tensor, blocks: list[int], start: int, stop: int) -> torch.Tensor:
    """Cache entries [stop-start e] of tokens start … stop-1, block by block."""
    size = kv_cache.shape[1]
    parts = [kv_cache[:0, 0]]
    for i in range(start // size, -(-stop // size)):
        low, high = max(start - i * size, 0), min(stop - i * size, size)
        parts.append(kv_cache[blocks[i], low:high])
    return torch.cat(parts)


def mix(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Weighted sums [h s x] of values [h j x], or of [1 j x] shared by all heads."""
    if values.shape[0] == weights.shape[0]:
        return weights @ values
    return (weights.reshape(-1, weights.shape[-1]) @ values[0]).reshape(*weights.shape[:2], -1)


def attention_rows(inputs: Any, numerics: Numerics) -> Iterator[Rows]:
    """Every query row of ``latent_attention`` or ``attention`` inputs, in chunks that fit in memory."""
    expand = hasattr(inputs, "w_uk")
    query = inputs.q_nope if expand else inputs.ql_nope
    tables, offsets = inputs.block_table.tolist(), inputs.cu_seqlens_q.tolist()
    dtype = operand_dtype(numerics.kv, query.dtype)
    latent_width = inputs.w_uk.shape[2] if expand else query.shape[2]
    for i, kv_len in enumerate(inputs.cache_seqlens.tolist()):
        first, q_len = offsets[i], offsets[i + 1] - offsets[i]
        stored = entries(inputs.kv_cache, tables[i], 0, kv_len)
        keys = inputs.cache_format.decode(stored, latent_width, inputs.q_pe.shape[2], inputs.kv_scale, dtype)
        kv_c, k_pe = (part.double() for part in keys)
        for heads, start, stop in _chunks(query.shape[1], q_len, max(kv_len, 1)):
            tokens = slice(first + start, first + stop)
            num_seen = torch.arange(start + 1, stop + 1, device=query.device) + (kv_len - q_len)
            last = min(max(kv_len - q_len + stop, 0), kv_len)
            seen = torch.arange(last, device=query.device) < num_seen[:, None]
            q_nope, q_pe = query[tokens, heads].double(), inputs.q_pe[tokens, heads].double()
            latent, values = q_nope, kv_c[None, :last]
            if expand:
                latent = torch.einsum("shp,hpc->shc", q_nope, inputs.w_uk[heads].double())
                values = torch.einsum("jc,hvc->hjv", kv_c[:last], inputs.w_uv[heads].double())
            yield _rows(
                tokens, heads, latent, q_pe, kv_c[:last], k_pe[:last], seen, values, inputs.softmax_scale
            )


def _chunks(num_heads: int, q_len: int, kv_len: int) -> Iterator[tuple[slice, int, int]]:
    queries = max(min(q_len, CHUNK_ELEMENTS // kv_len), 1)
    heads = max(min(num_heads, CHUNK_ELEMENTS // (kv_len * queries)), 1)
    for head in range(0, num_heads, heads):
        for start in range(0, q_len, queries):
            yield slice(head, min(head + heads, num_heads)), start, min(start + queries, q_len)


def _rows(
    tokens: slice,
    heads: slice,
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    seen: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
) -> Rows:
    dots = torch.einsum("shc,jc->hsj", q_latent, kv_c) + torch.einsum("shr,jr->hsj", q_pe, k_pe)
    scores = (softmax_scale * dots).masked_fill(~seen, -torch.inf)
    top = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -torch.inf)
    raised = torch.exp(scores - top.nan_to_num(nan=torch.nan, neginf=0.0)[..., None])
    total = raised.sum(-1)
    lse = top + torch.log(total)
    weights = raised / total.masked_fill(total == 0, 1.0)[..., None]
    out = mix(weights, values)
    return Rows(tokens, heads, q_latent, q_pe, kv_c, k_pe, seen, scores, top, lse, weights, values, out)
