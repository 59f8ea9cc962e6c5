"""The Hopper prefill kernel without a GPU: its source under the emulator, judged like any backend."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from emulated_kernels import assert_holds, assert_shows, case_of, config
from gluon_emulator import Emulated, array, edited

from mla_fast import _gluon_prefill_kernel, gluon_prefill
from mla_ref.backend import available
from mla_ref.case import Case
from mla_ref.problem import problem
from oracles.verify import OF_THE_OUTPUT

NUM_SMS = 3

CASES = {
    "one_tile": ((128,), (128,), 1, 64, {}),
    "ragged": ((100, 130, 1, 0), (300, 130, 70, 64), 2, 64, {}),
    "context": ((70, 3), (450, 129), 2, 64, {}),
    "empty": ((1, 1, 1), (0, 1, 0), 2, 64, {}),
    "more_queries_than_keys": ((200, 2), (3, 0), 2, 16, {}),
    "late_row": ((100,), (227,), 1, 64, {"regime": "negative"}),
    "five_heads": ((130, 5), (200, 80), 5, 64, {}),
    "pages_of_1": ((9, 40), (150, 60), 1, 1, {}),
    "padded": ((30,), (200,), 1, 64, {"entry_align": 256, "block_gap": 4096 + 16, "offset": 32}),
    "negative": ((90, 1), (300, 64), 2, 64, {"regime": "negative"}),
    "peaky": ((140, 2), (450, 200), 2, 64, {"regime": "peaky"}),
    "half": ((100, 30), (150, 300), 1, 64, {"dtype": "float16", "cache_format": "fp16"}),
    "fp8": ((100, 3), (150, 30), 1, 64, {"cache_format": "fp8_ds_mla"}),
    "narrow": ((100, 3), (330, 30), 2, 32, {"widths": (64, 32, 64)}),
    "narrow_keys": ((100, 3), (330, 30), 2, 32, {"widths": (64, 64, 128)}),
}


def case(name: str, seed: int) -> Case:
    q_lens, kv_lens, heads, block_size, others = CASES[name]
    p, r, v = others.get("widths", (128, 64, 128))
    fields = {key: value for key, value in others.items() if key != "widths"} | {"block_size": block_size}
    model = config(heads, 256 if r == 32 else 512, p, r, v)
    return case_of(seed, "attention", model, q_lens, kv_lens, **fields)


SOURCE = Path(_gluon_prefill_kernel.__file__).read_text(encoding="utf-8")


def lines(first: str, end: str) -> str:
    """The kernel's lines from one that opens so to before another."""
    rest = SOURCE[SOURCE.index(first) :]
    return rest[: rest.index(end)]


VALUES_FREE = "    mbarrier.wait(bar_v_free.index(slot), _parity(i_block) ^ 1)\n"
VALUES = lines("    mbarrier.expect(bar_v.index(slot)", "\n\n@")
SCORED = lines(
    "                # The last scores of the tile before", "                mbarrier.expect(bar_q,"
)
QUERY = lines("                mbarrier.expect(bar_q,", "            else:")

# Edits of the kernel's source, and the case whose verdict must notice.
PLANTED = {
    "keys_read_before_they_land": (
        "_wait_for_keys(bar_k, i_block + i + 1, i + 1 < num_blocks)",
        "_wait_for_keys(bar_k, i_block + i + 1, False)",
        "context",
    ),
    "values_read_before_they_land": (
        "mbarrier.wait(bar_v.index(last), _parity(i_block + i - 1))", "", "context",
    ),
    "values_filled_while_in_use": (VALUES_FREE + VALUES, VALUES + VALUES_FREE, "peaky"),
    "query_filled_while_in_use": (SCORED + QUERY, QUERY + SCORED, "five_heads"),
    "sum_in_the_old_frame": ("b_l * _column(b_alpha, b_l) +", "b_l +", "peaky"),
    "accumulator_in_the_old_frame": ("b_o = _rescaled(b_o,", "_rescaled(b_o,", "peaky"),
    "exponents_in_the_old_frame": ("b_x = _lowered(b_x,", "_lowered(b_x,", "peaky"),
    "second_half_of_the_sums_lost": ("b_l += _partial_sums(b_p1, b_l)", "", "context"),
    "halves_swapped": ("b_w = _weights(b_p0, b_p1,", "b_w = _weights(b_p1, b_p0,", "context"),
    "mask_one_key_late": ("(b_limit - o_key)", "(b_limit - o_key + 1)", "ragged"),
    "no_mask_in_the_second_block": ("if o_key + KEYS >= unmasked:", "if o_key > 1000000:", "ragged"),
    "no_maximum_from_the_first_keys": (
        "if o_key + KEYS >= unmasked:", "if o_key + KEYS > unmasked:", "late_row",
    ),
    "lower_rows_see_as_the_upper_do": (
        "seen = _get(s_item, ITEM_SEEN) + HALF * ROWS", "seen = _get(s_item, ITEM_SEEN)", "one_tile",
    ),
    "state_forgotten": ("b_was.to(gl.float32) * (b_keep / b_total)", "b_was.to(gl.float32) * (0.0 * b_keep)",
        "context",
    ),
    "heads_confused": ("head += rest % width", "head += rest % group", "five_heads"),
}  # fmt: skip


def raised(b_top, b_m):
    b_top = np.asarray(b_top).max(1, keepdims=True).astype(np.int32)
    b_up = b_m + np.where(
        b_top.view(np.float32) > _gluon_prefill_kernel.SLACK, b_top.view(np.float32), np.float32(0)
    )
    return array(b_up), array(np.exp2(b_m - b_up))


def emulate(monkeypatch: pytest.MonkeyPatch, kernel_module: ModuleType) -> None:
    asm = {
        "_opaque": lambda x: x,
        "_exp2": lambda x: array(np.exp2(np.asarray(x, np.float32))),
        "_rescaled": lambda b_o, b_factor: b_o * b_factor[:, :1],
        "_raised": raised,
        "_lowered": lambda b_x, b_by: b_x - b_by,
        "_masked": lambda b_s, b_left: array(np.where(np.arange(b_s.shape[1]) < b_left, b_s, -np.inf)),
        "_max3": lambda b_a, b_b, b_c: np.maximum(np.maximum(b_a, b_b), b_c),
    }
    monkeypatch.setattr(
        _gluon_prefill_kernel, "mla_prefill_kernel", Emulated(kernel_module, "mla_prefill_kernel", asm)
    )
    monkeypatch.setattr(gluon_prefill, "_num_sms", lambda device: NUM_SMS)
    # Five heads: groups of two, two and one.
    monkeypatch.setattr(gluon_prefill, "_group", lambda num_heads, head_bytes: min(num_heads, 2))


BACKEND = replace(gluon_prefill.BACKEND, requires=available)
VARIANTS = {"default", *BACKEND.variants}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, _gluon_prefill_kernel)
    assert_holds(BACKEND, case(name, seed), VARIANTS, OF_THE_OUTPUT)


def test_a_prepared_call_gives_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time: the kernel leaves its counters as it found them."""
    emulate(monkeypatch, _gluon_prefill_kernel)
    inputs = problem("attention").materialize(case("ragged", seed), torch.device("cpu"))
    want = gluon_prefill.gluon_prefill(*inputs)
    prepared = gluon_prefill.prepare(inputs)
    for _ in range(2):
        got = prepared.finish(prepared.run())
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)


def test_a_batch_on_no_gpu_is_refused(seed: int) -> None:
    inputs = problem("attention").materialize(case("ragged", seed), torch.device("cpu"))
    with pytest.raises(ValueError, match="expanded: on cpu, must be on a CUDA device"):
        gluon_prefill.gluon_prefill(*inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_oracle(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, _gluon_prefill_kernel)
    assert_holds(BACKEND, case(name, seed), VARIANTS)


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_show(bug: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good, bad, name = PLANTED[bug]
    emulate(monkeypatch, edited(_gluon_prefill_kernel, good, bad or "pass", tmp_path))
    backend = replace(BACKEND, variants={"thirds": BACKEND.variants["thirds"]})
    assert_shows(backend, case(name, seed), ("value",))
