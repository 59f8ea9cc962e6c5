# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (a jitted function's parameters are annotated for Triton, not for mypy)
"""Decode attention over an fp8 latent cache for Hopper: the consumers of ``_gluon_decode_kernel``, and a
producer that makes bfloat16 keys of codes.

Grid, items, pairs, consumers and order of accumulation: as there.

The codes of half a block (64 keys, 256 channels, 16 KB) are copied into the upper half of the 32 KB that
their bfloat16 values will fill, and expanded in place: nothing else in shared memory is free. The first
128 channels go to the lower half; then the second 128 are taken into registers, and replaced.

    before   |      free      |      free      |  codes 0–127   | codes 128–255  |
    after    | values  0–63   | values 64–127  | values 128–191 | values 192–255 |

Types: a code times its scale is rounded to float32, then to bfloat16. All else as there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mla_fast._gluon_decode_kernel import (
    BLOCK,
    FIELDS,
    HALF,
    LATENT,
    ROPE,
    _copy,
    _copy_query,
    _kv_len,
    _left,
    _pages,
    _pairs,
    _right,
    _shared,
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
def _expand_half(s_values, b_scale_0, b_scale_1, bar_raw, bar_full, phase):
    """Codes in the upper half of the bytes of s_values [64, 256] become its values.

    A thread takes 64 channels of one row, half of a tile, 16 bytes at a time; eight threads take the same
    channels of eight rows, which the swizzle puts in different banks.
    """
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32]],
        [[1, 0], [2, 0], [4, 0], [8, 0], [0, 64]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
    L_ROW: gl.constexpr = gl.SliceLayout(1, L)
    s_codes = _codes(s_values)
    mbarrier.wait(bar_raw, phase)
    b_code = s_codes.slice(0, TILE, dim=1).load(L)
    s_values.slice(0, TILE, dim=1).store(_dequantized(b_code, gl.convert_layout(b_scale_0, L_ROW)))
    b_code = s_codes.slice(TILE, TILE, dim=1).load(L)
    s_values.slice(128, TILE, dim=1).store(_dequantized(b_code, gl.convert_layout(b_scale_1, L_ROW)))
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
def _scales(scales, scale_block, scale_slot, table, i_block, kv_len, PAGE: gl.constexpr, TILED: gl.constexpr):
    """Scales [64] of the four tiles of a block's keys; of a cache under one scale, that scale."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[1, 0], [2, 0], [4, 0], [8, 0], [0, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    o_token = i_block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, L))
    m_token = o_token < kv_len
    if TILED:
        page = gl.load(table + o_token // PAGE, mask=m_token, other=0).to(gl.int64)
        p_row = scales + page * scale_block + o_token % PAGE * scale_slot
        o_tile = gl.arange(0, NUM_TILES, gl.SliceLayout(0, L))
        b_scale = gl.load(p_row[:, None] + o_tile[None, :], mask=m_token[:, None], other=0.0)
        b_even, b_odd = b_scale.reshape([BLOCK, 2, 2]).split()
        b_0, b_2 = b_even.split()
        b_1, b_3 = b_odd.split()
        return b_0, b_1, b_2, b_3
    else:  # noqa: RET505 (a branch that is decided at compile time needs its else)
        b_scale = gl.load(scales) + gl.zeros_like(o_token).to(gl.float32)
        return b_scale, b_scale, b_scale, b_scale


@gluon.jit
def _producer(
    q_nope, q_pe, kv, kv_pe, scales, s_q, s_q_pe, s_left, s_right, s_pe, bars, bars_raw, block_table,
    table_stride, scale_block, scale_slot, items, offsets, i_part, i_lane, PAGE: gl.constexpr,
    TILED: gl.constexpr,
):  # fmt: skip
    """Copies codes as soon as the place of their values is free, and expands them in that order.

    The rope part of a tiled entry is bfloat16 and needs no expansion.
    """
    (
        bar_q, bar_l, bar_l_free, bar_r, bar_r_free, _bar_m0, bar_m1, _bar_p0, _bar_p1, _bar_sum,
    ) = bars  # fmt: skip
    bar_l_raw, bar_r_raw = bars_raw
    ROPE_BYTES: gl.constexpr = BLOCK * ROPE * (2 if TILED else 1)
    ROPE_AT: gl.constexpr = LATENT + (4 * NUM_TILES if TILED else 0)
    i_begin = gl.load(offsets + i_part)
    i_end = gl.load(offsets + i_part + 1)
    i_pair = 0
    for i_item in range(i_begin, i_end):
        first, last = _pairs(items, i_item, i_lane)
        kv_len = _kv_len(items, i_item)
        request = gl.load(items + i_item * FIELDS)
        row = gl.load(items + i_item * FIELDS + 4) + i_lane * BLOCK
        table = block_table + request.to(gl.int64) * table_stride
        mbarrier.wait(bar_m1, (i_pair & 1) ^ 1, pred=i_item > i_begin)
        _copy_query(q_nope, q_pe, row, bar_q, s_q, s_q_pe)
        for i in range(first, last):
            phase = i_pair & 1
            free = phase ^ 1
            pages = _pages(table, 2 * i, kv_len, PAGE)
            mbarrier.wait(bar_l_free.index(0), free)
            mbarrier.expect(bar_l_raw.index(0), BLOCK * HALF)
            _copy(kv, pages, 2 * i, 0, bar_l_raw.index(0), _codes(s_left.index(0)), PAGE)
            b_00, b_01, b_02, b_03 = _scales(
                scales, scale_block, scale_slot, table, 2 * i, kv_len, PAGE, TILED
            )
            pages = _pages(table, 2 * i, kv_len, PAGE)
            mbarrier.wait(bar_r_free.index(0), free)
            mbarrier.expect(bar_r_raw.index(0), BLOCK * HALF + ROPE_BYTES)
            _copy(kv, pages, 2 * i, 256, bar_r_raw.index(0), _codes(s_right.index(0)), PAGE)
            _copy(kv_pe, pages, 2 * i, ROPE_AT, bar_r_raw.index(0), _rope_codes(s_pe.index(0), TILED), PAGE)
            pages = _pages(table, 2 * i + 1, kv_len, PAGE)
            b_10, b_11, b_12, b_13 = _scales(
                scales, scale_block, scale_slot, table, 2 * i + 1, kv_len, PAGE, TILED
            )
            mbarrier.wait(bar_r_free.index(1), free)
            mbarrier.expect(bar_r_raw.index(1), BLOCK * HALF)
            _copy(kv, pages, 2 * i + 1, 256, bar_r_raw.index(1), _codes(s_right.index(1)), PAGE)
            _expand_half(s_left.index(0), b_00, b_01, bar_l_raw.index(0), bar_l.index(0), phase)
            # The left half lets go of K1 when it has begun with K0's scores, which needs what was just made.
            pages = _pages(table, 2 * i + 1, kv_len, PAGE)
            mbarrier.wait(bar_l_free.index(1), free)
            mbarrier.expect(bar_l_raw.index(1), BLOCK * HALF + ROPE_BYTES)
            _copy(kv, pages, 2 * i + 1, 0, bar_l_raw.index(1), _codes(s_left.index(1)), PAGE)
            _copy(
                kv_pe, pages, 2 * i + 1, ROPE_AT, bar_l_raw.index(1), _rope_codes(s_pe.index(1), TILED), PAGE
            )
            if not TILED:
                _expand_rope(s_pe.index(0), b_00, bar_r_raw.index(0), phase)
            _expand_half(s_right.index(0), b_02, b_03, bar_r_raw.index(0), bar_r.index(0), phase)
            _expand_half(s_right.index(1), b_12, b_13, bar_r_raw.index(1), bar_r.index(1), phase)
            if not TILED:
                _expand_rope(s_pe.index(1), b_10, bar_l_raw.index(1), phase)
            _expand_half(s_left.index(1), b_10, b_11, bar_l_raw.index(1), bar_l.index(1), phase)
            i_pair += 1
    gdc_launch_dependents()


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

    Launch with num_warps=4 (the producer's) and maxnreg=168: 3 · 168 registers a thread are shared out as
    72 to the producer and 216 to each consumer.
    """
    i_part = gl.program_id(0) // LANES
    i_lane = gl.program_id(0) % LANES
    DTYPE: gl.constexpr = q_nope.dtype
    ROWS: gl.constexpr = LANES * BLOCK
    L_WIDE: gl.constexpr = q_nope.layout
    L_NARROW: gl.constexpr = q_pe.layout
    buffers, bars, bars_raw = _shared(DTYPE, L_WIDE, L_NARROW, True)
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
                    q_nope, q_pe, kv, kv_pe, scales, s_q, s_q_pe, s_left, s_right, s_pe, bars,
                    bars_raw, block_table, table_stride, scale_block, scale_slot, items,
                    offsets, i_part, i_lane, gl.constexpr(PAGE), gl.constexpr(TILED),
                ),
            ),
            (_left, consumer),
            (_right, consumer + (i_zero,)),  # noqa: RUF005 (Gluon has no starred tuples)
        ],
        [4, 4],
        [216, 216],
    )  # fmt: skip
