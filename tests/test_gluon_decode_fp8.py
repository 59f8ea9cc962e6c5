"""The fp8 Hopper decode kernel without a GPU: its source under the emulator, judged like any backend."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from emulated_kernels import assert_holds, assert_shows, decode_case, emulate_decode
from gluon_emulator import array, edited

from mla_fast import _gluon_decode_fp8_kernel, gluon_decode_fp8
from mla_ref.backend import available
from mla_ref.case import Case
from oracles.verify import OF_THE_OUTPUT

CASES = {
    "two_parts": ((1, 1), (130, 129), 16, 64, "fp8_ds_mla", {}),
    "ragged": ((1, 2, 0, 3), (300, 63, 64, 130), 20, 64, "fp8_ds_mla_pow2", {}),
    "one_scale": ((1, 2), (300, 63), 20, 64, "fp8_e4m3", {}),
    "two_lanes": ((1, 1), (130, 128), 128, 64, "fp8_ds_mla", {}),
    "empty": ((1, 1, 1), (0, 1, 0), 16, 64, "fp8_e4m3", {}),
    "more_queries_than_keys": ((3, 2), (2, 0), 24, 64, "fp8_ds_mla", {}),
    "pages_of_16": ((1, 2), (333, 70), 32, 16, "fp8_ds_mla", {}),
    "pages_of_32": ((2, 1), (65, 290), 16, 32, "fp8_e4m3", {}),
    "pages_of_128": ((1, 2), (200, 129), 16, 128, "fp8_ds_mla", {}),
    "padded": (
        (1, 1), (200, 70), 16, 64, "fp8_ds_mla", {"entry_align": 256, "block_gap": 4096 + 16, "offset": 32},
    ),
    "peaky": ((1, 2), (450, 200), 16, 64, "fp8_ds_mla", {"regime": "peaky"}),
    "tiny": ((1, 1), (200, 130), 16, 64, "fp8_ds_mla", {"regime": "tiny"}),
}  # fmt: skip


def case(name: str, seed: int) -> Case:
    *row, others = CASES[name]
    return decode_case(seed, *row, **others)


# The right half of K0 is free when P0 V0 is there, and not before.
MULTIPLIED = """\
            b_o = warpgroup_mma_wait(0, deps=(b_o,))
            gl.thread_barrier()
"""
COPIED = """\
            _copy_half_and_rope(
                kv, kv_pe, pages, 2 * i + 2, 256, bar_r_raw.index(0), s_right.index(0), s_pe.index(0),
                i + 1 < last, PAGE,
            )  # fmt: skip
"""

# Edits of the kernel's source, and the case whose verdict must notice.
PLANTED = {
    "codes_read_before_they_land": (
        "    mbarrier.wait(bar_raw, phase)\n    b_code_0 = s_codes.slice(0, TILE, dim=1).load(L)\n",
        "    b_code_0 = s_codes.slice(0, TILE, dim=1).load(L)\n    mbarrier.wait(bar_raw, phase)\n",
        "two_parts",
    ),
    "codes_of_the_wrong_tile": (
        "slice(0, TILE, dim=1).load(L)", "slice(TILE, TILE, dim=1).load(L)", "two_parts",
    ),
    "copied_while_in_use": (MULTIPLIED + COPIED, COPIED + MULTIPLIED, "peaky"),
    "last_product_of_the_item_left_out": (
        "b_o = warpgroup_mma(s_pe.index(1), s_left.index(1), b_o, is_async=True)\n"
        "        b_o = warpgroup_mma_wait(0, deps=(b_o,))\n        mbarrier.arrive(bar_done)",
        "mbarrier.arrive(bar_done)", "tiny",
    ),
    "left_sums_in_the_old_frame": ("            b_l = b_l * b_beta\n", "", "peaky"),
    "right_output_in_the_old_frame": (
        "            b_o = _rescaled(b_o, b_alpha)\n            b_o = warpgroup_mma(s_p0",
        "            b_o = warpgroup_mma(s_p0", "peaky",
    ),
    "scales_of_the_wrong_tile": ("gl.load(p_row + T, mask", "gl.load(p_row + (2 - T), mask", "two_parts"),
    "scales_of_the_wrong_page": ("o_token // PAGE, mask", "o_token // (2 * PAGE), mask", "pages_of_16"),
    "scales_of_the_block_before": ("table, 2 * i + 2, kv_len, 0", "table, 2 * i, kv_len, 0", "peaky"),
    "rope_left_as_codes": (
        "_expand_rope(s_pe.index(1), b_0, bar_l_raw.index(1), phase)", "pass", "one_scale",
    ),
}  # fmt: skip


def dequantized(b_code, b_scale):
    """What the inline assembly does, by torch's own conversions."""
    codes = torch.from_numpy(np.asarray(b_code, dtype=np.uint8)).view(torch.float8_e4m3fn)
    return array((codes.float().numpy() * np.asarray(b_scale)[:, None]).astype(np.float32)).to(torch.bfloat16)


ASM = {
    "_opaque": lambda x: x,
    "_rescaled": lambda b_o, b_alpha: b_o * b_alpha[:, None],
    "_dequantized": dequantized,
}


def emulate(monkeypatch: pytest.MonkeyPatch, source: ModuleType = _gluon_decode_fp8_kernel) -> None:
    emulate_decode(monkeypatch, _gluon_decode_fp8_kernel, "mla_decode_fp8_kernel", ASM, source)


BACKEND = replace(gluon_decode_fp8.BACKEND, requires=available)
VARIANTS = {"default", "batch_invariant"}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    assert_holds(BACKEND, case(name, seed), VARIANTS, OF_THE_OUTPUT)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_oracle(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    assert_holds(BACKEND, case(name, seed), VARIANTS)


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_show(bug: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good, bad, name = PLANTED[bug]
    emulate(monkeypatch, edited(_gluon_decode_fp8_kernel, good, bad, tmp_path))
    backend = replace(BACKEND, variants={})
    assert_shows(backend, case(name, seed), OF_THE_OUTPUT)
