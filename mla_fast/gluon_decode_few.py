"""Decode of few rows on Hopper GPUs over an fp8 cache: codes go from shared memory into the products.

Contract: 512 latent and 64 rope channels, bfloat16 queries, a cache in ``fp8_ds_mla``, ``fp8_ds_mla_pow2``
or ``fp8_e4m3``, at most 16 rows a request (heads times new tokens, by ``max_seqlen_q``); block sizes, strides
and plans are ``gluon_decode``'s. A NaN among visible keys makes their rows NaN, but in the rope part of
``fp8_e4m3``, where the codes of NaN count as ±480.
"""

from collections.abc import Callable

import torch

from mla_fast._split_keys import launching
from mla_fast.gluon_decode import (
    LATENT,
    LOG2_E,
    ROPE,
    Plan,
    _rows,
    by_columns,
    empty_results,
    merged,
    ready,
    requires,
    why_not_placed,
)
from mla_fast.gluon_decode_fp8 import TILED, check_read, why_not_read
from mla_ref.backend import Backend, Prepared
from mla_ref.case import Case
from mla_ref.formats import CacheFormat
from mla_ref.numerics import EXACT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.latent_attention import PROBLEM, LatentAttentionInputs

MOST_ROWS = 16  # of a request
KEYS = 64  # of a block
HALVES = 2  # of a block's keys, whose outputs are merged
TILE = 128  # channels under one scale
NUM_TILES = LATENT // TILE


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
    """Attention of one layer under a plan; the other arguments are ``LatentAttentionInputs``'s.

    Raises: ValueError for a plan of more rows than the kernel has.
    """
    if schedule.lanes != 1:
        raise ValueError(f"schedule: has {schedule.lanes} lanes of 64 rows, must have 1")
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mla_fast._gluon_decode_few_kernel import mla_decode_few_kernel

    tiled, block_size = TILED[cache_format.name], kv_cache.shape[1]
    codes = kv_cache.view(torch.uint8)
    nope, pe = _rows(ql_nope), _rows(q_pe)
    results = empty_results(schedule, ql_nope)
    block_table = by_columns(block_table)

    def cache(words: torch.Tensor, columns: int, swizzle: int) -> TensorDescriptor:
        box = [1, min(KEYS, block_size), columns]
        layout = gl.NVMMASharedLayout(swizzle, 8 * words.itemsize, 3)
        return TensorDescriptor(words, list(words.shape), list(words.stride()), box, layout)

    with launching(ql_nope.device):
        mla_decode_few_kernel[(schedule.parts,)](
            nope,
            pe,
            nope.stride(0),
            pe.stride(0),
            cache(codes, TILE, 128),
            cache(codes, 2 * ROPE if tiled else ROPE, 128 if tiled else 64),
            cache(kv_cache.view(torch.float32), NUM_TILES, 0) if tiled else kv_scale,
            *results,
            block_table,
            schedule.items,
            schedule.offsets,
            block_table.stride(0),
            ql_nope.shape[1],
            softmax_scale * LOG2_E,
            block_size,
            tiled,
            num_warps=8,
            maxnreg=168,
            launch_pdl=True,
        )
    return merged(schedule, results)


def _ready(inputs: LatentAttentionInputs, batch_invariant: bool = False) -> Callable[[], AttentionOutput]:
    query, fmt = inputs.ql_nope, inputs.cache_format
    check_read(fmt, query)
    if inputs.max_seqlen_q * query.shape[1] > MOST_ROWS:
        raise ValueError(
            f"ql_nope: {inputs.max_seqlen_q} tokens of {query.shape[1]} heads a request, must be at most "
            f"{MOST_ROWS} rows"
        )

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


def _gluon_decode_few(batch_invariant: bool) -> Callable[..., AttentionOutput]:
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
        """Multi-query attention over the latent cache, codes multiplied as they are and scaled afterwards.

        score[s h j] = softmax_scale · (Σ_tile scale[j tile] · (ql_nope[s h tile] · code[j tile])
                                        +  q_pe[s h] · k_pe[j])

        Raises: ValueError for what ``supports`` declines. Lengths and block ids are the caller's promise.
        Error: scores, softmax, sums and partial results in float32; each tile's weights, times its scale,
        rounded to float16 where the scales fit, else to two numbers of bfloat16.
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


gluon_decode_few = implements(PROBLEM, values=False)(_gluon_decode_few(batch_invariant=False))
batch_invariant = implements(PROBLEM, values=False)(_gluon_decode_few(batch_invariant=True))


def prepare(inputs: LatentAttentionInputs) -> Prepared:
    """The plan of a step made, and one layer's attention left."""
    return Prepared(_ready(inputs), lambda output: output)


def supports(case: Case) -> str | None:
    """One width, bfloat16 queries, an fp8 format, few rows, whole boxes and aligned strides."""
    if reason := why_not_read(case):
        return reason
    rows = max(case.q_lens, default=0) * case.config.num_heads
    if rows > MOST_ROWS:
        return f"{rows} rows a request, needs at most {MOST_ROWS}"
    return why_not_placed(case)


BACKEND = Backend(
    "mla_fast.gluon_decode_few",
    "latent_attention",
    gluon_decode_few,
    Numerics(
        accumulate="float32",
        kv=EXACT,
        p="float16",
        shared_p=False,  # a tile's weights are rounded after its scale
        sum_rounded_p=False,
        partial="float32",
        max_splits=132 * HALVES,
        merge_depth=2,
        min_tile=KEYS,
        slack=4.0,  # the kernel's SLACK
    ),
    requires,
    supports,
    {"batch_invariant": batch_invariant},
    prepare,
)
