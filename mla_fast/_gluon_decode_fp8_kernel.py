# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (a jitted function's parameters are annotated for Triton, not for mypy)
"""Decode attention over an fp8 latent cache for Hopper: as ``_gluon_decode_kernel``, with bfloat16 keys made
of codes on the way.

Grid, items, pairs, who multiplies what: as there. But buffers go round in a relay:
    copies     an item's first pair by the expander; every later one by the consumer whose product was the
               last to read the place, at once
    expander   makes keys of codes: K0 left, K0 right, K1 left, K1 right, and over again
    left       P1 V1 of the last pair, then S0 = Q K0ᵀ, then P0 V0, each [:, :256]
    right      the first part of S1 = Q K1ᵀ; P0 V0 [:, 256:] while the expander makes K1's right half;
               the rest of S1; P1 V1
The maximum goes with the weights: K0's with P0 to the right, K1's with P1 to the left.

The codes of half a block (64 keys, 256 channels, 16 KB) are copied into the upper half of the 32 KB that
their bfloat16 values will fill, and expanded in place: nothing else in shared memory is free. All codes are
in registers before the first value is stored.

    before   |      free      |      free      |  codes 0–127   | codes 128–255  |
    after    | values  0–63   | values 64–127  | values 128–191 | values 192–255 |

Types: a code times its scale is rounded to float32, then to bfloat16. All else, and the order of
accumulation, as there.
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

from mla_fast._gluon_decode_kernel import (
    BLOCK,
    FIELDS,
    HALF,
    LATENT,
    PAIR,
    ROPE,
    SLACK,
    _buffers,
    _copy_query,
    _first_maximum,
    _kv_len,
    _masked,
    _num_live,
    _pages,
    _pairs,
    _rescaled,
    _rows_of,
    _store_half,
    _visible,
    _zero_dead_rows,
)

TILE: gl.constexpr = gl.constexpr(128)  # channels under one scale
NUM_TILES: gl.constexpr = gl.constexpr(4)

# Four codes, one a byte, times their scale. Halves hold every code exactly.
DEQUANTIZE_ASM: gl.constexpr = gl.constexpr("""{
    .reg .b16 low, high, h0, h1, h2, h3;
    .reg .b32 first, second;
    .reg .f32 x0, x1, x2, x3;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {h0, h1}, first;
    mov.b32 {h2, h3}, second;
    cvt.f32.f16 x0, h0;
    cvt.f32.f16 x1, h1;
    cvt.f32.f16 x2, h2;
    cvt.f32.f16 x3, h3;
    mul.f32 x0, x0, $3;
    mul.f32 x1, x1, $3;
    mul.f32 x2, x2, $3;
    mul.f32 x3, x3, $3;
    cvt.rn.bf16x2.f32 $0, x1, x0;
    cvt.rn.bf16x2.f32 $1, x3, x2;
}""")


@gluon.jit
def _dequantized(b_code, b_scale):
    """bfloat16 [64, n] of codes [64, n], a scale a row."""
    b_scale = b_scale[:, None] + gl.zeros_like(b_code).to(gl.float32)
    return gl.inline_asm_elementwise(
        DEQUANTIZE_ASM, "=r,=r,r,f,f,f,f", [b_code, b_scale], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@gluon.jit
def _bytes(s_values, WIDTH: gl.constexpr):
    """The bytes of a swizzled tile of bfloat16, in panels of 128 columns."""
    return s_values._reinterpret(gl.uint8, [BLOCK, WIDTH], gl.NVMMASharedLayout(128, 8, 2))


@gluon.jit
def _codes(s_values):
    """Where the codes [64, 256] of half a block are copied: the upper half of the bytes of its values."""
    return _bytes(s_values, 512).slice(256, HALF, dim=1)


@gluon.jit
def _rope_codes(s_rope, TILED: gl.constexpr):
    """Where a rope tile is copied: where it stays, or into the upper half of the bytes of its values."""
    if TILED:
        return _bytes(s_rope, 2 * ROPE)
    else:  # noqa: RET505 (a branch that is decided at compile time needs its else)
        s_halves = s_rope._reinterpret(gl.uint8, [2, BLOCK, ROPE], gl.NVMMASharedLayout(64, 8, 2))
        return s_halves.index(1)


@gluon.jit
def _expand_half(s_values, b_scale_0, b_scale_1, bar_raw, bar_full, phase, L: gl.constexpr):
    """Codes in the upper half of the bytes of s_values [64, 256] become its values; a scale a row and tile.

    L: a thread takes 64 channels of one row of a tile, 16 bytes at a time; eight threads take the same
    channels of eight rows, which the swizzle puts in different banks.
    """
    s_codes = _codes(s_values)
    mbarrier.wait(bar_raw, phase)
    b_code_0 = s_codes.slice(0, TILE, dim=1).load(L)
    b_code_1 = s_codes.slice(TILE, TILE, dim=1).load(L)
    s_values.slice(0, TILE, dim=1).store(_dequantized(b_code_0, b_scale_0))
    s_values.slice(TILE, TILE, dim=1).store(_dequantized(b_code_1, b_scale_1))
    fence_async_shared()
    mbarrier.arrive(bar_full)


@gluon.jit
def _expand_rope(s_rope, b_scale, bar_raw, phase):
    """Codes in the upper half of the tile's bytes become its values [64, 64]."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        [[1, 0], [2, 0], [4, 0], [8, 0], [0, 32]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
    mbarrier.wait(bar_raw, phase)
    b_code = _rope_codes(s_rope, False).load(L)
    s_rope.store(_dequantized(b_code, gl.convert_layout(b_scale, gl.SliceLayout(1, L))))


@gluon.jit
def _scales(
    scales, scale_block, scale_slot, table, i_block, kv_len, T: gl.constexpr, PAGE: gl.constexpr,
    TILED: gl.constexpr, L_ROW: gl.constexpr,
):  # fmt: skip
    """Scales [64] of tiles T and T + 1 of a block's keys; of a cache under one scale, that scale."""
    o_token = i_block * BLOCK + gl.arange(0, BLOCK, L_ROW)
    m_token = o_token < kv_len
    if TILED:
        page = gl.load(table + o_token // PAGE, mask=m_token, other=0).to(gl.int64)
        p_row = scales + page * scale_block + o_token % PAGE * scale_slot
        return gl.load(p_row + T, mask=m_token, other=0.0), gl.load(p_row + (T + 1), mask=m_token, other=0.0)
    else:  # noqa: RET505 (a branch that is decided at compile time needs its else)
        b_scale = gl.load(scales) + gl.zeros_like(o_token).to(gl.float32)
        return b_scale, b_scale


@gluon.jit
def _copy_if(desc, pages, i_block, i_col, bar, s_block, live, PAGE: gl.constexpr):
    """Copy columns i_col … of a 64-token block, page by page, where ``live``."""
    i_0, i_1, i_2, i_3 = pages
    s_pages = s_block._reinterpret(s_block.dtype, [1, BLOCK, desc.block_shape[2]], desc.layout)
    if PAGE >= 64:
        tma.async_copy_global_to_shared(desc, [i_0, i_block * BLOCK % PAGE, i_col], bar, s_pages, pred=live)
    else:
        tma.async_copy_global_to_shared(desc, [i_0, 0, i_col], bar, s_pages.slice(0, PAGE, dim=1), pred=live)
        tma.async_copy_global_to_shared(
            desc, [i_1, 0, i_col], bar, s_pages.slice(PAGE, PAGE, dim=1), pred=live
        )
    if PAGE < 32:
        tma.async_copy_global_to_shared(
            desc, [i_2, 0, i_col], bar, s_pages.slice(2 * PAGE, PAGE, dim=1), pred=live
        )
        tma.async_copy_global_to_shared(
            desc, [i_3, 0, i_col], bar, s_pages.slice(3 * PAGE, PAGE, dim=1), pred=live
        )


@gluon.jit
def _copy_half(kv, pages, i_block, i_col, bar_raw, s_values, live, PAGE: gl.constexpr):
    """Copy half a block's codes to where they are expanded."""
    mbarrier.expect(bar_raw, BLOCK * HALF, pred=live)
    _copy_if(kv, pages, i_block, i_col, bar_raw, _codes(s_values), live, PAGE)


@gluon.jit
def _copy_half_and_rope(
    kv, kv_pe, pages, i_block, i_col, bar_raw, s_values, s_rope, live, PAGE: gl.constexpr
):
    """As ``_copy_half``, and the block's rope part under the same barrier."""
    WIDTH: gl.constexpr = kv_pe.block_shape[2]
    TILED: gl.constexpr = WIDTH == 2 * ROPE
    ROPE_AT: gl.constexpr = LATENT + (4 * NUM_TILES if TILED else 0)
    mbarrier.expect(bar_raw, BLOCK * (HALF + WIDTH), pred=live)
    _copy_if(kv, pages, i_block, i_col, bar_raw, _codes(s_values), live, PAGE)
    _copy_if(kv_pe, pages, i_block, ROPE_AT, bar_raw, _rope_codes(s_rope, TILED), live, PAGE)


@gluon.jit
def _expander(
    q_nope, q_pe, kv, kv_pe, scales, buffers, bars, block_table, table_stride, scale_block, scale_slot, items,
    offsets, i_part, i_lane, PAGE: gl.constexpr, TILED: gl.constexpr,
):  # fmt: skip
    """Copies an item's query and first pair; makes keys of all codes.

    The rope part of a tiled entry is bfloat16 and needs no expansion. Scales are loaded a half ahead.
    """
    s_q, s_q_pe, s_left, s_right, s_pe, _s_p0, _s_m0, _s_m1, _s_l0, _s_l1 = buffers
    bar_q, bar_l_raw, bar_l, bar_r_raw, bar_r, _bar_p0, _bar_p1, _bar_sum, bar_done, _bar_stored = bars
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32]],
        [[1, 0], [2, 0], [4, 0], [8, 0], [0, 64]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
    L_ROW: gl.constexpr = gl.SliceLayout(1, L)
    i_begin = gl.load(offsets + i_part)
    i_end = gl.load(offsets + i_part + 1)
    i_pair = 0
    for i_item in range(i_begin, i_end):
        first, last = _pairs(items, i_item, i_lane)
        kv_len = _kv_len(items, i_item)
        request = gl.load(items + i_item * FIELDS)
        row = gl.load(items + i_item * FIELDS + 4) + i_lane * BLOCK
        table = block_table + request.to(gl.int64) * table_stride
        b_0, b_1 = _scales(scales, scale_block, scale_slot, table, 2 * first, kv_len, 0, PAGE, TILED, L_ROW)
        pages_0 = _pages(table, 2 * first, kv_len, PAGE)
        pages_1 = _pages(table, 2 * first + 1, kv_len, PAGE)
        mbarrier.wait(bar_done, ((i_item - i_begin) & 1) ^ 1)
        _copy_half(kv, pages_0, 2 * first, 0, bar_l_raw.index(0), s_left.index(0), True, PAGE)
        _copy_half_and_rope(
            kv, kv_pe, pages_0, 2 * first, 256, bar_r_raw.index(0), s_right.index(0), s_pe.index(0), True,
            PAGE,
        )  # fmt: skip
        _copy_half_and_rope(
            kv, kv_pe, pages_1, 2 * first + 1, 0, bar_l_raw.index(1), s_left.index(1), s_pe.index(1), True,
            PAGE,
        )  # fmt: skip
        _copy_half(kv, pages_1, 2 * first + 1, 256, bar_r_raw.index(1), s_right.index(1), True, PAGE)
        _copy_query(q_nope, q_pe, row, bar_q, s_q, s_q_pe)
        for i in range(first, last):
            phase = i_pair & 1
            b_2, b_3 = _scales(scales, scale_block, scale_slot, table, 2 * i, kv_len, 2, PAGE, TILED, L_ROW)
            _expand_half(s_left.index(0), b_0, b_1, bar_l_raw.index(0), bar_l.index(0), phase, L)
            if not TILED:
                _expand_rope(s_pe.index(0), b_0, bar_r_raw.index(0), phase)
            b_0, b_1 = _scales(
                scales, scale_block, scale_slot, table, 2 * i + 1, kv_len, 0, PAGE, TILED, L_ROW
            )
            _expand_half(s_right.index(0), b_2, b_3, bar_r_raw.index(0), bar_r.index(0), phase, L)
            b_2, b_3 = _scales(
                scales, scale_block, scale_slot, table, 2 * i + 1, kv_len, 2, PAGE, TILED, L_ROW
            )
            if not TILED:
                _expand_rope(s_pe.index(1), b_0, bar_l_raw.index(1), phase)
            _expand_half(s_left.index(1), b_0, b_1, bar_l_raw.index(1), bar_l.index(1), phase, L)
            b_0, b_1 = _scales(
                scales, scale_block, scale_slot, table, 2 * i + 2, kv_len, 0, PAGE, TILED, L_ROW
            )
            _expand_half(s_right.index(1), b_2, b_3, bar_r_raw.index(1), bar_r.index(1), phase, L)
            i_pair += 1
    gdc_launch_dependents()


@gluon.jit
def _left(
    kv, kv_pe, buffers, bars, block_table, table_stride, results, items, offsets, i_part, i_lane, H,
    scale_log2, i_zero, ROWS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Scores of K0; out[:, :256]; copies of left halves, and of K1's rope part."""
    s_q, s_q_pe, s_left, s_right, s_pe, s_p0, s_m0, s_m1, s_l0, s_l1 = buffers
    bar_q, bar_l_raw, bar_l, _bar_r_raw, bar_r, bar_p0, bar_p1, bar_sum, bar_done, bar_stored = bars
    out, lse, partial_out, partial_lse = results
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    L_ROW: gl.constexpr = gl.SliceLayout(1, L_S)
    DTYPE: gl.constexpr = s_q.dtype
    i_begin = gl.load(offsets + i_part)
    i_end = gl.load(offsets + i_part + 1)
    i_pair = 0
    for i_item in range(i_begin, i_end):
        first, last = _pairs(items, i_item, i_lane)
        kv_len = _kv_len(items, i_item)
        visible = _visible(items, i_item)
        table = block_table + gl.load(items + i_item * FIELDS).to(gl.int64) * table_stride
        parity = (i_item - i_begin) & 1
        mbarrier.wait(bar_q, parity)
        b_m = _first_maximum(_num_live(items, i_item, i_lane), L_ROW)
        b_l = gl.full([BLOCK], 0.0, gl.float32, L_ROW)
        b_o = gl.zeros([BLOCK, HALF], gl.float32, L_O)
        for i in range(first, last):
            phase = i_pair & 1
            o_key = i * PAIR
            # P1 V1 of the last pair. In the first pair the product is garbage that the next one overwrites:
            # wgmma under a branch would make ptxas serialise all of them.
            mbarrier.wait(bar_p1, phase ^ 1, pred=i > first)
            b_m1 = gl.where(i > first, s_m1.load(L_ROW), b_m)
            b_beta = gl.exp2(b_m - b_m1)
            b_m = b_m1
            b_l = b_l * b_beta
            b_o = _rescaled(b_o, b_beta)
            b_o = warpgroup_mma(s_pe.index(1), s_left.index(1), b_o, is_async=True)
            pages = _pages(table, 2 * i + 1, kv_len, PAGE)
            b_o = warpgroup_mma_wait(0, deps=(b_o,))
            gl.thread_barrier()
            _copy_half_and_rope(
                kv, kv_pe, pages, 2 * i + 1, 0, bar_l_raw.index(1), s_left.index(1), s_pe.index(1), i > first,
                PAGE,
            )  # fmt: skip
            b_s = gl.zeros([BLOCK, BLOCK], gl.float32, L_S)
            mbarrier.wait(bar_l.index(0), phase)
            b_s = warpgroup_mma(
                s_q.index(0), s_left.index(0).permute((1, 0)), b_s, use_acc=False, is_async=True
            )
            mbarrier.wait(bar_r.index(0), phase)
            b_s = warpgroup_mma(s_q.index(1), s_right.index(0).permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma(s_q_pe, s_pe.index(0).permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            if o_key + BLOCK > visible:
                b_s = _masked(b_s, o_key, items, i_item, i_lane, H)
                _zero_dead_rows(s_left.index(0), _kv_len(items, i_item) - o_key)
            b_top = gl.max(b_s, 1) * scale_log2
            b_m0 = gl.where(b_top > b_m + SLACK, b_top, b_m)
            b_alpha = gl.exp2(b_m - b_m0)
            b_m = b_m0
            b_p = gl.exp2(b_s * scale_log2 - b_m0[:, None])
            b_l = b_l * b_alpha + gl.sum(b_p, 1)
            b_p_own = b_p.to(DTYPE)
            # The right half stages its last item's results in these rows.
            mbarrier.wait(bar_stored, parity ^ 1, pred=i == first)
            s_m0.store(b_m0)
            s_p0.store(b_p_own)
            fence_async_shared()
            mbarrier.arrive(bar_p0)
            b_o = _rescaled(b_o, b_alpha)
            b_o = warpgroup_mma(
                gl.convert_layout(b_p_own, gl.DotOperandLayout(0, L_O, 2)),
                s_left.index(0),
                b_o,
                use_acc=i > first,
                is_async=True,
            )
            pages = _pages(table, 2 * i + 2, kv_len, PAGE)
            b_o = warpgroup_mma_wait(0, deps=(b_o,))
            gl.thread_barrier()
            _copy_half(kv, pages, 2 * i + 2, 0, bar_l_raw.index(0), s_left.index(0), i + 1 < last, PAGE)
            i_pair += 1
        mbarrier.wait(bar_p1, (i_pair & 1) ^ 1)
        b_m1 = s_m1.load(L_ROW)
        b_beta = gl.exp2(b_m - b_m1)
        b_l = b_l * b_beta
        b_o = _rescaled(b_o, b_beta)
        _zero_dead_rows(s_left.index(1), _kv_len(items, i_item) - (last * PAIR - BLOCK))
        b_o = warpgroup_mma(s_pe.index(1), s_left.index(1), b_o, is_async=True)
        b_o = warpgroup_mma_wait(0, deps=(b_o,))
        mbarrier.arrive(bar_done)
        s_l0.store(b_l)
        mbarrier.arrive(bar_sum.index(0))
        mbarrier.wait(bar_sum.index(1), parity)
        b_l = b_l + s_l1.load(L_ROW)
        slot, row, num_rows = _rows_of(items, i_item, i_lane)
        _store_half(
            s_p0.slice(0, 32, dim=1), b_o, b_l, b_m1, out, lse, partial_out, partial_lse, slot, row,
            num_rows, i_lane, ROWS, 0, True,
        )  # fmt: skip


@gluon.jit
def _right(
    kv, kv_pe, buffers, bars, block_table, table_stride, results, items, offsets, i_part, i_lane, H,
    scale_log2, i_zero, ROWS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Scores of K1; out[:, 256:]; copies of right halves, and of K0's rope part.

    i_zero: as in ``_gluon_decode_kernel``.
    """
    s_q, s_q_pe, s_left, s_right, s_pe, s_p0, s_m0, s_m1, s_l0, s_l1 = buffers
    bar_q, _bar_l_raw, bar_l, bar_r_raw, bar_r, bar_p0, bar_p1, bar_sum, bar_done, bar_stored = bars
    out, lse, partial_out, partial_lse = results
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
        kv_len = _kv_len(items, i_item)
        visible = _visible(items, i_item)
        table = block_table + gl.load(items + i_item * FIELDS).to(gl.int64) * table_stride
        parity = (i_item - i_begin) & 1
        mbarrier.wait(bar_q, parity)
        b_m = _first_maximum(_num_live(items, i_item, i_lane), L_ROW)
        b_l = gl.full([BLOCK], 0.0, gl.float32, L_ROW)
        b_o = gl.zeros([BLOCK, HALF], gl.float32, L_O)
        for i in range(first, last):
            phase = i_pair & 1
            o_key = i * PAIR + BLOCK
            b_s = gl.zeros([BLOCK, BLOCK], gl.float32, L_S)
            mbarrier.wait(bar_l.index(1), phase)
            b_s = warpgroup_mma(
                s_q.index(i_zero), s_left.index(i_one).permute((1, 0)), b_s, use_acc=False, is_async=True
            )
            b_s = warpgroup_mma(s_q_pe, s_pe.index(i_one).permute((1, 0)), b_s, is_async=True)
            # P0 V0 fits before the right half of K1 is there.
            mbarrier.wait(bar_p0, phase)
            b_m0 = s_m0.load(L_ROW)
            b_alpha = gl.exp2(b_m - b_m0)
            b_l = b_l * b_alpha
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            if o_key > visible:
                _zero_dead_rows(s_right.index(i_zero), _kv_len(items, i_item) - o_key + BLOCK)
            b_o = _rescaled(b_o, b_alpha)
            b_o = warpgroup_mma(s_p0, s_right.index(i_zero), b_o, is_async=True)
            pages = _pages(table, 2 * i + 2, kv_len, PAGE)
            b_o = warpgroup_mma_wait(0, deps=(b_o,))
            gl.thread_barrier()
            _copy_half_and_rope(
                kv, kv_pe, pages, 2 * i + 2, 256, bar_r_raw.index(0), s_right.index(0), s_pe.index(0),
                i + 1 < last, PAGE,
            )  # fmt: skip
            mbarrier.wait(bar_r.index(1), phase)
            b_s = warpgroup_mma(s_q.index(i_one), s_right.index(i_one).permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,))
            if o_key + BLOCK > visible:
                b_s = _masked(b_s, o_key, items, i_item, i_lane, H)
                _zero_dead_rows(s_right.index(i_one), _kv_len(items, i_item) - o_key)
            b_top = gl.max(b_s, 1) * scale_log2
            b_m = gl.where(b_top > b_m0 + SLACK, b_top, b_m0)
            b_alpha = gl.exp2(b_m0 - b_m)
            b_p = gl.exp2(b_s * scale_log2 - b_m[:, None])
            b_l = b_l * b_alpha + gl.sum(b_p, 1)
            b_p_own = b_p.to(DTYPE)
            s_m1.store(b_m)
            gl.thread_barrier()  # every warp's product with these keys is done
            s_pe.index(i_one).store(b_p_own)
            fence_async_shared()
            mbarrier.arrive(bar_p1)
            b_o = _rescaled(b_o, b_alpha)
            b_o = warpgroup_mma(
                gl.convert_layout(b_p_own, gl.DotOperandLayout(0, L_O, 2)),
                s_right.index(i_one),
                b_o,
                is_async=True,
            )
            pages = _pages(table, 2 * i + 3, kv_len, PAGE)
            b_o = warpgroup_mma_wait(0, deps=(b_o,))
            gl.thread_barrier()
            _copy_half(kv, pages, 2 * i + 3, 256, bar_r_raw.index(1), s_right.index(1), i + 1 < last, PAGE)
            i_pair += 1
        mbarrier.arrive(bar_done)
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
def _shared(DTYPE: gl.constexpr, L_WIDE: gl.constexpr, L_NARROW: gl.constexpr):
    """The buffers, and the barriers, set up."""
    L_BAR: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = _buffers(DTYPE, L_WIDE, L_NARROW)
    bar_q = gl.allocate_shared_memory(gl.int64, [1], L_BAR)
    bar_p0 = gl.allocate_shared_memory(gl.int64, [1], L_BAR)
    bar_p1 = gl.allocate_shared_memory(gl.int64, [1], L_BAR)
    bar_done = gl.allocate_shared_memory(gl.int64, [1], L_BAR)
    bar_stored = gl.allocate_shared_memory(gl.int64, [1], L_BAR)
    bar_l_raw = gl.allocate_shared_memory(gl.int64, [2, 1], L_BAR)
    bar_l = gl.allocate_shared_memory(gl.int64, [2, 1], L_BAR)
    bar_r_raw = gl.allocate_shared_memory(gl.int64, [2, 1], L_BAR)
    bar_r = gl.allocate_shared_memory(gl.int64, [2, 1], L_BAR)
    bar_sum = gl.allocate_shared_memory(gl.int64, [2, 1], L_BAR)
    mbarrier.init(bar_q, count=1)
    mbarrier.init(bar_p0, count=1)
    mbarrier.init(bar_p1, count=1)
    mbarrier.init(bar_done, count=2)
    mbarrier.init(bar_stored, count=1)
    for j in gl.static_range(2):
        mbarrier.init(bar_l_raw.index(j), count=1)
        mbarrier.init(bar_l.index(j), count=1)
        mbarrier.init(bar_r_raw.index(j), count=1)
        mbarrier.init(bar_r.index(j), count=1)
        mbarrier.init(bar_sum.index(j), count=1)
    fence_async_shared()
    bars = (bar_q, bar_l_raw, bar_l, bar_r_raw, bar_r, bar_p0, bar_p1, bar_sum, bar_done, bar_stored)
    return buffers, bars


@gluon.jit(
    do_not_specialize=["table_stride", "scale_block", "scale_slot", "H", "i_zero"],
    do_not_specialize_on_alignment=["block_table", "items", "offsets"],
)
def mla_decode_fp8_kernel(
    q_nope, q_pe, kv, kv_pe, scales, out, lse, partial_out, partial_lse, block_table, items, offsets,
    table_stride, scale_block, scale_slot, H, scale_log2, i_zero, PAGE: gl.constexpr, LANES: gl.constexpr,
    TILED: gl.constexpr,
):  # fmt: skip
    """q_nope [t·h, 512], q_pe [t·h, 64] by 64 rows; kv, kv_pe [n, k, bytes of an entry] by min(64, k) tokens
    of 256 codes, and of the rope part's 128 bytes (TILED) or 64.

    scales: of tiles, at the first entry's, in float32 and strides of float32; or of the whole cache.

    Launch with num_warps=4 (the expander's) and maxnreg=168: 3 · 168 registers a thread are shared out as
    72 to the expander and 216 to each consumer.
    """
    i_part = gl.program_id(0) // LANES
    i_lane = gl.program_id(0) % LANES
    ROWS: gl.constexpr = LANES * BLOCK
    DTYPE: gl.constexpr = q_nope.dtype
    L_WIDE: gl.constexpr = q_nope.layout
    L_NARROW: gl.constexpr = q_pe.layout
    buffers, bars = _shared(DTYPE, L_WIDE, L_NARROW)
    gdc_wait()
    results = (out, lse, partial_out, partial_lse)
    gl.warp_specialize(
        [
            (
                _expander,
                (
                    q_nope, q_pe, kv, kv_pe, scales, buffers, bars, block_table, table_stride, scale_block,
                    scale_slot, items, offsets, i_part, i_lane, gl.constexpr(PAGE), gl.constexpr(TILED),
                ),
            ),
            (
                _left,
                (
                    kv, kv_pe, buffers, bars, block_table, table_stride, results, items, offsets, i_part,
                    i_lane, H, scale_log2, i_zero, gl.constexpr(ROWS), gl.constexpr(PAGE),
                ),
            ),
            (
                _right,
                (
                    kv, kv_pe, buffers, bars, block_table, table_stride, results, items, offsets, i_part,
                    i_lane, H, scale_log2, i_zero, gl.constexpr(ROWS), gl.constexpr(PAGE),
                ),
            ),
        ],
        [4, 4],
        [216, 216],
    )  # fmt: skip
