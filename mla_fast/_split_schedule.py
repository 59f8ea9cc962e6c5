# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (a jitted function's parameters are annotated for Triton, not for mypy)
"""Who works on which keys: a schedule made on the GPU, and the merge of the tiles that it splits.

A *tile* is up to ``span`` rows (query tokens times heads) of one request. Its work is its request's keys in
pairs of blocks, 128 keys. The machine is ``parts`` equal workers. An *item* is a run of pairs of one tile
on one part; a tile on more than one part is *split*: its items write partial results to consecutive slots,
and ``merge_kernel``, or where rows are many ``merge_rows_kernel``, adds them up. Lengths stay on the GPU, so
a captured graph may be replayed with others.

Item fields: request, first pair, end pair, slot (-1: not split), first row (global), rows from there to the
request's end, cached tokens, first row (in its request), keys that the request's first query sees.
Merge fields: first row (global), rows, first slot, last slot.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PAIR_KEYS = 128
ITEM_FIELDS = 9
MERGE_FIELDS = 4

PAIR: tl.constexpr = tl.constexpr(PAIR_KEYS)
ITEM: tl.constexpr = tl.constexpr(ITEM_FIELDS)
MERGE: tl.constexpr = tl.constexpr(MERGE_FIELDS)

# Costs in half pairs: an item's fixed part (query, drained pipeline, output); what splitting must save to
# pay for the partial results and their merge; and what a second item on a part costs beyond its fixed part.
# Where shares are long, memory is what parts wait for, and fewer of them read as much: a 1 / IDLE of a share
# may then be lost to parts that have nothing left to do, up to the cost of splitting once more.
OVERHEAD: tl.constexpr = tl.constexpr(2)
SPLIT_COST: tl.constexpr = tl.constexpr(8)
IDLE: tl.constexpr = tl.constexpr(4)
SECOND_ITEM: tl.constexpr = tl.constexpr(4)
# The shortest piece of a tile worth a part of its own, in pairs.
SHORTEST: tl.constexpr = tl.constexpr(2)
SIZES: tl.constexpr = tl.constexpr(8)  # of pieces, of which the smallest that will do is taken

# One compilation for every batch of about this size, wherever its tables lie.
LENGTHS = ["b", "H", "parts", "span"]
TABLES = ["cu_seqlens_q", "cache_seqlens", "ends", "items", "offsets", "merges", "num_merges"]

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _pairs_of(kv_len):
    """Pairs of a request; one even without a key, because someone must write its rows."""
    return tl.maximum((kv_len + PAIR - 1) // PAIR, 1)


@triton.jit
def _request_of(ends, b_x, b, LEVELS: tl.constexpr):
    """[P] Which request owns unit b_x; ends [b] are inclusive running sums; b past the last."""
    b_count = tl.zeros_like(b_x)
    for level in tl.static_range(LEVELS):
        b_probe = b_count + (1 << (LEVELS - 1 - level))
        b_end = tl.load(ends + b_probe - 1, mask=b_probe <= b, other=2147483647)
        b_count = tl.where(b_end <= b_x, b_probe, b_count)
    return b_count


@triton.jit
def _cut(b_x, cost_ends, tile_ends, cache_seqlens, b, LEVELS: tl.constexpr):
    """[P] Tile, and pair in it, where the work of cost b_x ends; no piece is shorter than SHORTEST."""
    i_request = _request_of(cost_ends, b_x, b, LEVELS)
    m = i_request < b
    m_before = m & (i_request > 0)
    b_pairs = _pairs_of(tl.load(cache_seqlens + i_request, mask=m, other=0))
    b_cost = 2 * b_pairs + OVERHEAD
    b_rest = b_x - tl.load(cost_ends + i_request - 1, mask=m_before, other=0)
    b_tile = tl.load(tile_ends + i_request - 1, mask=m_before, other=0)
    b_last = tl.load(tile_ends + b - 1)
    b_tile = tl.where(m, b_tile + b_rest // b_cost, b_last)
    b_pair = tl.maximum(b_rest % b_cost - OVERHEAD, 0) // 2
    b_pair = tl.where(m & (b_pair >= SHORTEST), b_pair, 0)
    m_next = (b_pair > 0) & (b_pairs - b_pair < SHORTEST)
    return tl.where(m_next, b_tile + 1, b_tile), tl.where(m_next, 0, b_pair)


@triton.jit
def _piece_size(b_pairs, b_tiles, parts):
    """The fewest pairs to a piece such that there is a part for every piece of every tile.

    Of a few sizes from the least conceivable on; beyond any length where none of them will do.
    """
    least = tl.maximum((tl.sum(b_tiles * b_pairs) + parts - 1) // parts, SHORTEST)
    o_size = least + tl.arange(0, SIZES) * ((least + 15) // 16)
    num_pieces = tl.sum(b_tiles[:, None] * ((b_pairs[:, None] + o_size[None, :] - 1) // o_size[None, :]), 0)
    return tl.min(tl.where(num_pieces <= parts, o_size, 1 << 28))


@triton.jit
def _cut_in_pieces(o_p, size, piece_ends, tile_ends, cache_seqlens, b, LEVELS: tl.constexpr):
    """[P] Tile, and pair in it, where the piece of part o_p begins; pieces of a tile are about equal."""
    i_request = _request_of(piece_ends, o_p, b, LEVELS)
    m = i_request < b
    m_before = m & (i_request > 0)
    b_pairs = _pairs_of(tl.load(cache_seqlens + i_request, mask=m, other=0))
    b_num = (b_pairs + size - 1) // size
    b_rest = o_p - tl.load(piece_ends + i_request - 1, mask=m_before, other=0)
    b_tile = tl.load(tile_ends + i_request - 1, mask=m_before, other=0) + b_rest // b_num
    b_pair = b_rest % b_num * ((b_pairs + b_num - 1) // b_num)
    return tl.where(m, b_tile, tl.load(tile_ends + b - 1)), tl.where(m, b_pair, 0)


@triton.jit
def _cost_before(b_tile, cost_ends, tile_ends, cache_seqlens, b, LEVELS: tl.constexpr):
    """[P] Cumulated cost of the tiles before b_tile."""
    i_request = _request_of(tile_ends, b_tile, b, LEVELS)
    m = i_request < b
    m_before = i_request > 0
    b_cost = 2 * _pairs_of(tl.load(cache_seqlens + i_request, mask=m, other=0)) + OVERHEAD
    b_first = tl.load(tile_ends + i_request - 1, mask=m_before, other=0)
    return (
        tl.load(cost_ends + i_request - 1, mask=m_before, other=0) + tl.where(m, b_tile - b_first, 0) * b_cost
    )


@triton.jit
def _next(b_x, P: tl.constexpr):
    """[P] Each lane's right neighbour; the last lane's own."""
    return tl.gather(b_x, tl.minimum(tl.arange(0, P) + 1, P - 1), 0)


@triton.jit
def _store_item(
    items, i_item, m, i_request, first, last, slot, row_in_request, cu_seqlens_q, cache_seqlens, H
):
    """Write one record a lane; returns its first global row and the rows from there to the request's end."""
    b_begin = tl.load(cu_seqlens_q + i_request, mask=m, other=0)
    b_end = tl.load(cu_seqlens_q + i_request + 1, mask=m, other=0)
    b_len = tl.load(cache_seqlens + i_request, mask=m, other=0)
    p = items + i_item * ITEM
    row = b_begin * H + row_in_request
    num_rows = (b_end - b_begin) * H - row_in_request
    tl.store(p, i_request, mask=m)
    tl.store(p + 1, first, mask=m)
    tl.store(p + 2, last, mask=m)
    tl.store(p + 3, slot, mask=m)
    tl.store(p + 4, row, mask=m)
    tl.store(p + 5, num_rows, mask=m)
    tl.store(p + 6, b_len, mask=m)
    tl.store(p + 7, row_in_request, mask=m)
    tl.store(p + 8, b_len - (b_end - b_begin) + 1, mask=m)
    return row, num_rows


@triton.jit
def _store_merge_first(merges, i_merge, m, row, num_rows, slot):
    p = merges + i_merge * MERGE
    tl.store(p, row, mask=m)
    tl.store(p + 1, num_rows, mask=m)
    tl.store(p + 2, slot, mask=m)


@triton.jit
def _store_merge_last(merges, i_merge, m, slot):
    tl.store(merges + i_merge * MERGE + 3, slot, mask=m)


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=TABLES)
def schedule_kernel(
    cu_seqlens_q, cache_seqlens, ends, items, offsets, merges, num_merges, b, H, parts, span,
    B: tl.constexpr, LEVELS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Equal cost for every part, cut inside tiles; or whole tiles, where that is about as fast; or tiles in
    equal pieces, one to a part, where that is.

    One program. B: a power of two ≥ b, of LEVELS bits; P: one > parts. ends [3 B]: scratch.
    offsets [parts + 1]: part i does items offsets[i] … offsets[i + 1] - 1.
    """
    gdc_wait()
    o_b = tl.arange(0, B)
    m_b = o_b < b
    b_begin = tl.load(cu_seqlens_q + o_b, mask=m_b, other=0)
    b_end = tl.load(cu_seqlens_q + o_b + 1, mask=m_b, other=0)
    b_pairs = _pairs_of(tl.load(cache_seqlens + o_b, mask=m_b, other=0))
    b_tiles = ((b_end - b_begin) * H + span - 1) // span
    b_cost = b_tiles * (2 * b_pairs + OVERHEAD)
    num_tiles = tl.sum(b_tiles)
    cost = tl.sum(b_cost)
    tile_ends = ends
    cost_ends = ends + B
    piece_ends = ends + 2 * B
    size = _piece_size(b_pairs, b_tiles, parts)
    tl.store(tile_ends + o_b, tl.cumsum(b_tiles), mask=m_b)
    tl.store(cost_ends + o_b, tl.cumsum(b_cost), mask=m_b)
    tl.store(piece_ends + o_b, tl.cumsum(b_tiles * ((b_pairs + size - 1) // size)), mask=m_b)
    tl.debug_barrier()

    o_p = tl.arange(0, P)
    m_p = o_p < parts
    share = (cost + parts - 1) // parts
    whole = (num_tiles + parts - 1) // parts
    # Where each part begins; it ends where the next one begins.
    b_first = tl.minimum(o_p * whole, num_tiles)
    b_before = _cost_before(b_first, cost_ends, tile_ends, cache_seqlens, b, LEVELS)
    b_load = tl.where(m_p, _next(b_before, P) - b_before, 0)
    b_pair = tl.zeros_like(o_p)
    if tl.max(b_load) > share + SPLIT_COST + tl.minimum(share // IDLE, SPLIT_COST):
        if 2 * size <= share + SECOND_ITEM:
            b_first, b_pair = _cut_in_pieces(o_p, size, piece_ends, tile_ends, cache_seqlens, b, LEVELS)
        else:
            b_x = tl.minimum(o_p * share, cost)
            b_first, b_pair = _cut(b_x, cost_ends, tile_ends, cache_seqlens, b, LEVELS)
    b_next = _next(b_first, P)
    b_last_pair = _next(b_pair, P)

    m_same = b_first == b_next
    b_items = tl.where(m_same, b_last_pair > b_pair, b_next - b_first + (b_last_pair > 0)).to(tl.int32)
    b_items = tl.where(m_p, b_items, 0)
    b_slots = tl.where(m_same, 1, (b_pair > 0).to(tl.int32) + (b_last_pair > 0).to(tl.int32))
    b_slots = tl.where(b_items > 0, b_slots, 0)
    b_offset = tl.cumsum(b_items) - b_items
    b_slot = tl.cumsum(b_slots) - b_slots
    tl.store(offsets + o_p, b_offset, mask=o_p <= parts)
    # The parts on which a split tile begins. At most one is open at a time.
    m_split = (b_items > 0) & (b_last_pair > 0) & ~(m_same & (b_pair > 0))
    b_merge = tl.cumsum(m_split.to(tl.int32)) - m_split.to(tl.int32)
    tl.store(num_merges, tl.sum(m_split.to(tl.int32)))
    for j in range(tl.max(b_items)):
        m = j < b_items
        b_tile = b_first + j
        i_request = _request_of(tile_ends, b_tile, b, LEVELS)
        m &= i_request < b
        b_before = tl.load(tile_ends + i_request - 1, mask=m & (i_request > 0), other=0)
        b_pairs_here = _pairs_of(tl.load(cache_seqlens + i_request, mask=m, other=0))
        first = tl.where(j == 0, b_pair, 0)
        last = tl.where(b_tile == b_next, b_last_pair, b_pairs_here)
        m_open = last < b_pairs_here
        slot = tl.where(first > 0, b_slot, tl.where(m_open, b_slot + b_slots - 1, -1))
        row, num_rows = _store_item(
            items, b_offset + j, m, i_request, first, last, slot, (b_tile - b_before) * span, cu_seqlens_q,
            cache_seqlens, H,
        )  # fmt: skip
        _store_merge_first(merges, b_merge, m & m_open & (first == 0), row, num_rows, slot)
        _store_merge_last(merges, b_merge - 1, m & ~m_open & (first > 0), slot)
    gdc_launch_dependents()


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=TABLES)
def fixed_schedule_kernel(
    cu_seqlens_q, cache_seqlens, ends, items, offsets, merges, num_merges, b, H, parts, span,
    B: tl.constexpr, LEVELS: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Every tile cut at the same multiples of CHUNK pairs, whatever else is in the batch.

    One program; as ``schedule_kernel``, but which sums are formed depends on nothing but a request's own
    length.
    """
    gdc_wait()
    o_b = tl.arange(0, B)
    m_b = o_b < b
    b_begin = tl.load(cu_seqlens_q + o_b, mask=m_b, other=0)
    b_end = tl.load(cu_seqlens_q + o_b + 1, mask=m_b, other=0)
    b_pieces = (_pairs_of(tl.load(cache_seqlens + o_b, mask=m_b, other=0)) + CHUNK - 1) // CHUNK
    b_tiles = ((b_end - b_begin) * H + span - 1) // span
    num_items = tl.sum(b_tiles * b_pieces)
    item_ends = ends
    merge_ends = ends + B
    b_merges = tl.where(b_pieces > 1, b_tiles, 0)
    tl.store(item_ends + o_b, tl.cumsum(b_tiles * b_pieces), mask=m_b)
    tl.store(merge_ends + o_b, tl.cumsum(b_merges), mask=m_b)
    tl.store(num_merges, tl.sum(b_merges))
    tl.debug_barrier()
    o_p = tl.arange(0, P)
    per_part = (num_items + parts - 1) // parts
    tl.store(offsets + o_p, tl.minimum(o_p * per_part, num_items), mask=o_p <= parts)
    for j in range(0, num_items, P):
        i_item = j + o_p
        i_request = _request_of(item_ends, i_item, b, LEVELS)
        m = i_request < b
        m_before = m & (i_request > 0)
        b_rest = i_item - tl.load(item_ends + i_request - 1, mask=m_before, other=0)
        b_pairs = _pairs_of(tl.load(cache_seqlens + i_request, mask=m, other=0))
        b_num = (b_pairs + CHUNK - 1) // CHUNK
        i_tile = b_rest // b_num
        first = b_rest % b_num * CHUNK
        slot = tl.where(b_num > 1, i_item, -1)
        row, num_rows = _store_item(
            items, i_item, m, i_request, first, tl.minimum(first + CHUNK, b_pairs), slot, i_tile * span,
            cu_seqlens_q, cache_seqlens, H,
        )  # fmt: skip
        i_merge = tl.load(merge_ends + i_request - 1, mask=m_before, other=0) + i_tile
        m_first = m & (b_num > 1) & (first == 0)
        _store_merge_first(merges, i_merge, m_first, row, num_rows, slot)
        _store_merge_last(merges, i_merge, m_first, slot + b_num - 1)
    gdc_launch_dependents()


@triton.jit(do_not_specialize_on_alignment=["merges", "num_merges"])
def merge_kernel(
    out, lse, partial_out, partial_lse, merges, num_merges, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    SPAN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """out and lse of split tiles from their partial results.

    Grid: (any, WIDTH / COLUMNS). A program takes COLUMNS columns of a row at a time, SPLITS partial rows at
    a time, and no more rows than there are: the merges are counted on the GPU.
    Partial outputs are normalised; their logarithms are base 2. Weights and sums are float32, in the order
    of the slots.
    """
    # The next kernel waits for this one's end, as this one does for the end of the one before.
    gdc_launch_dependents()
    # Safe before the wait: whoever launched this kernel has itself waited for the schedule.
    num_rows = tl.load(num_merges, cache_modifier=".cg") * SPAN
    gdc_wait()
    o_col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for i in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        p_merge = merges + i // SPAN * MERGE
        i_row = i % SPAN
        row = tl.load(p_merge)
        slot = tl.load(p_merge + 2)
        num_slots = tl.load(p_merge + 3) - slot + 1
        if i_row < tl.load(p_merge + 1):
            p_lse = partial_lse + slot * SPAN + i_row
            p_out = partial_out + (slot.to(tl.int64) * SPAN + i_row) * WIDTH + o_col
            b_max = float("-inf")
            b_sum = 0.0
            b_o = tl.zeros([COLUMNS], tl.float32)
            for j in range(0, num_slots, SPLITS):
                o_s = j + tl.arange(0, SPLITS)
                m_s = o_s < num_slots
                b_lse = tl.load(p_lse + o_s * SPAN, mask=m_s, other=float("-inf"))
                b_part = tl.load(
                    p_out[None, :] + o_s.to(tl.int64)[:, None] * (SPAN * WIDTH), mask=m_s[:, None], other=0.0
                )
                b_new = tl.maximum(b_max, tl.max(b_lse, 0))
                b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
                b_scale = tl.exp2(b_max - b_finite)
                b_weight = tl.exp2(b_lse - b_finite)
                b_sum = b_sum * b_scale + tl.sum(b_weight, 0)
                b_o = b_o * b_scale + tl.sum(b_part * b_weight[:, None], 0)
                b_max = b_new
            b_one = tl.where(b_sum == 0.0, 1.0, b_sum)
            tl.store(out + (row + i_row).to(tl.int64) * WIDTH + o_col, (b_o / b_one).to(out.dtype.element_ty))
            if tl.program_id(1) == 0:
                b_total = tl.where(b_sum == 0.0, float("-inf"), (b_max + tl.log2(b_one)) * LN_2)
                tl.store(lse + row + i_row, b_total)
