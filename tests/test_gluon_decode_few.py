"""The Hopper kernel for few rows without a GPU: its source under the emulator, judged like any backend."""

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from emulated_kernels import assert_holds, assert_shows, decode_case, emulate_decode
from gluon_emulator import STAND_INS, array, edited

from mla_fast import _gluon_decode_few_kernel, gluon_decode, gluon_decode_few
from mla_fast.gluon_decode_few import KEYS
from mla_ref.backend import available
from mla_ref.case import Case
from mla_ref.formats import cache_format
from mla_ref.problem import problem
from mla_ref.problems.latent_attention import LatentAttentionInputs
from oracles.bounds import ADMISSIBLE
from oracles.compare import within
from oracles.verify import OF_THE_OUTPUT

CASES = {
    "two_parts": ((1, 1), (130, 129), 16, 64, "fp8_ds_mla", {}),
    "ragged": ((1, 2, 0, 3), (300, 63, 64, 130), 5, 64, "fp8_ds_mla_pow2", {}),
    "one_head": ((16, 3), (500, 2), 1, 64, "fp8_ds_mla", {}),
    "empty": ((1, 1, 1), (0, 1, 0), 16, 64, "fp8_ds_mla", {}),
    "more_queries_than_keys": ((3, 2), (2, 0), 4, 64, "fp8_ds_mla", {}),
    "odd_blocks": ((1, 1, 1, 1), (65, 1, 190, 321), 16, 64, "fp8_ds_mla", {}),
    "pages_of_16": ((1, 2), (333, 70), 8, 16, "fp8_ds_mla", {}),
    "pages_of_32": ((2, 1), (65, 290), 8, 32, "fp8_e4m3", {}),
    "one_scale": ((1, 2, 0), (300, 63, 70), 5, 64, "fp8_e4m3", {"kv_scale": 0.375}),
    "pages_of_128": ((1, 1), (200, 129), 16, 128, "fp8_ds_mla", {}),
    "padded": (
        (1, 1), (200, 70), 16, 64, "fp8_ds_mla", {"entry_align": 256, "block_gap": 4096 + 16, "offset": 32},
    ),
    "peaky": ((1, 1), (450, 200), 16, 64, "fp8_ds_mla", {"regime": "peaky"}),
    "tiny": ((1, 1), (200, 130), 16, 64, "fp8_ds_mla", {"regime": "tiny"}),
    "cancelling": ((1, 1), (5, 9), 16, 64, "fp8_ds_mla", {"regime": "cancelling"}),
    "long": ((1, 1, 1), (900, 600, 1300), 16, 64, "fp8_ds_mla", {}),
    "many": ((1,) * 15, (70, 40, 129, 1, 96) * 3, 16, 64, "fp8_ds_mla", {}),
}  # fmt: skip


def case(name: str, seed: int) -> Case:
    *row, others = CASES[name]
    return decode_case(seed, *row, **others)


FREED = "            async_copy.mbarrier_arrive(bar_free.index(i_at), increment_count=False)\n"
SOURCE = Path(_gluon_decode_few_kernel.__file__).read_text(encoding="utf-8")
TURN = SOURCE[SOURCE.index("            if takes_float16:\n") : SOURCE.index(FREED)]
FREE = "            mbarrier.wait(bar_free.index(i_at), ((i_copy // PLACES) & 1) ^ 1)\n"
COPY = SOURCE[SOURCE.index(FREE) + len(FREE) : SOURCE.index("            i_copy += 1\n    gdc_")]
FITS = "fits = _fits(s_scales.index(i_next), unit_exponent)", "fits = True"

# Edits of the kernel's source, and the case whose verdict must notice.
PLANTED = {
    "codes_read_before_they_land": (
        "((i_copy + 1) // PLACES) & 1, pred", "((i_copy + 1) // PLACES) & 1 ^ 1, pred", "two_parts",
    ),
    "place_free_before_its_values_are_read": (TURN + FREED, FREED + TURN, "long"),
    "copied_before_the_place_is_free": (FREE + COPY, COPY + FREE, "long"),
    "scales_of_the_other_chunk": (
        "return b_scale_0, _load_scales(s_scale.slice(CHUNK,",
        "return b_scale_0, _load_scales(s_scale.slice(0,",
        "two_parts",
    ),
    "scales_of_the_next_block": ("            b_scale_0 = c_scale_0\n", "", "two_parts"),
    "scales_of_dead_keys": (
        "b_scale_1 = _live_scales(b_scale_1, i * BLOCK + CHUNK, items, i_item)", "pass", "two_parts",
    ),
    "a_tile_left_out": ("s_tiles.index(3)", "s_tiles.index(2)", "two_parts"),
    "a_half_left_out": ("+ s_halves.index(1).load(L)", "+ s_halves.index(0).load(L)", "two_parts"),
    "a_half_in_the_other_frame": ("gl.exp2(s_m.load(L_ROW) - b_top[None, :]) * b_one", "b_one", "peaky"),
    "sums_in_the_old_frame": ("b_l = b_l * b_alpha[:, :, None] +", "b_l = b_l +", "peaky"),
    "output_in_the_old_frame": (
        "            b_o = _rescaled(b_o, _owned(s_alpha.load(L_ROW), L_4, L_S))\n", "", "peaky",
    ),
    "a_tile_in_the_unit_of_another": ("index(3), L_P) * unit_3", "index(3), L_P) * unit_2", "two_parts"),
    "rope_in_no_unit": ("(b_q_pe * gl.exp2(-b_power)[:, :, None])", "b_q_pe", "two_parts"),
    "weights_of_the_other_chunk": ("_load_weights(s_weight, 1,", "_load_weights(s_weight, 0,", "two_parts"),
    "weights_in_no_unit": ("b_p * per_unit if TILED else b_p", "b_p", "long"),
    "masks_of_the_other_half": (" + o_key // 16 * 16", "", "ragged"),
    "rope_of_the_codes": ("i_block, ROPE_AT, bar", "i_block, 0, bar", "two_parts"),
    "rope_without_its_order": (
        "o_col_pe = (o_col_pe & 1) * 2 + (o_col_pe // 8) + (o_col_pe // 2 & 3) * 4", "pass", "one_scale",
    ),
    "output_without_its_scale": ("b_one = unit *", "b_one = 1.0 *", "one_scale"),
    "output_without_its_unit": ("unit * scale_unit /", "unit /", "long"),
    "float16_of_dead_codes": (
        "takes_float16 = i * BLOCK + BLOCK <= visible", "takes_float16 = True", "one_scale",
    ),
    "one_part_of_bfloat16": (
        "b_o = mma_v2(gl.convert_layout(b_low, L_W), b_v, b_o)", "pass", "cancelling",
    ),
}  # fmt: skip


def finite(b_code):
    codes = torch.from_numpy(np.asarray(b_code, dtype=np.uint8)).view(torch.float8_e4m3fn).float()
    return codes.nan_to_num(480.0)


def rope_keys(b_code):
    """Channels of four, the second and third in each other's place."""
    codes = finite(b_code)
    return array(codes.reshape(*codes.shape[:-1], -1, 2, 2).transpose(-1, -2).reshape(codes.shape).numpy())


def float16_values(b_code):
    """The same, and NaN as it is."""
    codes = torch.from_numpy(np.asarray(b_code, dtype=np.uint8)).view(torch.float8_e4m3fn).float()
    t, n, c = codes.shape
    parts = codes.reshape(t, n // 2, 2, c // 4, 2, 2).permute(0, 1, 4, 3, 5, 2)
    return array(parts.reshape(t, n, c).contiguous().numpy())


def keys(b_code):
    return array(
        torch.from_numpy(np.asarray(b_code, dtype=np.uint8)).view(torch.float8_e4m3fn).float().numpy()
    )


def values(b_code):
    """What belongs to (channel 1, channel 0, key 0) at the bits (key 0, channel 1, channel 0)."""
    codes = finite(b_code)
    t, n, c = codes.shape
    parts = codes.reshape(t, n // 2, 2, c // 4, 2, 2).permute(0, 1, 4, 3, 5, 2)
    return array(parts.reshape(t, n, c).contiguous().numpy())


ASM = {
    "_opaque": lambda x: x,
    "_rescaled": lambda b_o, b_factor: b_o * b_factor,
    "_keys": keys,
    "_rope_keys": rope_keys,
    "_values": values,
    "_float16_values": float16_values,
    "mma_v2": lambda a, b, acc: array(np.matmul(np.asarray(a, np.float32), np.asarray(b, np.float32)) + acc),
    # By every thread of eight warps.
    "async_copy": SimpleNamespace(
        mbarrier_arrive=lambda bar, increment_count: STAND_INS["mbarrier"].arrive(bar, 256)
    ),
}


def emulate(monkeypatch: pytest.MonkeyPatch, source: ModuleType = _gluon_decode_few_kernel) -> None:
    emulate_decode(monkeypatch, _gluon_decode_few_kernel, "mla_decode_few_kernel", ASM, source)


BACKEND = replace(gluon_decode_few.BACKEND, requires=available)
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
    emulate(monkeypatch, edited(_gluon_decode_few_kernel, good, bad, tmp_path))
    backend = replace(BACKEND, variants={})
    assert_shows(backend, case(name, seed), OF_THE_OUTPUT)


def scales_apart(seed: int, where: str) -> LatentAttentionInputs:
    """Scales beyond float16: those of a tile of every key, or of every block but a request's first."""
    inputs = problem("latent_attention").materialize(case("long", seed), torch.device("cpu"))
    scales = inputs.kv_cache.view(torch.float32)[..., 128:132]
    if where == "small_tile":
        scales[..., 1] *= 2.0**-40
        return inputs
    first = inputs.block_table[:, 0].long()
    kept = scales[first]
    scales *= 2.0**14
    scales[first] = kept
    return inputs._replace(ql_nope=inputs.ql_nope * 2.0**-14)


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("where", ["small_tile", "later_blocks"])
def test_scales_that_float16_does_not_hold(
    where: str, planted: bool, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = edited(_gluon_decode_few_kernel, *FITS, tmp_path) if planted else _gluon_decode_few_kernel
    emulate(monkeypatch, source)
    inputs = scales_apart(seed, where)
    want = ADMISSIBLE["latent_attention"](inputs, BACKEND.numerics)["out"]
    assert within("out", BACKEND.fn(*inputs).out, want).ok is not planted


# Scales of one tile and scores of an item's blocks; its unit is 2⁻⁸. Either end of what takes float16, and
# what is next to it, with weights up to the largest, 16.
EDGES = (
    (1.0, 0.0),
    (np.nextafter(np.float32(8), 0), 5.0),
    (np.nextafter(np.float32(16), 0), 9.0),
    (2.0**-8, 4.0),
    (8.0, 9.0),
    (np.nextafter(np.float32(8), 0), 9.0),
    (np.nextafter(np.float32(2.0**-8), 0), 9.0),
)
FLOAT16_BLOCKS = 4  # the first, the second, the fourth, the sixth
FITS_NEXT = "                takes_float16 = takes_float16 & fits\n", f"                {FITS[0]}\n"
EDGE_BUGS = {
    "a_binade_too_many": ("SPAN: gl.constexpr = gl.constexpr(11)", "SPAN: gl.constexpr = gl.constexpr(12)"),
    "a_weight_too_large": (
        "SLACK: gl.constexpr = gl.constexpr(4.0)",
        "SLACK: gl.constexpr = gl.constexpr(5.0)",
    ),
    "fits_if_the_next_block_does": ("".join(FITS_NEXT), "".join(FITS_NEXT[::-1])),
}


def edge_of_float16(seed: int) -> LatentAttentionInputs:
    """Scores are the rope part's first channel, exactly and in powers of two, whatever the scales."""
    edge = decode_case(seed, (1,), (KEYS * len(EDGES),), 1, KEYS, "fp8_ds_mla")
    inputs = problem("latent_attention").materialize(edge, torch.device("cpu"))
    pages = inputs.block_table[0, : len(EDGES)].long()
    scales = inputs.kv_cache.view(torch.float32)[..., 128:132]
    rope = inputs.kv_cache.view(torch.bfloat16)[..., 264:]
    for page, (scale, score) in zip(pages, EDGES, strict=True):
        scales[page] = 1.0
        scales[page, :, seed % 4] = float(scale)
        rope[page, :, 0] = score
    q_pe = torch.zeros_like(inputs.q_pe)
    q_pe[..., 0] = 1.0
    return inputs._replace(ql_nope=torch.zeros_like(inputs.ql_nope), q_pe=q_pe, softmax_scale=math.log(2.0))


@pytest.mark.parametrize("bug", [None, *EDGE_BUGS])
def test_the_edge_of_what_float16_holds(
    bug: str | None, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One item, whose blocks take float16 and bfloat16 in turn: which of them is seen, too."""
    planted = edited(_gluon_decode_few_kernel, *EDGE_BUGS[bug], tmp_path) if bug else _gluon_decode_few_kernel
    taken = []

    def counted(b_code):
        taken.append(b_code)
        return float16_values(b_code)

    monkeypatch.setitem(ASM, "_float16_values", counted)
    emulate(monkeypatch, planted)
    monkeypatch.setattr(gluon_decode, "plan", lambda *a, **k: gluon_decode.plan_for(1, *a, **k))
    inputs = edge_of_float16(seed)
    want = ADMISSIBLE["latent_attention"](inputs, BACKEND.numerics)["out"]
    assert within("out", BACKEND.fn(*inputs).out, want).ok is not bool(bug)
    if not bug:
        assert len(taken) == 2 * FLOAT16_BLOCKS  # by chunks


def test_more_rows_are_declined(seed: int) -> None:
    heavy = replace(case("two_parts", seed), q_lens=(2, 1))
    reason = gluon_decode_few.supports(heavy)
    assert reason is not None
    assert "32 rows" in reason


def test_a_plan_of_more_rows_is_refused() -> None:
    nothing = torch.zeros(1, dtype=torch.int32)
    wide = gluon_decode.Plan(*(nothing,) * 4, parts=66, lanes=2, num_slots=1, chunk=0)
    query, fmt = torch.zeros(1, 128, 576, dtype=torch.bfloat16), cache_format("fp8_ds_mla")
    with pytest.raises(ValueError, match=r"^schedule: has 2 lanes of 64 rows, must have 1$"):
        gluon_decode_few.attend(
            wide, query[..., :512], query[..., 512:], torch.zeros(1, 64, 656, dtype=torch.uint8),
            nothing[None], 1.0, fmt, nothing,
        )  # fmt: skip
