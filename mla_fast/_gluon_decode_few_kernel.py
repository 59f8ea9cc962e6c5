# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (a jitted function's parameters are annotated for Triton, not for mypy)
"""Decode of at most 16 rows over an fp8 cache for Hopper: codes go from shared memory into the products.

Grid: (parts,), at most one program an SM. A program walks the items of its part in order, 64 keys a turn.
    producer     copies blocks (TMA) as they are: codes, rope part, scales
    eight warps  a warp owns one tile (the 128 channels under one scale) of half of a block's keys, as keys
                 and as values: two halves, each with a maximum, sums and an output of its own, merged at
                 the item's end
        scores   Q[:, tile] · codes of its tile, times the keys' scales, and a quarter of the rope part:
                 partial scores, which go through shared memory
        softmax  a warp adds the partial scores of a quarter of its half's rows and makes their weights, and
                 the factors of what came before; they go through shared memory to the half's four warps
        values   weights times the keys' scales, rounded to float16, by codes of its tile; where that does not
                 do, by bfloat16 in two parts
Codes become 16-bit numbers in registers, on the way into a product. One partition, not one for each half:
what such a loop waits for are instructions, and so two warps of a scheduler run the same.

Types: a code is exact in float16 and in bfloat16. A row's query in a tile, and the quarter of the rope
part that goes with it, are scaled by a power of two, and the tile is rounded to float16, which changes
no channel that is above 2⁻²⁹ of its largest and 2⁻⁶⁹ of the quarter's. Partial scores are in that unit,
and finite there for scales up to 2⁹⁶ and rope parts of keys below 2⁶⁸. Scores, sums, weights and
accumulators float32. Exponentials are base 2. The maximum is lazy, as in ``_gluon_decode_kernel``.

float16 is two instructions from two codes where bfloat16 is five, and has eleven bits, but a range of forty
binades. A weight is at most 2^SLACK. Scales are counted in an item's unit, a power of two, and a block that
all rows see and whose scales are at least the unit and less than 2^SPAN of it takes float16: a weight times
its scale does not overflow, and what underflow takes is at most 2⁻²⁵ of a key's value, as if the weight alone
were rounded. Other blocks take bfloat16, of which two have sixteen bits and no such range. That holds for
whatever is masked: dead codes are NaN in float16 and ±480 as they become bfloat16, and the bits of a row do
not depend on the scales of keys that it does not see.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mla_fast._gluon_decode_kernel import (
    BLOCK,
    FIELDS,
    LATENT,
    LN_2,
    LOWEST,
    PAIR,
    ROPE,
    _kv_len,
    _opaque,
    _pages,
    _rescale_asm,
    _visible,
)

TILE: gl.constexpr = gl.constexpr(128)  # channels under one scale
TILES: gl.constexpr = gl.constexpr(4)
OWNERS: gl.constexpr = gl.constexpr(8)  # warps: a tile's two halves beside each other
CHUNK: gl.constexpr = gl.constexpr(32)  # keys of a product, 16 of each half
N: gl.constexpr = gl.constexpr(16)  # rows
PLACES: gl.constexpr = gl.constexpr(4)  # for a block each
SLACK: gl.constexpr = gl.constexpr(4.0)  # powers of two by which a weight may exceed 1
SPAN: gl.constexpr = gl.constexpr(11)  # binades of scales: one times a weight is less than 2¹⁵
BELOW: gl.constexpr = gl.constexpr(8)  # of these, up to the largest of an item's first block
BINADE: gl.constexpr = gl.constexpr(1 << 23)  # of float32's bits

_EXPAND = """
    shl.b32 left, {w}, 4;
    shl.b32 even, {w}, 8;
    shr.u32 right, {w}, 4;
    and.b32 left, left, 0x07f007f0;
    and.b32 right, right, 0x07f007f0;
    lop3.b32 even, even, 0x80008000, left, 0xea;
    lop3.b32 odd, {w}, 0x80008000, right, 0xea;
    mul.rn.bf16x2 {e}, even, factor;
    mul.rn.bf16x2 {o}, odd, factor;
"""
_HEAD = "{ .reg .b32 left, right, even, odd, factor, first, second;\n mov.b32 factor, 0x7b807b80;\n"
KEYS_ASM: gl.constexpr = gl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# Four codes, one a byte, as two pairs: those at even and those at odd places. Exponent and mantissa in the
# place of bfloat16's are 2⁻¹²⁰ of the value, subnormals included.
ROPE_ASM: gl.constexpr = gl.constexpr(_HEAD + _EXPAND.format(w="$2", e="$0", o="$1") + "}")
# The same four channels of two keys, as four pairs of keys.
FLOAT16_VALUES_ASM: gl.constexpr = gl.constexpr("""{
    .reg .b32 first, second;
    .reg .b16 even, odd;
    prmt.b32 first, $4, $5, 0x5140;
    prmt.b32 second, $4, $5, 0x7362;
    mov.b32 {even, odd}, first;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
    mov.b32 {even, odd}, second;
    cvt.rn.f16x2.e4m3x2 $2, even;
    cvt.rn.f16x2.e4m3x2 $3, odd;
}""")
VALUES_ASM: gl.constexpr = gl.constexpr(
    _HEAD
    + "prmt.b32 first, $4, $5, 0x5410;\n prmt.b32 second, $4, $5, 0x7632;\n"
    + _EXPAND.format(w="first", e="$0", o="$1")
    + _EXPAND.format(w="second", e="$2", o="$3")
    + "}"
)
_ASM, _CONSTRAINTS = _rescale_asm(64)
RESCALE_ASM: gl.constexpr = gl.constexpr(_ASM)
RESCALE_CONSTRAINTS: gl.constexpr = gl.constexpr(_CONSTRAINTS)


@gluon.jit
def _keys(b_code):
    """float16 of codes."""
    return gl.inline_asm_elementwise(KEYS_ASM, "=r,=r,r", [b_code], dtype=gl.float16, is_pure=True, pack=4)


@gluon.jit
def _rope_keys(b_code):
    """bfloat16 of codes; of any four channels, the second and third change places."""
    return gl.inline_asm_elementwise(ROPE_ASM, "=r,=r,r", [b_code], dtype=gl.bfloat16, is_pure=True, pack=4)


@gluon.jit
def _values(b_code):
    """bfloat16 of codes, ±480 of NaN; of a place's bits (key 0, channel 1, channel 0) all change places."""
    return gl.inline_asm_elementwise(
        VALUES_ASM, "=r,=r,=r,=r,r,r", [b_code], dtype=gl.bfloat16, is_pure=True, pack=8
    )


@gluon.jit
def _float16_values(b_code):
    """float16 of codes, in the same order."""
    return gl.inline_asm_elementwise(
        FLOAT16_VALUES_ASM, "=r,=r,=r,=r,r,r", [b_code], dtype=gl.float16, is_pure=True, pack=8
    )


@gluon.jit
def _owned(b_x, L_4: gl.constexpr, L_S: gl.constexpr):
    """[2, N] of the halves as [8, N, 1], for every owner its half's."""
    b_x = gl.convert_layout(b_x, gl.SliceLayout(0, gl.SliceLayout(3, L_4)))
    b_x = b_x[None, :, :] * gl.full([TILES, 2, N], 1.0, gl.float32, gl.SliceLayout(3, L_4))
    return gl.convert_layout(b_x.reshape([OWNERS, N]), gl.SliceLayout(2, L_S))[:, :, None]


@gluon.jit
def _rescaled(b_o, b_factor):
    """b_o [8, N, 128] · b_factor [8, N, 1], skipped by every warp whose factors are all 1."""
    return gl.inline_asm_elementwise(
        RESCALE_ASM, RESCALE_CONSTRAINTS, [b_o, b_factor], dtype=gl.float32, is_pure=False, pack=64
    )


@gluon.jit
def _blocks(items, i_item):
    """First and end block of an item: the same where it has no key."""
    p = items + i_item * FIELDS
    first = gl.load(p + 1) * (PAIR // BLOCK)
    last = gl.minimum(gl.load(p + 2) * (PAIR // BLOCK), (_kv_len(items, i_item) + BLOCK - 1) // BLOCK)
    return first, last


@gluon.jit
def _copy_part(desc, pages, i_block, i_col, bar, s_part, PAGE: gl.constexpr):
    """Columns i_col … of a block, into [1, 64, columns]."""
    i_0, i_1, i_2, i_3 = pages
    if PAGE >= 64:
        tma.async_copy_global_to_shared(desc, [i_0, i_block * BLOCK % PAGE, i_col], bar, s_part)
    else:
        tma.async_copy_global_to_shared(desc, [i_0, 0, i_col], bar, s_part.slice(0, PAGE, dim=1))
        tma.async_copy_global_to_shared(desc, [i_1, 0, i_col], bar, s_part.slice(PAGE, PAGE, dim=1))
    if PAGE < 32:
        tma.async_copy_global_to_shared(desc, [i_2, 0, i_col], bar, s_part.slice(2 * PAGE, PAGE, dim=1))
        tma.async_copy_global_to_shared(desc, [i_3, 0, i_col], bar, s_part.slice(3 * PAGE, PAGE, dim=1))


@gluon.jit
def _copy_block(
    kv, kv_pe, kv_scale, pages, i_block, bar, s_code, s_pe, s_scale, PAGE: gl.constexpr, TILED: gl.constexpr
):
    """A block's codes, rope part and scales."""
    WIDTH: gl.constexpr = kv_pe.block_shape[2]
    ROPE_AT: gl.constexpr = LATENT + (4 * TILES if TILED else 0)
    mbarrier.expect(bar, BLOCK * (LATENT + WIDTH + (4 * TILES if TILED else 0)))
    for t in gl.static_range(4):
        _copy_part(kv, pages, i_block, t * TILE, bar, s_code.slice(t, 1, dim=0), PAGE)
    s_rope = s_pe._reinterpret(gl.uint8, [1, BLOCK, WIDTH], kv_pe.layout)
    _copy_part(kv_pe, pages, i_block, ROPE_AT, bar, s_rope, PAGE)
    if TILED:
        s_words = s_scale._reinterpret(gl.float32, [1, BLOCK, TILES], kv_scale.layout)
        _copy_part(kv_scale, pages, i_block, TILE, bar, s_words, PAGE)


@gluon.jit
def _producer(
    kv, kv_pe, kv_scale, buffers, bars, block_table, table_stride, items, offsets, i_part,
    PAGE: gl.constexpr, TILED: gl.constexpr,
):  # fmt: skip
    """Copies blocks, each as soon as a place is free."""
    s_codes, s_pes, s_scales, _s_part, _s_weight, _s_alpha, _s_unit, _s_output, _s_m, _s_l = buffers
    bar_block, bar_free = bars
    i_begin = gl.load(offsets + i_part)
    i_end = gl.load(offsets + i_part + 1)
    i_copy = 0
    for i_item in range(i_begin, i_end):
        first, last = _blocks(items, i_item)
        kv_len = _kv_len(items, i_item)
        table = block_table + gl.load(items + i_item * FIELDS).to(gl.int64) * table_stride
        for i in range(first, last):
            i_at = i_copy & (PLACES - 1)
            pages = _pages(table, i, kv_len, PAGE)
            mbarrier.wait(bar_free.index(i_at), ((i_copy // PLACES) & 1) ^ 1)
            _copy_block(
                kv, kv_pe, kv_scale, pages, i, bar_block.index(i_at), s_codes.index(i_at), s_pes.index(i_at),
                s_scales.index(i_at), PAGE, TILED,
            )  # fmt: skip
            i_copy += 1
    gdc_launch_dependents()


@gluon.jit
def _query(q_nope, q_pe, stride_nope, stride_pe, row, num_rows, L_S: gl.constexpr, TILED: gl.constexpr):
    """An owner's tile and rope quarter of the query's rows, as operands, 0 past the request's end; and the
    power of two [8, N] by which their products are to be multiplied.

    Channels come in the order in which ``_partial_scores`` finds them in codes.
    """
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 8, 0]],
        [[0, 0, 32], [0, 0, 64], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [],
        [8, 16, 128],
    )
    L_PE: gl.constexpr = gl.DotOperandLayout(0, L_S, 2)
    o_row = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    o_tile = gl.arange(0, OWNERS, gl.SliceLayout(1, gl.SliceLayout(2, L))) // 2
    o_col = gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    p = q_nope + (row + o_row).to(gl.int64)[None, :, None] * stride_nope
    p = p + (o_tile * TILE)[:, None, None] + o_col[None, None, :]
    b_q = gl.load(p, mask=(o_row < num_rows)[None, :, None], other=0.0).to(gl.float32)
    b_top = gl.max(gl.maximum(b_q, -b_q), 2)
    o_row_pe = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, L_PE)))
    o_quarter = gl.arange(0, OWNERS, gl.SliceLayout(1, gl.SliceLayout(2, L_PE))) // 2
    o_col_pe = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, L_PE)))
    if not TILED:
        o_col_pe = (o_col_pe & 1) * 2 + (o_col_pe // 8) + (o_col_pe // 2 & 3) * 4
    p = q_pe + (row + o_row_pe).to(gl.int64)[None, :, None] * stride_pe
    p = p + (o_quarter * 16)[:, None, None] + o_col_pe[None, None, :]
    b_q_pe = gl.load(p, mask=(o_row_pe < num_rows)[None, :, None], other=0.0).to(gl.float32)
    b_top_pe = gl.convert_layout(gl.max(gl.maximum(b_q_pe, -b_q_pe), 2), gl.SliceLayout(2, L))
    b_top = gl.maximum(gl.maximum(b_top, b_top_pe * 2.0**-40), 1e-30)  # the rope part's is below 2⁵⁵ then
    b_power = gl.log2(b_top).to(gl.int32).to(gl.float32) - 13.0  # the largest is below 2¹⁴ then
    b_q = (b_q * gl.exp2(-b_power)[:, :, None]).to(gl.float16)
    b_power = gl.convert_layout(b_power, gl.SliceLayout(2, L_PE))
    b_q_pe = (b_q_pe * gl.exp2(-b_power)[:, :, None]).to(gl.bfloat16)
    b_q = b_q.reshape([OWNERS, N, 4, 8, 2, 2]).permute((0, 1, 3, 4, 2, 5)).reshape([OWNERS, N, TILE])
    return gl.convert_layout(b_q, gl.DotOperandLayout(0, L_S, 2)), b_q_pe, gl.exp2(b_power)


@gluon.jit
def _load_keys(s_code, s_pe, FIRST: gl.constexpr, TILED: gl.constexpr):
    """Codes of a chunk's keys, and their rope part."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 8, 0]],
        [[0, 0, 32], [0, 0, 64], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 16, 0], [1, 0, 0], [2, 0, 0]],
        [],
        [4, 32, 128],
    )
    L_PE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [0, 16], [0, 32]], [], [32, 64],
    ) if TILED else gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [0, 16], [0, 32]], [], [32, 64],
    )  # fmt: skip
    return s_code.slice(FIRST, CHUNK, dim=1).load(L), s_pe.slice(FIRST, CHUNK, dim=0).load(L_PE)


@gluon.jit
def _partial_scores(operands, keys, b_scale, L_S: gl.constexpr, TILED: gl.constexpr):
    """[8, N, 16]: what each tile, and each quarter of the rope part, adds to the scores of a chunk's keys."""
    L_K: gl.constexpr = gl.DotOperandLayout(1, L_S, 2)
    b_q, b_q_pe = operands
    b_code, b_rope = keys
    b_k = _keys(b_code).reshape([TILES, 2, 16, 4, 8, 2, 2]).permute((0, 1, 4, 5, 3, 6, 2))
    b_k = b_k.reshape([OWNERS, TILE, 16])
    b_s = mma_v2(b_q, gl.convert_layout(b_k, L_K), gl.zeros([OWNERS, N, 16], gl.float32, L_S))
    if TILED:
        b_k_pe = b_rope.reshape([2, 16, 4, 16]).permute((2, 0, 3, 1)).reshape([OWNERS, 16, 16])
        b_s = b_s * gl.convert_layout(b_scale.reshape([OWNERS, 16]), gl.SliceLayout(1, L_S))[:, None, :]
        return mma_v2(b_q_pe, gl.convert_layout(b_k_pe, L_K), b_s)
    else:  # noqa: RET505 (a branch that is decided at compile time needs its else)
        b_k_pe = _rope_keys(b_rope).reshape([2, 16, 4, 4, 2, 2]).permute((2, 0, 4, 3, 5, 1))
        return mma_v2(b_q_pe, gl.convert_layout(b_k_pe.reshape([OWNERS, 16, 16]), L_K), b_s)


@gluon.jit
def _store_partial(s_part, b_s_0, b_s_1):
    """A block's partial scores, two chunks of [8, N, 16], a thread's four of a row side by side."""
    b_s = gl.join(b_s_0, b_s_1).reshape([TILES, 2, 2, 8, 2, 4, 2, 2]).permute((0, 1, 7, 2, 3, 5, 4, 6))
    s_part.store(b_s.reshape([TILES, 2, 2, 2, 32, 4]))


@gluon.jit
def _partial(s_tile, L_P: gl.constexpr):
    """[2, N, 32]: a tile's partial scores."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2]],
        [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 0, 4, 0], [0, 0, 0, 8, 0], [0, 1, 0, 0, 0]],
        [[1, 0, 0, 0, 0], [0, 0, 0, 16, 0], [0, 0, 1, 0, 0]],
        [],
        [2, 2, 2, 32, 4],
    )
    # Bits: half; chunk; row 3, 2-0; key 2-1, 3, 0.
    b_s = s_tile.load(L).reshape([2, 2, 2, 8, 4, 2, 2]).permute((0, 2, 3, 1, 5, 4, 6)).reshape([2, N, 32])
    return gl.convert_layout(b_s, L_P)


@gluon.jit
def _scores(s_part, units, L_P: gl.constexpr):
    """[2, N, 32]: a block's scores: the sum of partial ones, each in the unit of its row and tile."""
    s_tiles = s_part._reinterpret(
        gl.float32, [TILES, 2, 2, 2, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    )
    unit_0, unit_1, unit_2, unit_3 = units
    b_s = _partial(s_tiles.index(0), L_P) * unit_0[:, :, None]
    b_s += _partial(s_tiles.index(1), L_P) * unit_1[:, :, None]
    b_s += _partial(s_tiles.index(2), L_P) * unit_2[:, :, None]
    b_s += _partial(s_tiles.index(3), L_P) * unit_3[:, :, None]
    return b_s


@gluon.jit
def _store_weights(s_weight, b_p):
    """A block's weights [2, N, 32], in the order of partial scores."""
    b_p = b_p.reshape([2, 2, 8, 2, 2, 4, 2]).permute((3, 0, 1, 2, 5, 4, 6)).reshape([2, 2, 2, 32, 4])
    s_weight.store(b_p)


@gluon.jit
def _load_weights(s_weight, CHUNK_AT: gl.constexpr, L_4: gl.constexpr):
    """[2, N, 16]: a chunk's weights, the same in the four owners of a half."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 1, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0], [0, 0, 16, 0]],
        [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
        [],
        [2, 2, 32, 4],
    )
    s_chunks = s_weight._reinterpret(
        gl.float32, [2, 2, 2, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    b_p = s_chunks.index(CHUNK_AT).load(L).reshape([2, 2, 8, 4, 2, 2]).permute((0, 1, 2, 4, 3, 5))
    return gl.convert_layout(b_p.reshape([2, N, 16]), gl.SliceLayout(0, L_4))


@gluon.jit
def _sums(b_p, L_SUM: gl.constexpr):
    """[2, N, 8]: what each of a row's threads has of its weights."""
    b_p = b_p.reshape([2, N, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5)).reshape([2, N, 8, 4])
    return gl.sum(gl.convert_layout(b_p, L_SUM), 3)


@gluon.jit
def _row_maximum(b_s, L_P: gl.constexpr):
    """[2, N]: the largest of [2, N, 32]."""
    # In two steps: Triton shuffles lanes that follow each other, and those of a row's chunks do not.
    b_top = gl.max(gl.max(b_s.reshape([2, N, 2, 16]), 3), 2)
    return gl.convert_layout(b_top, gl.SliceLayout(2, L_P))


@gluon.jit
def _row_sum(b_l, L_P: gl.constexpr):
    """[2, N]: the sums of [2, N, 8], in the same two steps."""
    b_l = gl.sum(gl.sum(b_l.reshape([2, N, 2, 4]), 3), 2)
    return gl.convert_layout(b_l, gl.SliceLayout(2, L_P))


@gluon.jit
def _load_values(s_code, FIRST: gl.constexpr):
    """Codes of a chunk's values."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 0, 4], [0, 0, 8], [0, 8, 0]],
        [[0, 2, 0], [0, 4, 0], [0, 0, 16], [0, 0, 32], [0, 0, 64]],
        [[0, 16, 0], [1, 0, 0], [2, 0, 0]],
        [],
        [4, 32, 128],
    )
    return s_code.slice(FIRST, CHUNK, dim=1).load(L)


@gluon.jit
def _weighted(b_p, b_scale, b_code, b_o, L_S: gl.constexpr, FLOAT16: gl.constexpr):
    """b_o + weights [2, N, 16] of a chunk's keys, times their scales [4, 2, 16], · values."""
    L_W: gl.constexpr = gl.DotOperandLayout(0, L_S, 2)
    b_w = (b_p[None, :, :, :] * b_scale[:, :, None, :]).reshape([OWNERS, N, 16])
    b_v = _float16_values(b_code) if FLOAT16 else _values(b_code)
    # Bits: half; key 3-1, 0; channel 6-4, 3-2, 1, 0. At (key 0, channel 1, 0) lies (channel 1, 0, key 0).
    b_v = (
        b_v.reshape([TILES, 2, 8, 2, 8, 4, 2, 2])
        .permute((0, 1, 2, 7, 5, 3, 6, 4))
        .reshape([OWNERS, 16, TILE])
    )
    b_v = gl.convert_layout(b_v, gl.DotOperandLayout(1, L_S, 2))
    if FLOAT16:
        return mma_v2(gl.convert_layout(b_w.to(gl.float16), L_W), b_v, b_o)
    else:  # noqa: RET505 (a branch that is decided at compile time needs its else)
        b_high = b_w.to(gl.bfloat16)
        b_low = (b_w - b_high.to(gl.float32)).to(gl.bfloat16)
        b_o = mma_v2(gl.convert_layout(b_low, L_W), b_v, b_o)
        return mma_v2(gl.convert_layout(b_high, L_W), b_v, b_o)


@gluon.jit
def _turn(
    operands, b_code_0, s_code, s_next_code, s_next_pe, b_p_0, b_p_1, b_scale_0, b_scale_1, next_scale_1, b_o,
    L_S: gl.constexpr, TILED: gl.constexpr, FLOAT16: gl.constexpr,
):  # fmt: skip
    """The output with a block's values, and the second partial scores of the next."""
    b_o = _weighted(b_p_0, b_scale_0, b_code_0, b_o, L_S, FLOAT16)
    b_code_1 = _load_values(s_code, CHUNK)
    next_keys = _load_keys(s_next_code, s_next_pe, CHUNK, TILED)
    b_next_1 = _partial_scores(operands, next_keys, next_scale_1, L_S, TILED)
    return _weighted(b_p_1, b_scale_1, b_code_1, b_o, L_S, FLOAT16), b_next_1


@gluon.jit
def _load_scales(s_scale, L_4: gl.constexpr, TILED: gl.constexpr):
    """[4, 2, 16]: scales of a chunk's keys."""
    if TILED:
        L: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 8]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 16], [1, 0], [2, 0]], [], [4, 32]
        )
        return gl.convert_layout(s_scale.load(L).reshape([TILES, 2, 16]), gl.SliceLayout(2, L_4))
    else:  # noqa: RET505 (a branch that is decided at compile time needs its else)
        return gl.full([TILES, 2, 16], 1.0, gl.float32, gl.SliceLayout(2, L_4))


@gluon.jit
def _block_scales(s_scale, L_4: gl.constexpr, TILED: gl.constexpr):
    s_scale = s_scale.permute((1, 0))
    b_scale_0 = _load_scales(s_scale.slice(0, CHUNK, dim=1), L_4, TILED)
    return b_scale_0, _load_scales(s_scale.slice(CHUNK, CHUNK, dim=1), L_4, TILED)


@gluon.jit
def _scale_bits(s_scale):
    """[256]: the bits of a block's scales, all of them in every warp."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[0, 0], [0, 0], [0, 0]],
        [],
        [64, 4],
    )
    return s_scale.load(L).to(gl.int32, bitcast=True).reshape([BLOCK * TILES])


@gluon.jit
def _unit_exponent(s_scale, is_seen):
    """Of an item's unit: BELOW its first block's largest scale, or 0 for what is unseen or far from 1."""
    exponent = gl.max(_scale_bits(s_scale), 0) // BINADE - 127
    return exponent - BELOW if is_seen and exponent > -30 and exponent < 30 else exponent * 0


@gluon.jit
def _fits(s_scale, unit_exponent):
    """Whether all scales of a block are at least the unit and less than 2^SPAN of it."""
    b_bits = _scale_bits(s_scale)
    low = (unit_exponent + 127) * BINADE
    return (gl.min(b_bits, 0) >= low) & (gl.max(b_bits, 0) < low + SPAN * BINADE)


@gluon.jit
def _masked(b_s, i_key, items, i_item, H):
    """Scores of a block's keys, the first i_key, -inf where a row does not see a key."""
    L: gl.constexpr = b_s.type.layout
    o_row = gl.load(items + i_item * FIELDS + 7) + gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    b_limit = _visible(items, i_item) + o_row // H
    o_half = i_key + 16 * gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    o_key = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    o_key = o_key + o_key // 16 * 16  # a chunk's 16 of this half, then the other's
    m_seen = o_half[:, None, None] + o_key[None, None, :] < b_limit[None, :, None]
    return gl.where(m_seen, b_s, float("-inf"))


@gluon.jit
def _live_scales(b_scale, i_key, items, i_item):
    """0 for dead keys, which may hold NaN."""
    L: gl.constexpr = b_scale.type.layout
    o_half = i_key + 16 * gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    o_key = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    m_live = o_half[None, :, None] + o_key[None, None, :] < _kv_len(items, i_item)
    return gl.where(m_live, b_scale, 0.0)


@gluon.jit
def _column_halves(b_o, WIDTH: gl.constexpr):
    return b_o.reshape([OWNERS, N, 2, WIDTH // 2]).permute((0, 1, 3, 2)).split()


@gluon.jit
def _both_halves(s_output, b_o):
    """[4, 4, 32, 4]: the sum of both halves' [8, N, 32], a thread's four numbers side by side."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 1, 0, 0], [0, 2, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0], [0, 0, 16, 0]],
        [[0, 0, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [4, 4, 32, 4],
    )
    b_o = b_o.reshape([TILES, 2, 2, 8, 4, 4, 2]).permute((1, 0, 4, 3, 5, 2, 6)).reshape([2, TILES, 4, 32, 4])
    s_output.store(b_o)
    s_halves = s_output._reinterpret(
        gl.float32, [2, TILES, 4, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    return s_halves.index(0).load(L) + s_halves.index(1).load(L)


@gluon.jit
def _store_output(s_output, p_rows, b_o, num_rows):
    """Adds the halves of [8, N, 128] and stores rows. Column c is a tile's channel 16 (c mod 8) + c / 8."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 8, 0]],
        [[0, 0, 32], [0, 0, 64], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 0, 0], [1, 0, 0], [2, 0, 0]],
        [],
        [4, 16, 128],
    )
    b_0, b_1 = _column_halves(b_o, 128)
    b_00, b_01 = _column_halves(b_0, 64)
    b_10, b_11 = _column_halves(b_1, 64)
    b_00 = _both_halves(s_output, b_00)
    b_01 = _both_halves(s_output, b_01)
    b_10 = _both_halves(s_output, b_10)
    b_11 = _both_halves(s_output, b_11)
    b_o = gl.join(gl.join(b_00, b_10), gl.join(b_01, b_11))
    # [tile, column 4-3, row 2-0, column 2-1, row 3, column 0, column 6, column 5]
    b_o = (
        b_o.reshape([TILES, 4, 8, 4, 2, 2, 2, 2]).permute((0, 4, 2, 3, 5, 6, 7, 1)).reshape([TILES, N, TILE])
    )
    b_o = gl.convert_layout(b_o, L)
    o_row = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    o_tile = gl.arange(0, TILES, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    o_col = gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    p = p_rows + (o_row * LATENT)[None, :, None] + (o_tile * TILE)[:, None, None] + o_col[None, None, :]
    gl.store(p, b_o.to(p_rows.dtype.element_ty), mask=(o_row < num_rows)[None, :, None])


@gluon.jit
def _attend(
    q_nope, q_pe, stride_nope, stride_pe, kv_scale, buffers, bars, results, items, offsets, i_part, H,
    scale_log2, TILED: gl.constexpr,
):  # fmt: skip
    """Scores, weights and output of all items."""
    s_codes, s_pes, s_scales, s_part, s_weight, s_alpha, s_unit, s_output, s_m, s_l = buffers
    bar_block, bar_free = bars
    out, lse, partial_out, partial_lse = results
    L_S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8])
    # The same for [tiles, halves, …].
    L_4: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 8, 0], [0, 0, 0, 8]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        [[0, 1, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [4, 2, 16, 16],
    )
    L_ROW: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(0, L_4))
    # Of the softmax: a half's owners take four rows each, a row's eight threads four keys each.
    L_P: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 8]],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 0, 16]],
        [[1, 0, 0], [0, 4, 0], [0, 8, 0]],
        [],
        [2, 16, 32],
    )
    L_SUM: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 4, 0]],
        [[1, 0, 0, 0], [0, 4, 0, 0], [0, 8, 0, 0]],
        [],
        [2, 16, 8, 4],
    )
    L_ONE: gl.constexpr = gl.SliceLayout(0, L_ROW)
    L_SOFTMAX: gl.constexpr = gl.SliceLayout(2, L_P)
    unit = 1.0
    if not TILED:
        unit = gl.load(kv_scale)
        scale_log2 = scale_log2 * unit
    i_begin = gl.load(offsets + i_part)
    i_end = gl.load(offsets + i_part + 1)
    i_copy = 0
    for i_item in range(i_begin, i_end):
        first, last = _blocks(items, i_item)
        visible = _visible(items, i_item)
        row = gl.load(items + i_item * FIELDS + 4)
        b_q, b_q_pe, b_unit = _query(
            q_nope, q_pe, stride_nope, stride_pe, row, gl.load(items + i_item * FIELDS + 5), L_S, TILED
        )
        operands = (b_q, b_q_pe)
        s_unit.store(b_unit)
        s_unit_of = s_unit._reinterpret(gl.float32, [TILES, 2, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        unit_0, unit_1 = s_unit_of.index(0).load(L_SOFTMAX), s_unit_of.index(1).load(L_SOFTMAX)
        unit_2, unit_3 = s_unit_of.index(2).load(L_SOFTMAX), s_unit_of.index(3).load(L_SOFTMAX)
        units = (unit_0, unit_1, unit_2, unit_3)
        b_m = gl.full([2, N], LOWEST, gl.float32, L_SOFTMAX)
        b_l = gl.full([2, N, 8], 0.0, gl.float32, gl.SliceLayout(3, L_SUM))
        b_o = gl.zeros([OWNERS, N, TILE], gl.float32, L_S)
        # The scores of a block are begun under the softmax and the values of the one before.
        i_at = i_copy & (PLACES - 1)
        mbarrier.wait(bar_block.index(i_at), (i_copy // PLACES) & 1, pred=first < last)
        fits, unit_exponent, scale_unit, per_unit = True, 0, 1.0, 1.0
        if TILED:
            unit_exponent = _unit_exponent(s_scales.index(i_at), first * BLOCK + BLOCK <= visible)
            fits = _fits(s_scales.index(i_at), unit_exponent)
            scale_unit, per_unit = gl.exp2(unit_exponent * 1.0), gl.exp2(unit_exponent * -1.0)
        b_scale_0, b_scale_1 = _block_scales(s_scales.index(i_at), L_4, TILED)
        keys_0 = _load_keys(s_codes.index(i_at), s_pes.index(i_at), 0, TILED)
        b_next_0 = _partial_scores(operands, keys_0, b_scale_0, L_S, TILED)
        keys_1 = _load_keys(s_codes.index(i_at), s_pes.index(i_at), CHUNK, TILED)
        b_next_1 = _partial_scores(operands, keys_1, b_scale_1, L_S, TILED)
        _store_partial(s_part, b_next_0, b_next_1)
        for i in range(first, last):
            i_next = (i_copy + 1) & (PLACES - 1)
            mbarrier.wait(bar_block.index(i_next), ((i_copy + 1) // PLACES) & 1, pred=i + 1 < last)
            b_s = _scores(s_part, units, L_P)
            takes_float16 = i * BLOCK + BLOCK <= visible
            if TILED:
                takes_float16 = takes_float16 & fits
                fits = _fits(s_scales.index(i_next), unit_exponent)
            c_scale_0, c_scale_1 = _block_scales(s_scales.index(i_next), L_4, TILED)
            next_keys = _load_keys(s_codes.index(i_next), s_pes.index(i_next), 0, TILED)
            if i * BLOCK + BLOCK > visible:
                b_s = _masked(b_s, i * BLOCK, items, i_item, H)
                if TILED:
                    b_scale_0 = _live_scales(b_scale_0, i * BLOCK, items, i_item)
                    b_scale_1 = _live_scales(b_scale_1, i * BLOCK + CHUNK, items, i_item)
            b_top = _row_maximum(b_s, L_P) * scale_log2
            b_before = b_m
            b_m = gl.where(b_top > b_m + SLACK, b_top, b_m)
            b_alpha = gl.exp2(b_before - b_m)
            b_p = gl.exp2(b_s * scale_log2 - b_m[:, :, None])
            _store_weights(s_weight, b_p * per_unit if TILED else b_p)
            s_alpha.store(b_alpha)
            b_alpha = gl.convert_layout(b_alpha, gl.SliceLayout(2, gl.SliceLayout(3, L_SUM)))
            b_l = b_l * b_alpha[:, :, None] + _sums(b_p, L_SUM)
            # The next scores run under the softmax and under the products of the values, in either branch.
            b_next_0 = _partial_scores(operands, next_keys, c_scale_0, L_S, TILED)
            b_code_0 = _load_values(s_codes.index(i_at), 0)
            b_p_0 = _load_weights(s_weight, 0, L_4)
            b_p_1 = _load_weights(s_weight, 1, L_4)
            b_o = _rescaled(b_o, _owned(s_alpha.load(L_ROW), L_4, L_S))
            if takes_float16:
                b_o, b_next_1 = _turn(
                    operands, b_code_0, s_codes.index(i_at), s_codes.index(i_next), s_pes.index(i_next),
                    b_p_0, b_p_1, b_scale_0, b_scale_1, c_scale_1, b_o, L_S, TILED, True,
                )  # fmt: skip
            else:
                b_o, b_next_1 = _turn(
                    operands, b_code_0, s_codes.index(i_at), s_codes.index(i_next), s_pes.index(i_next),
                    b_p_0, b_p_1, b_scale_0, b_scale_1, c_scale_1, b_o, L_S, TILED, False,
                )  # fmt: skip
            async_copy.mbarrier_arrive(bar_free.index(i_at), increment_count=False)
            _store_partial(s_part, b_next_0, b_next_1)
            b_scale_0 = c_scale_0
            b_scale_1 = c_scale_1
            i_at = i_next
            i_copy += 1
        s_m.store(b_m)
        s_l.store(_row_sum(b_l, L_P))
        s_m_of = s_m._reinterpret(gl.float32, [2, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        s_l_of = s_l._reinterpret(gl.float32, [2, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        b_m_0 = s_m_of.index(0).load(L_ONE)
        b_m_1 = s_m_of.index(1).load(L_ONE)
        b_top = gl.maximum(b_m_0, b_m_1)
        b_sum = s_l_of.index(0).load(L_ONE) * gl.exp2(b_m_0 - b_top)
        b_sum += s_l_of.index(1).load(L_ONE) * gl.exp2(b_m_1 - b_top)
        b_lse = gl.where(b_sum == 0.0, float("-inf"), b_top + gl.log2(b_sum))
        b_one = unit * scale_unit / gl.where(b_sum == 0.0, 1.0, b_sum)
        b_o = b_o * _owned(gl.exp2(s_m.load(L_ROW) - b_top[None, :]) * b_one[None, :], L_4, L_S)
        slot = gl.load(items + i_item * FIELDS + 3)
        num_rows = _opaque(gl.load(items + i_item * FIELDS + 5))
        o_row = gl.arange(0, N, L_ONE)
        if slot < 0:
            _store_output(s_output, out + row.to(gl.int64) * LATENT, b_o, num_rows)
            gl.store(lse + row + o_row, b_lse * LN_2, mask=o_row < num_rows)
        else:
            # A slot has 64 rows.
            _store_output(s_output, partial_out + slot.to(gl.int64) * (BLOCK * LATENT), b_o, num_rows)
            gl.store(partial_lse + slot * BLOCK + o_row, b_lse, mask=o_row < num_rows)


@gluon.jit(
    do_not_specialize=["table_stride", "H"],
    do_not_specialize_on_alignment=["block_table", "items", "offsets"],
)
def mla_decode_few_kernel(
    q_nope, q_pe, stride_nope, stride_pe, kv, kv_pe, kv_scale, out, lse, partial_out, partial_lse,
    block_table, items, offsets, table_stride, H, scale_log2, PAGE: gl.constexpr, TILED: gl.constexpr,
):  # fmt: skip
    """q_nope, q_pe: first row, and strides between rows. kv, kv_pe [n, k, bytes of an entry] by min(64, k)
    tokens of 128 codes, and of the rope part's 128 bytes (TILED) or 64. kv_scale: the same in float32, by
    four; or the scale of the whole cache.

    Launch with num_warps=8 and maxnreg=168: 12 · 168 registers a lane are shared out as 24 to each of the
    producer's four warps, three of which idle, and 240 to the eight.
    """
    i_part = gl.program_id(0)
    L_CODE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3)
    L_ROPE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2) if TILED else gl.NVMMASharedLayout(64, 8, 2)
    T_ROPE: gl.constexpr = gl.bfloat16 if TILED else gl.uint8
    L_BAR: gl.constexpr = mbarrier.MBarrierLayout()
    L_2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    L_5: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    L_6: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    s_codes = gl.allocate_shared_memory(gl.uint8, [PLACES, TILES, BLOCK, TILE], L_CODE)
    s_pes = gl.allocate_shared_memory(T_ROPE, [PLACES, BLOCK, ROPE], L_ROPE)
    s_scales = gl.allocate_shared_memory(gl.float32, [PLACES, BLOCK, TILES], L_2)
    s_part = gl.allocate_shared_memory(gl.float32, [TILES, 2, 2, 2, 32, 4], L_6)
    s_weight = gl.allocate_shared_memory(gl.float32, [2, 2, 2, 32, 4], L_5)
    s_alpha = gl.allocate_shared_memory(gl.float32, [2, N], L_2)
    s_unit = gl.allocate_shared_memory(gl.float32, [OWNERS, N], L_2)
    s_output = gl.allocate_shared_memory(gl.float32, [2, TILES, 4, 32, 4], L_5)
    s_m = gl.allocate_shared_memory(gl.float32, [2, N], L_2)
    s_l = gl.allocate_shared_memory(gl.float32, [2, N], L_2)
    bar_block = gl.allocate_shared_memory(gl.int64, [PLACES, 1], L_BAR)
    bar_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], L_BAR)
    for j in gl.static_range(PLACES):
        mbarrier.init(bar_block.index(j), count=1)
        mbarrier.init(bar_free.index(j), count=32 * OWNERS)
    fence_async_shared()
    gdc_wait()
    buffers = (s_codes, s_pes, s_scales, s_part, s_weight, s_alpha, s_unit, s_output, s_m, s_l)
    bars = (bar_block, bar_free)
    results = (out, lse, partial_out, partial_lse)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q_nope, q_pe, stride_nope, stride_pe, kv_scale, buffers, bars, results, items, offsets,
                    i_part, H, scale_log2, gl.constexpr(TILED),
                ),
            ),
            (
                _producer,
                (
                    kv, kv_pe, kv_scale, buffers, bars, block_table, table_stride, items, offsets, i_part,
                    gl.constexpr(PAGE), gl.constexpr(TILED),
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
