"""Multi-head latent attention between its projections: decode, MTP, prefill and chunked prefill alike."""

import math
from typing import NamedTuple

import torch

from mla_ref.case import RECORDED, Case
from mla_ref.formats import CacheFormat
from mla_ref.problem import AttentionOutput, Problem, bind_shapes
from mla_ref.problems._paged import (
    check_cache,
    check_lengths,
    check_paged,
    check_scale,
    paged,
    raw_values,
)
from mla_ref.recording import recorded_tensor
from mla_ref.values import bell


class AttentionInputs(NamedTuple):
    """What every implementation of ``attention`` is called with, in this order.

    q_nope: [t h p]. Queries without position, before absorption, all requests packed; any strides but the
        last, which is 1.
    q_pe: [t h r]. Rotated query part, same dtype, likewise.
    kv_cache: [n k e]. Pages as written by ``cache_format``; any strides but the last, which is 1. Slots past
        ``cache_seqlens`` may hold anything, NaN included.
    block_table: [b m] int32, any row stride. Logical block → page; entries past a request's last block are
        never followed.
    cu_seqlens_q: [b+1] int32. Request i owns query rows cu_seqlens_q[i] … cu_seqlens_q[i+1]-1.
    cache_seqlens: [b] int32. Cached tokens of each request, its new ones included.
    w_uk: [h p c]. Up-projection of keys, same dtype as the queries; any strides but the last.
    w_uv: [h v c]. Up-projection of values, likewise: both are often views of one weight.
    max_seqlen_q: the longest query, known to the host.
    softmax_scale: multiplies the scores; the model's.
    cache_format: how entries are stored.
    kv_scale: [] float32. Read only by formats with a per-tensor scale.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    max_seqlen_q: int
    softmax_scale: float
    cache_format: CacheFormat
    kv_scale: torch.Tensor


SHAPES = {
    "q_nope": "t h p",
    "q_pe": "t h r",
    "kv_cache": "n k e",
    "block_table": "b m",
    "cu_seqlens_q": "b+1",
    "cache_seqlens": "b",
    "w_uk": "h p c",
    "w_uv": "h v c",
    "kv_scale": "",
}


def check(inputs: AttentionInputs) -> None:
    """Raises: ValueError on a shape, dtype or device that breaks the contract."""
    sizes = bind_shapes(SHAPES, inputs._asdict())
    check_paged(inputs, "q_nope", "q_pe", "w_uk", "w_uv")
    check_cache(inputs.kv_cache, inputs.cache_format, sizes["c"], sizes["r"])


def check_values(inputs: AttentionInputs) -> None:
    """Raises: ValueError on lengths, offsets, live block ids or a scale out of range."""
    check_lengths(inputs, inputs.q_nope.shape[0])
    check_scale(inputs.cache_format, inputs.kv_scale)


def materialize(case: Case, device: torch.device) -> AttentionInputs:
    """The tensors of a case. Weights keep the expanded keys and values at unit variance."""
    config = case.config
    raw = raw_values(case, config.qk_nope_head_dim)
    dtype = getattr(torch, case.dtype)
    cache = paged(case, raw, device)
    w_uk, w_uv = _weights(case)
    return AttentionInputs(
        q_nope=raw.q_nope.to(dtype).to(device),
        q_pe=raw.q_pe.to(dtype).to(device),
        kv_cache=cache.kv_cache,
        block_table=cache.block_table,
        cu_seqlens_q=cache.cu_seqlens_q,
        cache_seqlens=cache.cache_seqlens,
        w_uk=w_uk.to(dtype).to(device),
        w_uv=w_uv.to(dtype).to(device),
        max_seqlen_q=cache.max_seqlen_q,
        softmax_scale=config.softmax_scale,
        cache_format=cache.cache_format,
        kv_scale=cache.kv_scale,
    )


def _weights(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """w_uk [h p c] and w_uv [h v c], float64."""
    if case.regime == RECORDED:
        return recorded_tensor(case, "w_uk"), recorded_tensor(case, "w_uv")
    config = case.config
    h, c, gain = config.num_heads, config.kv_lora_rank, 1.0 / math.sqrt(config.kv_lora_rank)
    w_uk = bell(case.seed, "w_uk", h, config.qk_nope_head_dim, c) * gain
    return w_uk, bell(case.seed, "w_uv", h, config.v_head_dim, c) * gain


PROBLEM = Problem(
    name="attention",
    inputs=AttentionInputs,
    output=AttentionOutput,
    shapes=SHAPES,
    output_shapes={"out": "t h v", "lse": "t h"},
    check=check,
    check_values=check_values,
    materialize=materialize,
)
