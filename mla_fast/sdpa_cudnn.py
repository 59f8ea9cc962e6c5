"""Adapter to cuDNN's attention as torch calls it, ``aten::_scaled_dot_product_cudnn_attention``.

Version: torch 2.11 with cuDNN 9.19. It is the call under ``scaled_dot_product_attention``, which declines
cuDNN for an explicit mask and returns no log-sum-exp.
Conversions: keys and values are expanded and packed as by ``mla_fast.flash_attn_3_varlen``, and attended to
one request at a time. ``is_causal`` is aligned top-left, which is right where all tokens are new; elsewhere
the mask is a bias of 0 and -inf. ``lse`` comes as [b h s 1]. Rows without a key never reach cuDNN.
Not supported: a batch without requests, more than 256 channels, widths that are no multiple of 8, queries
that are not bf16 or fp16.
"""

from collections.abc import Callable

import torch

from mla_fast._expanded_keys import Packed, packed, planned, why_not_packed
from mla_fast._installed import calling, does_not_load
from mla_ref.backend import Backend, Prepared
from mla_ref.case import Case
from mla_ref.formats import CacheFormat
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM, AttentionInputs
from mla_ref.rows import Request, causal_mask, requests


def requires(device: str) -> str | None:
    """A GPU of Ampere's or later, and the cuDNN that torch was built with."""
    if device != "cuda" or not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "cuDNN's attention needs compute capability 8.0"
    try:
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except Exception as error:  # as torch raises for another cuDNN than it was built with
        return does_not_load("cuDNN", error)
    return None if version else "torch was built without cuDNN"


def supports(case: Case) -> str | None:
    """Some requests, and widths and types that cuDNN has."""
    x, v = case.config.qk_head_dim, case.config.v_head_dim
    fits = x % 8 == v % 8 == 0 and max(x, v) <= 256
    return why_not_packed(case, "cuDNN", fits, "multiples of 8 up to 256")


@implements(PROBLEM, values=False)
def sdpa_cudnn(
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
    """Attention over keys and values expanded from the latent, one request at a time.

    Error: expanded keys and values, and weights, in the query's type; scores and sums in float32.
    Source: aten/src/ATen/native/cudnn/MHA.cpp of torch.
    """
    paged = kv_cache, block_table, cu_seqlens_q, cache_seqlens, w_uk, w_uv
    inputs = AttentionInputs(q_nope, q_pe, *paged, max_seqlen_q, softmax_scale, cache_format, kv_scale)
    prepared = _over(lambda: packed(q_nope, q_pe, *paged, cache_format, kv_scale), inputs)
    return prepared.finish(prepared.run())  # type: ignore[no-any-return]


def prepare(inputs: AttentionInputs) -> Prepared:
    """Lengths read back and masks made, queries and projections joined; keys are expanded in each run."""
    return _over(planned(inputs), inputs)


def _over(expand: Callable[[], Packed], inputs: AttentionInputs) -> Prepared:
    (t, h, _), v, scale = inputs.q_nope.shape, inputs.w_uv.shape[1], inputs.softmax_scale
    calls, first = [], 0
    for one in requests(inputs.block_table, inputs.cu_seqlens_q, inputs.cache_seqlens):
        s = min(one.q_len, one.kv_len)
        if s:
            rows, seen = slice(one.rows.stop - s, one.rows.stop), slice(first, first + one.kv_len)
            calls.append((rows, seen, _bias(one, inputs.q_nope), s == one.kv_len))
        first += one.kv_len

    def run() -> list[tuple[torch.Tensor, torch.Tensor]]:
        query, key, value, *_ = expand()
        attend, parts = torch.ops.aten._scaled_dot_product_cudnn_attention, []
        with calling(query.device):
            for rows, seen, bias, causal in calls:
                q, k, w = (x.transpose(0, 1)[None] for x in (query[rows], key[seen], value[seen]))
                parts.append(attend(q, k, w, bias, True, 0.0, causal, False, scale=scale)[:2])
        return parts

    def finish(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> AttentionOutput:
        out = inputs.q_nope.new_zeros(t, h, v)
        lse = torch.full((t, h), -torch.inf, dtype=torch.float32, device=out.device)
        for (rows, *_), (part, part_lse) in zip(calls, parts, strict=True):
            out[rows], lse[rows] = part[0].transpose(0, 1), part_lse.reshape(h, -1).T
        return AttentionOutput(out, lse)

    return Prepared(run, finish)


def _bias(one: Request, like: torch.Tensor) -> torch.Tensor | None:
    """[1 h s j] of 0 and -inf, rows aligned to 16 bytes; None where is_causal, or no mask, is right."""
    if one.q_len == 1 or one.q_len >= one.kv_len:
        return None
    bias = like.new_zeros(one.q_len, -(-one.kv_len // 8) * 8)[:, : one.kv_len]
    bias.masked_fill_(~causal_mask(one, 0, one.kv_len, like.device), -torch.inf)
    return bias[None, None].expand(1, like.shape[1], -1, -1)


BACKEND = Backend(
    "mla_fast.sdpa_cudnn",
    "attention",
    sdpa_cudnn,
    Numerics(form="expanded", kv=INPUT, operand=INPUT, p=INPUT, min_tile=32),
    requires=requires,
    supports=supports,
    prepare=prepare,
)
