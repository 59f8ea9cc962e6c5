"""The rotation on answers that are exact, and its frequencies against their closed form."""

import math
from dataclasses import replace

import pytest
import torch

from mla_ref.case import Case
from mla_ref.config import YARN, MLAConfig, RopeConfig
from mla_ref.frequencies import inv_freq
from mla_ref.presets import PRESETS, preset
from mla_ref.problems.rope import PROBLEM, RopeInputs
from mla_ref.rope import BACKEND, cos_sin, rotate
from mla_ref.values import bell, integers
from oracles.bounds import ADMISSIBLE
from oracles.compare import within

V3 = preset("deepseek-v3").rope
KIMI = preset("kimi-k2").rope
PLAIN = RopeConfig()
HALVES = RopeConfig(interleaved=False)


def rope_case(config: MLAConfig, t: int, seed: int, dtype: str = "float32") -> RopeInputs:
    case = Case(problem="rope", config=config, q_lens=(t,), kv_lens=(t,), dtype=dtype, seed=seed)
    return PROBLEM.materialize(case, torch.device("cpu"))


@pytest.mark.parametrize("rope", [PLAIN, HALVES, V3, KIMI])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_position_zero_is_the_identity(rope, dtype, seed):
    x = bell(seed, "x", 3, 5, 64).to(dtype)
    assert torch.equal(rotate(x, torch.zeros(3, dtype=torch.int64), rope).x, x)


def test_a_nope_model_keeps_its_channels(seed):
    x = bell(seed, "x", 3, 5, 64)
    assert rotate(x, torch.arange(3), RopeConfig(rotate=False)).x is x


@pytest.mark.parametrize("rope", [PLAIN, HALVES, V3])
def test_no_rope_channels(rope):
    assert inv_freq(rope, 0).shape == (0,)
    assert rotate(torch.zeros(3, 5, 0), torch.arange(3), rope).x.shape == (3, 5, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_both_pairings_are_one_rotation_of_permuted_channels(dtype, seed):
    """Channel 2i of an interleaved row is channel i of a half-split one, 2i+1 is r/2 + i."""
    x, positions = bell(seed, "x", 7, 3, 64).to(dtype), integers(seed, "positions", 163_840, 7)
    order = torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2)])
    interleaved = rotate(x, positions, PLAIN).x
    halves = rotate(x[..., order], positions, HALVES).x
    assert torch.equal(interleaved[..., order], halves)
    assert not torch.equal(interleaved, rotate(x, positions, HALVES).x)


@pytest.mark.parametrize("rope", [PLAIN, HALVES])
def test_one_hot_channels_turn_within_their_pair(rope):
    """Row c of x is the unit vector of channel c; it becomes cos there and ± sin in its partner."""
    positions = torch.full((8,), 1000)
    got = rotate(torch.eye(8, dtype=torch.float64)[:, None], positions, rope).x[:, 0]
    cos, sin = (table[0] for table in cos_sin(rope, positions[:1], 8))
    want = torch.zeros(8, 8, dtype=torch.float64)
    for i in range(4):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + 4)
        want[a, a], want[a, b], want[b, a], want[b, b] = cos[i], sin[i], -sin[i], cos[i]
    assert torch.equal(got, want)


def test_views_are_rotated_as_their_copies(seed):
    """q_pe is a slice of q, k_pe of the down-projection: their strides have nothing in common."""
    whole, positions = bell(seed, "q", 5, 4, 192).float(), torch.arange(5) * 1000
    view = whole[..., 128:]
    assert not view.is_contiguous()
    for rope in (PLAIN, HALVES):
        assert torch.equal(rotate(view, positions, rope).x, rotate(view.clone(), positions, rope).x)
        every_other = torch.stack([positions, positions], dim=1).flatten()[::2]
        assert torch.equal(rotate(view, every_other, rope).x, rotate(view, positions, rope).x)


def test_each_token_turns_by_its_own_position(seed):
    x, positions = bell(seed, "x", 9, 2, 32).float(), integers(seed, "positions", 200_000, 9)
    whole = rotate(x, positions, V3).x
    for t in range(9):
        assert torch.equal(rotate(x[t : t + 1], positions[t : t + 1], V3).x[0], whole[t])


def test_the_table_scale_multiplies_the_rotation(seed):
    """A power of two commutes with every rounding."""
    x, positions = bell(seed, "x", 4, 2, 64).float(), torch.tensor([1, 40, 2000, 131_071])
    scaled = RopeConfig(scaling=YARN, factor=40.0, attention_factor=0.5)
    same = RopeConfig(scaling=YARN, factor=40.0, attention_factor=1.0)
    assert torch.equal(rotate(x, positions, scaled).x, 0.5 * rotate(x, positions, same).x)


def test_yarn_leaves_fast_pairs_and_slows_down_slow_ones():
    """V3: 32 turns over 4096 positions are made by pair 10.47 and one turn by pair 22.51, so 10 and 23."""
    plain, yarn = inv_freq(PLAIN, 64), inv_freq(V3, 64)
    assert torch.equal(yarn[:11], plain[:11])
    assert torch.equal(yarn[23:], plain[23:] / 40.0)
    between = yarn[11:23] / plain[11:23]
    assert bool((between[1:] < between[:-1]).all())
    assert bool((between < 1.0).all())
    assert bool((between > 1.0 / 40.0).all())


def test_the_ramp_is_linear_in_the_pair():
    """Pair 16 of V3 has ramp (16 - 10) / 13; its frequency is 10 ** -2 times the blend."""
    ramp = 6.0 / 13.0
    assert f"{inv_freq(V3, 64)[16]:.12e}" == f"{0.01 * (1.0 - ramp) + 0.01 / 40.0 * ramp:.12e}"


def test_equal_betas_give_a_step():
    """Kimi-K2: both betas are 1, so the ramp spans the one pair that turns once."""
    plain, yarn = inv_freq(RopeConfig(theta=50000.0), 64), inv_freq(KIMI, 64)
    pair = 64 * math.log(4096 / (2 * math.pi)) / (2 * math.log(50000))
    assert math.floor(pair) == 19
    assert torch.equal(yarn[:20], plain[:20])
    assert torch.equal(yarn[20:], plain[20:] / 32.0)


def test_an_untruncated_ramp_has_fractional_ends():
    yarn = inv_freq(RopeConfig(scaling=YARN, factor=40.0, truncate=False), 64)
    plain = inv_freq(PLAIN, 64)
    assert torch.equal(yarn[:11], plain[:11])
    assert bool((yarn[11:23] != inv_freq(V3, 64)[11:23]).all())


def test_a_ramp_ends_no_later_than_at_pair_r_less_one():
    """Pair 2.2 turns a million times, and none once: of eight pairs, the last that is counted is the end."""
    longest = RopeConfig(scaling=YARN, factor=4.0, original_max_position=10**9, beta_fast=1e6)
    plain, yarn = inv_freq(PLAIN, 8), inv_freq(longest, 8)
    assert torch.equal(yarn[:3], plain[:3])
    assert f"{yarn[3] / plain[3]:.12f}" == f"{1.0 - 0.75 / (7 - 2):.12f}"


def test_a_ramp_without_width_does_not_divide_by_zero():
    """Both ends clipped to the same pair."""
    yarn = inv_freq(RopeConfig(scaling=YARN, factor=4.0, original_max_position=4), 8)
    assert bool(yarn.isfinite().all())


def test_frequencies_fall_geometrically():
    frequency = inv_freq(RopeConfig(theta=16.0), 8)
    assert frequency.dtype == torch.float64
    assert torch.equal(frequency, torch.tensor([1.0, 0.5, 0.25, 0.125], dtype=torch.float64))


@pytest.mark.parametrize("name", ["deepseek-v3", "moonlight-16b-a3b", "kimi-linear-48b", "minicpm3-4b"])
def test_cases_reach_the_longest_position(name, seed):
    inputs = rope_case(preset(name), 50, seed)
    assert inputs.positions[0] == 0
    assert inputs.positions[-1] == max(163_840, preset(name).max_position)
    octaves = inputs.positions[1:-1].double().log2().long().bincount(minlength=18)
    assert int((octaves > 0).sum()) > 9, "positions crowd into a few octaves"
    PROBLEM.check(inputs)
    PROBLEM.check_values(inputs)


@pytest.mark.parametrize("t", [0, 1, 2])
def test_cases_of_few_tokens(t, seed):
    inputs = rope_case(preset("deepseek-v3"), t, seed)
    assert rotate(*inputs).x.shape == (t, 128, 64)
    if t == 1:
        assert inputs.positions[0] > 0, "where nothing is rotated, nothing can be wrong"
    else:
        assert inputs.positions.tolist() == [0, 163_840][:t]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("name", [name for name in PRESETS if preset(name).qk_rope_head_dim])
def test_every_model_is_within_the_bound_at_every_position(name, dtype, seed):
    """float64 angles: at position 163,840 a float32 one is off by 0.01, a bfloat16 one by whole turns."""
    inputs = rope_case(replace(preset(name), num_heads=2), 40, seed, dtype)
    finding = within("x", rotate(*inputs).x, ADMISSIBLE["rope"](inputs, BACKEND.numerics)["x"], "t h r")
    assert finding.ok, finding.detail


GOOD = RopeInputs(torch.zeros(3, 2, 4), torch.arange(3), PLAIN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 2, 5)}, "x: r=5, must be even"),
        ({"x": torch.zeros(3, 4)}, r"x: shape \[3, 4\] has 2 axes"),
        ({"x": torch.zeros(3, 2, 4, dtype=torch.int32)}, "x: dtype is int32, must be bfloat16"),
        ({"positions": torch.arange(4)}, r"positions: t=4, but t=3 elsewhere"),
        ({"positions": torch.arange(3, dtype=torch.int32)}, "positions: dtype is int32, must be int64"),
        ({"positions": torch.tensor([0, -1, 2])}, r"positions\[1\]: is -1, must not be negative"),
    ],
)
def test_bad_inputs_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        rotate(*GOOD._replace(**changes))
