# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (a jitted function's parameters are annotated for Triton, not for mypy)
"""The jitted half of ``triton_cache_gather``, ``triton_cache_write`` and ``triton_merge_states``.

Imported on first use, as ``_triton_decode_kernel``, whose roundings these kernels share. All three move rows:
a program owns ROWS of them, a thread 16 bytes of a row at a time, and nothing is read twice.
"""

import triton
import triton.language as tl

from mla_fast._triton_decode_kernel import INTERPRETED, _e4m3_value, _round, _widen

BF16_MAX = tl.constexpr(3.3895313892515355e38)
FP16_MAX = tl.constexpr(65504.0)
FP32_MAX = tl.constexpr(3.4028234663852886e38)
E4M3_MAX = tl.constexpr(448.0)
OVER_448 = tl.constexpr(0.0022321429569274187)  # float32 nearest to 1 / 448
# What tiled formats saturate latent channels to, so that the largest code times its scale is finite.
TILED_MAX = tl.constexpr(2.0**127)
# Between these, as bits of a float32, the largest channel of an ordinary tile lies.
SMALL = tl.constexpr(0x26800000)  # 2⁻⁵⁰
LARGE = tl.constexpr(0x60800000)  # 2⁶⁶


@triton.jit
def _float32(x):
    """float32 nearest to a float of any width."""
    if x.dtype == tl.bfloat16:
        return _widen(x)
    return x.to(tl.float32)


@triton.jit
def _stored_value(stored, dtype: tl.constexpr):
    """Channels of a 16- or 32-bit cache as ``dtype``."""
    if stored.dtype == dtype:
        return stored
    return _round(_float32(stored), dtype)


@triton.jit
def _e4m3(codes, NATIVE: tl.constexpr):
    """float32 with the value of e4m3 codes given as bytes."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return _e4m3_value(codes)


@triton.jit
def _code_value(codes, scale, NATIVE: tl.constexpr, dtype: tl.constexpr):
    """code · scale: exact in float64, rounded to float32 and then to any narrower ``dtype``."""
    value = _e4m3(codes, NATIVE)
    if dtype == tl.float64:
        return value.to(tl.float64) * scale.to(tl.float64)
    return _round(value * scale, dtype)


@triton.jit
def _request_of(row, cu_seqlens, num_requests, num_steps):
    """The request whose range holds each row: the last that starts at or before it."""
    low = row * 0
    high = low + num_requests
    for _ in range(num_steps):
        middle = (low + high) // 2
        before = tl.load(cu_seqlens + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "num_steps"])
def _cache_gather_kernel(
    latent,
    rope,
    scales,
    kv_scale,
    block_table,
    cu_seqlens,
    seq_starts,
    kv_c,
    k_pe,
    num_tokens,
    num_requests,
    num_steps,
    block_bytes,
    slot_bytes,
    stride_table_row,
    stride_table_column,
    stride_kv_c,
    stride_k_pe,
    C: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    R_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALING: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``kv_c`` and ``k_pe`` of ROWS rows: request by binary search, page by the block table, one conversion.

    Grid: row blocks. Rows past the last repeat it and are not stored, so that only padding needs a mask.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_tokens
    row = tl.minimum(row, num_tokens - 1)
    request = _request_of(row, cu_seqlens, num_requests, num_steps)
    token = tl.load(seq_starts + request) + row - tl.load(cu_seqlens + request)
    column = (token // BLOCK_SIZE).to(tl.int64)
    page = tl.load(block_table + request.to(tl.int64) * stride_table_row + column * stride_table_column)
    page = page.to(tl.int64)
    slot = (token % BLOCK_SIZE).to(tl.int64)
    row = row.to(tl.int64)

    tile = tl.arange(0, TILES)
    channel = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    real = (channel < C)[None, :, :]
    size: tl.constexpr = latent.dtype.element_ty.primitive_bitwidth // 8
    start = page * (block_bytes // size) + slot * (slot_bytes // size)
    stored = tl.load(latent + start[:, None, None] + channel[None, :, :], mask=real, other=0)
    dtype: tl.constexpr = kv_c.dtype.element_ty
    if SCALING == "none":
        value = _stored_value(stored, dtype)
    elif SCALING == "tensor":
        scale = tl.load(kv_scale)
        value = _code_value(stored, scale, NATIVE, dtype)
    else:
        first = page * (block_bytes // 4) + slot * (slot_bytes // 4)
        scale = tl.load(scales + first[:, None] + tile[None, :], mask=(tile * TILE < C)[None, :], other=0.0)
        value = _code_value(stored, scale[:, :, None], NATIVE, dtype)
    p_kv_c = kv_c + row[:, None, None] * stride_kv_c + channel[None, :, :]
    tl.store(p_kv_c, value, mask=live[:, None, None] & real)

    if R:
        turned = tl.arange(0, R_PADDED)
        real_pe = (turned < R)[None, :]
        size_pe: tl.constexpr = rope.dtype.element_ty.primitive_bitwidth // 8
        start_pe = page * (block_bytes // size_pe) + slot * (slot_bytes // size_pe)
        stored_pe = tl.load(rope + start_pe[:, None] + turned[None, :], mask=real_pe, other=0)
        if SCALING == "tensor":
            value_pe = _code_value(stored_pe, scale, NATIVE, dtype)
        else:
            value_pe = _stored_value(stored_pe, dtype)
        p_k_pe = k_pe + row[:, None] * stride_k_pe + turned[None, :]
        tl.store(p_k_pe, value_pe, mask=live[:, None] & real_pe)


@triton.jit
def _clamped(x, LIMIT: tl.constexpr):
    """float32 ``x`` within ±LIMIT; NaN stays NaN."""
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _stored(x, dtype: tl.constexpr):
    """float32 ``x`` as a 16- or 32-bit cache holds it: saturated, then rounded to nearest, ties to even."""
    limit: tl.constexpr = BF16_MAX if dtype == tl.bfloat16 else FP16_MAX if dtype == tl.float16 else FP32_MAX
    return _round(_clamped(x, limit), dtype)


@triton.jit
def _code(quotient, NATIVE: tl.constexpr):
    """The e4m3 code nearest to a float32, ties to the even one, as a byte; saturated, NaN for NaN.

    The instruction saturates. Without it: a normal code is the float's own bits, rounded at the twentieth;
    adding 2¹⁴, whose last place is 2⁻⁹, rounds to a subnormal one.
    """
    if NATIVE:
        return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = quotient.to(tl.uint32, bitcast=True)
    size = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), E4M3_MAX)
    whole = size.to(tl.uint32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, subnormal, normal)
    code = tl.where(quotient != quotient, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _quotient(x, scale, STEPS: tl.constexpr):
    """x / scale rounded to nearest in float32, for a positive scale; anything from 512 on where it is larger.

    The reciprocal of a tile serves all its channels, and STEPS of Newton's iteration make its product with
    one of them the quotient, in half the instructions of a division:

    - 2: after the first it is within a unit in the last place, and the second, whose remainder is exact,
      rounds as a division does (Markstein's theorem).
    - 1, for 16-bit channels under a 448th of one of them: it is off by 2⁻⁴⁵, and no such quotient is as
      close to where its rounding, and then its code's, would change. These are finitely many: see the test.

    Remainders must not underflow, so the scale is brought to 1 … 2 by a power of two, and x with it. A sum
    of zeros is positive, so the sign is x's own. The interpreter, which rounds a product before it adds,
    divides.
    """
    if INTERPRETED:
        return tl.div_rn(x, scale)
    exponent = (scale.to(tl.uint32, bitcast=True) >> 23).to(tl.int32)
    power = (tl.minimum(tl.maximum(254 - exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
    divisor = scale * power
    minus = -divisor
    reciprocal = tl.div_rn(1.0, divisor)
    dividend = tl.minimum(tl.abs(x) * power, 2048.0, propagate_nan=tl.PropagateNan.ALL)
    quotient = dividend * reciprocal
    for _ in tl.static_range(STEPS):
        quotient = tl.fma(tl.fma(quotient, minus, dividend), reciprocal, quotient)
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (quotient.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _largest(tiles):
    """The largest magnitude [rows, tiles] of latent tiles, saturated; a NaN channel takes no part in it."""
    size = tl.abs(tiles)
    if INTERPRETED:
        # A GPU's maximum passes over NaN by itself; numpy's warns where nothing is left.
        size = tl.where(tiles == tiles, size, 0.0)
    return tl.minimum(tl.maximum(tl.max(size, 2), 0.0), TILED_MAX)


@triton.jit
def _ordinary(largest):
    """Whether all tiles [rows, tiles] of a program are, as those of a working model: one branch for all."""
    above = largest.to(tl.uint32, bitcast=True) - SMALL  # of a smaller one: beyond any
    return tl.max(tl.max(above, 1), 0) <= LARGE - SMALL


@triton.jit
def _ordinary_quotient(x, scale, STEPS: tl.constexpr):
    """``_quotient`` of ordinary tiles in half of its instructions: a product, and two multiply-adds a step.

    Scales are 2⁻⁵⁹ … 2⁵⁸, so nothing is infinite and reciprocals are normal. Powers of two change no rounding
    where nothing underflows: a quotient of 2⁻¹¹ or more has a remainder that is a multiple of 2⁻¹¹⁶, and the
    float32 is that of ``_quotient``. A smaller one may be another, but its code is 0 either way.

    Remainders are taken negative: that of a zero, of either sign, is then +0, and the zero keeps its sign.
    """
    if INTERPRETED:
        return tl.div_rn(x, scale)
    reciprocal = tl.div_rn(1.0, scale)
    quotient = x * reciprocal
    for _ in tl.static_range(STEPS):
        # Times -1 is a sign on an operand; a minus would be a subtraction from 0.
        quotient = tl.fma(tl.fma(quotient, scale, x * -1.0), reciprocal * -1.0, quotient)
    return quotient


@triton.jit
def _over_448(largest):
    """The float32 nearest to a 448th: a product and its remainder, which is exact.

    It is a multiple of 64 units in the last place of the product, so it is exact for subnormal ones too.
    """
    if INTERPRETED:
        return tl.div_rn(largest, E4M3_MAX)
    product = largest * OVER_448
    return tl.fma(tl.fma(product, -448.0, largest), OVER_448, product)


@triton.jit
def _tile_scale(largest, FLOOR: tl.constexpr, POW2: tl.constexpr):
    """The scale [rows, tiles] of latent tiles by their largest magnitudes."""
    scale = tl.maximum(_over_448(largest), FLOOR)
    if POW2:
        # Adding the largest mantissa carries into the exponent unless the mantissa is 0.
        bits = (scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _store_latents(
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
    C: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    SCALING: tl.constexpr,
    FLOOR: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The latents of tokens ``row``, encoded, and the scales of their tiles, in (page, slot) where live.

    Returns: the scale of the whole cache, or of each tile, or 1.
    """
    tile = tl.arange(0, TILES)
    channel = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    real = (channel < C)[None, :, :]
    p_kv_c = kv_c + row[:, None, None] * stride_kv_c + channel[None, :, :] * stride_kv_c_channel
    # What is not there is dropped. As ones it makes no program leave the path of ordinary tiles.
    absent: tl.constexpr = 1.0 if SCALING == "tile" else 0.0
    x = _float32(tl.load(p_kv_c, mask=there[:, None, None] & real, other=absent))
    if SCALING == "none":
        scale = 1.0
        entry = _stored(x, latent.dtype.element_ty)
    elif SCALING == "tensor":
        scale = tl.load(kv_scale)
        entry = _code(_quotient(x, scale, 2), NATIVE)
    else:
        steps: tl.constexpr = 1 if kv_c.dtype.element_ty.primitive_bitwidth == 16 else 2
        largest = _largest(x)
        scale = _tile_scale(largest, FLOOR, POW2)
        if _ordinary(largest):
            if POW2:
                quotient = x * tl.div_rn(1.0, scale)[:, :, None]  # the reciprocal is exact
            else:
                quotient = _ordinary_quotient(x, scale[:, :, None], steps)
        elif POW2:
            # Under the other rule what is cut off here has the largest code anyway.
            quotient = _clamped(x, TILED_MAX) * tl.div_rn(1.0, scale)[:, :, None]
        else:
            quotient = _quotient(x, scale[:, :, None], steps)
        entry = _code(quotient, NATIVE)
        first = page * (block_bytes // 4) + slot * (slot_bytes // 4)
        p_scale = scales + first[:, None] + tile[None, :]
        tl.store(p_scale, scale, mask=live[:, None] & (tile * TILE < C)[None, :])
    size: tl.constexpr = latent.dtype.element_ty.primitive_bitwidth // 8
    start = page * (block_bytes // size) + slot * (slot_bytes // size)
    tl.store(latent + start[:, None, None] + channel[None, :, :], entry, mask=live[:, None, None] & real)
    return scale


@triton.jit(do_not_specialize=["num_tokens"])
def _cache_write_kernel(
    kv_c,
    k_pe,
    latent,
    rope,
    scales,
    kv_scale,
    slot_mapping,
    num_tokens,
    block_bytes,
    slot_bytes,
    stride_kv_c,
    stride_kv_c_channel,
    stride_k_pe,
    stride_k_pe_channel,
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
    """The entries of ROWS tokens in their slots; of a token with a negative slot nothing is written.

    Grid: row blocks. Channels are loaded beside their slot and not after it; what those of a token without
    one hold is dropped. They pass through float32; quotients are those of a division, to the last bit.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = row < num_tokens
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

    if R:
        turned = tl.arange(0, R_PADDED)
        real_pe = (turned < R)[None, :]
        p_k_pe = k_pe + row[:, None] * stride_k_pe + turned[None, :] * stride_k_pe_channel
        x_pe = _float32(tl.load(p_k_pe, mask=there[:, None] & real_pe, other=0.0))
        if SCALING == "tensor":
            entry_pe = _code(_quotient(x_pe, scale, 2), NATIVE)
        else:
            entry_pe = _stored(x_pe, rope.dtype.element_ty)
        size_pe: tl.constexpr = rope.dtype.element_ty.primitive_bitwidth // 8
        start_pe = page * (block_bytes // size_pe) + slot * (slot_bytes // size_pe)
        tl.store(rope + start_pe[:, None] + turned[None, :], entry_pe, mask=live[:, None] & real_pe)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_states_kernel(
    outs,
    lses,
    out,
    lse,
    num_rows,
    num_heads,
    num_states,
    stride_outs_state,
    stride_outs_token,
    stride_outs_head,
    stride_lses_state,
    stride_lses_token,
    stride_lses_head,
    stride_out_token,
    stride_out_head,
    V: tl.constexpr,
    V_PADDED: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``out`` and ``lse`` of ROWS (token, head) pairs, states in their order.

    Grid: row blocks. AHEAD states are loaded at a time. Sums are float32, float64 for float64 outputs. The
    largest log-sum-exp is subtracted before any exponential. A lone state has a weight of exactly 1 and a
    logarithm of exactly 0.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    # A number a row: with a scalar the interpreter makes a mask of integers, and Triton 3.9's refuses it.
    states = tl.full([ROWS], num_states, tl.int32)
    token = (row // num_heads).to(tl.int64)
    head = (row % num_heads).to(tl.int64)
    p_lse = lses + token * stride_lses_token + head * stride_lses_head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    p_state = p_lse
    for first in range(0, num_states, AHEAD):
        for i in tl.static_range(AHEAD):
            b_lse = tl.load(p_state, mask=live & (first + i < states), other=float("-inf"))
            top = tl.maximum(top, b_lse)
            p_state += stride_lses_state

    shift = tl.where(top == float("-inf"), 0.0, top).to(wide)
    channel = tl.arange(0, V_PADDED)
    real = (channel < V)[None, :]
    p_out = outs + (token * stride_outs_token + head * stride_outs_head)[:, None] + channel[None, :]
    total = tl.zeros([ROWS], wide)
    mixed = tl.zeros([ROWS, V_PADDED], wide)
    for first in range(0, num_states, AHEAD):
        for i in tl.static_range(AHEAD):
            b_lse = tl.load(p_lse, mask=live & (first + i < states), other=float("-inf"))
            # Loaded beside its weight and not after it; that of an empty state is dropped, whatever it is.
            b_out = tl.load(p_out, mask=(live & (first + i < states))[:, None] & real, other=0.0)
            weight = tl.exp(b_lse.to(wide) - shift)
            value = _float32(b_out) if dtype == tl.bfloat16 else b_out.to(wide)
            total += weight
            mixed += weight[:, None] * tl.where((weight != 0.0)[:, None], value, 0.0)
            p_lse += stride_lses_state
            p_out += stride_outs_state

    # The heaviest weight is 1, so a total of 0 is that of empty states alone.
    any_seen = total != 0.0
    divisor = tl.where(any_seen, total, 1.0)
    merged = mixed / divisor[:, None]
    merged = _round(merged, dtype) if dtype == tl.bfloat16 else merged.to(dtype)
    b_merged = tl.where(any_seen, shift + tl.log(divisor), float("-inf")).to(tl.float32)
    # Where the result takes the place of a state: every thread has read its part of all of them.
    tl.debug_barrier()
    p_merged = out + (token * stride_out_token + head * stride_out_head)[:, None] + channel[None, :]
    tl.store(p_merged, merged, mask=live[:, None] & real)
    tl.store(lse + row, b_merged, mask=live)
