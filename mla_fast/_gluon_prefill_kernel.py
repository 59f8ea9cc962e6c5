# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (a jitted function's parameters are annotated for Triton, not for mypy)
"""Attention over expanded keys and values for Hopper: one persistent kernel, three warpgroups.

Grid: at most one program an SM. A *tile* is up to 128 query rows of one request and one head; programs take
tiles from a counter, so that the order of the table is the order of the work. Its keys come in blocks of 128,
the last first: masks and dead slots meet the first blocks, and what follows needs neither.

Inside a program:
    producer  takes tiles; copies queries, keys, shared rope rows and values from global memory (TMA)
    upper     rows 0 … 63 of the tile
    lower     rows 64 … 127
Each consumer multiplies the weights of a block while it makes those of the next, and the softmax of one runs
under the products of the other. The producer is already in the next tile when they write a result.

Types: scores, weights, sums and accumulators float32; weights are rounded to the query's type for the product
with the values, and summed unrounded. Exponentials are base 2, of scores times ``scale_log2``.
Order of accumulation: per row, blocks from the last to the first; a running state enters at the end.

The maximum is lazy: it moves only when a score exceeds it by more than ``SLACK`` (in powers of two), so
weights reach 2 ** SLACK and the accumulators are hardly ever rescaled. A weight's rounding is relative to
itself whatever the maximum; but where one key outweighs all others, its weight is 1, which is exact, only if
the maximum is its own. A block's exponents are made with the maximum that is there, each thread finds its
own largest, and a warp where none exceeds the slack has no maximum to find: it exchanges nothing between
threads, and its exponentials wait for nothing.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS: gl.constexpr = gl.constexpr(64)  # of a consumer
KEYS: gl.constexpr = gl.constexpr(128)  # of a block
STAGES: gl.constexpr = gl.constexpr(2)
THREADS: gl.constexpr = gl.constexpr(128)  # of a consumer
LANES: gl.constexpr = gl.constexpr(4)  # threads that share a row of an accumulator
LOWEST: gl.constexpr = gl.constexpr(-3.4028234663852886e38)
SLACK = 8.0
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)

# What the producer tells the consumers of a tile.
ITEM_ROW: gl.constexpr = gl.constexpr(0)
ITEM_ROWS: gl.constexpr = gl.constexpr(1)
ITEM_KEYS: gl.constexpr = gl.constexpr(2)
ITEM_SEEN: gl.constexpr = gl.constexpr(3)
ITEM_HEAD: gl.constexpr = gl.constexpr(4)
ITEM_MERGE: gl.constexpr = gl.constexpr(5)
ITEM_BLOCKS: gl.constexpr = gl.constexpr(6)

FIELDS: gl.constexpr = gl.constexpr(6)  # of a tile's record


_SLACK_BITS = struct.unpack("<i", struct.pack("<f", SLACK))[0]


def _unless_none_moved(n: int, neutral: str, instruction: str) -> tuple[str, str]:
    """PTX that gives a thread's n numbers ``instruction`` with its rows' operands, unless all of the warp's
    operands are ``neutral``; constraints.

    Numbers alternate between two rows, two by two, so operands n and n + 2 hold the rows' own.
    """
    upper, lower = f"${2 * n}", f"${2 * n + 2}"
    lines = [
        "{ .reg .pred moved, any;",
        f"setp.ne.f32 moved, {upper}, {neutral};",
        f"setp.ne.or.f32 moved, {lower}, {neutral}, moved;",
        "vote.sync.any.pred any, moved, 0xffffffff;",
        "@!any bra same;",
        *(f"{instruction} ${i}, ${i}, {lower if i & 2 else upper};" for i in range(n)),
        "same: }",
    ]
    return "\n".join(lines), ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


_WIDE, _NARROW = (_unless_none_moved(n, "0f3F800000", "mul.f32") for n in (64, 32))
_DOWN = _unless_none_moved(64, "0f00000000", "sub.f32")
RESCALE_128: gl.constexpr = gl.constexpr(_WIDE[0])
CONSTRAINTS_128: gl.constexpr = gl.constexpr(_WIDE[1])
RESCALE_64: gl.constexpr = gl.constexpr(_NARROW[0])
CONSTRAINTS_64: gl.constexpr = gl.constexpr(_NARROW[1])
LOWER: gl.constexpr = gl.constexpr(_DOWN[0])
CONSTRAINTS_LOWER: gl.constexpr = gl.constexpr(_DOWN[1])


def _mask_asm(n: int) -> tuple[str, str]:
    """PTX that makes -inf of a thread's n scores from its rows' limits on; constraints.

    Behind a thread's first column the others are constants, so a comparison needs no register of its own.
    Computed, they would be 32 registers, live throughout the loop for a branch that is rare.
    """
    lines = [
        "{ .reg .pred live; .reg .b32 first, upper, lower;",
        "mov.u32 first, %laneid; and.b32 first, first, 3; shl.b32 first, first, 1;",
        f"sub.s32 upper, ${2 * n}, first; sub.s32 lower, ${2 * n + 2}, first;",
    ]
    for i in range(n):
        row, column = "lower" if i & 2 else "upper", (i >> 2) * 8 + (i & 1)
        lines.append(f"setp.gt.s32 live, {row}, {column}; selp.f32 ${i}, ${i}, 0fFF800000, live;")
    return "\n".join([*lines, "}"]), ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * n)


_MASKS = _mask_asm(64)
MASK: gl.constexpr = gl.constexpr(_MASKS[0])
CONSTRAINTS_MASK: gl.constexpr = gl.constexpr(_MASKS[1])

# Of a thread's two rows: 0, 1 new maxima; 2, 3 factors of what is older; 4, 5 its largest exponents; 6, 7
# maxima. Exponents are compared as integers: their order is that of positive numbers, and a negative one
# is below the slack whatever it is.
RAISE: gl.constexpr = gl.constexpr(
    "{ .reg .pred up, any; .reg .b32 top, other; .reg .f32 now;"
    " mov.f32 $0, $6; mov.f32 $1, $7; mov.f32 $2, 0f3F800000; mov.f32 $3, 0f3F800000;"
    f" setp.gt.s32 up, $4, {_SLACK_BITS}; setp.gt.or.s32 up, $5, {_SLACK_BITS}, up;"
    " vote.sync.any.pred any, up, 0xffffffff; @!any bra same;"
    + " ".join(
        f"shfl.sync.bfly.b32 other, ${4 + i}, 1, 0x1f, 0xffffffff; max.s32 top, ${4 + i}, other;"
        f" shfl.sync.bfly.b32 other, top, 2, 0x1f, 0xffffffff; max.s32 top, top, other;"
        f" setp.gt.s32 up, top, {_SLACK_BITS}; mov.b32 now, top; add.f32 now, ${6 + i}, now;"
        f" @up mov.f32 ${i}, now; sub.f32 now, ${6 + i}, ${i}; ex2.approx.ftz.f32 ${2 + i}, now;"
        for i in (0, 1)
    )
    + " same: }"
)


@gluon.jit
def _spread(b_row, b_x):
    """A number of each row, [64, 4], for b_x [64, c / 8, 4, 2]."""
    return gl.convert_layout(b_row, gl.SliceLayout(1, gl.SliceLayout(3, b_x.type.layout)))[:, None, :, None]


@gluon.jit
def _column(b_row, b_l):
    """A number of each row, [64, 4], for b_l [64, 4, 2]."""
    return gl.convert_layout(b_row, gl.SliceLayout(2, b_l.type.layout))[:, :, None]


@gluon.jit
def _by_thread(b_x):
    """[64, c] as [64, c / 8, 4, 2]: in a row, a thread has every fourth pair of columns."""
    return b_x.reshape([ROWS, b_x.shape[1] // (2 * LANES), LANES, 2])


@gluon.jit
def _rescaled(b_o, b_factor):
    """b_o [64, v] · b_factor [64, 4]; skipped by every warp whose sixteen factors are all 1."""
    L: gl.constexpr = b_o.type.layout
    b_x = _by_thread(b_o)
    if b_o.shape[1] == 128:
        b_x = gl.inline_asm_elementwise(
            RESCALE_128, CONSTRAINTS_128, [b_x, _spread(b_factor, b_x)], gl.float32, is_pure=False, pack=64
        )
    else:
        b_x = gl.inline_asm_elementwise(
            RESCALE_64, CONSTRAINTS_64, [b_x, _spread(b_factor, b_x)], gl.float32, is_pure=False, pack=32
        )
    return gl.convert_layout(b_x.reshape(b_o.shape), L)


@gluon.jit
def _raised(b_top, b_m):
    """(maxima, factors of what is older), both [64, 4]: a row's moves if an exponent is above the slack."""
    b_top = gl.convert_layout(b_top, b_m.type.layout)
    return gl.inline_asm_elementwise(
        RAISE, "=&f,=&f,=&f,=&f,r,r,f,f", [b_top, b_m], (gl.float32, gl.float32), is_pure=False, pack=2
    )


@gluon.jit
def _lowered(b_x, b_by):
    """b_x - b_by; skipped by every warp whose rows' maxima are where they were."""
    return gl.inline_asm_elementwise(
        LOWER, CONSTRAINTS_LOWER, [b_x, b_by], gl.float32, is_pure=False, pack=64
    )


@gluon.jit
def _masked(b_s, b_left):
    """Scores of a block [64, 128]; -inf from column b_left [64, 1] on."""
    return gl.inline_asm_elementwise(MASK, CONSTRAINTS_MASK, [b_s, b_left], gl.float32, is_pure=True, pack=64)


@gluon.jit
def _max3(b_a, b_b, b_c):
    """The largest of three integers: one instruction, as the compiler's own tree of pairs seldom is."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; max.s32 t, $1, $2; max.s32 $0, t, $3; }", "=r,r,r,r", [b_a, b_b, b_c], gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _exp2(b_x):
    """2 ** b_x; results below the smallest normal number are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _opaque(x):
    """``x``, unknown to the optimiser: keeps epilogue addresses out of the main loop's registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _get(s_item, i: gl.constexpr):
    return gl.sum(s_item.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _put(s_item, i: gl.constexpr, x):
    s_item.index(i).store(gl.full([1], x, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _zero_dead_rows(s_v, num_live):
    """Rows num_live … of a block of values [128, v] become 0: they may be NaN, and 0 · NaN is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    o_row = gl.arange(0, KEYS, gl.SliceLayout(1, L))
    for i in gl.static_range(s_v.shape[1] // 32):
        s_part = s_v.slice(i * 32, 32, dim=1)
        b_part = s_part.load(L)
        s_part.store(gl.where((o_row < num_live)[:, None], b_part, gl.zeros_like(b_part)))
    fence_async_shared()


@gluon.jit
def _scores(s_q, s_q_pe, s_k, s_k_pe, b_s):
    b_s = warpgroup_mma(s_q, s_k.permute((1, 0)), b_s, use_acc=False, is_async=True)
    return warpgroup_mma(s_q_pe, s_k_pe.permute((1, 0)), b_s, is_async=True)


@gluon.jit
def _halves(b_x):
    """The first and the last half of b_x [64, n, 4, 2] along its second dimension."""
    return b_x.reshape([ROWS, 2, b_x.shape[1] // 2, LANES, 2]).permute((0, 2, 3, 4, 1)).split()


@gluon.jit
def _split(b_x):
    """The first and the last half of b_x [64, n, 4] along its second dimension."""
    return b_x.reshape([ROWS, 2, b_x.shape[1] // 2, LANES]).permute((0, 2, 3, 1)).split()


@gluon.jit
def _top(b_x):
    """[64, 4] the bits of a thread's largest exponent of a row, if any is positive; else not positive."""
    b_a, b_b = b_x.to(gl.int32, bitcast=True).split()
    for _ in gl.static_range(4):
        b_a0, b_a1 = _split(b_a)
        b_b0, b_b = _split(b_b)
        b_a = _max3(b_a0, b_a1, b_b0)
    return gl.max(gl.maximum(b_a, b_b), 1)


@gluon.jit
def _partial_sums(b_p, b_l):
    """[64, 4, 2] sums of what a thread holds of each row, like b_l: so none crosses threads yet."""
    return gl.convert_layout(gl.sum(b_p, 1), b_l.type.layout)


@gluon.jit
def _row_max(b_s, scale_log2):
    """[64, 4] the maximum of each row's scores, in powers of two; LOWEST where all are -inf."""
    b_top = gl.max(gl.max(_by_thread(b_s), 3), 1)
    b_row = gl.maximum(gl.max(b_top, 1) * scale_log2, LOWEST)
    L: gl.constexpr = b_top.type.layout
    return gl.convert_layout(b_row, gl.SliceLayout(1, L))[:, None] + gl.zeros([ROWS, LANES], gl.float32, L)


@gluon.jit
def _weights(b_0, b_1, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """A block's weights [64, 128], narrowed, of the halves of its columns."""
    b_w = gl.join(b_0.to(DTYPE), b_1.to(DTYPE)).permute((0, 4, 1, 2, 3)).reshape([ROWS, KEYS])
    return gl.convert_layout(b_w, LAYOUT)


@gluon.jit
def _slot(i_block):
    """The buffer of a block; a remainder of signed numbers would be a few instructions more."""
    return i_block & (STAGES - 1)


@gluon.jit
def _parity(i_block):
    """How often a block's buffer has been filled before, modulo 2."""
    return (i_block >> 1) & 1


@gluon.jit
def _done_with(bar):
    """Every thread arrives at ``bar`` for itself.

    For mbarrier.arrive the consumer's warps meet and one thread arrives, twice a block. This is the arrival
    that follows a thread's asynchronous copies; it has none outstanding, so it arrives at once. It orders
    no other access, and need not: products that have been waited for have read their operands. A tile's
    record, which a consumer reads, is reported by mbarrier.arrive after the first scores.
    """
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _wait_for_keys(bar_k, i_block, pred):
    mbarrier.wait(bar_k.index(_slot(i_block)), _parity(i_block), pred=pred)


@gluon.jit
def _store_columns(s_stage, p_rows, b_x, num_rows, stride):
    """Store [64, 64] so that a thread writes 16 bytes; an accumulator's own layout gives it 4."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    o_col = gl.arange(0, 64, gl.SliceLayout(0, L))
    s_stage.store(b_x)
    gl.store(
        p_rows + o_row[:, None] * stride + o_col[None, :], s_stage.load(L), mask=(o_row < num_rows)[:, None]
    )


@gluon.jit
def _finish(s_stage, b_o, b_m, b_l, out, lse, row, num_rows, head, H, merge):
    """Normalise and write, merged with the state that is there where ``merge``; without a key, 0 and -inf."""
    V: gl.constexpr = b_o.shape[1]
    L_O: gl.constexpr = b_o.type.layout
    L_ROW: gl.constexpr = gl.SliceLayout(1, L_O)
    b_m = gl.convert_layout(gl.max(b_m, 1), L_ROW)
    b_l = gl.convert_layout(gl.sum(gl.sum(b_l, 2), 1), L_ROW)
    o_row = gl.arange(0, ROWS, L_ROW)
    m_row = o_row < num_rows
    p_lse = lse + row.to(gl.int64) * H + head + o_row * H
    p_out = out + (row.to(gl.int64) * H + head) * V
    b_sum = gl.where(b_l == 0.0, 1.0, b_l)
    b_lse = gl.where(b_l == 0.0, float("-inf"), b_m + gl.log2(b_sum))
    if merge:
        b_old = gl.load(p_lse, mask=m_row, other=float("-inf")) * LOG2_E
        b_top = gl.maximum(b_old, b_lse)
        b_top = gl.where(b_top == float("-inf"), 0.0, b_top)
        b_keep = gl.exp2(b_old - b_top)
        b_add = gl.exp2(b_lse - b_top)
        b_total = b_keep + b_add
        b_lse = gl.where(b_total == 0.0, float("-inf"), b_top + gl.log2(b_total))
        b_total = gl.where(b_total == 0.0, 1.0, b_total)
        o_col = gl.arange(0, V, gl.SliceLayout(0, L_O))
        b_was = gl.load(p_out + o_row[:, None] * (H * V) + o_col[None, :], mask=m_row[:, None], other=0.0)
        b_o = b_o * (b_add / (b_sum * b_total))[:, None] + b_was.to(gl.float32) * (b_keep / b_total)[:, None]
    else:
        b_o = b_o * (1.0 / b_sum)[:, None]
    gl.store(p_lse, b_lse * LN_2, mask=m_row)
    b_out = b_o.to(out.dtype.element_ty)
    if V == 128:
        b_0, b_1 = b_out.reshape([ROWS, 2, 64]).permute((0, 2, 1)).split()
        _store_columns(s_stage, p_out, b_0, num_rows, H * V)
        _store_columns(s_stage, p_out + 64, b_1, num_rows, H * V)
    else:
        _store_columns(s_stage, p_out, b_out, num_rows, H * V)


@gluon.jit
def _consume(
    s_q, s_q_pe, s_k, s_k_pe, s_v, s_stage, s_item, bars, out, lse, H, scale_log2, HALF: gl.constexpr, i_zero,
):  # fmt: skip
    """Rows 64 · HALF … of every tile.

    i_zero: 0, unknown to the optimiser. Indexing with it keeps ptxas from sharing descriptor arithmetic
    between the two consumers, which it would hold in spilled registers.
    """
    bar_item, bar_q, bar_k, bar_k_free, bar_v, bar_v_free = bars
    V: gl.constexpr = s_v.shape[2]
    DTYPE: gl.constexpr = s_q.dtype
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    L_ROW: gl.constexpr = gl.SliceLayout(1, L_S)
    L_W: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    i_half = i_zero + HALF
    i_block = 0
    i_tile = 0
    mbarrier.wait(bar_item, 0)
    num_blocks = _get(s_item, ITEM_BLOCKS)
    while num_blocks > 0:
        row = _get(s_item, ITEM_ROW) + HALF * ROWS
        num_rows = _get(s_item, ITEM_ROWS) - HALF * ROWS
        num_keys = _get(s_item, ITEM_KEYS)
        seen = _get(s_item, ITEM_SEEN) + HALF * ROWS
        head = _get(s_item, ITEM_HEAD)
        merge = _get(s_item, ITEM_MERGE)
        b_limit = gl.minimum(seen + gl.arange(0, ROWS, L_ROW), num_keys)
        unmasked = gl.minimum(seen, num_keys)
        mbarrier.wait(bar_q, i_tile & 1)
        slot = _slot(i_block)
        mbarrier.wait(bar_k.index(slot), _parity(i_block))
        b_s = gl.zeros([ROWS, KEYS], gl.float32, L_S)
        b_s = _scores(s_q.index(i_half), s_q_pe.index(i_half), s_k.index(slot), s_k_pe.index(slot), b_s)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(bar_k_free.index(slot), count=THREADS)
        o_key = (num_blocks - 1) * KEYS
        b_s = _masked(b_s, (b_limit - o_key)[:, None])
        b_m = _row_max(b_s, scale_log2)
        b_x = _by_thread(b_s)
        b_p = _exp2(b_x * scale_log2 - _spread(b_m, b_x))
        b_l = gl.sum(b_p, 1)
        b_p0, b_p1 = _halves(b_p)
        b_w = _weights(b_p0, b_p1, DTYPE, L_W)
        if o_key + KEYS > num_keys:
            mbarrier.wait(bar_v.index(slot), _parity(i_block))
            _zero_dead_rows(s_v.index(slot), num_keys - o_key)
        b_o = gl.zeros([ROWS, V], gl.float32, L_O)
        _wait_for_keys(bar_k, i_block + 1, num_blocks > 1)
        for i in range(1, num_blocks):
            last = _slot(i_block + i - 1)
            slot = _slot(i_block + i)
            b_s = _scores(s_q.index(i_half), s_q_pe.index(i_half), s_k.index(slot), s_k_pe.index(slot), b_s)
            mbarrier.wait(bar_v.index(last), _parity(i_block + i - 1))
            b_o = warpgroup_mma(b_w, s_v.index(last), b_o, is_async=True)
            b_s = warpgroup_mma_wait(1, deps=(b_s,))
            _done_with(bar_k_free.index(slot))
            o_key = (num_blocks - 1 - i) * KEYS
            if o_key + KEYS >= unmasked:
                b_s = _masked(b_s, (b_limit - o_key)[:, None])
                # A row's first keys set its maximum. No row is without one where nothing is masked any more.
                b_m = gl.where(b_m == LOWEST, _row_max(b_s, scale_log2), b_m)
            b_x = _by_thread(b_s)
            b_x = b_x * scale_log2 - _spread(b_m, b_x)
            b_now, b_alpha = _raised(_top(b_x), b_m)
            b_x = _lowered(b_x, _spread(b_now - b_m, b_x))
            b_m = b_now
            # Half of the weights are made while the last product runs, the others and the narrowing after it,
            # so that they fill each other's gaps. The assembler would move the wait to the start of all this,
            # were it not behind the branch of the wait for keys.
            b_x0, b_x1 = _halves(b_x)
            b_p0 = _exp2(b_x0)
            b_l = b_l * _column(b_alpha, b_l) + _partial_sums(b_p0, b_l)
            _wait_for_keys(bar_k, i_block + i + 1, i + 1 < num_blocks)
            b_o, b_p0, b_x1 = warpgroup_mma_wait(0, deps=(b_o, b_p0, b_x1))
            _done_with(bar_v_free.index(last))
            b_o = _rescaled(b_o, b_alpha)
            b_p1 = _exp2(b_x1)
            b_l += _partial_sums(b_p1, b_l)
            b_w = _weights(b_p0, b_p1, DTYPE, L_W)
        i_block += num_blocks
        last = _slot(i_block - 1)
        mbarrier.wait(bar_v.index(last), _parity(i_block - 1))
        b_o = warpgroup_mma(b_w, s_v.index(last), b_o, is_async=True)
        b_o = warpgroup_mma_wait(0, deps=(b_o,))
        mbarrier.arrive(bar_v_free.index(last), count=THREADS)
        _finish(s_stage.index(i_half), b_o, b_m, b_l, out, lse, _opaque(row), num_rows, head, H, merge)
        i_tile += 1
        mbarrier.wait(bar_item, i_tile & 1)
        num_blocks = _get(s_item, ITEM_BLOCKS)


@gluon.jit
def _fill(desc, i_head, i_row, i_col, bar, s_box):
    """Copy a box of [head, row, column]."""
    tma.async_copy_global_to_shared(
        desc, [i_head, i_row, i_col], bar, s_box._reinterpret(s_box.dtype, desc.block_shape, desc.layout)
    )


@gluon.jit
def _fill_values(values, i_head, i_row, bar_v, bar_v_free, s_v, i_block, P: gl.constexpr):
    """Copy the values of a block when those of two blocks ago are done with."""
    slot = _slot(i_block)
    mbarrier.wait(bar_v_free.index(slot), _parity(i_block) ^ 1)
    mbarrier.expect(bar_v.index(slot), KEYS * s_v.shape[2] * 2)
    _fill(values, i_head, i_row, P, bar_v.index(slot), s_v.index(slot))


@gluon.jit
def _produce(
    q_nope, q_pe, expanded, values, k_pe, s_q, s_q_pe, s_k, s_k_pe, s_v, s_item, bars, tiles, counters,
    num_tiles, num_programs, H, group,
):  # fmt: skip
    """Takes tiles, and copies in the order in which the consumers free the buffers."""
    bar_item, bar_q, bar_k, bar_k_free, bar_v, bar_v_free = bars
    P: gl.constexpr = s_k.shape[2]
    R: gl.constexpr = s_k_pe.shape[2]
    i_block = 0
    index = gl.atomic_add(counters, 1)
    while index < num_tiles * H:
        # Heads of a group are neighbours, and their tiles go from the longest to the shortest.
        head = index // (num_tiles * group) * group
        width = gl.minimum(group, H - head)
        rest = index - head * num_tiles
        head += rest % width
        p_tile = tiles + rest // width * FIELDS
        row = gl.load(p_tile)
        num_rows = gl.load(p_tile + 1)
        key = gl.load(p_tile + 2)
        num_keys = gl.load(p_tile + 3)
        seen = gl.load(p_tile + 4)
        merge = gl.load(p_tile + 5)
        num_blocks = gl.maximum((gl.minimum(num_keys, seen + num_rows - 1) + KEYS - 1) // KEYS, 1)
        for i in range(num_blocks):
            slot = _slot(i_block)
            i_key = key + (num_blocks - 1 - i) * KEYS
            mbarrier.wait(bar_k_free.index(slot), _parity(i_block) ^ 1)
            mbarrier.expect(bar_k.index(slot), KEYS * (P + R) * 2)
            _fill(expanded, head, i_key, 0, bar_k.index(slot), s_k.index(slot))
            tma.async_copy_global_to_shared(k_pe, [i_key, 0], bar_k.index(slot), s_k_pe.index(slot))
            if i == 0:
                # The last scores of the tile before are done once its last keys are free: so is its query.
                before = i_block + STAGES - 1
                mbarrier.wait(bar_k_free.index(_slot(before)), _parity(before) ^ 1, pred=i_block > 0)
                _put(s_item, ITEM_ROW, row)
                _put(s_item, ITEM_ROWS, num_rows)
                _put(s_item, ITEM_KEYS, num_keys)
                _put(s_item, ITEM_SEEN, seen)
                _put(s_item, ITEM_HEAD, head)
                _put(s_item, ITEM_MERGE, merge)
                _put(s_item, ITEM_BLOCKS, num_blocks)
                mbarrier.arrive(bar_item)
                mbarrier.expect(bar_q, 2 * ROWS * (P + R) * 2)
                for j in gl.static_range(2):
                    _fill(q_nope, head, row + j * ROWS, 0, bar_q, s_q.index(j))
                    _fill(q_pe, head, row + j * ROWS, 0, bar_q, s_q_pe.index(j))
            else:
                # Keys first: scores of a block are made before the product with the values of the last.
                _fill_values(values, head, i_key + KEYS, bar_v, bar_v_free, s_v, i_block - 1, P)
            i_block += 1
        _fill_values(values, head, key, bar_v, bar_v_free, s_v, i_block - 1, P)
        index = gl.atomic_add(counters, 1)
    before = i_block + STAGES - 1
    mbarrier.wait(bar_k_free.index(_slot(before)), _parity(before) ^ 1, pred=i_block > 0)
    _put(s_item, ITEM_BLOCKS, 0)
    mbarrier.arrive(bar_item)
    # The last program leaves the counters as it found them, for the next launch.
    if gl.atomic_add(counters + 1, 1) == num_programs - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit(
    do_not_specialize=["num_tiles", "H", "group", "i_zero"],
    do_not_specialize_on_alignment=["tiles", "counters"],
)
def mla_prefill_kernel(
    q_nope, q_pe, expanded, values, k_pe, out, lse, tiles, counters, num_tiles, H, group, scale_log2, i_zero,
):  # fmt: skip
    """q_nope [h, t, p], q_pe [h, t, r] by 64 rows of a head; expanded, values [h, j, p+v] by 128 rows of a
    head, p and v columns; k_pe [j, r] by 128 rows. out [t, h, v], lse [t, h].

    tiles: [num_tiles, 6] first query row, rows, first key row, keys, keys that the first row sees (each
    further row sees one more), whether to merge. counters: two zeros, and again zeros when the kernel ends.
    group: heads that are worked on side by side.

    Launch with num_warps=4 (the upper consumer's) and maxnreg=168: 3 · 168 registers a thread are shared as
    240 to each consumer and 24 to the producer, a single warp.
    """
    DTYPE: gl.constexpr = q_nope.dtype
    P: gl.constexpr = q_nope.block_shape[2]
    R: gl.constexpr = q_pe.block_shape[2]
    V: gl.constexpr = values.block_shape[2]
    L_BAR: gl.constexpr = mbarrier.MBarrierLayout()
    L_ITEM: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    L_Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, P], DTYPE)
    L_Q_PE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, R], DTYPE)
    L_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, V], DTYPE)
    L_STAGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 64], DTYPE)
    s_q = gl.allocate_shared_memory(DTYPE, [2, ROWS, P], L_Q)
    s_q_pe = gl.allocate_shared_memory(DTYPE, [2, ROWS, R], L_Q_PE)
    s_k = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, P], L_Q)
    s_k_pe = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, R], k_pe.layout)
    s_v = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, V], L_V)
    s_stage = gl.allocate_shared_memory(DTYPE, [2, ROWS, 64], L_STAGE)
    s_item = gl.allocate_shared_memory(gl.int32, [8, 1], L_ITEM)
    bar_item = gl.allocate_shared_memory(gl.int64, [1], L_BAR)
    bar_q = gl.allocate_shared_memory(gl.int64, [1], L_BAR)
    bar_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], L_BAR)
    bar_k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], L_BAR)
    bar_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], L_BAR)
    bar_v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], L_BAR)
    mbarrier.init(bar_item, count=1)
    mbarrier.init(bar_q, count=1)
    for j in gl.static_range(STAGES):
        mbarrier.init(bar_k.index(j), count=1)
        mbarrier.init(bar_k_free.index(j), count=2 * THREADS)
        mbarrier.init(bar_v.index(j), count=1)
        mbarrier.init(bar_v_free.index(j), count=2 * THREADS)
    fence_async_shared()
    bars = (bar_item, bar_q, bar_k, bar_k_free, bar_v, bar_v_free)
    upper = (
        s_q, s_q_pe, s_k, s_k_pe, s_v, s_stage, s_item, bars, out, lse, H, scale_log2, gl.constexpr(0),
        i_zero,
    )  # fmt: skip
    lower = (
        s_q, s_q_pe, s_k, s_k_pe, s_v, s_stage, s_item, bars, out, lse, H, scale_log2, gl.constexpr(1),
        i_zero,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, upper),
            (_consume, lower),
            (
                _produce,
                (
                    q_nope, q_pe, expanded, values, k_pe, s_q, s_q_pe, s_k, s_k_pe, s_v, s_item, bars, tiles,
                    counters, num_tiles, gl.num_programs(0), H, group,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
