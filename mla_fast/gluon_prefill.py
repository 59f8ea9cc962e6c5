"""Prefill and chunked prefill on Hopper GPUs: expanded attention by TMA, wgmma and specialised warpgroups.

Contract: bf16 or fp16 queries over any cache format; head widths (nope, rope, value) of ``WIDTHS``; any
lengths, block sizes and numbers of heads. Query strides and addresses that the copy engine cannot use, which
are multiples of 16 bytes, cost a copy of the queries.

Keys go through one workspace: chunk by chunk of ``packed`` they are gathered and dequantised, multiplied by
both projections at once, and attended to where that product lies; the shared rope channels are read where
they were gathered. The kernel merges a chunk into the running state as it writes it, so nothing else is held
(``mla_ref.capacity``, "fused"). New tokens are keys like any other: causality is in how many keys each row
sees, not in a kernel of its own.

``plan`` is the part of a call that depends on lengths alone. Lengths are read back to make it; one plan
serves every layer of a step: ``attend(plan(...), ...)``.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from mla_fast import _stored_entries
from mla_fast._split_keys import launching
from mla_fast.chunked_sdpa import float32_sums
from mla_fast.gluon_decode import requires
from mla_fast.triton_cache_gather import gather_into
from mla_ref.backend import Backend, Prepared
from mla_ref.case import Case
from mla_ref.chunk_plan import CAP, packed, places, whole_blocks
from mla_ref.formats import CacheFormat
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import PROBLEM, AttentionInputs

WIDTHS = ((128, 64, 128), (64, 64, 128), (64, 32, 64))
DTYPES = (torch.bfloat16, torch.float16)
ROWS, KEYS = 64, 128  # of a consumer, of a block
TILE_ROWS = 2 * ROWS
TILE_FIELDS = 6
ALIGNMENT = 16  # bytes, of every address and stride that TMA sees
L2_BYTES = 8 * 2**20  # of keys and values that heads worked on side by side may have
FEWEST_HEADS = 4  # side by side: with fewer, their last tiles leave too many programs idle
MAX_PARTS = 64  # of one request that the declared numerics cover
LOG2_E = 1.4426950408889634

Rows = Callable[[Sequence[int], int], int]


class Part(NamedTuple):
    """Query rows of one request against some of its keys.

    row, num_rows: in the batch. key, num_keys: in the workspace. seen: keys that the first row sees; every
    further row sees one more. merge: whether the state has keys already.
    """

    row: int
    num_rows: int
    key: int
    num_keys: int
    seen: int
    merge: bool


class Launch(NamedTuple):
    """One run of the kernel, over ``num_keys`` rows of the workspace.

    ends [b+1], starts [b]: from row ends[i] on, the workspace holds tokens starts[i] … of request i.
    tiles: [n 6]. All are int32.
    """

    num_keys: int
    ends: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor


class Plan(NamedTuple):
    """How a batch is cut. counters: of the kernel, which leaves them as it finds them: one stream at a time.

    blind: some request has queries and no keys.
    """

    launches: list[Launch]
    counters: torch.Tensor
    blind: bool


def tiles_of(parts: Sequence[Part]) -> list[tuple[int, int, int, int, int, int]]:
    """Records of up to 128 rows each, the ones with the most blocks first."""
    tiles = []
    for row, num_rows, key, num_keys, seen, merge in parts:
        for first in range(0, num_rows, TILE_ROWS):
            rows = min(TILE_ROWS, num_rows - first)
            visible = min(num_keys, seen + first + rows - 1)
            if visible > 0 or not merge:
                record = (row + first, rows, key, num_keys, seen + first, int(merge))
                tiles.append((-(-visible // KEYS), record))
    return [record for _, record in sorted(tiles, key=lambda tile: -tile[0])]


def plan(
    cu_seqlens_q: torch.Tensor, cache_seqlens: torch.Tensor, block_size: int, rows_of: Rows | int
) -> Plan:
    """The chunks and tiles of a batch. rows_of: rows of the workspace, or (lengths, block size) → them."""
    offsets, lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    queries = [stop - start for start, stop in pairwise(offsets)]
    keys = [kv_len if q_len else 0 for q_len, kv_len in zip(queries, lengths, strict=True)]
    rows = rows_of if isinstance(rows_of, int) else rows_of(keys, block_size)
    b, num_keys = len(keys), []
    numbers: list[int] = [0, 0]
    sizes = [2]
    for chunk in packed(keys, rows, block_size):
        starts, counts, parts = [0] * b, [0] * b, []
        for span, place in zip(chunk, places(chunk), strict=True):
            i = span.request
            starts[i], counts[i] = span.start, span.num_tokens
            seen = lengths[i] - queries[i] + 1 - span.start
            parts.append(Part(offsets[i], queries[i], place.start, span.num_tokens, seen, span.start > 0))
        tiles = [field for tile in tiles_of(parts) for field in tile]
        numbers += [*accumulate(counts, initial=0), *starts, *tiles]
        sizes += [b + 1, b, len(tiles)]
        num_keys.append(sum(counts))
    memory = torch.tensor(numbers, dtype=torch.int32).to(cu_seqlens_q.device)
    counters, *pieces = torch.split(memory, sizes)
    launches = [
        Launch(count, pieces[3 * i], pieces[3 * i + 1], pieces[3 * i + 2].view(-1, TILE_FIELDS))
        for i, count in enumerate(num_keys)
    ]
    blind = any(q_len and not kv_len for q_len, kv_len in zip(queries, lengths, strict=True))
    return Plan(launches, counters, blind)


def attend(step: Plan, inputs: AttentionInputs) -> AttentionOutput:
    """Attention of one layer under a plan."""
    q_nope, q_pe = inputs.q_nope, inputs.q_pe
    (t, h, p), r, (v, c) = q_nope.shape, q_pe.shape[2], inputs.w_uv.shape[1:]
    device, dtype = q_nope.device, q_nope.dtype
    kv_b = joined(inputs.w_uk, inputs.w_uv)
    make = torch.zeros if step.blind else torch.empty
    out = make(t, h, v, dtype=dtype, device=device)
    lse = torch.full((t, h), -torch.inf, dtype=torch.float32, device=device)
    num_rows = max((launch.num_keys for launch in step.launches), default=0)
    workspace = torch.empty(num_rows, c + r, dtype=dtype, device=device)
    for launch in step.launches:
        latent, k_pe = workspace[: launch.num_keys, :c], workspace[: launch.num_keys, c:]
        gather_into(
            latent,
            k_pe,
            inputs.kv_cache,
            inputs.block_table,
            launch.ends,
            launch.starts,
            inputs.cache_format,
            inputs.kv_scale,
        )
        with float32_sums():
            expanded = torch.mm(latent, kv_b).view(-1, h, p + v)
        run(launch.tiles, step.counters, q_nope, q_pe, expanded, k_pe, out, lse, inputs.softmax_scale)
        del expanded
    return AttentionOutput(out, lse)


def run(
    tiles: torch.Tensor,
    counters: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    expanded: torch.Tensor,
    k_pe: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
) -> None:
    """One launch: attention of tiles over expanded [j h p+v] and k_pe [j r], into out [t h v] and lse [t h].

    q_nope [t h p] and q_pe [t h r] are read where they are if the copy engine can.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from mla_fast._gluon_prefill_kernel import mla_prefill_kernel

    (num_keys, h, width), p, r = expanded.shape, q_nope.shape[2], q_pe.shape[2]
    dtype = gl.bfloat16 if q_nope.dtype == torch.bfloat16 else gl.float16

    def boxes(x: torch.Tensor, *box: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for(list(box), dtype)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), layout)

    group = _group(h, num_keys * width * expanded.itemsize)
    num_tiles = tiles.shape[0]
    by_head = expanded.transpose(0, 1)
    with launching(out.device):
        mla_prefill_kernel[(min(num_tiles * h, _num_sms(expanded.device)),)](
            boxes(by_heads(q_nope), 1, ROWS, p),
            boxes(by_heads(q_pe), 1, ROWS, r),
            boxes(by_head, 1, KEYS, p),
            boxes(by_head, 1, KEYS, width - p),
            boxes(k_pe, KEYS, r),
            out,
            lse,
            tiles,
            counters,
            num_tiles,
            h,
            group,
            softmax_scale * LOG2_E,
            0,
            num_warps=4,
            maxnreg=168,
        )


def _group(num_heads: int, head_bytes: int) -> int:
    """Heads that are worked on side by side, as many as L2 has room for: a power of two."""
    fitting = max(FEWEST_HEADS, L2_BYTES // head_bytes)
    return min(num_heads, 1 << (fitting.bit_length() - 1))


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        raise ValueError(f"expanded: on {device}, must be on a CUDA device")
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def by_heads(query: torch.Tensor) -> torch.Tensor:
    """[h t x] of [t h x], with strides and an address that TMA can use; a copy where these are not."""
    steps = [step for size, step in zip(query.shape[:2], query.stride()[:2], strict=True) if size > 1]
    usable = query.stride(2) == 1 and not any(step * query.itemsize % ALIGNMENT for step in steps)
    if not usable or query.data_ptr() % ALIGNMENT:
        # Not contiguous(): that returns packed rows at an unaligned address as they are.
        query = query.clone(memory_format=torch.contiguous_format)
    t, h, x = query.shape
    # The step of a dimension of one is arbitrary, and must be aligned nevertheless.
    steps = [
        step if size > 1 else x for size, step in zip((h, t), (query.stride(1), query.stride(0)), strict=True)
    ]
    return query.as_strided((h, t, x), (*steps, 1))


def joined(w_uk: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """[c h·(p+v)] both projections in one matrix; a copy unless they are views of one ``kv_b_proj``."""
    (h, p, c), v = w_uk.shape, w_uv.shape[1]
    strides = ((p + v) * c, c, 1)
    size = w_uk.itemsize
    together = w_uk.untyped_storage().data_ptr() == w_uv.untyped_storage().data_ptr()
    adjacent = w_uv.data_ptr() - w_uk.data_ptr() == p * c * size
    if together and adjacent and w_uk.stride() == strides and w_uv.stride() == strides:
        return w_uk.as_strided((h * (p + v), c), (c, 1)).T
    return torch.cat([w_uk, w_uv], dim=1).reshape(h * (p + v), c).T


def roomy(lengths: Sequence[int], block_size: int) -> int:
    """What an engine has."""
    return max(CAP, block_size)


def third(lengths: Sequence[int], block_size: int) -> int:
    """A third of the longest request, in whole blocks: three chunks or four."""
    return whole_blocks(max(1, -(-max(lengths, default=0) // 3)), block_size)


def fortieth(lengths: Sequence[int], block_size: int) -> int:
    """A fortieth of the longest request, in whole blocks: many chunks, and rows that see nothing of some."""
    return whole_blocks(max(1, -(-max(lengths, default=0) // 40)), block_size)


def chunked_by(rows_of: Rows) -> Callable[..., AttentionOutput]:
    """The implementation with a workspace of ``rows_of(lengths, block_size)``."""

    @implements(PROBLEM)
    def gluon_prefill(
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
        """Expanded attention over each chunk of keys, merged into one state by the kernel that computes it.

        Raises: ValueError for what ``supports`` declines.
        Error: latents, expanded keys and values, weights, and the running output between chunks in the
        query's type; scores, softmax, sums and merges in float32.
        Source: vLLM, the "compute friendly" prefill of its MLA backend, with a chunked context.
        """
        inputs = AttentionInputs(
            q_nope,
            q_pe,
            kv_cache,
            block_table,
            cu_seqlens_q,
            cache_seqlens,
            w_uk,
            w_uv,
            max_seqlen_q,
            softmax_scale,
            cache_format,
            kv_scale,
        )
        return attend(_planned(inputs, rows_of), inputs)

    return gluon_prefill


gluon_prefill = chunked_by(roomy)


def prepare(inputs: AttentionInputs) -> Prepared:
    """The plan of a step made and the projections in one matrix, and one layer's attention left."""
    step = _planned(inputs, roomy)
    kv_b, p = torch.cat([inputs.w_uk, inputs.w_uv], dim=1), inputs.w_uk.shape[1]
    beside = inputs._replace(w_uk=kv_b[:, :p], w_uv=kv_b[:, p:])
    return Prepared(lambda: attend(step, beside), lambda output: output)


def _planned(inputs: AttentionInputs, rows_of: Rows) -> Plan:
    widths = (*(x.shape[2] for x in (inputs.q_nope, inputs.q_pe)), inputs.w_uv.shape[1])
    if reason := why_not(inputs.q_nope.dtype, widths, inputs.w_uv.shape[2]):
        raise ValueError(reason)
    if inputs.softmax_scale <= 0:
        raise ValueError(f"softmax_scale: is {inputs.softmax_scale}, must be positive")
    return plan(inputs.cu_seqlens_q, inputs.cache_seqlens, inputs.kv_cache.shape[1], rows_of)


def why_not(dtype: torch.dtype, widths: tuple[int, ...], c: int) -> str | None:
    """Why queries of this type, or heads and latents of these widths, are refused; or None."""
    if dtype not in DTYPES:
        return f"queries are {str(dtype).removeprefix('torch.')}, needs bfloat16 or float16"
    if widths not in WIDTHS:
        known = ", ".join("/".join(map(str, each)) for each in WIDTHS)
        return f"nope/rope/value widths {'/'.join(map(str, widths))}, has {known}"
    return f"{c} latent channels, needs a multiple of 8" if c % 8 else None


def supports(case: Case) -> str | None:
    """Queries and widths that the kernel has, and no more parts of a request than the numerics declare."""
    config = case.config
    widths = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    if reason := why_not(getattr(torch, case.dtype), widths, config.kv_lora_rank):
        return reason
    if reason := _stored_entries.supports(case):
        return reason
    keys = [kv_len if q_len else 0 for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)]
    for rows_of in (roomy, third, fortieth):
        chunks = packed(keys, rows_of(keys, case.block_size), case.block_size)
        if len(chunks) > MAX_PARTS:
            return f"{len(chunks)} chunks, at most {MAX_PARTS}"
    return None


BACKEND = Backend(
    "mla_fast.gluon_prefill",
    "attention",
    gluon_prefill,
    Numerics(
        accumulate="float32",
        form="expanded",
        kv=INPUT,
        operand=INPUT,
        p=INPUT,
        sum_rounded_p=False,
        partial=INPUT,
        max_splits=MAX_PARTS,
        merge_depth=MAX_PARTS - 1,
        min_tile=KEYS,
        slack=math.inf,  # a block that raises the maximum subtracts the older one first
    ),
    requires,
    supports,
    {"thirds": chunked_by(third), "fortieths": chunked_by(fortieth)},
    prepare,
)
