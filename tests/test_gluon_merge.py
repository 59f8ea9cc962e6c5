"""The merge of split tiles where rows are many, under the emulator: results of which every step is exact."""

import math
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from emulated_kernels import MERGE_ASM
from gluon_emulator import Emulated, edited

from mla_fast import _gluon_merge_kernel
from mla_fast._split_schedule import MERGE_FIELDS
from mla_ref.values import integers

C = 512
PROGRAMS = 3
EMPTY = -math.inf
# Logarithms to base 2 of weights that add up to a power of two: fewer pieces than are taken at a time, as
# many, more, with larger ones to come; empty ones first, last, a round of them, and nothing else.
WEIGHTS = (
    (0.0, 0.0),
    (3.0, 1.0, 1.0, 2.0),
    (EMPTY, -5.0, -5.0, EMPTY),
    (0.0,) * 8,
    (EMPTY,) * 8 + (1.0, 0.0, 0.0),
    (EMPTY,) * 3,
    (0.0,) * 8 + (3.0,) + (EMPTY,) * 7 + (4.0,),
)
NUM_ROWS = (1, 7, 8, 9, 63, 64, 200)  # to the request's end: more than a tile has


class Split(NamedTuple):
    """Partial results and what they are merged into; NaN in rows that are no merge's."""

    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    merges: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def split(span: int, seed: int) -> Split:
    num_slots = sum(map(len, WEIGHTS)) + 1  # one that is no merge's
    part = integers(seed, "partial", 7, num_slots * span * C).view(num_slots, span, C).float() - 3
    part_lse = torch.full((num_slots, span), math.nan)
    out = torch.full((len(WEIGHTS) * span, C), math.nan, dtype=torch.bfloat16)
    lse = torch.full((len(WEIGHTS) * span,), math.nan)
    merges, slot = [], 0
    for i, (weights, num_rows) in enumerate(zip(WEIGHTS, NUM_ROWS, strict=True)):
        here, row = min(num_rows, span), i * span
        pieces = part[slot : slot + len(weights), :here]
        part_lse[slot : slot + len(weights), :here] = torch.tensor(weights)[:, None]
        weight = torch.exp2(torch.tensor(weights, dtype=torch.float64))
        total = float(weight.sum())
        mean = (pieces * weight[:, None, None]).sum(0) / (total or 1.0)
        out[row : row + here] = mean.to(torch.bfloat16)
        lse[row : row + here] = torch.tensor(math.log2(total) if total else EMPTY) * math.log(2)
        merges.append([row, num_rows, slot, slot + len(weights) - 1])
        slot += len(weights)
    part[part_lse.isnan()] = math.nan
    return Split(part, part_lse, torch.tensor(merges, dtype=torch.int32), out, lse)


def merged(
    module: ModuleType, parts: Split, span: int, drop: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.full_like(parts.out, math.nan), torch.full_like(parts.lse, math.nan)
    num_merges = torch.tensor([parts.merges.numel() // MERGE_FIELDS], dtype=torch.int32)
    grid = PROGRAMS, C // _gluon_merge_kernel.COLUMNS.value
    with np.errstate(all="ignore"):
        Emulated(module, "merge_rows_kernel", MERGE_ASM)[grid](
            out, lse, parts.partial_out.flatten(), parts.partial_lse.flatten(), parts.merges.flatten(),
            num_merges, span, drop,
        )  # fmt: skip
    return out, lse


def same(got: tuple[torch.Tensor, torch.Tensor], parts: Split) -> bool:
    """Bit by bit, what nobody may write included."""
    mark = 123.0  # in place of NaN, which equals nothing
    pairs = zip(got, (parts.out, parts.lse), strict=True)
    return all(
        torch.equal(x.nan_to_num(mark, neginf=EMPTY), y.nan_to_num(mark, neginf=EMPTY)) for x, y in pairs
    )


@pytest.mark.parametrize("span", [64, 128])
def test_every_row_of_every_split_tile(span: int, seed: int) -> None:
    parts = split(span, seed)
    assert same(merged(_gluon_merge_kernel, parts, span), parts)


@pytest.mark.parametrize("drop", [True, False])
def test_partial_results_are_dropped_and_no_others(drop: bool, seed: int) -> None:
    parts = split(64, seed)
    others = parts.partial_out[-1].fill_(1.0)
    before = parts.partial_out.clone()
    merged(_gluon_merge_kernel, parts, 64, drop)
    if drop:
        assert parts.partial_out[:-1].isnan().all()
    else:
        assert torch.equal(parts.partial_out.nan_to_num(9.0), before.nan_to_num(9.0))
    assert torch.equal(others, torch.ones_like(others))


PLANTED = {
    "a_piece_more": ("j + o_piece < num_slots", "j + o_piece <= num_slots"),
    "pieces_of_the_first_round_again": ("(slot + j + o_piece)", "(slot + o_piece)"),
    "sum_in_the_old_frame": ("b_sum = b_sum * b_scale", "b_sum = b_sum * 1.0"),
    "output_in_the_old_frame": (
        "b_o = b_o * gl.convert_layout(b_scale,", "b_o = b_o * gl.convert_layout(1.0 + 0.0 * b_scale,",
    ),
    "empty_rows_divided_by_nothing": ("gl.where(b_sum == 0.0, 1.0, b_sum)", "b_sum"),
    "empty_rounds_subtracted": ('gl.where(b_new == float("-inf"), 0.0, b_new)', "b_new"),
    "rows_of_the_next_request": ("mask=(o_row < num_rows)[:, None]", "mask=(o_row < SPAN)[:, None]"),
    "every_program_the_same_rows": ("gl.program_id(0) * ROWS", "0 * ROWS"),
    "drops_a_piece_more": ("j + o_part < num_slots", "j + o_part <= num_slots"),
    "drops_the_other_half": ("i_column + LINE * gl", "COLUMNS - i_column + LINE * gl"),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_show(bug: str, seed: int, tmp_path: Path) -> None:
    parts = split(64, seed)
    assert not same(merged(edited(_gluon_merge_kernel, *PLANTED[bug], tmp_path), parts, 64), parts)
