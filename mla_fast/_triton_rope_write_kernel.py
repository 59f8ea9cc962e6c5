# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (a jitted function's parameters are annotated for Triton, not for mypy)
"""The jitted half of ``triton_rope_cache_write``: what rotates, around what ``_triton_copy_kernels`` stores.

Imported on first use, as ``_triton_decode_kernel``. No table of cosines and sines is read: an angle is some
multiplications, and a table row of every token would be as many bytes as its rope channels.
"""

import triton
import triton.language as tl

from mla_fast._triton_copy_kernels import _code, _float32, _quotient, _store_latents, _stored
from mla_fast._triton_decode_kernel import _round

HALF_PI = tl.constexpr(1.5707963267948966)


@triton.jit
def _cos_sin(position, quarters, MAGNITUDE: tl.constexpr, wide: tl.constexpr):
    """Cosines and sines [rows, pairs] of positions times quarter turns a position, times a magnitude.

    What remains beyond whole quarters is rounded once in float64 and to ``wide`` only then, so its relative
    error is that type's, wherever the position is. So are those of the two series: the first terms that are
    left out are below half of its roundoff.
    """
    turns = position.to(tl.float64)[:, None]
    quarters = quarters[None, :]
    whole = tl.floor(tl.fma(turns, quarters, 0.5))
    angle = (tl.fma(turns, quarters, -whole) * HALF_PI).to(wide)
    square = angle * angle
    if wide == tl.float64:
        odd = square * (1.0 / 355687428096000.0) - 1.0 / 1307674368000.0
        odd = odd * square + 1.0 / 6227020800.0
        odd = odd * square - 1.0 / 39916800.0
        odd = odd * square + 1.0 / 362880.0
        even = square * (1.0 / 20922789888000.0) - 1.0 / 87178291200.0
        even = even * square + 1.0 / 479001600.0
        even = even * square - 1.0 / 3628800.0
    else:
        odd = 1.0 / 362880.0
        even = -1.0 / 3628800.0
    odd = odd * square - 1.0 / 5040.0
    odd = odd * square + 1.0 / 120.0
    odd = odd * square - 1.0 / 6.0
    even = even * square + 1.0 / 40320.0
    even = even * square - 1.0 / 720.0
    even = even * square + 1.0 / 24.0
    even = even * square - 0.5
    sin = tl.fma(angle, square * odd, angle)
    cos = tl.fma(square, even, 1.0)
    quarter = whole.to(tl.int64) & 3
    crossed = (quarter & 1) == 1
    b_cos = tl.where(crossed, sin, cos)
    b_sin = tl.where(crossed, cos, sin)
    b_cos = tl.where((quarter == 1) | (quarter == 2), -b_cos, b_cos)
    b_sin = tl.where(quarter >= 2, -b_sin, b_sin)
    return b_cos * MAGNITUDE, b_sin * MAGNITUDE


@triton.jit
def _widened(x, wide: tl.constexpr):
    """A float of any width in the type that rotates."""
    return x.to(tl.float64) if wide == tl.float64 else _float32(x)


@triton.jit
def _turned(p_x, stride, there, cos, sin, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both channels [rows, heads, pairs] of the pairs of vectors that begin at ``p_x`` [rows, heads], turned.

    Interleaved pairs are loaded side by side, as they lie, and parted in registers. A sum of two products
    says which of them is rounded: left to the compiler, that changes with the alignment of the cache.
    """
    wide: tl.constexpr = cos.dtype
    if INTERLEAVED:
        channel = tl.arange(0, 2 * HALF)[None, None, :]
        x = tl.load(p_x[:, :, None] + channel * stride, mask=there[:, :, None] & (channel < R), other=0.0)
        x = _widened(x, wide)
        a, b = tl.split(tl.reshape(x, [p_x.shape[0], p_x.shape[1], HALF, 2]))
    else:
        pair = tl.arange(0, HALF)[None, None, :]
        real = there[:, :, None] & (pair < R // 2)
        a = _widened(tl.load(p_x[:, :, None] + pair * stride, mask=real, other=0.0), wide)
        b = _widened(tl.load(p_x[:, :, None] + (pair + R // 2) * stride, mask=real, other=0.0), wide)
    b_cos = cos[:, None, :]
    b_sin = sin[:, None, :]
    return tl.fma(a, b_cos, -(b * b_sin)), tl.fma(b, b_cos, a * b_sin)


@triton.jit
def _store_turned(p_x, live, a, b, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both channels of pairs, as they are stored, in packed vectors at ``p_x``, where they came from."""
    if INTERLEAVED:
        channel = tl.arange(0, 2 * HALF)[None, None, :]
        x = tl.reshape(tl.join(a, b), [p_x.shape[0], p_x.shape[1], 2 * HALF])
        tl.store(p_x[:, :, None] + channel, x, mask=live[:, :, None] & (channel < R))
    else:
        pair = tl.arange(0, HALF)[None, None, :]
        real = live[:, :, None] & (pair < R // 2)
        tl.store(p_x[:, :, None] + pair, a, mask=real)
        tl.store(p_x[:, :, None] + pair + R // 2, b, mask=real)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """What was turned, in the type of queries."""
    return _round(x, dtype) if dtype == tl.bfloat16 else x.to(dtype)


@triton.jit
def _encoded(x, scale, SCALING: tl.constexpr, NATIVE: tl.constexpr, dtype: tl.constexpr):
    """What was turned as a cache holds it; float64 goes by way of float32."""
    value = x.to(tl.float32)
    return _code(_quotient(value, scale, 2), NATIVE) if SCALING == "tensor" else _stored(value, dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_cache_write_kernel(
    q_pe,
    kv_c,
    k_pe,
    positions,
    quarters,
    turned_q_pe,
    latent,
    rope,
    scales,
    kv_scale,
    slot_mapping,
    num_tokens,
    block_bytes,
    slot_bytes,
    stride_q_pe,
    stride_q_pe_head,
    stride_q_pe_channel,
    stride_kv_c,
    stride_kv_c_channel,
    stride_k_pe,
    stride_k_pe_channel,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    R_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALING: tl.constexpr,
    FLOOR: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The entries of ROWS tokens, or HEADS of their query heads; of a token without a slot only the latter.

    Grid: row blocks, and for each one program for the cache and one for every HEADS heads. Keys are not
    rounded between their rotation and their encoding. Every token has a position, with a slot or without.
    """
    HALF: tl.constexpr = R_PADDED // 2
    wide: tl.constexpr = tl.float64 if q_pe.dtype.element_ty == tl.float64 else tl.float32
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = row < num_tokens
    pair = tl.arange(0, HALF)
    position = tl.load(positions + row, mask=there, other=0)
    quarter = tl.load(quarters + pair, mask=pair < R // 2, other=0.0)
    cos, sin = _cos_sin(position, quarter, MAGNITUDE, wide)
    part = tl.program_id(1)
    if part == 0:
        place = tl.load(slot_mapping + row, mask=there, other=-1)
        live = place >= 0
        page = place // BLOCK_SIZE
        slot = place % BLOCK_SIZE
        scale = _store_latents(
            kv_c,
            latent,
            scales,
            kv_scale,
            row,
            there,
            page,
            slot,
            live,
            block_bytes,
            slot_bytes,
            stride_kv_c,
            stride_kv_c_channel,
            C,
            TILES,
            TILE,
            SCALING,
            FLOOR,
            POW2,
            NATIVE,
        )
        p_k_pe = (k_pe + row * stride_k_pe)[:, None]
        k_a, k_b = _turned(p_k_pe, stride_k_pe_channel, there[:, None], cos, sin, R, HALF, INTERLEAVED)
        dtype: tl.constexpr = rope.dtype.element_ty
        k_a = _encoded(k_a, scale, SCALING, NATIVE, dtype)
        k_b = _encoded(k_b, scale, SCALING, NATIVE, dtype)
        size: tl.constexpr = dtype.primitive_bitwidth // 8
        start = page * (block_bytes // size) + slot * (slot_bytes // size)
        _store_turned((rope + start)[:, None], live[:, None], k_a, k_b, R, HALF, INTERLEAVED)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[None, :]
        asked = there[:, None] & (head < NUM_HEADS)
        p_q_pe = q_pe + row[:, None] * stride_q_pe + head.to(tl.int64) * stride_q_pe_head
        q_a, q_b = _turned(p_q_pe, stride_q_pe_channel, asked, cos, sin, R, HALF, INTERLEAVED)
        p_turned = turned_q_pe + (row[:, None] * NUM_HEADS + head) * R
        q_a = _rounded(q_a, q_pe.dtype.element_ty)
        q_b = _rounded(q_b, q_pe.dtype.element_ty)
        _store_turned(p_turned, asked, q_a, q_b, R, HALF, INTERLEAVED)
