"""Kernels whose conventions differ from the contract's, each in its own way: what the probe must find out.

They share one honest loop; a deviation is a knob of ``kernel``.
"""

import inspect
import math
import os
from collections.abc import Callable

import torch

from mla_ref.pages import gather

LATENT_SHARE = 64  # rope channels


def kernel(
    *,
    base: float = math.e,
    transposed: bool = False,
    empty: float = -math.inf,
    empty_out: float = 0.0,
    default_scale: float | None = None,
    ignores_scale: bool = False,
    alignment: str = "bottom-right",
    past_length: str = "never",
    lse_dtype: torch.dtype = torch.float32,
    packed_strides: bool = False,
    aligned: bool = False,
    tail: str = "ignored",
    unscaled_lse: bool = False,
    writes: bool = False,
    split_parameter: bool = False,
    no_lse: bool = False,
) -> Callable[..., object]:
    """A decode kernel [b s h e] → out [b s h c], lse [b h s], with some of its conventions changed.

    past_length: "never"; "block": to the end of the last block; "zero weight": read and multiplied by 0.
    tail: "ignored"; "refuses": a negative entry raises; "dies": it ends the process.
    """

    def attend(
        q, kv_cache, block_table, cache_seqlens, softmax_scale=default_scale, causal=True, num_splits=0
    ):
        if tail == "refuses" and bool((block_table < 0).any()):
            raise RuntimeError("block_table has negative entries")
        if tail == "dies" and bool((block_table < 0).any()):
            os._exit(17)
        if packed_strides and not kv_cache.is_contiguous():
            raise ValueError("kv_cache must be contiguous")
        if aligned and (kv_cache.storage_offset() * kv_cache.itemsize % 16 or kv_cache.stride(0) % 8):
            raise ValueError("kv_cache must be aligned to 16 bytes")
        scale = default_scale if ignores_scale else softmax_scale
        (b, s, h, e), k = q.shape, kv_cache.shape[1]
        c = e - (LATENT_SHARE if e > 2 * LATENT_SHARE else e // 3)
        out = torch.zeros(b, s, h, c, dtype=q.dtype)
        lse = torch.zeros(b, h, s, dtype=torch.float32)
        for i, length in enumerate(cache_seqlens.tolist()):
            stop = -(-length // k) * k if past_length == "block" else length
            entries = gather(kv_cache, block_table[i], 0, stop).float()
            scores = torch.einsum("she,je->hsj", q[i].float(), entries)
            key, row = torch.arange(stop), torch.arange(s)[:, None]
            if causal:
                seen = key <= row + {"bottom-right": stop - s, "top-left": 0, "none": stop}[alignment]
            else:
                seen = torch.ones(s, stop, dtype=torch.bool)
            scores = (scores * scale).masked_fill(~seen, -math.inf)
            weights = torch.softmax(scores, -1) if stop else scores
            weights = weights.nan_to_num(0.0).to(q.dtype).float()
            values = entries[:, :c]
            if past_length == "zero weight":
                last = gather(kv_cache, block_table[i], 0, -(-length // k) * k).float()[:, :c]
                values = last
                weights = torch.nn.functional.pad(weights, (0, len(last) - stop))
            out[i] = torch.einsum("hsj,jc->shc", weights, values).to(q.dtype)
            total = scores.logsumexp(-1) if stop else scores.new_full((h, s), -math.inf)
            nothing = total == -math.inf
            total = total / scale if unscaled_lse else total / math.log(base)
            lse[i] = total.masked_fill(nothing, empty)
            out[i] = out[i].masked_fill(nothing.T[..., None], empty_out)
        if writes:
            q.mul_(scale)
        lse = lse.to(lse_dtype)
        if no_lse:
            return out
        return out, lse.permute(2, 0, 1).reshape(s * b, h).contiguous() if transposed == "s first" else (
            lse.permute(1, 0, 2).reshape(h, b * s) if transposed else lse
        )

    parameters = dict(inspect.signature(attend).parameters)
    if default_scale is None:
        parameters["softmax_scale"] = parameters["softmax_scale"].replace(default=inspect.Parameter.empty)
    if not split_parameter:
        parameters.pop("num_splits")
    order = sorted(parameters.values(), key=lambda p: p.default is not inspect.Parameter.empty)
    attend.__signature__ = inspect.Signature(order)
    return attend


honest = kernel()
base_two = kernel(base=2.0)
transposed_lse = kernel(transposed=True)
infinite_when_empty = kernel(empty=math.inf)
wide_default = kernel(default_scale=576**-0.5)
top_left = kernel(alignment="top-left")
past_the_length = kernel(past_length="block")

# Two deviations at once.
base_two_transposed = kernel(base=2.0, transposed=True)
top_left_and_wide = kernel(alignment="top-left", default_scale=576**-0.5)
base_two_infinite = kernel(base=2.0, empty=math.inf)
unmasked_past_the_length = kernel(alignment="none", past_length="block")
ignores_scale_base_two = kernel(default_scale=576**-0.5, ignores_scale=True, base=2.0)

# Further ways.
unmasked = kernel(alignment="none")
nan_when_empty = kernel(empty=math.nan, empty_out=math.nan)
zero_weight = kernel(past_length="zero weight")
narrow_lse = kernel(lse_dtype=torch.bfloat16)
unscaled_lse = kernel(unscaled_lse=True)
packed = kernel(packed_strides=True)
aligned = kernel(aligned=True)
refuses_negative = kernel(tail="refuses")
dies_of_negative = kernel(tail="dies")
writes_its_query = kernel(writes=True)
no_lse = kernel(no_lse=True)


def nonsense(q, kv_cache, block_table, cache_seqlens, softmax_scale):
    """The right shapes, and no attention."""
    b, s, h, e = q.shape
    return q[..., : e - LATENT_SHARE].clone(), torch.zeros(b, h, s, dtype=torch.float32)


def needs_more(q, kv_cache, block_table, cache_seqlens, softmax_scale, tuning):
    """A parameter whose role nobody can guess."""
    return honest(q, kv_cache, block_table, cache_seqlens, softmax_scale)


def packed_queries(
    ql_nope, q_pe, kv_cache, block_table, cu_seqlens_q, cache_seqlens, softmax_scale, overwrite=False
):
    """Ragged queries [t h c] and [t h r], as the contract has them; lse [h t] in base 2."""
    outs, lses = [], []
    for i, (start, stop) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False)):
        query = torch.cat([ql_nope[start:stop], q_pe[start:stop]], dim=-1)[None]
        out, lse = base_two(query, kv_cache, block_table[i : i + 1], cache_seqlens[i : i + 1], softmax_scale)
        outs.append(out[0])
        lses.append(lse[0])
    if overwrite:
        ql_nope.zero_()
    return torch.cat(outs), torch.cat(lses, dim=1)


def overwrites(ql_nope, q_pe, kv_cache, block_table, cu_seqlens_q, cache_seqlens, softmax_scale):
    """The same, and its query is gone."""
    return packed_queries(
        ql_nope, q_pe, kv_cache, block_table, cu_seqlens_q, cache_seqlens, softmax_scale, overwrite=True
    )


class Counter:
    """A kernel that answers differently in every second call."""

    calls = 0

    def __call__(self, q, kv_cache, block_table, cache_seqlens, softmax_scale):
        out, lse = honest(q, kv_cache, block_table, cache_seqlens, softmax_scale)
        self.calls += 1
        return out, torch.nextafter(lse, lse + self.calls % 2)


restless = Counter()


def in_batch(q, kv_cache, block_table, cache_seqlens, softmax_scale):
    """The last bit depends on how many requests there are."""
    out, lse = honest(q, kv_cache, block_table, cache_seqlens, softmax_scale)
    return out, torch.nextafter(lse, lse + (len(q) > 1))


def renamed(a, b, table, lens, factor):
    """Parameters that nobody can guess."""
    return honest(a, b, table, lens, factor)


def rotate_backwards(q, cos, sin):
    """Half-split pairs turned the other way."""
    a, b = q.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


def rotate_heads_first(x, position_ids):
    """Interleaved pairs of [1 h t r], with frequencies of its own."""
    if x.dim() != 4:
        raise ValueError("x must be [b h t r]")
    r = x.shape[-1]
    angle = position_ids[:, None].double() * 10000.0 ** (-torch.arange(0, r, 2).double() / r)
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


def rotate_twice(q, cos, sin):
    """By twice the angle."""
    return rotate_backwards(rotate_backwards(q, cos, -sin), cos, -sin)
