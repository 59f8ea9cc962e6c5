"""Decode on Hopper GPUs: TMA, wgmma and three specialised warpgroups, written in Gluon.

Contract: 512 latent and 64 rope channels, a bf16 or fp16 cache of the query's type, block sizes 16, 32 and
multiples of 64, any number of heads, any ragged mix of query lengths. Entry and block strides and the
storage offset must be multiples of 16 bytes, which the copy engine demands; the cache is never copied.
Queries whose rows are not evenly spaced (or not aligned) are.

``plan`` is the part of a call that depends on lengths alone. It runs on the GPU, never waits, and one plan
serves every layer of a step: ``attend(plan(...), ...)``.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mla_fast._installed import why_not
from mla_fast._split_keys import launching
from mla_ref.backend import Backend, Prepared
from mla_ref.case import Case
from mla_ref.formats import CacheFormat, cache_format
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.latent_attention import PROBLEM, LatentAttentionInputs

GLUON = "triton.experimental.gluon.language.nvidia.hopper"  # of Triton 3.6 or newer
LATENT, ROPE = 512, 64
BLOCK = 64  # keys of a block, rows of a lane
MAX_LANES = 4
MERGE_PROGRAMS = 264  # for either half of the columns: four on a multiprocessor, at once
FEW_ROWS, FEW_COLUMNS = 1024, 64
CHUNK_PAIRS = 64  # of 128 keys: where the batch-invariant schedule cuts
ALIGNMENT = 16  # bytes, of every address and stride that TMA sees
FORMATS = {"bf16": "bfloat16", "fp16": "float16"}
LOG2_E = 1.4426950408889634


class Plan(NamedTuple):
    """Which part of the GPU works on which keys. Fields are described in ``_split_schedule``.

    lanes: row blocks of 64 that one tile has, each on an SM of its own. chunk: 0, or the fixed cut in pairs.
    """

    items: torch.Tensor
    offsets: torch.Tensor
    merges: torch.Tensor
    num_merges: torch.Tensor
    parts: int
    lanes: int
    num_slots: int
    chunk: int


def plan(
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    num_tokens: int,
    num_heads: int,
    max_kv_len: int,
    batch_invariant: bool = False,
) -> Plan:
    """The schedule of a batch whose lengths are on the GPU.

    num_tokens: query rows of the batch. max_kv_len: no cached length exceeds it (block-table columns times
    block size will do). batch_invariant: a request's sums never depend on the rest of the batch.

    Raises: ValueError for lengths that are on no GPU.
    """
    device = cu_seqlens_q.device
    if device.type != "cuda":
        raise ValueError(f"cu_seqlens_q: on {device}, must be on a CUDA device")
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return plan_for(
        num_sms,
        cu_seqlens_q,
        cache_seqlens,
        num_tokens=num_tokens,
        num_heads=num_heads,
        max_kv_len=max_kv_len,
        batch_invariant=batch_invariant,
    )


def plan_for(
    num_sms: int,
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    num_tokens: int,
    num_heads: int,
    max_kv_len: int,
    batch_invariant: bool,
) -> Plan:
    """``plan`` for a GPU with ``num_sms`` multiprocessors."""
    import triton

    from mla_fast import _split_schedule as schedule

    b, device = cache_seqlens.shape[0], cache_seqlens.device
    num_rows = num_tokens * num_heads
    # Lanes by the mean request: with a longer one the machine is only less even, with a shorter one lanes
    # idle.
    row_blocks = max(1, -(-num_rows // (BLOCK * b)))
    lanes = -(-row_blocks // -(-row_blocks // MAX_LANES))
    parts = max(1, num_sms // lanes)
    span = lanes * BLOCK
    max_tiles = b + num_rows // span
    chunk = CHUNK_PAIRS if batch_invariant else 0
    if chunk:
        max_pieces = max(1, -(-max_kv_len // (chunk * schedule.PAIR_KEYS)))
        max_items = max_tiles * max_pieces
        max_merges, num_slots = (max_tiles, max_items) if max_pieces > 1 else (0, 0)
    else:
        max_items = max_tiles + parts
        max_merges, num_slots = min(max_tiles, parts - 1), 2 * parts
    size_b, size_p = triton.next_power_of_2(max(b, 16)), triton.next_power_of_2(parts + 1)
    sizes = (max_items * schedule.ITEM_FIELDS, parts + 1, max_merges * schedule.MERGE_FIELDS, 1, 3 * size_b)
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    items, offsets, merges, num_merges, ends = torch.split(memory, list(sizes))
    arguments = (
        cu_seqlens_q.contiguous(), cache_seqlens.contiguous(), ends, items, offsets, merges, num_merges, b,
        num_heads, parts, span, size_b, size_b.bit_length(), size_p,
    )  # fmt: skip
    with launching(device):
        if chunk:
            schedule.fixed_schedule_kernel[(1,)](*arguments, chunk, num_warps=4, launch_pdl=True)
        else:
            schedule.schedule_kernel[(1,)](*arguments, num_warps=4, launch_pdl=True)
    return Plan(items, offsets, merges, num_merges, parts, lanes, num_slots, chunk)


class Results(NamedTuple):
    """What a call writes: its output, and in float32 the partial results of tiles that are split."""

    out: torch.Tensor
    lse: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor


def attend(
    schedule: Plan,
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
) -> AttentionOutput:
    """Attention of one layer under a plan; the other arguments are ``LatentAttentionInputs``'s."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mla_fast._gluon_decode_kernel import mla_decode_kernel

    n, block_size, width = kv_cache.shape
    dtype = gl.bfloat16 if ql_nope.dtype == torch.bfloat16 else gl.float16
    results = empty_results(schedule, ql_nope)
    block_table = by_columns(block_table)

    def cache(columns: int) -> TensorDescriptor:
        box = [1, min(BLOCK, block_size), columns]
        layout = gl.NVMMASharedLayout.get_default_for([1, BLOCK, columns], dtype)
        return TensorDescriptor(kv_cache, [n, block_size, width], list(kv_cache.stride()), box, layout)

    with launching(ql_nope.device):
        mla_decode_kernel[(schedule.parts * schedule.lanes,)](
            *query_descriptors(ql_nope, q_pe),
            cache(256),
            cache(ROPE),
            *results,
            block_table,
            schedule.items,
            schedule.offsets,
            block_table.stride(0),
            ql_nope.shape[1],
            softmax_scale * LOG2_E,
            0,
            block_size,
            schedule.lanes,
            num_warps=4,
            maxnreg=168,
            launch_pdl=True,
        )
    return merged(schedule, results, drop=schedule.lanes == 1)  # up to 64 rows a request memory bounds


def empty_results(schedule: Plan, ql_nope: torch.Tensor) -> Results:
    """Memory for the results of a call under a plan."""
    t, h, _ = ql_nope.shape
    rows, device = schedule.num_slots * schedule.lanes * BLOCK, ql_nope.device
    return Results(
        torch.empty(t, h, LATENT, dtype=ql_nope.dtype, device=device),
        torch.empty(t, h, dtype=torch.float32, device=device),
        torch.empty(rows * LATENT, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def merged(schedule: Plan, results: Results, drop: bool = False) -> AttentionOutput:
    """The output, once the partial results of split tiles are merged into it.

    drop: where rows are many, partial outputs are discarded in L2 once read, so that few reach memory; for
    kernels that memory bounds.
    """
    from mla_fast._gluon_merge_kernel import COLUMNS, ROWS, merge_rows_kernel
    from mla_fast._split_schedule import MERGE_FIELDS, merge_kernel

    span = schedule.lanes * BLOCK
    max_rows = schedule.merges.shape[0] // MERGE_FIELDS * span
    arguments = (*results, schedule.merges, schedule.num_merges)
    with launching(results.out.device):
        # Few rows have many splits: more programs a row. A fixed cut must not depend on the batch.
        if 0 < max_rows <= FEW_ROWS and not schedule.chunk:
            merge_kernel[(max_rows, LATENT // FEW_COLUMNS)](
                *arguments, LATENT, FEW_COLUMNS, span, 128, num_warps=4, launch_pdl=True
            )
        elif max_rows:
            registers = 64 if drop else None  # as many as it takes without: four on a multiprocessor
            merge_rows_kernel[(MERGE_PROGRAMS, LATENT // COLUMNS.value)](
                *arguments, span, drop, num_warps=ROWS.value, maxnreg=registers, launch_pdl=True
            )
    return AttentionOutput(results.out, results.lse)


def query_descriptors(ql_nope: torch.Tensor, q_pe: torch.Tensor) -> tuple[Any, Any]:
    """The latent part by [64, 256] and the rope part by [64, 64], as the copy engine takes them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtype = gl.bfloat16 if ql_nope.dtype == torch.bfloat16 else gl.float16

    def by_rows(query: torch.Tensor, columns: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([BLOCK, columns], dtype)
        return TensorDescriptor.from_tensor(_rows(query), [BLOCK, columns], layout)

    return by_rows(ql_nope, 256), by_rows(q_pe, ROPE)


def by_columns(block_table: torch.Tensor) -> torch.Tensor:
    """The table with rows whose columns follow each other, as the kernels read them."""
    return block_table if block_table.stride(1) == 1 else block_table.contiguous()


def _rows(query: torch.Tensor) -> torch.Tensor:
    """[t h d] as rows [t·h d] that TMA can address; a copy where they are unevenly spaced or unaligned."""
    t, h, d = query.shape
    step = query.stride(1)
    even = query.stride(2) == 1 and (t == 1 or query.stride(0) == h * step)
    if not even or step * query.itemsize % ALIGNMENT or query.data_ptr() % ALIGNMENT:
        # Not contiguous(): that returns packed rows at an unaligned address as they are.
        query = query.clone(memory_format=torch.contiguous_format)
        step = d
    return query.as_strided((t * h, d), (step, 1))


def why_not_strides(kv_cache: torch.Tensor) -> str | None:
    """Why TMA cannot address this cache, or None."""
    size = kv_cache.itemsize
    for name, value in (
        ("block stride", kv_cache.stride(0) * size),
        ("entry stride", kv_cache.stride(1) * size),
        ("address", kv_cache.data_ptr()),
    ):
        if value % ALIGNMENT:
            return f"kv_cache: {name} is {value} bytes, must be a multiple of {ALIGNMENT}"
    if kv_cache.stride(2) != 1:
        return f"kv_cache: channel stride is {kv_cache.stride(2)}, must be 1"
    return None


def why_not_block_size(block_size: int) -> str | None:
    """Why blocks of this size cannot be copied in whole boxes, or None."""
    if block_size in (16, 32) or block_size % BLOCK == 0:
        return None
    return f"block size {block_size}, needs 16, 32 or a multiple of {BLOCK}"


def _ready(inputs: LatentAttentionInputs, batch_invariant: bool = False) -> Callable[[], AttentionOutput]:
    query, cache = inputs.ql_nope, inputs.kv_cache
    if inputs.cache_format.name not in FORMATS or cache.dtype != query.dtype:
        raise ValueError(
            f"kv_cache: {inputs.cache_format.name} with {query.dtype} queries, must be the same type"
        )

    def layer(schedule: Plan) -> AttentionOutput:
        return attend(schedule, query, inputs.q_pe, cache, inputs.block_table, inputs.softmax_scale)

    return ready(inputs, layer, batch_invariant)


def ready(
    inputs: LatentAttentionInputs, layer: Callable[[Plan], AttentionOutput], batch_invariant: bool
) -> Callable[[], AttentionOutput]:
    """``layer`` under the plan of the inputs' step, which is made here.

    Raises: ValueError for channels, a scale, strides or blocks that no kernel of this plan takes.
    """
    query, cache = inputs.ql_nope, inputs.kv_cache
    (t, h, c), r = query.shape, inputs.q_pe.shape[2]
    if (c, r) != (LATENT, ROPE):
        raise ValueError(f"ql_nope, q_pe: {c} and {r} channels, must be {LATENT} and {ROPE}")
    if inputs.softmax_scale <= 0:
        raise ValueError(f"softmax_scale: is {inputs.softmax_scale}, must be positive")
    if reason := why_not_strides(cache) or why_not_block_size(cache.shape[1]):
        raise ValueError(reason)
    if t == 0:
        nothing = AttentionOutput(torch.empty_like(query), query.new_empty((t, h), dtype=torch.float32))
        return lambda: nothing
    schedule = plan(
        inputs.cu_seqlens_q,
        inputs.cache_seqlens,
        num_tokens=t,
        num_heads=h,
        max_kv_len=inputs.block_table.shape[1] * cache.shape[1],
        batch_invariant=batch_invariant,
    )
    return lambda: layer(schedule)


def _gluon_decode(batch_invariant: bool) -> Callable[..., AttentionOutput]:
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
        """Multi-query attention over the latent cache, two warpgroups a row tile, keys by the copy engine.

        score[s h j] = softmax_scale · (ql_nope[s h] · kv_c[j]  +  q_pe[s h] · k_pe[j])

        Raises: ValueError for what ``supports`` declines. Lengths and block ids are the caller's promise.
        Error: scores, softmax, sums and partial results in float32; weights rounded to the query's type.
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


gluon_decode = implements(PROBLEM, values=False)(_gluon_decode(batch_invariant=False))
batch_invariant = implements(PROBLEM, values=False)(_gluon_decode(batch_invariant=True))


def prepare(inputs: LatentAttentionInputs) -> Prepared:
    """The plan of a step made, and one layer's attention left."""
    return Prepared(_ready(inputs), lambda output: output)


@functools.cache
def requires(device: str) -> str | None:
    """A Hopper GPU and a Triton that has Gluon."""
    if device != "cuda" or not torch.cuda.is_available():
        return "needs a CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs compute capability 9.0, this device has {capability[0]}.{capability[1]}"
    return why_not("triton") or why_not(GLUON)


def supports(case: Case) -> str | None:
    """One width, a cache of the query's type, whole boxes and aligned strides."""
    dims = case.config.kv_lora_rank, case.config.qk_rope_head_dim
    if dims != (LATENT, ROPE):
        return f"{dims[0]} latent and {dims[1]} rope channels, needs {LATENT} and {ROPE}"
    if FORMATS.get(case.cache_format) != case.dtype:
        return f"{case.cache_format} cache with {case.dtype} queries, needs bf16 or fp16 in both"
    return why_not_placed(case)


def why_not_placed(case: Case) -> str | None:
    """Why the copy engine cannot address the cache of a case, or None."""
    if reason := why_not_block_size(case.block_size):
        return reason
    entry = cache_format(case.cache_format).entry_bytes(LATENT, ROPE)
    strides = {
        "entry stride": case.layout.entry_stride(entry),
        "block stride": case.layout.block_stride(entry, case.block_size),
        "offset": case.layout.offset,
    }
    for name, value in strides.items():
        if value % ALIGNMENT:
            return f"{name} of {value} bytes, needs a multiple of {ALIGNMENT}"
    return None


BACKEND = Backend(
    "mla_fast.gluon_decode",
    "latent_attention",
    gluon_decode,
    Numerics(
        accumulate="float32",
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
