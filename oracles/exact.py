"""Truth in float64, written independently of ``mla_ref``'s maths: its own gather, sums, softmax and angles.

Only the input types and the formats' decode are shared. Every function takes its operands as they are: what
an implementation materialises in a narrow type is rounded before it comes here, which is the stage cut.
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from mla_ref.config import YARN, RopeConfig

# Scores, or expanded keys, of one chunk of rows; some twenty temporaries of this size live in the bounds.
CHUNK_ELEMENTS = 2**23


class Cached(NamedTuple):
    """What one request has cached, for some of its heads, in float64.

    first: its first query row. key [j x]: scored against the query. k_pe [j r]: scored against q_pe.
    value [j v]: mixed.
    """

    first: int
    q_len: int
    heads: slice
    key: torch.Tensor
    k_pe: torch.Tensor
    value: torch.Tensor


class Operands(NamedTuple):
    """What is multiplied: query [s h x], q_pe [s h r], key [g j x] and values [g j v], g being 1 or h.

    The errors, of the same shapes, bound how far an implementation's own operands may be; None: not at all.
    """

    query: torch.Tensor
    q_pe: torch.Tensor
    key: torch.Tensor
    k_pe: torch.Tensor
    values: torch.Tensor
    query_error: torch.Tensor | None = None
    pe_error: torch.Tensor | None = None
    key_error: torch.Tensor | None = None
    value_error: torch.Tensor | None = None


class Rows(NamedTuple):
    """Some query rows and heads of one request, and what float64 knows about them.

    tokens, heads: which part of the packed output they are.
    seen [s j]: which key each query sees, always a prefix.
    scores [h s j]: scaled, -inf where unseen. top, lse [h s]: their maximum and log-sum-exp.
    weights [h s j]: softmax of the scores; 0 on a row without a key. out [h s v].
    """

    tokens: slice
    heads: slice
    operands: Operands
    seen: torch.Tensor
    scores: torch.Tensor
    top: torch.Tensor
    lse: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor


Prepare = Callable[[Any, slice, slice, torch.Tensor, torch.Tensor, torch.Tensor], Operands]


def entries(kv_cache: torch.Tensor, blocks: list[int], start: int, stop: int) -> torch.Tensor:
    """Cache entries [stop-start …] of tokens start … stop-1, block by block; reads no other slot."""
    size = kv_cache.shape[1]
    first, last = -(-start // size), stop // size
    if first >= last:
        return torch.cat([kv_cache[:0, 0], *_within_blocks(kv_cache, blocks, start, stop)])
    whole = kv_cache[torch.tensor(blocks[first:last], device=kv_cache.device)]
    ends = (start, first * size), (last * size, stop)
    before, after = (_within_blocks(kv_cache, blocks, *end) for end in ends)
    return torch.cat([*before, whole.flatten(0, 1), *after])


def _within_blocks(
    kv_cache: torch.Tensor, blocks: list[int], start: int, stop: int
) -> Iterator[torch.Tensor]:
    """The entries of each block that has some of them."""
    size = kv_cache.shape[1]
    for i in range(start // size, -(-stop // size)):
        low, high = max(start - i * size, 0), min(stop - i * size, size)
        yield kv_cache[blocks[i], low:high]


def channels(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as ``dtype`` holds them, in float64: code · scale for e4m3, by way of float32."""
    if stored.dtype != torch.float8_e4m3fn:
        return stored.to(dtype).double()
    product = stored.double() * scale.double()
    return product if dtype == torch.float64 else product.float().to(dtype).double()


def cached(inputs: Any, dtype: torch.dtype) -> Iterator[Cached]:
    """The operands of every request, and of every key-value head where heads have their own, as ``dtype``."""
    tables, offsets = inputs.block_table.tolist(), inputs.cu_seqlens_q.tolist()
    query = inputs[0]
    for blocks, (first, last), kv_len in zip(
        tables, pairwise(offsets), inputs.cache_seqlens.tolist(), strict=True
    ):
        if hasattr(inputs, "kv_cache"):
            width = inputs.w_uk.shape[2] if hasattr(inputs, "w_uk") else query.shape[2]
            stored = entries(inputs.kv_cache, blocks, 0, kv_len)
            kv_c, k_pe = inputs.cache_format.decode(
                stored, width, inputs.q_pe.shape[2], inputs.kv_scale, dtype
            )
            kv_c = kv_c.double()
            yield Cached(first, last - first, slice(0, query.shape[1]), kv_c, k_pe.double(), kv_c)
            continue
        group = query.shape[1] // inputs.key_cache.shape[2]
        for g in range(inputs.key_cache.shape[2]):
            key, value = (
                channels(entries(cache[:, :, g], blocks, 0, kv_len), scale, dtype)
                for cache, scale in (
                    (inputs.key_cache, inputs.k_scale),
                    (inputs.value_cache, inputs.v_scale),
                )
            )
            yield Cached(first, last - first, slice(g * group, (g + 1) * group), key, key[:, :0], value)


def mix(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Weighted sums [h s v] of values [h j v], or of [1 j v] shared by all heads."""
    if values.shape[0] == weights.shape[0]:
        return weights @ values
    h, s, j = weights.shape
    return (weights.reshape(h * s, j) @ values[0]).reshape(h, s, values.shape[2])


def unprojected(
    inputs: Any,
    tokens: slice,
    heads: slice,
    key: torch.Tensor,
    k_pe: torch.Tensor,
    value: torch.Tensor,
) -> Operands:
    """The operands before any rounding: queries in the space of the keys, values as the problem has them."""
    query = inputs[0][tokens, heads].double()
    if not hasattr(inputs, "w_uk"):
        q_pe = inputs.q_pe[tokens, heads].double() if hasattr(inputs, "q_pe") else query[..., :0]
        return Operands(query, q_pe, key[None], k_pe, value[None])
    latent = torch.einsum("shp,hpc->shc", query, inputs.w_uk[heads].double())
    values = torch.einsum("jc,hvc->hjv", value, inputs.w_uv[heads].double())
    return Operands(latent, inputs.q_pe[tokens, heads].double(), key[None], k_pe, values)


def attention_rows(
    inputs: Any, dtype: torch.dtype = torch.float64, prepare: Prepare = unprojected
) -> Iterator[Rows]:
    """Every query row of a paged attention problem, in chunks that fit in memory.

    dtype: what dequantised keys and values are held in. prepare: makes the operands of some rows and heads.
    """
    width = max(x.shape[1] for x in (inputs.w_uk, inputs.w_uv)) if hasattr(inputs, "w_uk") else 1
    for item in cached(inputs, dtype):
        kv_len = item.key.shape[0]
        for heads, start, stop in _chunks(item, width):
            tokens = slice(item.first + start, item.first + stop)
            num_seen = torch.arange(start + 1, stop + 1, device=item.key.device) + (kv_len - item.q_len)
            last = min(max(kv_len - item.q_len + stop, 0), kv_len)
            seen = torch.arange(last, device=item.key.device) < num_seen[:, None]
            operands = prepare(inputs, tokens, heads, item.key[:last], item.k_pe[:last], item.value[:last])
            yield attend(tokens, heads, operands, seen, inputs.softmax_scale)


def _chunks(item: Cached, width: int) -> Iterator[tuple[slice, int, int]]:
    kv_len, num_heads = max(item.key.shape[0], 1), item.heads.stop - item.heads.start
    queries = max(min(item.q_len, CHUNK_ELEMENTS // kv_len), 1)
    heads = max(min(num_heads, CHUNK_ELEMENTS // (kv_len * max(queries, width))), 1)
    for head in range(item.heads.start, item.heads.stop, heads):
        for start in range(0, item.q_len, queries):
            yield slice(head, min(head + heads, item.heads.stop)), start, min(start + queries, item.q_len)


def attend(tokens: slice, heads: slice, operands: Operands, seen: torch.Tensor, softmax_scale: float) -> Rows:
    """Scores, softmax and weighted sums of the operands."""
    query, q_pe, key, k_pe = operands[:4]
    dots = mix(query.transpose(0, 1), key.transpose(1, 2)) + torch.einsum("shr,jr->hsj", q_pe, k_pe)
    return softmax(tokens, heads, operands, seen, (softmax_scale * dots).masked_fill(~seen, -torch.inf))


def softmax(
    tokens: slice, heads: slice, operands: Operands, seen: torch.Tensor, scores: torch.Tensor
) -> Rows:
    """Softmax of scores [h s j], -inf where unseen, and the sums of the values that it weights."""
    top = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -torch.inf)
    raised = torch.exp(scores - top.masked_fill(top.isneginf(), 0.0)[..., None])
    total = raised.sum(-1)
    lse = top + torch.log(total)
    weights = raised / total.masked_fill(total == 0, 1.0)[..., None]
    return Rows(tokens, heads, operands, seen, scores, top, lse, weights, mix(weights, operands.values))


def attention(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out [t h v] and lse [t h] of any paged attention problem, nothing rounded on the way."""
    shape = (*inputs[0].shape[:2], value_width(inputs))
    out = torch.full(shape, torch.nan, dtype=torch.float64, device=inputs[0].device)
    lse = out.new_full(shape[:2], torch.nan)
    for rows in attention_rows(inputs):
        out[rows.tokens, rows.heads] = rows.out.transpose(0, 1)
        lse[rows.tokens, rows.heads] = rows.lse.T
    return out, lse


def value_width(inputs: Any) -> int:
    """Channels of an attention problem's output."""
    for name, axis in (("w_uv", 1), ("value_cache", -1), ("ql_nope", -1)):
        if hasattr(inputs, name):
            return int(getattr(inputs, name).shape[axis])
    raise ValueError(f"{type(inputs).__name__} is no attention problem's inputs")


def merged(outs: torch.Tensor, lses: torch.Tensor) -> Rows:
    """States as keys: every token and head is a head of its own, with one query [t·h 1 s].

    The value of a state without keys may be NaN; its weight is 0, and the heaviest state's stands in for it.
    """
    scores = lses.double().flatten(1).T[:, None]
    values = outs.double().flatten(1, 2).transpose(0, 1)
    heaviest = scores.argmax(-1)[..., None].expand(-1, 1, values.shape[2])
    values = torch.where(scores.transpose(1, 2).isneginf(), values.gather(1, heaviest), values)
    values = values.masked_fill(scores.isneginf().all(-1)[..., None], 0.0)
    none = scores.new_empty(0)
    operands = Operands(query=none, q_pe=none, key=none, k_pe=none, values=values)
    seen = torch.ones(1, outs.shape[0], dtype=torch.bool, device=outs.device)
    return softmax(slice(0, 1), slice(0, len(scores)), operands, seen, scores)


def frequencies(rope: RopeConfig, r: int) -> list[float]:
    """Radians per position of each pair of channels; under YaRN, interpolated by how often the pair turns.

    Pair i turns original_max_position · theta^(-2i/r) / 2π times over the original context.
    """
    plain = [math.exp(-2.0 * i / r * math.log(rope.theta)) for i in range(r // 2)]
    if rope.scaling != YARN:
        return plain

    def pair_turning(times: float) -> float:
        whole = rope.original_max_position / (2.0 * math.pi)
        return math.log(whole / times) / math.log(rope.theta) * r / 2.0

    fast, slow = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0.0), min(slow, r - 1.0)
    slow = slow if slow != fast else slow + 0.001
    share = [min(max((i - fast) / (slow - fast), 0.0), 1.0) for i in range(r // 2)]
    return [(1.0 - s) * f + s * (f / rope.factor) for f, s in zip(plain, share, strict=True)]


def angles(rope: RopeConfig, positions: torch.Tensor, r: int) -> torch.Tensor:
    """[t r/2] float64."""
    ladder = torch.tensor(frequencies(rope, r), dtype=torch.float64, device=positions.device)
    return positions.double()[:, None] * ladder


def pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The two channels [… r/2] of every pair: neighbours, or half the width apart."""
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def unpaired(a: torch.Tensor, b: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The channels [… r] of the pairs (a, b), where ``pairs`` found them."""
    return torch.stack([a, b], dim=-1 if interleaved else -2).flatten(-2)


def gathered(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_c [t c] and k_pe [t r] of the ranges of a ``cache_gather``, code · scale in float64."""
    tables, offsets = inputs.block_table.tolist(), inputs.cu_seqlens.tolist()
    parts = [inputs.kv_cache[:0, 0]]
    for i, start in enumerate(inputs.seq_starts.tolist()):
        if length := offsets[i + 1] - offsets[i]:
            parts.append(entries(inputs.kv_cache, tables[i], start, start + length))
    widths = inputs.kv_lora_rank, inputs.qk_rope_head_dim
    kv_c, k_pe = inputs.cache_format.decode(torch.cat(parts), *widths, inputs.kv_scale, torch.float64)
    return kv_c, k_pe
