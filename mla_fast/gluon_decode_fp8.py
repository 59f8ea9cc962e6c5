"""Decode on Hopper GPUs over an fp8 cache: ``gluon_decode`` with a warpgroup that makes bfloat16 of codes.

Contract: 512 latent and 64 rope channels, bfloat16 queries, a cache in ``fp8_ds_mla``, ``fp8_ds_mla_pow2`` or
``fp8_e4m3``; block sizes, heads, query lengths, strides and plans are ``gluon_decode``'s.
"""

from collections.abc import Callable

import torch

from mla_fast._split_keys import launching
from mla_fast.gluon_decode import (
    BLOCK,
    LATENT,
    LOG2_E,
    ROPE,
    Plan,
    by_columns,
    empty_results,
    merged,
    query_descriptors,
    ready,
    requires,
    why_not_placed,
)
from mla_ref.backend import Backend, Prepared
from mla_ref.case import Case
from mla_ref.formats import CacheFormat
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.latent_attention import PROBLEM, LatentAttentionInputs

TILED = {"fp8_ds_mla": True, "fp8_ds_mla_pow2": True, "fp8_e4m3": False}
SCALE_BYTES = 4


def attend(
    schedule: Plan,
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    cache_format: CacheFormat,
    kv_scale: torch.Tensor,
) -> AttentionOutput:
    """Attention of one layer under a plan; the other arguments are ``LatentAttentionInputs``'s."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mla_fast._gluon_decode_fp8_kernel import mla_decode_fp8_kernel

    tiled = TILED[cache_format.name]
    codes = kv_cache.view(torch.uint8)
    n, block_size, width = codes.shape
    results = empty_results(schedule, ql_nope)
    block_table = by_columns(block_table)
    words = codes.view(torch.float32) if tiled else None
    scales = kv_scale.expand(1, 1, 1) if words is None else words[:, :, LATENT // SCALE_BYTES :]

    def cache(columns: int) -> TensorDescriptor:
        box = [1, min(BLOCK, block_size), columns]
        layout = gl.NVMMASharedLayout(min(columns, 128), 8, 3)
        return TensorDescriptor(codes, [n, block_size, width], list(codes.stride()), box, layout)

    with launching(ql_nope.device):
        mla_decode_fp8_kernel[(schedule.parts * schedule.lanes,)](
            *query_descriptors(ql_nope, q_pe),
            cache(256),
            cache(2 * ROPE if tiled else ROPE),
            scales,
            *results,
            block_table,
            schedule.items,
            schedule.offsets,
            block_table.stride(0),
            *scales.stride()[:2],
            ql_nope.shape[1],
            softmax_scale * LOG2_E,
            0,
            block_size,
            schedule.lanes,
            tiled,
            num_warps=4,
            maxnreg=168,
            launch_pdl=True,
        )
    return merged(schedule, results)


def check_read(cache_format: CacheFormat, query: torch.Tensor) -> None:
    """Raises: ValueError for a format or type of query that kernels over an fp8 cache do not read."""
    if cache_format.name not in TILED or query.dtype != torch.bfloat16:
        raise ValueError(
            f"kv_cache: {cache_format.name} with {query.dtype} queries, must be one of "
            f"{', '.join(TILED)} with torch.bfloat16"
        )


def _ready(inputs: LatentAttentionInputs, batch_invariant: bool = False) -> Callable[[], AttentionOutput]:
    query, fmt = inputs.ql_nope, inputs.cache_format
    check_read(fmt, query)

    def layer(schedule: Plan) -> AttentionOutput:
        return attend(
            schedule,
            query,
            inputs.q_pe,
            inputs.kv_cache,
            inputs.block_table,
            inputs.softmax_scale,
            fmt,
            inputs.kv_scale,
        )

    return ready(inputs, layer, batch_invariant)


def _gluon_decode_fp8(batch_invariant: bool) -> Callable[..., AttentionOutput]:
    def decode(
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
        """Multi-query attention over the latent cache, codes expanded to bfloat16 once for each row tile.

        score[s h j] = softmax_scale · (ql_nope[s h] · kv_c[j]  +  q_pe[s h] · k_pe[j])

        Raises: ValueError for what ``supports`` declines. Lengths and block ids are the caller's promise.
        Error: keys rounded to bfloat16; scores, softmax, sums and partial results in float32; weights rounded
        to bfloat16.
        Source: the two-warpgroup schedule of FlashMLA (docs/20250422-new-kernel-deep-dive.md there).
        """
        inputs = LatentAttentionInputs(
            ql_nope,
            q_pe,
            kv_cache,
            block_table,
            cu_seqlens_q,
            cache_seqlens,
            max_seqlen_q,
            softmax_scale,
            cache_format,
            kv_scale,
        )
        return _ready(inputs, batch_invariant)()

    return decode


gluon_decode_fp8 = implements(PROBLEM, values=False)(_gluon_decode_fp8(batch_invariant=False))
batch_invariant = implements(PROBLEM, values=False)(_gluon_decode_fp8(batch_invariant=True))


def prepare(inputs: LatentAttentionInputs) -> Prepared:
    """The plan of a step made, and one layer's attention left."""
    return Prepared(_ready(inputs), lambda output: output)


def supports(case: Case) -> str | None:
    """One width, bfloat16 queries, an fp8 format, whole boxes and aligned strides."""
    return why_not_read(case) or why_not_placed(case)


def why_not_read(case: Case) -> str | None:
    """Why a case has another width, format or type than kernels over an fp8 cache; or None."""
    dims = case.config.kv_lora_rank, case.config.qk_rope_head_dim
    if dims != (LATENT, ROPE):
        return f"{dims[0]} latent and {dims[1]} rope channels, needs {LATENT} and {ROPE}"
    if case.cache_format not in TILED:
        return f"{case.cache_format} cache, needs one of {', '.join(TILED)}"
    if case.dtype != "bfloat16":
        return f"{case.dtype} queries, needs bfloat16"
    return None


BACKEND = Backend(
    "mla_fast.gluon_decode_fp8",
    "latent_attention",
    gluon_decode_fp8,
    Numerics(
        accumulate="float32",
        kv=INPUT,
        p=INPUT,
        sum_rounded_p=False,
        partial="float32",
        max_splits=132,
        min_tile=BLOCK,
        slack=8.0,  # the kernels' SLACK
    ),
    requires,
    supports,
    {"batch_invariant": batch_invariant},
    prepare,
)
