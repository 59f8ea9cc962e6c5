"""Adapter to ``torch.nn.functional.scaled_dot_product_attention`` on expanded keys and values.

Version: torch 2.11 to 2.13, any device. Conversions: each request's latent is gathered, dequantised to the
query's type and expanded to per-head keys and values (float32 sums, rounded to the query's type). The mask is
given explicitly, aligned bottom-right, where torch's own ``is_causal`` aligns top-left. Rows without a key
never reach torch. SDPA has no public log-sum-exp: ``lse`` is computed here, in float32 from the same queries
and keys, so what is judged as torch's is ``out`` alone.

Torch chooses the kernel, and the numerics have to cover them all:
- "math", on the CPU where keys and values differ in width: 16-bit inputs are widened to float32 throughout.
- CPU flash attention, where they agree: weights rounded to the query's type, denominators of unrounded ones,
  512 keys a tile. Its vectorised exponential is a polynomial: off by 20 ulp for float32, and for bfloat16 and
  float16, at degree 3 (``fexp_u20``), by up to 1.07e-4, which is the figure declared.
- memory-efficient and cuDNN attention on CUDA: weights rounded to the query's type, 64 keys a tile or more.
The variant ``math`` allows the first alone.
"""

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mla_ref.backend import Backend
from mla_ref.formats import CacheFormat
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM
from mla_ref.rows import causal_mask, compute_dtype, keys, requests

Attention = Callable[..., torch.Tensor]
SCORES = 2**28  # of all heads, held at a time for the log-sum-exp


def _math(*args: torch.Tensor, **kwargs: torch.Tensor | float) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)  # type: ignore[arg-type]


def expanded(attend: Attention) -> Callable[..., AttentionOutput]:
    """The implementation around one way to call SDPA."""

    @implements(PROBLEM)
    def sdpa(
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
        """Torch's attention over keys and values expanded from the latent, one request at a time.

        Returns: ``out`` from SDPA; ``lse`` from float32 scores of the same rounded keys.
        Error: dequantised and expanded keys and values in the query's type; inside SDPA, see the module.
        Source: torch.nn.functional.scaled_dot_product_attention; aten/src/ATen/native/transformers.
        """
        dtype, wide = q_nope.dtype, compute_dtype(q_nope)
        dims = w_uk.shape[-1], q_pe.shape[-1]
        out = q_nope.new_zeros(*q_nope.shape[:2], w_uv.shape[1])
        lse = torch.full(q_nope.shape[:2], -torch.inf, dtype=torch.float32, device=q_nope.device)
        query = torch.cat([q_nope, q_pe], dim=-1)
        for request in requests(block_table, cu_seqlens_q, cache_seqlens):
            unseeing = max(request.q_len - request.kv_len, 0)
            rows = slice(request.rows.start + unseeing, request.rows.stop)
            if rows.start == rows.stop:
                continue
            kv_c, k_pe = keys(kv_cache, request, 0, request.kv_len, dims, cache_format, kv_scale, dtype)
            k_nope = torch.einsum("hpc,jc->hjp", w_uk.to(wide), kv_c.to(wide)).to(dtype)
            value = torch.einsum("hvc,jc->hjv", w_uv.to(wide), kv_c.to(wide)).to(dtype)
            key = torch.cat([k_nope, k_pe.expand(k_nope.shape[0], -1, -1)], dim=-1)
            mask = causal_mask(request, 0, request.kv_len, query.device)[unseeing:]
            q = query[rows].transpose(0, 1)
            attended = attend(q[None], key[None], value[None], attn_mask=mask, scale=softmax_scale)
            out[rows] = attended[0].transpose(0, 1)
            at_once = max(1, SCORES // (key.shape[0] * key.shape[1]))
            for start in range(0, q.shape[1], at_once):
                part = slice(start, start + at_once)
                scores = softmax_scale * torch.einsum("hsd,hjd->hsj", q[:, part].to(wide), key.to(wide))
                row_lse = torch.logsumexp(scores.masked_fill(~mask[part], -torch.inf), dim=-1)
                lse[rows][part] = row_lse.transpose(0, 1)
        return AttentionOutput(out, lse)

    return sdpa


sdpa = expanded(torch.nn.functional.scaled_dot_product_attention)

BACKEND = Backend(
    "mla_fast.sdpa",
    "attention",
    sdpa,
    Numerics(
        form="expanded",
        kv=INPUT,
        operand=INPUT,
        p=INPUT,
        min_tile=64,
        dot_roundings=1.5,
        exp_error=2048.0,
    ),
    variants={"math": expanded(_math)},
)
