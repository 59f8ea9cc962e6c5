"""Keys and values of a whole batch, expanded from the latent and packed: what varlen attention takes."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from mla_fast.chunked_sdpa import float32_sums
from mla_fast.triton_cache_gather import gather_into
from mla_ref.case import Case
from mla_ref.formats import CacheFormat
from mla_ref.problems.attention import AttentionInputs
from mla_ref.rows import compute_dtype, keys, requests


class Packed(NamedTuple):
    """query [t h x], key [j h x] and value [j h v] of all requests, one behind the other.

    cu_seqlens_k: int32, [b + 1]. max_seqlen_k: the keys of the longest request.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_k: int


def why_not_packed(case: Case, library: str, fits: bool, widths: str) -> str | None:
    """Why a library that takes these widths, of bf16 or fp16, cannot attend over packed keys; or None."""
    if not case.q_lens:
        return "a batch without requests has nothing to pack"
    if not fits:
        x, v = case.config.qk_head_dim, case.config.v_head_dim
        return f"x={x}, v={v}; {library} takes {widths}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"{case.dtype} queries; {library} takes bf16 or fp16"
    return None


def packed(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    cache_format: CacheFormat,
    kv_scale: torch.Tensor,
) -> Packed:
    """Each request's latent gathered, dequantised and expanded; lengths are read back for it.

    Error: dequantised and expanded keys and values are rounded to the query's type, sums are float32.
    """
    dtype, wide = q_nope.dtype, compute_dtype(q_nope)
    dims = w_uk.shape[-1], q_pe.shape[-1]
    batch = list(requests(block_table, cu_seqlens_q, cache_seqlens))
    parts = [keys(kv_cache, one, 0, one.kv_len, dims, cache_format, kv_scale, dtype) for one in batch]
    kv_c, k_pe = (torch.cat(part) for part in zip(*parts, strict=True))
    k_nope = torch.einsum("hpc,jc->jhp", w_uk.to(wide), kv_c.to(wide)).to(dtype)
    value = torch.einsum("hvc,jc->jhv", w_uv.to(wide), kv_c.to(wide)).to(dtype)
    return Packed(
        torch.cat([q_nope, q_pe], dim=-1),
        torch.cat([k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)], dim=-1),
        value,
        torch.nn.functional.pad(cache_seqlens.cumsum(0), (1, 0)).to(torch.int32),
        max((one.kv_len for one in batch), default=0),
    )


def planned(inputs: AttentionInputs) -> Callable[[], Packed]:
    """``packed`` as each layer of a step repeats it: lengths are read back once, here; it waits for nothing.

    As an engine does it: the gather of ``mla_fast.triton_cache_gather``, one product with both projections,
    and a copy that joins nope and rope channels. Queries and projections are joined ahead.
    """
    (_, h, p), r, (v, c) = inputs.q_nope.shape, inputs.q_pe.shape[2], inputs.w_uv.shape[1:]
    kv_lens = inputs.cache_seqlens.tolist()
    num_keys, longest = sum(kv_lens), max(kv_lens, default=0)
    ends = torch.nn.functional.pad(inputs.cache_seqlens.cumsum(0), (1, 0)).to(torch.int32)
    starts = torch.zeros_like(inputs.cache_seqlens)
    query = torch.cat([inputs.q_nope, inputs.q_pe], dim=-1)
    kv_b = torch.cat([inputs.w_uk, inputs.w_uv], dim=1).reshape(h * (p + v), c).T

    def expand() -> Packed:
        rows = query.new_empty(num_keys, c + r)
        latent, k_pe = rows[:, :c], rows[:, c:]
        gather_into(
            latent,
            k_pe,
            inputs.kv_cache,
            inputs.block_table,
            ends,
            starts,
            inputs.cache_format,
            inputs.kv_scale,
        )
        with float32_sums():
            expanded = torch.mm(latent, kv_b).view(num_keys, h, p + v)
        key = torch.cat([expanded[..., :p], k_pe[:, None].expand(-1, h, -1)], dim=-1)
        return Packed(query, key, expanded[..., p:], ends, longest)

    return expand
