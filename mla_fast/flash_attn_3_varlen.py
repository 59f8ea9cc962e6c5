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

from mla_fast.flash_attn_3 import CONTIGUOUS, NUMERICS, installed, requires
from mla_fast.flash_attn_3_paged import UNEQUAL
from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.formats import CacheFormat
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM
from mla_ref.rows import compute_dtype, keys, requests


def supports(case: Case) -> str | None:
    """Some requests, and widths that its kernels have, in a type that the installed module is built with."""
    if not case.q_lens:
        return "a batch without requests has nothing to pack"
    x, v = case.config.qk_head_dim, case.config.v_head_dim
    if x % 8 or v % 8 or x > 256 or (x != v and (x, v) != UNEQUAL):
        return f"x={x}, v={v}; FlashAttention-3 takes equal multiples of 8 up to 256, or {UNEQUAL}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"{case.dtype} queries; FlashAttention-3 takes bf16 or fp16"
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
    dtype, wide = q_nope.dtype, compute_dtype(q_nope)
    dims = w_uk.shape[-1], q_pe.shape[-1]
    batch = list(requests(block_table, cu_seqlens_q, cache_seqlens))
    parts = [keys(kv_cache, one, 0, one.kv_len, dims, cache_format, kv_scale, dtype) for one in batch]
    kv_c, k_pe = (torch.cat(part) for part in zip(*parts, strict=True))
    k_nope = torch.einsum("hpc,jc->jhp", w_uk.to(wide), kv_c.to(wide)).to(dtype)
    value = torch.einsum("hvc,jc->jhv", w_uv.to(wide), kv_c.to(wide)).to(dtype)
    key = torch.cat([k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)], dim=-1)
    out, lse, *_ = importlib.import_module(installed() or CONTIGUOUS).flash_attn_varlen_func(
        torch.cat([q_nope, q_pe], dim=-1),
        key,
        value,
        cu_seqlens_q,
        torch.nn.functional.pad(cache_seqlens.cumsum(0), (1, 0)).to(torch.int32),
        max_seqlen_q,
        max((one.kv_len for one in batch), default=0),
        softmax_scale=softmax_scale,
        causal=True,
        return_attn_probs=True,
    )
    lse = lse.transpose(0, 1)
    return AttentionOutput(out, lse if len(key) else torch.full_like(lse, -torch.inf))


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
)
