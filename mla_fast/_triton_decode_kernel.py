# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (a jitted function's parameters are annotated for Triton, not for mypy)
"""The jitted half of ``triton_decode``: attention of one row block over one split, and the merge of splits.

Imported on first use: ``triton.jit`` decides at decoration time whether a kernel is compiled or interpreted.
Triton 3.6's interpreter multiplies the raw bits of bfloat16 and truncates where it should round, so under it
every operand is widened to float32 (exactly) and every rounding is done on the bits. The numbers that are
multiplied are the same in both modes.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _round(x, dtype: tl.constexpr):
    """float32 to nearest, ties to even, in a 16-bit ``dtype``."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        # A NaN whose payload is all ones would carry into the sign.
        kept = tl.where(x != x, bits | 0x400000, nearest)
        return (kept >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def _widen(x):
    """float32 with the value of a 16-bit float."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _operand(x):
    """What ``tl.dot`` is given for a 16-bit float."""
    if INTERPRETED:
        return _widen(x)
    return x


@triton.jit
def _e4m3_value(codes):
    """float32 with the value of e4m3 codes given as bytes.

    e4m3's exponent and mantissa inside float16 are 2⁻⁸ of the value, subnormals included, so that neither the
    architecture nor the interpreter needs to know the type.
    """
    magnitude = codes & 0x7F
    half = (magnitude.to(tl.uint16) << 7) | ((codes & 0x80).to(tl.uint16) << 8)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def _load_keys(pointers, mask, scale, SCALING: tl.constexpr, dtype: tl.constexpr):
    """Cache channels [keys, channels] as values of ``dtype``; 0 where masked.

    SCALING: "none" for a cache of 16-bit floats; otherwise e4m3 codes, times ``scale``, a scalar for "tensor"
    and [keys, tiles] for "tile". The product is rounded to float32 and then to ``dtype``.
    """
    if SCALING == "none":
        stored = tl.load(pointers, mask=mask, other=0.0)
        if pointers.dtype.element_ty == dtype:
            return stored
        else:  # noqa: RET505 (a branch that is decided at compile time needs its else)
            return _round(_widen(stored), dtype)
    else:
        value = _e4m3_value(tl.load(pointers, mask=mask, other=0))
        if SCALING == "tile":
            keys: tl.constexpr = value.shape[0]
            channels: tl.constexpr = value.shape[1]
            tiles: tl.constexpr = scale.shape[1]
            tiled = tl.reshape(value, [keys, tiles, channels // tiles]) * scale[:, :, None]
            return _round(tl.reshape(tiled, [keys, channels]), dtype)
        else:  # noqa: RET505
            return _round(value * scale, dtype)


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "num_rows",
        "num_row_blocks",
        "num_splits",
        "min_tiles",
        "stride_table_request",
    ]
)
def _mla_decode_kernel(
    ql_nope,
    q_pe,
    latent,
    rope,
    tile_scales,
    kv_scale,
    block_table,
    cu_seqlens_q,
    cache_seqlens,
    out,
    lse,
    partial_out,
    partial_max,
    partial_sum,
    scale_log2,
    num_heads,
    num_rows,
    num_row_blocks,
    num_splits,
    min_tiles,
    stride_ql_token,
    stride_ql_head,
    stride_ql_channel,
    stride_qp_token,
    stride_qp_head,
    stride_qp_channel,
    stride_latent_block,
    stride_latent_slot,
    stride_rope_block,
    stride_rope_slot,
    stride_scales_block,
    stride_scales_slot,
    stride_table_request,
    stride_table_block,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALING: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of ROWS query rows of one request over one split of its keys.

    Grid: requests · num_splits · num_row_blocks, row block fastest, so that programs that read the same keys
    run together. A row is one head of one new token; rows of a request are its tokens' heads in order, so a
    block may hold several tokens, each with a causal limit of its own.
    Scores, weights, sums and the accumulator are float32; weights are rounded to the query's type for the
    product with the values. Keys are taken KEYS at a time, oldest first, and are both key and value.
    With one split the program writes ``out`` and ``lse``; otherwise its unnormalised sum, maximum (of base-2
    scores) and denominator. A split without keys writes no sum, a maximum of -inf and a denominator of 0.
    """
    pid = tl.program_id(0)
    i_block = pid % num_row_blocks
    i_split = (pid // num_row_blocks) % num_splits
    i_request = pid // num_row_blocks // num_splits

    first_token = tl.load(cu_seqlens_q + i_request)
    q_len = tl.load(cu_seqlens_q + i_request + 1) - first_token
    kv_len = tl.load(cache_seqlens + i_request)
    row = i_block * ROWS + tl.arange(0, ROWS)
    if i_block * ROWS >= q_len * num_heads:
        return
    m_row = row < q_len * num_heads
    i_query = row // num_heads
    num_seen = kv_len - q_len + 1 + i_query
    last_query = tl.minimum((i_block * ROWS + ROWS - 1) // num_heads, q_len - 1)
    most_seen = kv_len - q_len + 1 + last_query

    split_keys = tl.maximum(tl.cdiv(tl.cdiv(kv_len, KEYS), num_splits), min_tiles) * KEYS
    start = i_split * split_keys
    stop = tl.minimum(tl.minimum(start + split_keys, kv_len), most_seen)
    # One 64-bit base and small offsets: a 64-bit address for each row would be live across the loop.
    first_row = first_token.to(tl.int64) * num_heads + i_block * ROWS
    i_row = tl.arange(0, ROWS)
    if SPLIT:
        first_row += i_split.to(tl.int64) * num_rows
        if start >= stop:
            tl.store(partial_max + first_row + i_row, float("-inf"), mask=m_row)
            tl.store(partial_sum + first_row + i_row, 0.0, mask=m_row)
            return

    channel = tl.arange(0, C_PADDED)
    m_channel = channel < C
    dtype: tl.constexpr = ql_nope.dtype.element_ty
    token = (first_token + i_query).to(tl.int64)
    head = row % num_heads
    b_ql = _operand(
        tl.load(
            ql_nope
            + (token * stride_ql_token + head * stride_ql_head)[:, None]
            + channel[None, :] * stride_ql_channel,
            mask=m_row[:, None] & m_channel[None, :],
            other=0.0,
        )
    )
    if R > 0:
        rope_channel = tl.arange(0, R_PADDED)
        m_rope = rope_channel < R
        b_qp = _operand(
            tl.load(
                q_pe
                + (token * stride_qp_token + head * stride_qp_head)[:, None]
                + rope_channel[None, :] * stride_qp_channel,
                mask=m_row[:, None] & m_rope[None, :],
                other=0.0,
            )
        )
    cache_scale = 1.0
    if SCALING == "tensor":
        cache_scale = tl.load(kv_scale)
    p_table = block_table + i_request.to(tl.int64) * stride_table_request

    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, C_PADDED], tl.float32)
    for first_key in tl.range(start, stop, KEYS):
        key = first_key + tl.arange(0, KEYS)
        m_key = key < stop
        # int64: block id · stride passes 2³¹ in a cache of a few gigabytes.
        if BLOCK_SIZE % KEYS == 0:
            # The whole tile is in one block: one id, one base address.
            block = tl.load(p_table + first_key // BLOCK_SIZE * stride_table_block).to(tl.int64)
        else:
            block = tl.load(p_table + key // BLOCK_SIZE * stride_table_block, mask=m_key, other=0)
            block = block.to(tl.int64)
        slot = key % BLOCK_SIZE
        if SCALING == "tile":
            tile = tl.arange(0, C_PADDED // TILE_CHANNELS)
            b_scale = tl.load(
                tile_scales
                + (block * stride_scales_block + slot * stride_scales_slot)[:, None]
                + tile[None, :],
                mask=m_key[:, None] & (tile < C // TILE_CHANNELS)[None, :],
                other=0.0,
            )
        else:
            b_scale = cache_scale
        # Masked slots may hold NaN: they are replaced on the way in, since 0 · NaN is NaN.
        b_latent = _operand(
            _load_keys(
                latent
                + (block * stride_latent_block + slot * stride_latent_slot)[:, None]
                + channel[None, :],
                m_key[:, None] & m_channel[None, :],
                b_scale,
                SCALING,
                dtype,
            )
        )
        b_score = tl.dot(b_ql, tl.trans(b_latent))
        if R > 0:
            b_rope = _operand(
                _load_keys(
                    rope
                    + (block * stride_rope_block + slot * stride_rope_slot)[:, None]
                    + rope_channel[None, :],
                    m_key[:, None] & m_rope[None, :],
                    cache_scale,
                    "tensor" if SCALING == "tensor" else "none",
                    dtype,
                )
            )
            b_score = tl.dot(b_qp, tl.trans(b_rope), acc=b_score)
        m_seen = m_key[None, :] & (key[None, :] < num_seen[:, None])
        b_score = tl.where(m_seen, b_score * scale_log2, float("-inf"))

        new_max = tl.maximum(b_max, tl.max(b_score, 1))
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        b_weight = tl.exp2(b_score - shift[:, None])
        rescale = tl.exp2(b_max - shift)
        b_sum = b_sum * rescale + tl.sum(b_weight, 1)
        b_acc = tl.dot(_operand(_round(b_weight, dtype)), b_latent, acc=b_acc * rescale[:, None])
        b_max = new_max

    offset = i_row[:, None] * C + channel[None, :]
    m_out = m_row[:, None] & m_channel[None, :]
    if not SPLIT:
        seen_any = b_sum != 0.0
        divisor = tl.where(seen_any, b_sum, 1.0)
        b_lse = tl.where(seen_any, (b_max + tl.log2(divisor)) * LN_2, float("-inf"))
        tl.store(lse + first_row + i_row, b_lse, mask=m_row)
        tl.store(out + first_row * C + offset, _round(b_acc * (1.0 / divisor)[:, None], dtype), mask=m_out)
    else:
        tl.store(partial_max + first_row + i_row, b_max, mask=m_row)
        tl.store(partial_sum + first_row + i_row, b_sum, mask=m_row)
        tl.store(partial_out + first_row * C + offset, b_acc, mask=m_out)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge_splits_kernel(
    out,
    lse,
    partial_out,
    partial_max,
    partial_sum,
    num_rows,
    num_splits,
    C: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``out`` and ``lse`` of ROWS rows, CHANNELS channels at a time, from all their splits at once.

    Grid: row blocks, channel blocks; the first channel block writes ``lse``. All in float32.
    Weights come from the splits' maxima and not from a logarithm of their sums, so scores of any size merge
    without loss. Sums of a split without keys were never written; its denominator of 0 says so.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    m_row = row < num_rows
    split = tl.arange(0, SPLITS_PADDED)
    split_row = split.to(tl.int64)[None, :] * num_rows + row[:, None]
    m_split = m_row[:, None] & (split < num_splits)[None, :]
    b_max = tl.load(partial_max + split_row, mask=m_split, other=float("-inf"))
    b_sum = tl.load(partial_sum + split_row, mask=m_split, other=0.0)

    top = tl.max(b_max, 1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(b_max - shift[:, None])
    total = tl.sum(b_sum * weight, 1)
    seen_any = total != 0.0
    divisor = tl.where(seen_any, total, 1.0)

    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    m_channel = channel < C
    b_out = tl.load(
        partial_out + split_row[:, :, None] * C + channel[None, None, :],
        mask=(m_split & (b_sum != 0.0))[:, :, None] & m_channel[None, None, :],
        other=0.0,
    )
    merged = tl.sum(b_out * weight[:, :, None], 1) / divisor[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    p_out = out + row[:, None] * C + channel[None, :]
    tl.store(p_out, _round(merged, dtype), mask=m_row[:, None] & m_channel[None, :])
    if tl.program_id(1) == 0:
        b_lse = tl.where(seen_any, (top + tl.log2(divisor)) * LN_2, float("-inf"))
        tl.store(lse + row, b_lse, mask=m_row)
