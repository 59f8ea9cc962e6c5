"""Adapter to FlashInfer's paged MLA, ``flashinfer.mla.BatchMLAPagedAttentionWrapper``.

Version: flashinfer-python 0.6.6, whose kernels are compiled on first use, which needs nvcc. The backend is
FlashInfer's own choice: "fa3" on Hopper, "fa2" elsewhere; the variant ``fa2`` asks for that one.
Conversions: latent and rope parts of the cache are two views of it; the block table becomes the list of live
pages; lengths are read back, since the plan is made on the host. ``lse`` is asked for in base 2: for base e
several warps multiply it in memory where it lies, and now and then twice. Rows without a key are answered for
here: FlashInfer masks with a finite number, and their ``lse`` is finite there. So is a call without requests,
by whose number its planner divides.
What nothing here mends: a row whose scores are all below -5e4 gets the ``lse`` of that number; where heads do
not divide 64, some of them may lose a token's newest key; pages from 2³² elements on are taken for others.
Not supported: widths other than 512 + 64, other types than bfloat16, entries not aligned to 16 bytes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from mla_fast._installed import calling, why_not
from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.formats import CacheFormat, cache_format
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.latent_attention import PROBLEM

LATENT, ROPE = 512, 64
ALIGNMENT = 16  # bytes of one asynchronous copy
WORKSPACE = 128 << 20  # bytes for partial results: what its documentation asks for


def requires(device: str) -> str | None:
    """The module, and a CUDA device."""
    if device != "cuda" or not torch.cuda.is_available():
        return "needs a CUDA device"
    return why_not("flashinfer.mla", "BatchMLAPagedAttentionWrapper")


def supports(case: Case) -> str | None:
    """512 + 64 channels of bfloat16, aligned."""
    config, fmt = case.config, cache_format(case.cache_format)
    if (config.kv_lora_rank, config.qk_rope_head_dim) != (LATENT, ROPE):
        return f"c={config.kv_lora_rank}, r={config.qk_rope_head_dim}; FlashInfer is built for 512 and 64"
    if (case.dtype, fmt.name) != ("bfloat16", "bf16"):
        return f"{case.dtype} queries over a {fmt.name} cache; FlashInfer was judged with bfloat16 alone"
    return case.layout.why_not_aligned(fmt.entry_bytes(LATENT, ROPE), case.block_size, ALIGNMENT)


@functools.cache
def wrapper(device: torch.device, backend: str) -> Any:
    """FlashInfer's wrapper with a workspace of its own; planned anew in every call."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    return BatchMLAPagedAttentionWrapper(workspace, backend=backend)


def on(backend: str) -> Callable[..., AttentionOutput]:
    """The implementation on one of FlashInfer's backends."""

    @implements(PROBLEM, values=False)
    def flashinfer(
        ql_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cache_seqlens: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        cache_format: CacheFormat,
        kv_scale: torch.Tensor,
    ) -> AttentionOutput:
        """Multi-query attention over the latent cache by FlashInfer.

        Error: float32 scores and sums; weights and partial outputs rounded to the query's type.
        Source: flashinfer-ai/flashinfer, include/flashinfer/attention/mla.cuh and mla_hopper.cuh.
        """
        (t, h, c), r, block_size = ql_nope.shape, q_pe.shape[2], kv_cache.shape[1]
        if len(cache_seqlens) == 0:
            nothing = ql_nope.new_empty(t, h, c)
            return AttentionOutput(nothing, nothing.new_empty((t, h), dtype=torch.float32))
        pages = (cache_seqlens + block_size - 1) // block_size
        live = torch.arange(block_table.shape[1], device=pages.device) < pages[:, None]
        first_page = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
        latent, rope = kv_cache[..., :c], kv_cache[..., c:]
        with calling(ql_nope.device):
            planned = wrapper(ql_nope.device, backend)
            planned.plan(
                cu_seqlens_q, first_page, block_table[live], cache_seqlens, h, c, r, block_size, True,
                softmax_scale, ql_nope.dtype, kv_cache.dtype,
            )  # fmt: skip
            out, lse = planned.run(ql_nope, q_pe, latent, rope, return_lse=True)
        q_lens = cu_seqlens_q.diff().long()
        first_seeing = (cu_seqlens_q[1:] - cache_seqlens).repeat_interleave(q_lens)
        empty = torch.arange(t, device=out.device) < first_seeing
        return AttentionOutput(
            out.masked_fill(empty[:, None, None], 0.0),
            (lse * math.log(2)).masked_fill(empty[:, None], -torch.inf),
        )

    return flashinfer


BACKEND = Backend(
    "mla_fast.flashinfer",
    "latent_attention",
    on("auto"),
    # A row is split over at most as many clusters as there are multiprocessors.
    Numerics(p=INPUT, shared_p=False, partial=INPUT, max_splits=160, min_tile=16),
    requires=requires,
    supports=supports,
    variants={"fa2": on("fa2")},
)
