"""Adapter to FlashAttention-3 over packed keys and values, ``flash_attn_varlen_func``: what prefill calls.

Version: the modules that ``mla_fast.flash_attn_3`` calls.
Conversions: each request's latent is gathered, dequantised and expanded to per-head keys and values (float32
sums, rounded to the query's type), one request behind the other; lengths are read back for it. ``lse`` comes
as [h t]. Rows without a key already give 0 and -inf, save in a batch without any: its +inf is turned.
Not supported: a batch without requests, keys and values of different widths other than 192 and 128, more
than 256 channels, widths that are no multiple of 8, queries that are not bf16 or fp16, GPUs other than
Hopper.
"""

import importlib

import torch

from mla_fast._expanded_keys import Packed, packed, planned, why_not_packed
from mla_fast._installed import calling
from mla_fast.flash_attn_3 import CONTIGUOUS, NUMERICS, installed, requires
from mla_fast.flash_attn_3_paged import UNEQUAL
from mla_ref.backend import Backend, Prepared
from mla_ref.case import Case
from mla_ref.formats import CacheFormat
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM, AttentionInputs


def supports(case: Case) -> str | None:
    """Some requests, and widths that its kernels have, in a type that the installed module is built with."""
    x, v = case.config.qk_head_dim, case.config.v_head_dim
    fits = x % 8 == v % 8 == 0 and x <= 256 and (x == v or (x, v) == UNEQUAL)
    widths = f"equal multiples of 8 up to 256, or {UNEQUAL}"
    if reason := why_not_packed(case, "FlashAttention-3", fits, widths):
        return reason
    if installed() == CONTIGUOUS and case.dtype == "float16":
        return f"{CONTIGUOUS} is built without float16"
    return None


@implements(PROBLEM, values=False)
def flash_attn_3_varlen(
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

    Error: dequantised and expanded keys and values in the query's type; inside, as ``mla_fast.flash_attn_3``.
    Source: Dao-AILab/flash-attention, hopper/flash_attn_interface.py.
    """
    expanded = packed(
        q_nope, q_pe, kv_cache, block_table, cu_seqlens_q, cache_seqlens, w_uk, w_uv, cache_format, kv_scale
    )
    return _finished(*_attended(expanded, cu_seqlens_q, max_seqlen_q, softmax_scale), len(expanded.key))


def prepare(inputs: AttentionInputs) -> Prepared:
    """Lengths read back, queries and projections joined; keys are expanded and attended to in each run."""
    expand = planned(inputs)
    sizes = inputs.cu_seqlens_q, inputs.max_seqlen_q, inputs.softmax_scale

    def run() -> tuple[torch.Tensor, torch.Tensor, int]:
        expanded = expand()
        return *_attended(expanded, *sizes), len(expanded.key)

    return Prepared(run, lambda result: _finished(*result))


def _attended(
    expanded: Packed, cu_seqlens_q: torch.Tensor, max_seqlen_q: int, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [t h v] and lse [h t], as the library gives them."""
    with calling(expanded.query.device):
        out, lse, *_ = importlib.import_module(installed() or CONTIGUOUS).flash_attn_varlen_func(
            expanded.query,
            expanded.key,
            expanded.value,
            cu_seqlens_q,
            expanded.cu_seqlens_k,
            max_seqlen_q,
            expanded.max_seqlen_k,
            softmax_scale=softmax_scale,
            causal=True,
            return_attn_probs=True,
        )
    return out, lse


def _finished(out: torch.Tensor, lse: torch.Tensor, num_keys: int) -> AttentionOutput:
    lse = lse.transpose(0, 1)
    return AttentionOutput(out, lse if num_keys else torch.full_like(lse, -torch.inf))


BACKEND = Backend(
    "mla_fast.flash_attn_3_varlen",
    "attention",
    flash_attn_3_varlen,
    Numerics(
        form="expanded",
        kv=INPUT,
        operand=INPUT,
        p=INPUT,
        sum_rounded_p=NUMERICS.sum_rounded_p,
        min_tile=NUMERICS.min_tile,
    ),
    requires=requires,
    supports=supports,
    prepare=prepare,
)
