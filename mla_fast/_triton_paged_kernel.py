# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (a jitted function's parameters are annotated for Triton, not for mypy)
"""The jitted half of ``triton_paged_attention``. What an operand is under the interpreter is decided once, in
``_triton_decode_kernel``, whose rounding, e4m3 decoding and merge of splits serve here as well.
"""

import triton
import triton.language as tl

from mla_fast._triton_decode_kernel import LN_2, _load_keys, _operand, _round


@triton.jit
def _query_part(query, row_offset, m_row, first, WIDTH: tl.constexpr, PADDED: tl.constexpr, stride):
    """[rows, PADDED] channels first … first + WIDTH - 1 of each row's query."""
    channel = tl.arange(0, PADDED)
    pointers = query + row_offset[:, None] + (first + channel)[None, :] * stride
    return _operand(tl.load(pointers, mask=m_row[:, None] & (channel < WIDTH)[None, :], other=0.0))


@triton.jit
def _cache_part(
    cache,
    key_offset,
    m_key,
    first,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    scale,
    SCALING: tl.constexpr,
    dtype: tl.constexpr,
):
    """[keys, PADDED] channels first … first + WIDTH - 1 of each key, or of each value."""
    channel = tl.arange(0, PADDED)
    pointers = cache + key_offset[:, None] + (first + channel)[None, :]
    mask = m_key[:, None] & (channel < WIDTH)[None, :]
    # Masked slots may hold NaN: they are replaced on the way in, since 0 · NaN is NaN.
    return _operand(_load_keys(pointers, mask, scale, SCALING, dtype))


@triton.jit(do_not_specialize=["num_rows", "num_splits", "stride_table_request"])
def _paged_attention_kernel(
    query,
    key_cache,
    value_cache,
    k_scale,
    v_scale,
    block_table,
    cu_seqlens_q,
    cache_seqlens,
    out,
    lse,
    partial_out,
    partial_max,
    partial_sum,
    scale_log2,
    num_rows,
    num_splits,
    stride_query_token,
    stride_query_head,
    stride_query_channel,
    stride_key_block,
    stride_key_slot,
    stride_key_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    stride_table_request,
    stride_table_block,
    GROUP: tl.constexpr,
    X: tl.constexpr,
    X_HEAD: tl.constexpr,
    X_REST: tl.constexpr,
    V: tl.constexpr,
    V_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALING: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of ROWS query rows of one request and one key/value head over one split of its keys.

    Grid: row blocks, key/value heads · num_splits, requests. A row is one query head of one new token; the
    GROUP heads of a token are neighbours, so that keys are read once for all of them.
    Key channels are taken in two powers of two, X_HEAD and X_REST (0: none), so that 192 costs 192.
    Scores, weights, sums and the accumulator are float32; weights are rounded to the query's type for the
    product with the values. Keys are taken KEYS at a time, oldest first, whatever the layout.
    With one split the program writes ``out`` and ``lse``; otherwise its unnormalised sum, maximum (of base-2
    scores) and denominator. A split without keys writes a denominator of 0 and nothing else.
    """
    i_block = tl.program_id(0)
    i_split = tl.program_id(1) % num_splits
    i_head = tl.program_id(1) // num_splits
    i_request = tl.program_id(2)
    num_heads = tl.num_programs(1) // num_splits * GROUP

    first_token = tl.load(cu_seqlens_q + i_request)
    q_len = tl.load(cu_seqlens_q + i_request + 1) - first_token
    kv_len = tl.load(cache_seqlens + i_request)
    if i_block * ROWS >= q_len * GROUP:
        return
    row = i_block * ROWS + tl.arange(0, ROWS)
    m_row = row < q_len * GROUP
    i_query = row // GROUP
    num_seen = kv_len - q_len + 1 + i_query
    last_query = tl.minimum((i_block * ROWS + ROWS - 1) // GROUP, q_len - 1)

    dtype: tl.constexpr = query.dtype.element_ty
    token = (first_token + i_query).to(tl.int64)
    head = i_head * GROUP + row % GROUP
    row_offset = token * stride_query_token + head * stride_query_head
    b_head = _query_part(query, row_offset, m_row, 0, X, X_HEAD, stride_query_channel)
    if X_REST > 0:
        b_rest = _query_part(query, row_offset, m_row, X_HEAD, X - X_HEAD, X_REST, stride_query_channel)
    key_scale = 1.0
    value_scale = 1.0
    if SCALING == "tensor":
        key_scale = tl.load(k_scale)
        value_scale = tl.load(v_scale)

    split_keys = tl.cdiv(tl.cdiv(kv_len, KEYS), num_splits) * KEYS
    start = i_split * split_keys
    stop = tl.minimum(tl.minimum(start + split_keys, kv_len), kv_len - q_len + 1 + last_query)

    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, V_PADDED], tl.float32)
    for first_key in tl.range(start, stop, KEYS):
        key = first_key + tl.arange(0, KEYS)
        m_key = key < stop
        # int64: block id · stride, and head · stride where heads are outermost, pass 2³¹ in a large pool.
        block = tl.load(
            block_table
            + i_request.to(tl.int64) * stride_table_request
            + (key // BLOCK_SIZE) * stride_table_block,
            mask=m_key,
            other=0,
        ).to(tl.int64)
        slot = (key % BLOCK_SIZE).to(tl.int64)
        kv_head = i_head.to(tl.int64)
        key_offset = block * stride_key_block + slot * stride_key_slot + kv_head * stride_key_head
        b_key = _cache_part(key_cache, key_offset, m_key, 0, X, X_HEAD, key_scale, SCALING, dtype)
        b_score = tl.dot(b_head, tl.trans(b_key))
        if X_REST > 0:
            b_key_rest = _cache_part(
                key_cache, key_offset, m_key, X_HEAD, X - X_HEAD, X_REST, key_scale, SCALING, dtype
            )
            b_score = tl.dot(b_rest, tl.trans(b_key_rest), acc=b_score)
        m_seen = m_key[None, :] & (key[None, :] < num_seen[:, None])
        b_score = tl.where(m_seen, b_score * scale_log2, float("-inf"))

        new_max = tl.maximum(b_max, tl.max(b_score, 1))
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        b_weight = tl.exp2(b_score - shift[:, None])
        rescale = tl.exp2(b_max - shift)
        b_sum = b_sum * rescale + tl.sum(b_weight, 1)
        value_offset = block * stride_value_block + slot * stride_value_slot + kv_head * stride_value_head
        b_value = _cache_part(value_cache, value_offset, m_key, 0, V, V_PADDED, value_scale, SCALING, dtype)
        b_acc = tl.dot(_operand(_round(b_weight, dtype)), b_value, acc=b_acc * rescale[:, None])
        b_max = new_max

    channel = tl.arange(0, V_PADDED)
    m_out = m_row[:, None] & (channel < V)[None, :]
    flat_row = token * num_heads + head
    if not SPLIT:
        seen_any = b_sum != 0.0
        divisor = tl.where(seen_any, b_sum, 1.0)
        p_out = out + flat_row[:, None] * V + channel[None, :]
        tl.store(p_out, _round(b_acc / divisor[:, None], dtype), mask=m_out)
        b_lse = tl.where(seen_any, (b_max + tl.log2(divisor)) * LN_2, float("-inf"))
        tl.store(lse + flat_row, b_lse, mask=m_row)
    else:
        split_row = i_split.to(tl.int64) * num_rows + flat_row
        p_out = partial_out + split_row[:, None] * V + channel[None, :]
        tl.store(p_out, b_acc, mask=m_out & (b_sum != 0.0)[:, None])
        tl.store(partial_max + split_row, b_max, mask=m_row)
        tl.store(partial_sum + split_row, b_sum, mask=m_row)
