"""The fp8 Hopper decode kernel without a GPU: its source under the emulator, judged like any backend."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from gluon_emulator import Emulated, array, edited

from mla_fast import _gluon_decode_fp8_kernel, _split_schedule, gluon_decode, gluon_decode_fp8
from mla_ref.backend import available
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.layout import CacheLayout
from oracles.verdict import ERROR, FAIL, PASS
from oracles.verify import judge

NUM_SMS = 6

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
    q_lens, kv_lens, heads, block_size, cache_format, extra = CASES[name]
    layout = {k: v for k, v in extra.items() if k in ("entry_align", "block_gap", "offset")}
    fields = {k: v for k, v in extra.items() if k not in layout}
    config = MLAConfig(
        name="wide", hidden_size=64, num_heads=heads, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    return Case(
        problem="latent_attention", config=config, q_lens=q_lens, kv_lens=kv_lens, block_size=block_size,
        cache_format=cache_format, layout=CacheLayout(**layout), seed=seed, **fields,
    )  # fmt: skip


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


def emulate(monkeypatch: pytest.MonkeyPatch, kernel_module: ModuleType) -> None:
    asm = {
        "_opaque": lambda x: x,
        "_rescaled": lambda b_o, b_alpha: b_o * b_alpha[:, None],
        "_dequantized": dequantized,
    }
    kernel = Emulated(kernel_module, "mla_decode_fp8_kernel", asm)
    monkeypatch.setattr(_gluon_decode_fp8_kernel, "mla_decode_fp8_kernel", kernel)
    for name in ("schedule_kernel", "fixed_schedule_kernel", "merge_kernel"):
        monkeypatch.setattr(_split_schedule, name, Emulated(_split_schedule, name))
    monkeypatch.setattr(gluon_decode, "plan", lambda *a, **k: gluon_decode.plan_for(NUM_SMS, *a, **k))
    monkeypatch.setattr(gluon_decode, "CHUNK_PAIRS", 2)


BACKEND = replace(gluon_decode_fp8.BACKEND, requires=available)


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, _gluon_decode_fp8_kernel)
    verdicts = judge(BACKEND, case(name, seed), oracles=("value", "lse"))
    assert {verdict.variant for verdict in verdicts} == {"default", "batch_invariant"}
    for verdict in verdicts:
        assert verdict.status == PASS, f"{verdict.variant} {verdict.oracle}: {verdict.detail} {verdict.worst}"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_oracle(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, _gluon_decode_fp8_kernel)
    for verdict in judge(BACKEND, case(name, seed)):
        assert verdict.status == PASS, f"{verdict.variant} {verdict.oracle}: {verdict.detail} {verdict.worst}"


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_show(bug: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good, bad, name = PLANTED[bug]
    emulate(monkeypatch, edited(_gluon_decode_fp8_kernel, good, bad, tmp_path))
    backend = replace(BACKEND, variants={})
    statuses = {verdict.status for verdict in judge(backend, case(name, seed), oracles=("value", "lse"))}
    assert statuses & {FAIL, ERROR}
