"""Ordinary attention, multi-head or grouped-query, over pages of keys and values in any layout."""

from typing import NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.formats import cache_format
from mla_ref.layout import poisoned_pool
from mla_ref.pages import block_table, scatter
from mla_ref.problem import AttentionOutput, Problem, bind_shapes
from mla_ref.problems._paged import (
    QUERY_DTYPES,
    check_device,
    check_dtype,
    check_lengths,
    live_slots,
    raw_values,
)
from mla_ref.values import signs

CACHE_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn)

# A case attends to one layer of a pool that has more of them, the others poisoned.
NUM_LAYERS = 3
LAYER = 1


class PagedAttentionInputs(NamedTuple):
    """What every implementation of ``paged_attention`` is called with, in this order.

    query: [t h x]. All requests packed; any strides but the last, which is 1.
    key_cache: [n k g x]. Pages of keys; any strides but the last, which is 1. Slots past ``cache_seqlens``
        may hold anything, NaN included. h is a multiple of g: head i reads key/value head i // (h / g).
    value_cache: [n k g v]. Pages of values, likewise, in the same type; often the same memory.
    block_table: [b m] int32, any row stride. Logical block → page; entries past a request's last block are
        never followed.
    cu_seqlens_q: [b+1] int32. Request i owns query rows cu_seqlens_q[i] … cu_seqlens_q[i+1]-1.
    cache_seqlens: [b] int32. Cached tokens of each request, its new ones included.
    max_seqlen_q: the longest query, known to the host.
    softmax_scale: multiplies the scores.
    k_scale: [] float32. Keys are code · k_scale where the pages are e4m3; otherwise never read.
    v_scale: [] float32. Likewise for values; the two differ.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    max_seqlen_q: int
    softmax_scale: float
    k_scale: torch.Tensor
    v_scale: torch.Tensor


SHAPES = {
    "query": "t h x",
    "key_cache": "n k g x",
    "value_cache": "n k g v",
    "block_table": "b m",
    "cu_seqlens_q": "b+1",
    "cache_seqlens": "b",
    "k_scale": "",
    "v_scale": "",
}


def check(inputs: PagedAttentionInputs) -> None:
    """Raises: ValueError on a shape, dtype, stride or device that breaks the contract."""
    sizes = bind_shapes(SHAPES, inputs._asdict())
    if sizes["g"] < 1 or sizes["h"] % sizes["g"]:
        raise ValueError(f"query: h={sizes['h']} is no multiple of g={sizes['g']} key/value heads")
    check_dtype("query", inputs.query, *QUERY_DTYPES)
    check_dtype("key_cache", inputs.key_cache, *CACHE_DTYPES)
    check_dtype("value_cache", inputs.value_cache, inputs.key_cache.dtype)
    for name in ("block_table", "cu_seqlens_q", "cache_seqlens"):
        check_dtype(name, getattr(inputs, name), torch.int32)
    for name in ("k_scale", "v_scale"):
        check_dtype(name, getattr(inputs, name), torch.float32)
    for name in ("key_cache", "value_cache"):
        pages = getattr(inputs, name)
        if pages.shape[-1] > 1 and pages.stride(-1) != 1:
            raise ValueError(f"{name}: last stride is {pages.stride(-1)}, must be 1")
    check_device(inputs)


def check_values(inputs: PagedAttentionInputs) -> None:
    """Raises: ValueError on lengths, offsets or live block ids out of range."""
    check_lengths(inputs, inputs.query.shape[0], inputs.key_cache)


def materialize(case: Case, device: torch.device) -> PagedAttentionInputs:
    """The tensors of a case: one layer of a pool of several, in the case's order of axes.

    A head's channels are the model's nope and rope channels together. What a regime puts into the latent is
    split into the heads' nope keys and values; the rope keys of each head are the regime's with signs of the
    head's own, and so are its queries', so that scores keep their meaning and heads differ.
    """
    config, seed, g = case.config, case.seed, case.num_kv_heads
    if config.num_heads % g:
        raise ValueError(f"case: num_heads={config.num_heads} is no multiple of num_kv_heads={g}")
    p, r, v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    raw = raw_values(case, p, g * (p + v))
    sign = signs(seed, "kv_head", g, r)
    q_pe = raw.q_pe * sign.repeat_interleave(config.num_heads // g, dim=0)
    nope, value = torch.split(raw.kv_c.reshape(-1, g, p + v), [p, v], dim=-1)
    key = torch.cat([nope, raw.k_pe[:, None] * sign], dim=-1)
    query = torch.cat([raw.q_nope, q_pe], dim=-1).to(getattr(torch, case.dtype))
    table, num_blocks = block_table(case.kv_lens, case.block_size, case.layout, seed)
    key_cache, value_cache = pages(case, num_blocks, device)
    slot_mapping = live_slots(case, table).to(device)
    fmt = cache_format(case.cache_format)
    scales = [
        torch.tensor(scale if fmt.per_tensor_scale else float("nan"), dtype=torch.float32)
        for scale in (case.kv_scale, case.v_scale)
    ]
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    for cache, channels, scale in zip((key_cache, value_cache), (key, value), scales, strict=True):
        entries = fmt.encode(channels.to(wide), channels[..., :0].to(wide), scale)
        scatter(cache, slot_mapping, entries.to(device))
    return PagedAttentionInputs(
        query=query.to(device),
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=table.to(device),
        cu_seqlens_q=torch.tensor([0, *case.q_lens]).cumsum(0).to(torch.int32).to(device),
        cache_seqlens=torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        max_seqlen_q=max(case.q_lens, default=0),
        softmax_scale=config.softmax_scale,
        k_scale=scales[0].to(device),
        v_scale=scales[1].to(device),
    )


def why_not(case: Case) -> str | None:
    """Why the case's format cannot hold keys and values, or None."""
    fmt, widths = cache_format(case.cache_format), (case.config.qk_head_dim, case.config.v_head_dim)
    if fmt.dtype not in CACHE_DTYPES or any(fmt.entry_width(width, 0) != width for width in widths):
        return f"cache format {fmt.name} stores latents, not keys and values"
    return None


def pages(case: Case, num_blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n k g x] and values [n k g v] of one layer in a pool whose every byte is poison.

    Raises: ValueError if the cache format stores anything but the channels themselves.
    """
    if reason := why_not(case):
        raise ValueError(f"case: {reason}")
    fmt, widths = cache_format(case.cache_format), (case.config.qk_head_dim, case.config.v_head_dim)
    sizes = {"l": NUM_LAYERS, "n": num_blocks, "k": case.block_size, "g": case.num_kv_heads}
    placement = case.layout.place(case.kv_layout, sizes, widths, fmt.dtype.itemsize)
    pool = poisoned_pool(placement.pool_bytes, device)
    key, value = (view.permute("lnkgx").select(l=LAYER).tensor(pool, fmt.dtype) for view in placement.views)
    return key, value


PROBLEM = Problem(
    name="paged_attention",
    inputs=PagedAttentionInputs,
    output=AttentionOutput,
    shapes=SHAPES,
    output_shapes={"out": "t h v", "lse": "t h"},
    check=check,
    check_values=check_values,
    materialize=materialize,
    why_not=why_not,
)
