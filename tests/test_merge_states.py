"""Merging partial attention: closed forms, the monoid's laws, and states that hold nothing but NaN."""

import math

import pytest
import torch

from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.merge_states import merge, merge_states
from mla_ref.problems.merge_states import MergeStatesInputs, materialize
from mla_ref.values import bell, permutation

CPU = torch.device("cpu")
NAN = float("nan")
INF = float("inf")
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
TINY = MLAConfig(
    name="tiny",
    hidden_size=64,
    num_heads=3,
    q_lora_rank=None,
    kv_lora_rank=128,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)


def rows(*states: tuple[float, float], dtype: torch.dtype = torch.float32) -> MergeStatesInputs:
    """One row of one channel: (out, lse) of each state."""
    outs = torch.tensor([out for out, _ in states], dtype=dtype)[:, None, None, None]
    return MergeStatesInputs(outs, torch.tensor([lse for _, lse in states])[:, None, None])


def merged(*states: tuple[float, float], dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    result = merge_states(*rows(*states, dtype=dtype))
    return float(result.out), float(result.lse)


def single(x: float) -> float:
    """x rounded to float32."""
    return float(torch.tensor(x))


@DTYPES
def test_equal_masses_average(dtype: torch.dtype) -> None:
    # Weights e⁰ and e⁰: (2 + 6) / 2 = 4; -96 + ln 2.
    out, lse = merged((2.0, -96.0), (6.0, -96.0), dtype=dtype)
    assert out == 4.0
    assert lse == single(-96.0 + math.log(2.0))


@DTYPES
def test_a_state_e200_times_heavier_decides(dtype: torch.dtype) -> None:
    # e⁻²⁰⁰ is not 0, but far below the last bit of a sum of order 1: 7 and 1000 stay.
    assert merged((-5.0, 800.0), (7.0, 1000.0), dtype=dtype) == (7.0, 1000.0)


def test_unequal_masses_weigh_by_their_exponential() -> None:
    # Masses 2 and 8, values 0 and 10: 80 / 10 = 8, lse ln 10. With powers of two it would be 7.23. The two
    # logarithms are rounded to float32 on the way in, so the exact answer is 8 + 3·10⁻⁷, which float32 keeps.
    light, heavy = (float(torch.tensor(math.log(mass))) for mass in (2.0, 8.0))
    out, lse = merged((0.0, light), (10.0, heavy), dtype=torch.float64)
    ratio = math.exp(light - heavy)
    assert single(out) == single(10.0 / (1.0 + ratio))
    assert lse == single(heavy + math.log1p(ratio))


@DTYPES
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 6e4])
@pytest.mark.parametrize("lse", [-1000.0, -0.5, 0.0, 3.25, 1000.0])
def test_empty_is_neutral_bit_for_bit(dtype: torch.dtype, garbage: float, lse: float) -> None:
    for out in (1.0, -0.1, 0.0, 3e4):
        want = float(torch.tensor(out, dtype=dtype)), lse
        assert merged((out, lse), dtype=dtype) == want
        assert merged((garbage, -INF), (out, lse), dtype=dtype) == want
        assert merged((out, lse), (garbage, -INF), (garbage, -INF), dtype=dtype) == want


@DTYPES
@pytest.mark.parametrize("count", [1, 2, 5])
def test_nothing_but_empty_is_empty(dtype: torch.dtype, count: int) -> None:
    assert merged(*[(NAN, -INF)] * count, dtype=dtype) == (0.0, -INF)


def test_rows_heads_and_states_keep_to_themselves() -> None:
    # State i, row t, head h holds 100 i + 10 t + h in both channels; it alone has mass if i == (t + h) % 3.
    i, t, h = torch.meshgrid(torch.arange(3), torch.arange(4), torch.arange(5), indexing="ij")
    outs = (100.0 * i + 10 * t + h)[..., None].expand(3, 4, 5, 2)
    alone = i == (t + h) % 3
    result = merge_states(outs.masked_fill(~alone[..., None], NAN), torch.where(alone, 1.0 * h - t, -INF))
    t, h = t[0], h[0]
    assert torch.equal(result.out, (100.0 * ((t + h) % 3) + 10 * t + h)[..., None].expand(4, 5, 2))
    assert torch.equal(result.lse, 1.0 * h - t)


@pytest.mark.parametrize("kv_lens", [(5,), (5, 300), (0, 5, 70, 0, 1)], ids=str)
def test_hostile_inputs_never_give_nan(kv_lens: tuple[int, ...], seed: int) -> None:
    case = Case(problem="merge_states", config=TINY, q_lens=(40,) * len(kv_lens), kv_lens=kv_lens, seed=seed)
    inputs = materialize(case, CPU)
    empty = inputs.lses == -INF
    assert inputs.outs[empty].isnan().all()
    assert inputs.outs[~empty].isfinite().all()
    for i, kv_len in enumerate(kv_lens):
        assert bool(empty[i].all()) == (kv_len == 0)
    assert empty.all(0).any()
    assert inputs.lses[~empty].abs().max() > 200
    assert inputs.outs.stride(2) == 16 + 64
    result = merge_states(*inputs)
    assert result.out.isfinite().all()
    assert torch.equal(result.lse == -INF, empty.all(0))
    assert (result.out[empty.all(0)] == 0).all()
    assert not result.lse.isnan().any()


def test_the_order_of_two_states_does_not_matter(seed: int) -> None:
    outs, lses = bell(seed, "outs", 2, 50, 3, 8), bell(seed, "lses", 2, 50, 3) * 8.0
    for got, want in zip(merge(outs.flip(0), lses.flip(0)), merge(outs, lses), strict=True):
        assert torch.equal(got, want)  # addition commutes, even when rounded


def test_any_order_and_any_grouping_of_six_states(seed: int) -> None:
    # In float64, and equal once rounded to float32: what the order changes is far below its last bit.
    outs, lses = bell(seed, "outs", 6, 50, 3, 8), bell(seed, "lses", 6, 50, 3) * 8.0
    order = permutation(seed, "order", 6)
    at_once = merge(outs, lses)
    assert (at_once[0].float() <= outs.amax(0).float()).all()
    assert (at_once[0].float() >= outs.amin(0).float()).all()
    one_by_one = outs[0], lses[0]
    for state in zip(outs[1:], lses[1:], strict=True):
        one_by_one = merge(*(torch.stack(pair) for pair in zip(one_by_one, state, strict=True)))
    halves = merge(outs[:2], lses[:2]), merge(outs[2:], lses[2:])
    by_halves = merge(*(torch.stack(pair) for pair in zip(*halves, strict=True)))
    for result in (merge(outs[order], lses[order]), one_by_one, by_halves):
        for got, want in zip(result, at_once, strict=True):
            assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"lses": torch.tensor([[[0.0]], [[INF]]])}, r"lses\[1, 0, 0\]: is inf, must be finite or -inf"),
        ({"lses": torch.tensor([[[NAN]], [[0.0]]])}, r"lses\[0, 0, 0\]: is nan, must be finite or -inf"),
        ({"lses": torch.zeros(2, 1, 1).bfloat16()}, r"lses: dtype is bfloat16, must be float32"),
        ({"lses": torch.zeros(1, 1, 1)}, r"lses: s=1, but s=2 elsewhere \(contract \[s t h\]\)"),
        ({"lses": torch.zeros(2, 1, 4)}, r"lses: h=4, but h=1 elsewhere"),
        ({"outs": torch.zeros(0, 1, 1, 1), "lses": torch.zeros(0, 1, 1)}, r"outs: s=0, but a merge needs"),
        ({"outs": torch.zeros(2, 1, 1, 1, dtype=torch.int32)}, r"outs: dtype is int32, must be bfloat16 or"),
    ],
)
def test_bad_input_is_named(edit, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_states(*rows((1.0, 0.0), (2.0, 0.0))._replace(**edit))
