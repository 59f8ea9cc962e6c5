# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (a jitted function's parameters are annotated for Triton, not for mypy)
"""Decode attention over a paged latent cache for Hopper: one kernel, three warpgroups.

Grid: (parts · lanes,), at most one program an SM. Program (part, lane) walks the items of its part in
order; an item is a run of key pairs of one tile (``_split_schedule``), and lane l owns rows 64 l … 64 l +
63 of the tile.

Inside a program, keys come in pairs of 64-token blocks, K0 and K1, each in one shared buffer that is both
key and value:
    producer  copies queries and blocks from global memory (TMA)
    left      scores of K0, and out[:, :256]
    right     scores of K1, and out[:, 256:]
The two consumers hand each other their weights, and the maximum that these are relative to, through shared
memory: K0's go to the right half, which multiplies them under its own softmax; K1's go to the left one, which
multiplies them under the next pair's scores. So each multiplies both weights into its own half of the values,
and the left one never waits for a softmax of the right one, only for its weights.

Types: scores, weights, sums and accumulators float32; weights are rounded to the query's type for the
product with the values, and summed unrounded. Exponentials are base 2, of scores times ``scale_log2``.
Order of accumulation: per row, pairs in order; in the left half P0 V0 of a pair before P1 V1, in the right
half too; the denominators of K0's and K1's keys are summed apart and added at the end.

The maximum is lazy: it moves only when a score exceeds it by more than ``SLACK`` (in powers of two), so
weights reach 2 ** SLACK and the accumulators are hardly ever rescaled. Rounding a weight costs the same
relative error whatever it is relative to, with one exception: where one key outweighs all others, its weight
is exactly 1 under a maximum that never lags, and is rounded like any other under this one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mla_fast._split_schedule import ITEM_FIELDS

BLOCK: gl.constexpr = gl.constexpr(64)  # keys of a block, rows of a lane
PAIR: gl.constexpr = gl.constexpr(128)
HALF: gl.constexpr = gl.constexpr(256)
LATENT: gl.constexpr = gl.constexpr(512)
ROPE: gl.constexpr = gl.constexpr(64)
FIELDS: gl.constexpr = gl.constexpr(ITEM_FIELDS)
LOWEST: gl.constexpr = gl.constexpr(-3.4028234663852886e38)
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
SLACK: gl.constexpr = gl.constexpr(8.0)


def _rescale_asm(n: int) -> tuple[str, str]:
    """PTX that multiplies a thread's n accumulators by their rows' factors unless the warp's are all 1;
    constraints.

    An accumulator's elements alternate between two rows, two by two, so operands n and n + 2 hold the
    factors.
    """
    lines = [
        "{ .reg .pred moved, any;",
        f"setp.ne.f32 moved, ${2 * n}, 0f3F800000;",
        f"setp.ne.or.f32 moved, ${2 * n + 2}, 0f3F800000, moved;",
        "vote.sync.any.pred any, moved, 0xffffffff;",
        "@!any bra same;",
        *(f"mul.f32 ${i}, ${i}, ${2 * n + (i & 2)};" for i in range(n)),
        "same: }",
    ]
    return "\n".join(lines), ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


_ASM, _CONSTRAINTS = _rescale_asm(128)
RESCALE_ASM: gl.constexpr = gl.constexpr(_ASM)
RESCALE_CONSTRAINTS: gl.constexpr = gl.constexpr(_CONSTRAINTS)


@gluon.jit
def _pairs(items, i_item, i_lane):
    """First and end pair of an item. A lane past the tile's last row walks one pair."""
    p = items + i_item * FIELDS
    first = gl.load(p + 1)
    return first, gl.where(gl.load(p + 5) > i_lane * BLOCK, gl.load(p + 2), first + 1)


@gluon.jit
def _num_live(items, i_item, i_lane):
    """Rows of the lane's block that belong to the request; 64 or more: all."""
    return gl.load(items + i_item * FIELDS + 5) - i_lane * BLOCK


@gluon.jit
def _kv_len(items, i_item):
    return gl.load(items + i_item * FIELDS + 6)


@gluon.jit
def _visible(items, i_item):
    """Keys that the request's first query sees: a pair that ends within them needs no mask."""
    return gl.load(items + i_item * FIELDS + 8)


@gluon.jit
def _masked(b_s, o_key, items, i_item, i_lane, H):
    """Scores of the keys from o_key on, -inf where a row does not see a key.

    Everything is read again here, in the rare branch, so that nothing of it lives in the loop's registers.
    """
    L_ROW: gl.constexpr = gl.SliceLayout(1, b_s.type.layout)
    L_COLUMN: gl.constexpr = gl.SliceLayout(0, b_s.type.layout)
    o_row = gl.load(items + i_item * FIELDS + 7) + i_lane * BLOCK + gl.arange(0, BLOCK, L_ROW)
    b_limit = _visible(items, i_item) + o_row // H
    o_col = o_key + gl.arange(0, BLOCK, L_COLUMN)
    return gl.where(o_col[None, :] < b_limit[:, None], b_s, float("-inf"))


@gluon.jit
def _rows_of(items, i_item, i_lane):
    p = items + i_item * FIELDS
    return gl.load(p + 3), gl.load(p + 4) + i_lane * BLOCK, gl.load(p + 5) - i_lane * BLOCK


@gluon.jit
def _opaque(x):
    """``x``, unknown to the optimiser: keeps epilogue addresses out of the main loop's registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _rescaled(b_o, b_alpha):
    """b_o · b_alpha by rows, skipped by every warp whose sixteen factors are all 1."""
    b_factor = gl.convert_layout(b_alpha, gl.SliceLayout(1, b_o.type.layout))[:, None]
    return gl.inline_asm_elementwise(
        RESCALE_ASM, RESCALE_CONSTRAINTS, [b_o, b_factor], dtype=gl.float32, is_pure=False, pack=128
    )


@gluon.jit
def _zero_dead_rows(s_half, num_live):
    """Rows num_live … 63 of a half block [64, 256] become 0.

    Dead slots of the cache may hold NaN, and 0 · NaN is NaN.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_row = gl.arange(0, BLOCK, gl.SliceLayout(1, L))
    if num_live < BLOCK:
        for c in gl.static_range(4):
            s_part = s_half.slice(c * 64, 64, dim=1)
            b_part = s_part.load(L)
            s_part.store(gl.where((o_row < num_live)[:, None], b_part, gl.zeros_like(b_part)))
        fence_async_shared()


@gluon.jit
def _first_maximum(num_live, L_ROW: gl.constexpr):
    """Below every score; above every score in dead rows, whose weights are then 0 for good."""
    return gl.where(gl.arange(0, BLOCK, L_ROW) < num_live, LOWEST, -LOWEST)


@gluon.jit
def _column_halves(b_x, N: gl.constexpr):
    return b_x.reshape([BLOCK, 2, N // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _store_columns(s_stage, p_rows, b_x, num_rows, i_col):
    """Store [64, 32] so that a thread writes 16 bytes; an accumulator's own layout gives it 4."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
    o_row = gl.arange(0, BLOCK, gl.SliceLayout(1, L))
    o_col = i_col + gl.arange(0, 32, gl.SliceLayout(0, L))
    s_stage.store(b_x)
    gl.store(
        p_rows + o_row[:, None] * LATENT + o_col[None, :], s_stage.load(L), mask=(o_row < num_rows)[:, None]
    )


@gluon.jit
def _store_quarter(s_stage, p_rows, b_x, num_rows, i_col):
    b_0, b_1 = _column_halves(b_x, 128)
    b_00, b_01 = _column_halves(b_0, 64)
    b_10, b_11 = _column_halves(b_1, 64)
    _store_columns(s_stage, p_rows, b_00, num_rows, i_col)
    _store_columns(s_stage, p_rows, b_01, num_rows, i_col + 32)
    _store_columns(s_stage, p_rows, b_10, num_rows, i_col + 64)
    _store_columns(s_stage, p_rows, b_11, num_rows, i_col + 96)


@gluon.jit
def _store_half(
    s_stage, b_o, b_l, b_m, out, lse, partial_out, partial_lse, slot, row, num_rows, i_lane,
    ROWS: gl.constexpr, COLUMN: gl.constexpr, WITH_LSE: gl.constexpr,
):  # fmt: skip
    """Normalise, and write either the result or, for a split tile (slot ≥ 0), a float32 partial.

    A row without a key has b_l = 0: out 0, lse -inf.
    """
    L_O: gl.constexpr = b_o.type.layout
    L_ROW: gl.constexpr = b_l.type.layout
    b_sum = gl.where(b_l == 0.0, 1.0, b_l)
    b_o = b_o * gl.convert_layout(1.0 / b_sum, gl.SliceLayout(1, L_O))[:, None]
    num_rows = _opaque(num_rows)
    if slot < 0:
        p_out = out + row.to(gl.int64) * LATENT
        b_0, b_1 = _column_halves(b_o.to(out.dtype.element_ty), 256)
        _store_quarter(s_stage, p_out, b_0, num_rows, COLUMN)
        _store_quarter(s_stage, p_out, b_1, num_rows, COLUMN + 128)
    else:
        o_row = gl.arange(0, BLOCK, gl.SliceLayout(1, L_O))
        o_col = COLUMN + gl.arange(0, HALF, gl.SliceLayout(0, L_O))
        p_part = partial_out + (slot.to(gl.int64) * ROWS + i_lane * BLOCK) * LATENT
        gl.store(p_part + o_row[:, None] * LATENT + o_col[None, :], b_o, mask=(o_row < num_rows)[:, None])
    if WITH_LSE:
        o_r = gl.arange(0, BLOCK, L_ROW)
        b_lse = gl.where(b_l == 0.0, float("-inf"), b_m + gl.log2(b_sum))
        if slot < 0:
            gl.store(lse + row + o_r, b_lse * LN_2, mask=o_r < num_rows)
        else:
            gl.store(partial_lse + slot * ROWS + i_lane * BLOCK + o_r, b_lse, mask=o_r < num_rows)


@gluon.jit
def _left(
    s_q, s_q_pe, s_left, s_right, s_pe, s_p0, s_m0, s_m1, s_l0, s_l1, bars, out, lse, partial_out,
    partial_lse, items, offsets, i_part, i_lane, H, scale_log2, ROWS: gl.constexpr,
):  # fmt: skip
    """Scores of K0; out[:, :256]."""
    (
        bar_q, bar_l, bar_l_free, bar_r, _bar_r_free, bar_stored, bar_p0, bar_p1, bar_sum,
    ) = bars  # fmt: skip
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    L_ROW: gl.constexpr = gl.SliceLayout(1, L_S)
    DTYPE: gl.constexpr = s_q.dtype
    i_begin = gl.load(offsets + i_part)
    i_end = gl.load(offsets + i_part + 1)
    i_pair = 0
    for i_item in range(i_begin, i_end):
        first, last = _pairs(items, i_item, i_lane)
        visible = _visible(items, i_item)
        parity = (i_item - i_begin) & 1
        mbarrier.wait(bar_q, parity)
        b_m = _first_maximum(_num_live(items, i_item, i_lane), L_ROW)
        b_l = gl.full([BLOCK], 0.0, gl.float32, L_ROW)
        b_o = gl.zeros([BLOCK, HALF], gl.float32, L_O)
        for i in range(first, last):
            phase = i_pair & 1
            o_key = i * PAIR
            # The previous pair's P1 V1 runs under this pair's scores. In the first pair the product is
            # garbage that the next one overwrites: wgmma under a branch would make ptxas serialise all of
            # them.
            mbarrier.wait(bar_p1, phase ^ 1, pred=i > first)
            b_m1 = gl.where(i > first, s_m1.load(L_ROW), b_m)
            b_beta = gl.exp2(b_m - b_m1)
            b_m = b_m1
            b_l = b_l * b_beta
            b_o = _rescaled(b_o, b_beta)
            b_o = warpgroup_mma(s_pe.index(1), s_left.index(1), b_o, is_async=True)
            b_s = gl.zeros([BLOCK, BLOCK], gl.float32, L_S)
            mbarrier.wait(bar_l.index(0), phase)
            b_s = warpgroup_mma(
                s_q.index(0), s_left.index(0).permute((1, 0)), b_s, use_acc=False, is_async=True
            )
            b_o = warpgroup_mma_wait(1, deps=(b_o,))
            mbarrier.arrive(bar_l_free.index(1), pred=i > first)
            mbarrier.wait(bar_r.index(0), phase)
            b_s = warpgroup_mma(s_q.index(1), s_right.index(0).permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma(s_q_pe, s_pe.index(0).permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            if o_key + BLOCK > visible:
                b_s = _masked(b_s, o_key, items, i_item, i_lane, H)
                _zero_dead_rows(s_left.index(0), _kv_len(items, i_item) - o_key)
            b_top = gl.max(b_s, 1) * scale_log2
            b_m0 = gl.where(b_top > b_m + SLACK, b_top, b_m)
            b_p = gl.exp2(b_s * scale_log2 - b_m0[:, None])
            b_p_own = b_p.to(DTYPE)
            # The right half has staged its last item's results in these rows.
            mbarrier.wait(bar_stored, parity ^ 1, pred=i == first)
            s_m0.store(b_m0)
            s_p0.store(b_p_own)
            fence_async_shared()
            mbarrier.arrive(bar_p0)
            b_alpha = gl.exp2(b_m - b_m0)
            b_m = b_m0
            b_o = _rescaled(b_o, b_alpha)
            b_o = warpgroup_mma(
                gl.convert_layout(b_p_own, gl.DotOperandLayout(0, L_O, 2)),
                s_left.index(0),
                b_o,
                use_acc=i > first,
                is_async=True,
            )
            b_l = b_l * b_alpha + gl.sum(b_p, 1)
            b_o = warpgroup_mma_wait(0, deps=(b_o,))
            mbarrier.arrive(bar_l_free.index(0))
            i_pair += 1
        mbarrier.wait(bar_p1, (i_pair & 1) ^ 1)
        b_m1 = s_m1.load(L_ROW)
        b_beta = gl.exp2(b_m - b_m1)
        b_m = b_m1
        b_l = b_l * b_beta
        b_o = _rescaled(b_o, b_beta)
        _zero_dead_rows(s_left.index(1), _kv_len(items, i_item) - (last * PAIR - BLOCK))
        b_o = warpgroup_mma(s_pe.index(1), s_left.index(1), b_o, is_async=True)
        b_o = warpgroup_mma_wait(0, deps=(b_o,))
        mbarrier.arrive(bar_l_free.index(1))
        s_l0.store(b_l)
        mbarrier.arrive(bar_sum.index(0))
        mbarrier.wait(bar_sum.index(1), parity)
        b_l = b_l + s_l1.load(L_ROW)
        slot, row, num_rows = _rows_of(items, i_item, i_lane)
        _store_half(
            s_p0.slice(0, 32, dim=1), b_o, b_l, b_m, out, lse, partial_out, partial_lse, slot, row,
            num_rows, i_lane, ROWS, 0, True,
        )  # fmt: skip


@gluon.jit
def _right(
    s_q, s_q_pe, s_left, s_right, s_pe, s_p0, s_m0, s_m1, s_l0, s_l1, bars, out, lse, partial_out,
    partial_lse, items, offsets, i_part, i_lane, H, scale_log2, ROWS: gl.constexpr, i_zero,
):  # fmt: skip
    """Scores of K1; out[:, 256:].

    i_zero: 0, unknown to the optimiser. Indexing this branch's buffers with it keeps ptxas from sharing
    descriptor arithmetic with the other branch, which it would hold in spilled registers.
    """
    (
        bar_q, bar_l, _bar_l_free, bar_r, bar_r_free, bar_stored, bar_p0, bar_p1, bar_sum,
    ) = bars  # fmt: skip
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    L_ROW: gl.constexpr = gl.SliceLayout(1, L_S)
    DTYPE: gl.constexpr = s_q.dtype
    i_begin = gl.load(offsets + i_part)
    i_end = gl.load(offsets + i_part + 1)
    i_pair = 0
    i_one = i_zero + 1
    for i_item in range(i_begin, i_end):
        first, last = _pairs(items, i_item, i_lane)
        visible = _visible(items, i_item)
        parity = (i_item - i_begin) & 1
        mbarrier.wait(bar_q, parity)
        b_m = _first_maximum(_num_live(items, i_item, i_lane), L_ROW)
        b_l = gl.full([BLOCK], 0.0, gl.float32, L_ROW)
        b_o = gl.zeros([BLOCK, HALF], gl.float32, L_O)
        for i in range(first, last):
            phase = i_pair & 1
            o_key = i * PAIR + BLOCK
            b_s = gl.zeros([BLOCK, BLOCK], gl.float32, L_S)
            mbarrier.wait(bar_r.index(1), phase)
            b_s = warpgroup_mma(
                s_q.index(i_one), s_right.index(i_one).permute((1, 0)), b_s, use_acc=False, is_async=True
            )
            mbarrier.wait(bar_l.index(1), phase)
            b_s = warpgroup_mma(s_q.index(i_zero), s_left.index(i_one).permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma(s_q_pe, s_pe.index(i_one).permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            if o_key + BLOCK > visible:
                b_s = _masked(b_s, o_key, items, i_item, i_lane, H)
                _zero_dead_rows(s_right.index(i_one), _kv_len(items, i_item) - o_key)
            mbarrier.wait(bar_p0, phase)
            if o_key > visible:
                _zero_dead_rows(s_right.index(i_zero), _kv_len(items, i_item) - o_key + BLOCK)
            b_m0 = s_m0.load(L_ROW)
            b_o = _rescaled(b_o, gl.exp2(b_m - b_m0))
            # P0 V0 runs under this block's softmax.
            b_o = warpgroup_mma(s_p0, s_right.index(i_zero), b_o, is_async=True)
            b_top = gl.max(b_s, 1) * scale_log2
            b_m1 = gl.where(b_top > b_m0 + SLACK, b_top, b_m0)
            b_p = gl.exp2(b_s * scale_log2 - b_m1[:, None])
            b_p_own = b_p.to(DTYPE)
            b_o = warpgroup_mma_wait(0, deps=(b_o,))
            mbarrier.arrive(bar_r_free.index(0))
            s_m1.store(b_m1)
            s_pe.index(i_one).store(b_p_own)  # its keys are multiplied, in all warps: they met in the arrival
            fence_async_shared()
            b_l = b_l * gl.exp2(b_m - b_m1) + gl.sum(b_p, 1)
            mbarrier.arrive(bar_p1)
            b_o = _rescaled(b_o, gl.exp2(b_m0 - b_m1))
            b_m = b_m1
            b_o = warpgroup_mma(
                gl.convert_layout(b_p_own, gl.DotOperandLayout(0, L_O, 2)),
                s_right.index(i_one),
                b_o,
                is_async=True,
            )
            b_o = warpgroup_mma_wait(0, deps=(b_o,))
            mbarrier.arrive(bar_r_free.index(1))
            i_pair += 1
        s_l1.store(b_l)
        mbarrier.arrive(bar_sum.index(1))
        mbarrier.wait(bar_sum.index(0), parity)
        b_l = b_l + s_l0.load(L_ROW)
        slot, row, num_rows = _rows_of(items, i_item, i_lane)
        _store_half(
            s_p0.slice(32, 32, dim=1), b_o, b_l, b_m, out, lse, partial_out, partial_lse, slot, row,
            num_rows, i_lane, ROWS, 256, False,
        )  # fmt: skip
        mbarrier.arrive(bar_stored)


@gluon.jit
def _page(table, i_block, kv_len, PAGE: gl.constexpr, i_sub: gl.constexpr):
    """Physical block of the i_sub-th page of a 64-token block; -1 where all is dead: it copies as zeros."""
    o_token = i_block * BLOCK + i_sub * PAGE
    return gl.load(table + o_token // PAGE, mask=o_token < kv_len, other=-1)


@gluon.jit
def _pages(table, i_block, kv_len, PAGE: gl.constexpr):
    """The pages of a 64-token block, as many as it has (the others repeat the first)."""
    i_0 = _page(table, i_block, kv_len, PAGE, 0)
    i_1 = i_0
    i_2 = i_0
    i_3 = i_0
    if PAGE < 64:
        i_1 = _page(table, i_block, kv_len, PAGE, 1)
    if PAGE < 32:
        i_2 = _page(table, i_block, kv_len, PAGE, 2)
        i_3 = _page(table, i_block, kv_len, PAGE, 3)
    return i_0, i_1, i_2, i_3


@gluon.jit
def _copy(desc, pages, i_block, i_col, bar, s_block, PAGE: gl.constexpr):
    """Copy columns i_col … of a 64-token block, page by page."""
    i_0, i_1, i_2, i_3 = pages
    s_pages = s_block._reinterpret(s_block.dtype, [1, BLOCK, desc.block_shape[2]], desc.layout)
    if PAGE >= 64:
        tma.async_copy_global_to_shared(desc, [i_0, i_block * BLOCK % PAGE, i_col], bar, s_pages)
    else:
        tma.async_copy_global_to_shared(desc, [i_0, 0, i_col], bar, s_pages.slice(0, PAGE, dim=1))
        tma.async_copy_global_to_shared(desc, [i_1, 0, i_col], bar, s_pages.slice(PAGE, PAGE, dim=1))
    if PAGE < 32:
        tma.async_copy_global_to_shared(desc, [i_2, 0, i_col], bar, s_pages.slice(2 * PAGE, PAGE, dim=1))
        tma.async_copy_global_to_shared(desc, [i_3, 0, i_col], bar, s_pages.slice(3 * PAGE, PAGE, dim=1))


@gluon.jit
def _copy_query(q_nope, q_pe, row, bar, s_q, s_q_pe):
    mbarrier.expect(bar, BLOCK * (LATENT + ROPE) * 2)
    tma.async_copy_global_to_shared(q_nope, [row, 0], bar, s_q.index(0))
    tma.async_copy_global_to_shared(q_nope, [row, 256], bar, s_q.index(1))
    tma.async_copy_global_to_shared(q_pe, [row, 0], bar, s_q_pe)


@gluon.jit
def _producer(
    q_nope, q_pe, kv, kv_pe, s_q, s_q_pe, s_left, s_right, s_pe, bars, block_table, table_stride, items,
    offsets, i_part, i_lane, PAGE: gl.constexpr,
):  # fmt: skip
    """Copies in the order in which the consumers free the buffers."""
    (
        bar_q, bar_l, bar_l_free, bar_r, bar_r_free, _bar_stored, _bar_p0, bar_p1, _bar_sum,
    ) = bars  # fmt: skip
    i_begin = gl.load(offsets + i_part)
    i_end = gl.load(offsets + i_part + 1)
    i_pair = 0
    for i_item in range(i_begin, i_end):
        first, last = _pairs(items, i_item, i_lane)
        kv_len = _kv_len(items, i_item)
        request = gl.load(items + i_item * FIELDS)
        row = gl.load(items + i_item * FIELDS + 4) + i_lane * BLOCK
        table = block_table + request.to(gl.int64) * table_stride
        # K1's weights of the last pair say that all scores are done, hence that the query is free.
        mbarrier.wait(bar_p1, (i_pair & 1) ^ 1, pred=i_item > i_begin)
        _copy_query(q_nope, q_pe, row, bar_q, s_q, s_q_pe)
        for i in range(first, last):
            free = (i_pair & 1) ^ 1
            # Loaded before the wait for the buffer, which hides them.
            pages_0 = _pages(table, 2 * i, kv_len, PAGE)
            mbarrier.wait(bar_l_free.index(0), free)
            mbarrier.expect(bar_l.index(0), BLOCK * HALF * 2)
            _copy(kv, pages_0, 2 * i, 0, bar_l.index(0), s_left.index(0), PAGE)
            mbarrier.wait(bar_r_free.index(0), free)
            mbarrier.expect(bar_r.index(0), BLOCK * (HALF + ROPE) * 2)
            _copy(kv, pages_0, 2 * i, 256, bar_r.index(0), s_right.index(0), PAGE)
            _copy(kv_pe, pages_0, 2 * i, 512, bar_r.index(0), s_pe.index(0), PAGE)
            pages_1 = _pages(table, 2 * i + 1, kv_len, PAGE)
            mbarrier.wait(bar_r_free.index(1), free)
            mbarrier.expect(bar_r.index(1), BLOCK * HALF * 2)
            _copy(kv, pages_1, 2 * i + 1, 256, bar_r.index(1), s_right.index(1), PAGE)
            # The rope tile of K1 has held P1, which the left half multiplied last.
            mbarrier.wait(bar_l_free.index(1), free)
            mbarrier.expect(bar_l.index(1), BLOCK * (HALF + ROPE) * 2)
            _copy(kv, pages_1, 2 * i + 1, 0, bar_l.index(1), s_left.index(1), PAGE)
            _copy(kv_pe, pages_1, 2 * i + 1, 512, bar_l.index(1), s_pe.index(1), PAGE)
            i_pair += 1
    gdc_launch_dependents()


@gluon.jit
def _buffers(DTYPE: gl.constexpr, L_WIDE: gl.constexpr, L_NARROW: gl.constexpr):
    """Queries, keys, K0's weights, and what the consumers hand each other a row."""
    L_ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_q = gl.allocate_shared_memory(DTYPE, [2, BLOCK, HALF], L_WIDE)
    s_q_pe = gl.allocate_shared_memory(DTYPE, [BLOCK, ROPE], L_NARROW)
    s_left = gl.allocate_shared_memory(DTYPE, [2, BLOCK, HALF], L_WIDE)
    s_right = gl.allocate_shared_memory(DTYPE, [2, BLOCK, HALF], L_WIDE)
    s_pe = gl.allocate_shared_memory(DTYPE, [2, BLOCK, ROPE], L_NARROW)
    s_p0 = gl.allocate_shared_memory(DTYPE, [BLOCK, BLOCK], L_NARROW)
    s_m0 = gl.allocate_shared_memory(gl.float32, [BLOCK], L_ROWS)
    s_m1 = gl.allocate_shared_memory(gl.float32, [BLOCK], L_ROWS)
    s_l0 = gl.allocate_shared_memory(gl.float32, [BLOCK], L_ROWS)
    s_l1 = gl.allocate_shared_memory(gl.float32, [BLOCK], L_ROWS)
    return s_q, s_q_pe, s_left, s_right, s_pe, s_p0, s_m0, s_m1, s_l0, s_l1


@gluon.jit
def _shared(DTYPE: gl.constexpr, L_WIDE: gl.constexpr, L_NARROW: gl.constexpr):
    """The buffers, and the barriers, set up."""
    L_BAR: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = _buffers(DTYPE, L_WIDE, L_NARROW)
    bar_q = gl.allocate_shared_memory(gl.int64, [1], L_BAR)
    bar_stored = gl.allocate_shared_memory(gl.int64, [1], L_BAR)
    bar_p0 = gl.allocate_shared_memory(gl.int64, [1], L_BAR)
    bar_p1 = gl.allocate_shared_memory(gl.int64, [1], L_BAR)
    bar_l = gl.allocate_shared_memory(gl.int64, [2, 1], L_BAR)
    bar_l_free = gl.allocate_shared_memory(gl.int64, [2, 1], L_BAR)
    bar_r = gl.allocate_shared_memory(gl.int64, [2, 1], L_BAR)
    bar_r_free = gl.allocate_shared_memory(gl.int64, [2, 1], L_BAR)
    bar_sum = gl.allocate_shared_memory(gl.int64, [2, 1], L_BAR)
    mbarrier.init(bar_q, count=1)
    mbarrier.init(bar_stored, count=1)
    mbarrier.init(bar_p0, count=1)
    mbarrier.init(bar_p1, count=1)
    for j in gl.static_range(2):
        mbarrier.init(bar_l.index(j), count=1)
        mbarrier.init(bar_l_free.index(j), count=1)
        mbarrier.init(bar_r.index(j), count=1)
        mbarrier.init(bar_r_free.index(j), count=1)
        mbarrier.init(bar_sum.index(j), count=1)
    fence_async_shared()
    bars = (bar_q, bar_l, bar_l_free, bar_r, bar_r_free, bar_stored, bar_p0, bar_p1, bar_sum)
    return buffers, bars


@gluon.jit(
    do_not_specialize=["table_stride", "H", "i_zero"],
    do_not_specialize_on_alignment=["block_table", "items", "offsets"],
)
def mla_decode_kernel(
    q_nope, q_pe, kv, kv_pe, out, lse, partial_out, partial_lse, block_table, items, offsets, table_stride, H,
    scale_log2, i_zero, PAGE: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """q_nope [t·h, 512], q_pe [t·h, 64] by 64 rows; kv, kv_pe [n, k, 576] by min(64, k) tokens of 256, 64
    columns.

    Launch with num_warps=4 (the producer's) and maxnreg=168: 3 · 168 registers a thread are shared out as
    24 to the producer and 240 to each consumer, whose 64 × 256 accumulator alone takes 128.
    """
    i_part = gl.program_id(0) // LANES
    i_lane = gl.program_id(0) % LANES
    DTYPE: gl.constexpr = q_nope.dtype
    ROWS: gl.constexpr = LANES * BLOCK
    L_WIDE: gl.constexpr = q_nope.layout
    L_NARROW: gl.constexpr = q_pe.layout
    buffers, bars = _shared(DTYPE, L_WIDE, L_NARROW)
    s_q, s_q_pe, s_left, s_right, s_pe, s_p0, s_m0, s_m1, s_l0, s_l1 = buffers
    gdc_wait()
    consumer = (
        s_q, s_q_pe, s_left, s_right, s_pe, s_p0, s_m0, s_m1, s_l0, s_l1, bars, out, lse, partial_out,
        partial_lse, items, offsets, i_part, i_lane, H, scale_log2, gl.constexpr(ROWS),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _producer,
                (
                    q_nope, q_pe, kv, kv_pe, s_q, s_q_pe, s_left, s_right, s_pe, bars, block_table,
                    table_stride, items, offsets, i_part, i_lane, gl.constexpr(PAGE),
                ),
            ),
            (_left, consumer),
            (_right, consumer + (i_zero,)),  # noqa: RUF005 (Gluon has no starred tuples)
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
