"""Adapter to FlashAttention-2 over packed keys and values, ``flash_attn_varlen_func``: what prefill calls.

Version: ``flash_attn``, of which there is no wheel: as 2.8.3 documents itself, not judged. Where it is not
installed, the copy of its kernels in torch, ``aten::_flash_attention_forward``, judged with torch 2.11.
Conversions: keys and values are expanded and packed as by ``mla_fast.flash_attn_3_varlen``, values padded
with zeros to the width of keys, the one width that FlashAttention-2 has. ``lse`` comes as [h t], and +inf
where a row sees no key; it leaves as [t h], and -inf. A call without any token or any key, which raised with
torch 2.11, is answered here.
Not supported: a batch without requests, values wider than keys, more than 256 channels, widths that are no
multiple of 8, queries that are not bf16 or fp16.
"""

import importlib

import torch

from mla_fast._expanded_keys import packed, why_not_packed
from mla_fast._installed import calling, found, why_not
from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.formats import CacheFormat
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM

MODULE = "flash_attn.flash_attn_interface"  # FlashAttention-4 is a package of the same name


def requires(device: str) -> str | None:
    """A GPU of Ampere's or later, and the package or, where there is none, torch's copy."""
    if device != "cuda" or not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "FlashAttention-2 needs compute capability 8.0"
    if found(MODULE):
        return why_not(MODULE, "flash_attn_varlen_func")
    if not torch.backends.cuda.is_flash_attention_available():
        return f"neither {MODULE} nor torch's copy of FlashAttention-2 is installed"
    return None


def supports(case: Case) -> str | None:
    """Some requests, and widths and types that its kernels have."""
    x, v = case.config.qk_head_dim, case.config.v_head_dim
    fits = x % 8 == 0 and v <= x <= 256
    return why_not_packed(case, "FlashAttention-2", fits, "one width for both, a multiple of 8 up to 256")


@implements(PROBLEM, values=False)
def flash_attn_2(
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
    Source: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py and csrc/flash_attn/src/softmax.h.
    """
    query, key, value, *lengths = packed(
        q_nope, q_pe, kv_cache, block_table, cu_seqlens_q, cache_seqlens, w_uk, w_uv, cache_format, kv_scale
    )
    if not len(query) or not len(key):
        lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
        return AttentionOutput(q_nope.new_zeros(*query.shape[:2], value.shape[-1]), lse)
    padded = torch.nn.functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
    ends = cu_seqlens_q, lengths[0], max_seqlen_q, lengths[1]
    with calling(query.device):
        if found(MODULE):
            out, lse, _ = importlib.import_module(MODULE).flash_attn_varlen_func(
                query, key, padded, *ends, softmax_scale=softmax_scale, causal=True, return_attn_probs=True
            )
        else:
            out, lse, *_ = torch.ops.aten._flash_attention_forward(
                query, key, padded, *ends, 0.0, True, False, scale=softmax_scale
            )
    lse = lse.transpose(0, 1)
    return AttentionOutput(out[..., : value.shape[-1]], lse.masked_fill(lse == torch.inf, -torch.inf))


BACKEND = Backend(
    "mla_fast.flash_attn_2",
    "attention",
    flash_attn_2,
    Numerics(form="expanded", kv=INPUT, operand=INPUT, p=INPUT, sum_rounded_p=False, min_tile=32),
    requires=requires,
    supports=supports,
)
