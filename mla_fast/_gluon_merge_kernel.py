# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (a jitted function's parameters are annotated for Triton, not for mypy)
"""The merge of split tiles where rows are many: a row a warp, so that few programs are enough.

Where no tile is split, all that counts is what the launch costs: few programs, and the next kernel may start
before this one has waited. It waits for this one's end, as this one does for the end of the one before.

Partial results are written once, read once and then in the way: they stay in L2 as lines that memory has not
seen, until the keys of the next call push them out, as writes to memory among its reads. DROP: they are
discarded once read. That is worth its instructions where memory bounds the kernel of attention.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mla_fast._split_schedule import MERGE_FIELDS

LATENT: gl.constexpr = gl.constexpr(512)
COLUMNS: gl.constexpr = gl.constexpr(256)
ROWS: gl.constexpr = gl.constexpr(8)  # and warps
PIECES: gl.constexpr = gl.constexpr(8)  # of a row at a time
MERGE: gl.constexpr = gl.constexpr(MERGE_FIELDS)
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
LINE: gl.constexpr = gl.constexpr(32)  # float32 of a line of L2
DISCARD_ASM: gl.constexpr = gl.constexpr(
    "{ .reg .pred on; setp.ne.b32 on, $2, 0; @on discard.global.L2 [$1], 128; mov.b32 $0, $2; }"
)


@gluon.jit
def _discard(p_line, m):
    """What lines of L2 hold is undefined from now on, and need not be written to memory."""
    gl.inline_asm_elementwise(
        DISCARD_ASM, "=r,l,r", [p_line, m.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _discard_rows(partial_out, slot, num_slots, i_row, num_rows, i_column, SPAN: gl.constexpr):
    """Partial outputs of these rows and COLUMNS columns. A warp takes its row's, a thread a line."""
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 4, 8], [ROWS, 1, 1], [2, 1, 0])
    L_PIECES: gl.constexpr = gl.SliceLayout(2, L)
    b_row = i_row + gl.arange(0, ROWS, gl.SliceLayout(1, L_PIECES))
    o_part = gl.arange(0, PIECES, gl.SliceLayout(0, L_PIECES))
    o_line = i_column + LINE * gl.arange(0, COLUMNS // LINE, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    for j in range(0, num_slots, PIECES):
        m = (b_row < num_rows)[:, None] & (j + o_part < num_slots)[None, :]
        b_at = (slot + j + o_part)[None, :] * SPAN + b_row[:, None]
        p_line = partial_out + (b_at.to(gl.int64) * LATENT)[:, :, None] + o_line[None, None, :]
        _discard(p_line, m[:, :, None] & (o_line >= 0)[None, None, :])


@gluon.jit
def _store_rows(
    out, lse, partial_out, partial_lse, slot, num_slots, row, i_row, num_rows, i_column, SPAN: gl.constexpr,
    DROP: gl.constexpr,
):  # fmt: skip
    """Rows i_row … i_row + ROWS - 1 of a tile, those of them that it has, and COLUMNS of their columns."""
    L: gl.constexpr = gl.BlockedLayout([1, PIECES, 4], [1, 1, 32], [ROWS, 1, 1], [2, 1, 0])
    L_PIECES: gl.constexpr = gl.SliceLayout(2, L)
    L_COLUMNS: gl.constexpr = gl.SliceLayout(1, L)
    L_ROW: gl.constexpr = gl.SliceLayout(1, L_PIECES)
    b_row = i_row + gl.arange(0, ROWS, L_ROW)
    o_piece = gl.arange(0, PIECES, gl.SliceLayout(0, L_PIECES))
    o_col = i_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, L_COLUMNS))
    m_row = b_row < num_rows
    b_max = gl.full([ROWS], float("-inf"), gl.float32, L_ROW)
    b_sum = gl.full([ROWS], 0.0, gl.float32, L_ROW)
    b_o = gl.zeros([ROWS, COLUMNS], gl.float32, L_COLUMNS)
    for j in range(0, num_slots, PIECES):
        m = m_row[:, None] & (j + o_piece < num_slots)[None, :]
        b_at = (slot + j + o_piece)[None, :] * SPAN + b_row[:, None]
        b_lse = gl.load(partial_lse + b_at, mask=m, other=float("-inf"))
        b_part = gl.load(
            partial_out + (b_at.to(gl.int64) * LATENT)[:, :, None] + o_col[None, None, :],
            mask=m[:, :, None],
            other=0.0,
        )
        b_new = gl.maximum(b_max, gl.max(b_lse, 1))
        b_finite = gl.where(b_new == float("-inf"), 0.0, b_new)
        b_scale = gl.exp2(b_max - b_finite)
        b_weight = gl.exp2(b_lse - b_finite[:, None])
        b_sum = b_sum * b_scale + gl.sum(b_weight, 1)
        b_o = b_o * gl.convert_layout(b_scale, gl.SliceLayout(1, L_COLUMNS))[:, None]
        b_o = b_o + gl.sum(b_part * b_weight[:, :, None], 1)
        b_max = b_new
    b_one = gl.where(b_sum == 0.0, 1.0, b_sum)
    b_o = b_o / gl.convert_layout(b_one, gl.SliceLayout(1, L_COLUMNS))[:, None]
    o_row = i_row + gl.arange(0, ROWS, gl.SliceLayout(1, L_COLUMNS))
    p_out = out + (row + o_row).to(gl.int64)[:, None] * LATENT + o_col[None, :]
    gl.store(p_out, b_o.to(out.dtype.element_ty), mask=(o_row < num_rows)[:, None])
    if i_column == 0:
        b_total = gl.where(b_sum == 0.0, float("-inf"), (b_max + gl.log2(b_one)) * LN_2)
        gl.store(lse + row + b_row, b_total, mask=m_row)
    if DROP:
        gl.thread_barrier()  # all have read
        _discard_rows(partial_out, slot, num_slots, i_row, num_rows, i_column, SPAN)


@gluon.jit(do_not_specialize_on_alignment=["merges", "num_merges"])
def merge_rows_kernel(
    out, lse, partial_out, partial_lse, merges, num_merges, SPAN: gl.constexpr, DROP: gl.constexpr
):
    """out and lse of split tiles from their partial results.

    Grid: (any, LATENT / COLUMNS), with a warp for each of ROWS rows. No more rows than there are: the merges
    are counted on the GPU. Partial outputs are normalised; their logarithms are base 2. Weights and sums are
    float32, in the order of the slots. DROP: partial outputs are undefined afterwards, and begin at a line of
    L2, as all memory of torch does.
    """
    gdc_launch_dependents()
    # Safe before the wait: whoever launched this kernel has itself waited for the schedule.
    num_rows = gl.load(num_merges, cache_modifier=".cg") * SPAN
    gdc_wait()
    for i in range(gl.program_id(0) * ROWS, num_rows, gl.num_programs(0) * ROWS):
        p_merge = merges + i // SPAN * MERGE
        i_row = i % SPAN
        slot = gl.load(p_merge + 2)
        num_slots = gl.load(p_merge + 3) - slot + 1
        num_rows_here = gl.load(p_merge + 1)
        if i_row < num_rows_here:
            _store_rows(
                out, lse, partial_out, partial_lse, slot, num_slots, gl.load(p_merge), i_row, num_rows_here,
                gl.program_id(1) * COLUMNS, SPAN, DROP,
            )  # fmt: skip
