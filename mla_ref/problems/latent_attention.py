"""Multi-query attention over the paged latent cache: what decode kernels compute."""

from typing import NamedTuple

import torch

from mla_ref.case import Case
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


class LatentAttentionInputs(NamedTuple):
    """What every implementation of ``latent_attention`` is called with, in this order.

    ql_nope: [t h c]. Queries after absorption, all requests packed; any strides but the last, which is 1.
    q_pe: [t h r]. Rotated query part, same dtype, likewise.
    kv_cache: [n k e]. Pages as written by ``cache_format``; any strides but the last, which is 1. Slots past
        ``cache_seqlens`` may hold anything, NaN included.
    block_table: [b m] int32, any row stride. Logical block → page; entries past a request's last block are
        never followed.
    cu_seqlens_q: [b+1] int32. Request i owns query rows cu_seqlens_q[i] … cu_seqlens_q[i+1]-1.
    cache_seqlens: [b] int32. Cached tokens of each request, its new ones included.
    max_seqlen_q: the longest query, known to the host.
    softmax_scale: multiplies the scores; the model's, never this width's default.
    cache_format: how entries are stored.
    kv_scale: [] float32. Read only by formats with a per-tensor scale.
    """

    ql_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    max_seqlen_q: int
    softmax_scale: float
    cache_format: CacheFormat
    kv_scale: torch.Tensor


SHAPES = {
    "ql_nope": "t h c",
    "q_pe": "t h r",
    "kv_cache": "n k e",
    "block_table": "b m",
    "cu_seqlens_q": "b+1",
    "cache_seqlens": "b",
    "kv_scale": "",
}


def check(inputs: LatentAttentionInputs) -> None:
    """Raises: ValueError on a shape, dtype or device that breaks the contract."""
    sizes = bind_shapes(SHAPES, inputs._asdict())
    check_paged(inputs, "ql_nope", "q_pe")
    check_cache(inputs.kv_cache, inputs.cache_format, sizes["c"], sizes["r"])


def check_values(inputs: LatentAttentionInputs) -> None:
    """Raises: ValueError on lengths, offsets, live block ids or a scale out of range."""
    check_lengths(inputs, inputs.ql_nope.shape[0])
    check_scale(inputs.cache_format, inputs.kv_scale)


def materialize(case: Case, device: torch.device) -> LatentAttentionInputs:
    """The tensors of a case."""
    raw = raw_values(case, case.config.kv_lora_rank)
    dtype = getattr(torch, case.dtype)
    cache = paged(case, raw, device)
    return LatentAttentionInputs(
        ql_nope=raw.q_nope.to(dtype).to(device),
        q_pe=raw.q_pe.to(dtype).to(device),
        kv_cache=cache.kv_cache,
        block_table=cache.block_table,
        cu_seqlens_q=cache.cu_seqlens_q,
        cache_seqlens=cache.cache_seqlens,
        max_seqlen_q=cache.max_seqlen_q,
        softmax_scale=case.config.softmax_scale,
        cache_format=cache.cache_format,
        kv_scale=cache.kv_scale,
    )


PROBLEM = Problem(
    name="latent_attention",
    inputs=LatentAttentionInputs,
    output=AttentionOutput,
    shapes=SHAPES,
    output_shapes={"out": "t h c", "lse": "t h"},
    check=check,
    check_values=check_values,
    materialize=materialize,
)
