"""Adapter to FlashAttention-4 over packed keys and values, ``flash_attn.cute.flash_attn_varlen_func``.

Version: the PyPI wheel flash-attn-4 4.0.0b10 with nvidia-cutlass-dsl 4.4.2, which compiles a kernel for each
pair of widths and each type when it is first called.
Conversions: keys and values are expanded and packed as by ``mla_fast.flash_attn_3_varlen``; ``lse`` comes as
[h t]. Rows without a key already give 0 and -inf. A call without any token, a launch of no blocks which ends
in a CUDA error, is answered here.
Not supported: a batch without requests, more than 256 channels, widths that are no multiple of 8, queries
that are not bf16 or fp16, GPUs other than Hopper, on which it was not judged.
"""

import importlib

import torch

from mla_fast._expanded_keys import packed, why_not_packed
from mla_fast._installed import calling, why_not
from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.formats import CacheFormat
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM

MODULE = "flash_attn.cute"


def requires(device: str) -> str | None:
    """The package, and a Hopper GPU."""
    if device != "cuda" or not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "FlashAttention-4 was judged on compute capability 9.0 alone"
    return why_not(MODULE, "flash_attn_varlen_func")


def supports(case: Case) -> str | None:
    """Some requests, and widths and types that its kernels have."""
    x, v = case.config.qk_head_dim, case.config.v_head_dim
    fits = x % 8 == v % 8 == 0 and max(x, v) <= 256
    return why_not_packed(case, "FlashAttention-4", fits, "multiples of 8 up to 256")


@implements(PROBLEM, values=False)
def flash_attn_4(
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
    """Attention over keys and values expanded from the latent, all requests in one call.

    Error: expanded keys and values, and weights, in the query's type; scores and sums in float32.
    Source: Dao-AILab/flash-attention, flash_attn/cute/interface.py and flash_fwd_sm90.py.
    """
    query, key, value, cu_seqlens_k, max_seqlen_k = packed(
        q_nope, q_pe, kv_cache, block_table, cu_seqlens_q, cache_seqlens, w_uk, w_uv, cache_format, kv_scale
    )
    if not len(query):
        return AttentionOutput(
            q_nope.new_zeros(0, *value.shape[1:]), query.new_zeros(query.shape[:2]).float()
        )
    with calling(query.device):
        out, lse = importlib.import_module(MODULE).flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            softmax_scale=softmax_scale,
            causal=True,
            return_lse=True,
        )
    return AttentionOutput(out, lse.transpose(0, 1))


BACKEND = Backend(
    "mla_fast.flash_attn_4",
    "attention",
    flash_attn_4,
    Numerics(form="expanded", kv=INPUT, operand=INPUT, p=INPUT, sum_rounded_p=False, min_tile=32),
    requires=requires,
    supports=supports,
)
