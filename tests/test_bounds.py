"""The bounds hold for every right kernel, are reached by some, and round as the hardware does."""

import importlib
import math
import os
import random
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from random_trials import random_kernel
from simulated_kernel import Schedule, simulated

from evals import flash_latent
from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.config import MLAConfig, RopeConfig
from mla_ref.formats import cache_format
from mla_ref.numerics import Numerics
from mla_ref.presets import preset
from mla_ref.problem import problem
from mla_ref.problems.latent_attention import LatentAttentionInputs
from mla_ref.values import bell
from oracles.bounds import (
    ADMISSIBLE,
    NO_CLAIM,
    Admissible,
    Ball,
    _greatest,
    attended,
    gamma,
    intersection,
    linear,
    materialised,
    nearest,
    new_entries,
    number_format,
    rms_norm,
    rotation,
    spacing,
    stored_parts,
)
from oracles.compare import within
from oracles.coverage import draw
from oracles.mutants import LATENT
from oracles.precision_mutants import MANY, NUMERICS, kernel
from oracles.verdict import FAIL, PASS
from oracles.verify import find_backend, judge

NARROW = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
CPU = torch.device("cpu")


def spread(count: int) -> torch.Tensor:
    """Values of every magnitude that the types tell apart, ties and neighbours of ties among them."""
    draw = random.Random(count)
    values = [0.0, -0.0, math.inf, -math.inf, math.nan]
    for _ in range(count):
        value = math.ldexp(draw.randrange(1, 2**53), draw.randrange(-200, 80))
        short = math.ldexp(draw.randrange(1, 2**13), draw.randrange(-150, 120))
        values += [value, -short, math.nextafter(short, 0.0), math.nextafter(short, math.inf)]
    return torch.tensor(values, dtype=torch.float64)


def by_definition(x: float, dtype: torch.dtype) -> float:
    """The nearest multiple of the spacing, ties to even, in exact arithmetic."""
    info = torch.finfo(dtype)
    if not math.isfinite(x) or x == 0.0:
        return x
    exponent = max(math.frexp(x)[1] - 1, math.frexp(info.tiny)[1] - 1)
    step = Fraction(2) ** exponent * Fraction(info.eps)
    value = round(Fraction(x) / step) * step
    return math.copysign(math.inf if abs(value) > info.max else float(abs(value)), x)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_nearest_is_one_rounding_to_nearest_even(dtype):
    x = spread(500)
    want = torch.tensor([by_definition(value, dtype) for value in x.tolist()], dtype=torch.float64)
    got = nearest(x, dtype)
    assert torch.equal(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))


def test_nearest_agrees_with_the_hardware_in_float32():
    x = spread(500)
    assert torch.equal(nearest(x, torch.float32).nan_to_num(7.0), x.float().double().nan_to_num(7.0))


def test_nearest_does_not_round_twice():
    # Just above the middle of two bfloat16 neighbours, by less than float32 can tell.
    x = torch.tensor(1.0 + 2.0**-8 + 2.0**-40, dtype=torch.float64)
    assert nearest(x, torch.bfloat16).item() == 1.0 + 2.0**-7
    assert x.float().bfloat16().item() == 1.0


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_spacing_is_that_of_the_type(dtype):
    info = torch.finfo(dtype)
    x = torch.tensor([1.0, 1.5, 2.0, 0.0, info.tiny, info.max], dtype=torch.float64)
    at_max = 2.0 ** (math.frexp(info.max)[1] - 1) * info.eps
    want = [info.eps, info.eps, 2 * info.eps, info.tiny * info.eps, info.tiny * info.eps, at_max]
    assert spacing(x, dtype).tolist() == want


def test_gamma_bounds_a_product_of_roundings_and_gives_up_in_time():
    u = Fraction(1, 2**24)
    assert gamma(1000, 2.0**-24).item() > float((1 + u) ** 1000 - 1)
    assert gamma(2.0**24, 2.0**-24).item() == NO_CLAIM


def test_a_materialised_value_is_known_unless_a_boundary_is_near():
    far, near = 1.0 + 2.0**-9, 1.0 + 2.0**-8
    ball = Ball(torch.tensor([far, near]).double(), torch.tensor([2.0**-20, 2.0**-20]).double())
    cut = materialised(ball, "bfloat16", torch.bfloat16)
    assert cut.radius.tolist() == [0.0, 2.0**-8]
    assert (cut.mid - cut.radius).tolist() == [1.0, 1.0]
    assert (cut.mid + cut.radius)[1].item() == 1.0 + 2.0**-7


def test_a_float64_is_narrowed_by_way_of_float32_or_at_once():
    value = 1.0 + 2.0**-8 + 2.0**-40  # at once 1 + 2⁻⁷, and by way of float32 a tie, so 1
    exact = Ball(torch.tensor([value], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    for query, least in ((torch.float64, 1.0), (torch.float32, 1.0 + 2.0**-7)):
        cut = materialised(exact, "bfloat16", query)
        assert (cut.mid - cut.radius).item() == least
        assert (cut.mid + cut.radius).item() == 1.0 + 2.0**-7


def test_formats_are_those_of_ieee():
    half = number_format("float16", torch.bfloat16)
    assert (half.roundoff, half.underflow, half.flush) == (2.0**-11, 2.0**-25, 2.0**-14)
    assert number_format("input", torch.bfloat16).roundoff == 2.0**-8
    assert number_format("exact", torch.bfloat16).roundoff == 0.0
    with pytest.raises(ValueError, match="'bf16' is no torch dtype"):
        number_format("bf16", torch.bfloat16)


def test_a_layers_steps_stay_inside_their_balls():
    draw = torch.Generator().manual_seed(3)
    x, w = torch.randn(64, 96, generator=draw), torch.randn(48, 96, generator=draw)
    acc = number_format("float32", torch.float32)
    given = Ball(x.double(), torch.zeros(64, 96, dtype=torch.float64))
    ball = linear(given, w.double(), Numerics(), acc)
    assert ((x @ w.T).double() - ball.mid).abs().le(ball.radius).all()
    norm = rms_norm(given, w[0].double(), 1e-6, 1.5, acc)
    got = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * 1.5 * w[0]
    assert (got.double() - norm.mid).abs().le(norm.radius).all()
    assert norm.radius.le(2.0**-14 * norm.mid.abs() + 2.0**-100).all()


def test_a_projection_may_flush_what_is_denormal():
    tiny = torch.tensor([[2.0**-70]], dtype=torch.float64)
    ball = linear(
        Ball(tiny, torch.zeros_like(tiny)), tiny, Numerics(), number_format("float32", torch.float32)
    )
    assert ball.mid.item() == 2.0**-140
    assert ball.radius.item() >= ball.mid.item()


def keys_of_one_query(count: int, scores: float, value: float) -> LatentAttentionInputs:
    """A key whose score is 0, and others; in channel 1 it is 0 itself, and they are what is given."""
    config = MLAConfig(
        name="few", hidden_size=64, num_heads=1, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    case = Case(
        problem="latent_attention", config=config, q_lens=(1,), kv_lens=(count,), dtype="float32",
        cache_format="fp32", block_size=count,
    )  # fmt: skip
    inputs = problem(case.problem).materialize(case, CPU)
    ql_nope, kv_cache = torch.zeros_like(inputs.ql_nope), torch.zeros_like(inputs.kv_cache)
    ql_nope[0, 0, 0] = 1.0
    page = kv_cache[inputs.block_table[0, 0]]
    page[1:, 0], page[1:, 1] = scores, value
    q_pe = torch.zeros_like(inputs.q_pe)
    return inputs._replace(ql_nope=ql_nope, q_pe=q_pe, kv_cache=kv_cache, softmax_scale=1.0)


@pytest.mark.parametrize(
    ("field", "splits", "scores", "value"),
    [("p", 1, -18.0, 1.0), ("partial", 2, 0.0, 2.0**-26)],
    ids=["weights", "partial results"],
)
def test_what_vanishes_in_a_narrow_type_may_be_lost(field, splits, scores, value):
    inputs = keys_of_one_query(300, scores, value)
    backend = simulated("latent_attention", Numerics(**{field: "float16"}), Schedule(splits=splits))
    out = backend.fn(*inputs).out
    assert out[0, 0, 1] == 0.0
    for numerics, ok in ((backend.numerics, True), (replace(backend.numerics, **{field: "exact"}), False)):
        want = ADMISSIBLE["latent_attention"](inputs, numerics)["out"]
        assert want.mid[0, 0, 1] > 0.0
        assert within("out", out, want).ok is ok


def test_every_merge_has_a_logarithm_and_an_exponential_of_its_own():
    inputs, rough = keys_of_one_query(30, 0.0, 1.0), Numerics(max_splits=9, exp_error=64.0, log_error=64.0)
    once, often = (
        ADMISSIBLE["latent_attention"](inputs, replace(rough, merge_depth=depth))["lse"].radius.item()
        for depth in (1, 8)
    )
    assert often - once >= 7 * (64 + 64) * 2.0**-24


@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "fp8_ds_mla_pow2"])
def test_a_scale_of_a_tile_is_off_by_few_roundings(fmt, seed):
    kv_c, k_pe, none = bell(seed, "kv_c", 4, 256).float(), torch.zeros(4, 64), torch.tensor(math.nan)
    entries = cache_format(fmt).encode(kv_c, k_pe, none)
    balls = [Ball(x.double(), torch.zeros_like(x, dtype=torch.float64)) for x in (kv_c, k_pe)]
    for bits, ok in ((0, True), (1, fmt == "fp8_ds_mla"), (8, False), (-8, False)):
        stored = entries.clone()
        scales = stored[:, 256:264].contiguous().view(torch.int32) + bits
        stored[:, 256:264] = scales.view(torch.uint8)
        scale = next(
            part for part in stored_parts(cache_format(fmt), stored, *balls, none) if part.name == "scale"
        )
        assert within("scale", scale.got, scale.want).ok is ok


def test_a_norm_of_what_may_be_next_to_nothing_is_bounded_by_its_epsilon():
    """Of numbers that may all be 0: no scale is above that of the epsilon alone."""
    mid = torch.full((1, 4), 1e-3, dtype=torch.float64)
    near = Ball(mid, torch.full_like(mid, 1e-2))
    radius = rms_norm(near, torch.ones(4).double(), 1e-6, 1.0, number_format("float32", torch.float32)).radius
    assert (radius > 0.0).all()
    assert (radius < 2.0 * near.size() * 1e-6**-0.5).all()


def test_a_rotation_by_any_angle_at_all_keeps_a_pair_within_twice_its_size():
    x = Ball(torch.ones(1, 1, 2, dtype=torch.float64), torch.zeros(1, 1, 2, dtype=torch.float64))
    numerics = Numerics(angle="bfloat16")
    far = rotation(x, torch.tensor([100_000]), RopeConfig(), numerics, torch.float32)
    assert (far.radius >= 2.0).all()
    assert (far.radius < 4.0 + 2.0**-15).all()


def test_what_is_encoded_from_float64_passes_through_float32_and_its_denormals():
    kept, lost = 2.0**-140, 2.0**-140 + 2.0**-152
    given = torch.tensor([[kept, lost]], dtype=torch.float64)
    ball, _ = new_entries(SimpleNamespace(kv_c=given, k_pe=given), Numerics())
    assert ball.radius[0, 0] == 0.0
    assert ball.radius[0, 1] >= lost - given.float().double()[0, 1] > 0.0


def test_the_intersection_is_what_both_hold():
    a, b = (
        Ball(*(torch.tensor([x], dtype=torch.float64) for x in ball)) for ball in ((0.0, 3.0), (2.0, 2.0))
    )
    for both in (intersection(a, b), intersection(b, a)):
        assert (both.mid - both.radius).item() == 0.0
        assert (both.mid + both.radius).item() == 3.0


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 5), (3, 5), (5, 5), (4, 2), (2, 0)])
def test_the_greatest_value_of_every_row_is_among_the_keys_that_it_sees(rows, keys, seed):
    values = bell(seed, "values", 2, keys, 3).double()
    seen = torch.arange(keys)[None, :] <= torch.arange(rows)[:, None] + (keys - rows)
    for row in range(rows):
        live = values[:, seen[row]]
        if live.shape[1]:
            assert torch.equal(_greatest(seen, values)[:, row], live.amax(1))


LAGGING = [
    Schedule(tile=1, slack=1000.0),
    Schedule(tile=1, slack=1000.0, base2=False),
    Schedule(tile=1, twice=True),
    Schedule(tile=1, twice=True, slack=8.0, base2=False),
]


@pytest.mark.parametrize("schedule", LAGGING, ids=["lazy", "lazy, base e", "twice", "twice and lazy, base e"])
def test_an_exponent_relative_to_an_older_maximum_is_off_by_more(schedule):
    """By what subtracting a number as far away is rounded by: the oldest key's score, which has no weight.

    The newer keys' are next to 0 and their products are exact, so nothing else leaves room for that.
    """
    config = MLAConfig(
        name="lag", hidden_size=64, num_heads=64, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    case = Case(
        problem="latent_attention", config=config, q_lens=(1,), kv_lens=(3,), dtype="float64",
        cache_format="fp32", block_size=4,
    )  # fmt: skip
    contract = problem(case.problem)
    inputs = contract.materialize(case, CPU)
    ql_nope, kv_cache = torch.zeros_like(inputs.ql_nope), torch.zeros_like(inputs.kv_cache)
    ql_nope[0, :, 0] = 1.0 + torch.arange(64, dtype=torch.float64) / 1000.0
    page = kv_cache[inputs.block_table[0, 0]]
    page[:3, 0] = torch.tensor([-9000.0 if schedule.twice else -640.0, 2.0**-7, 2.0**-6])
    page[1, 1] = 1.0  # of the output, the share of this key
    inputs = inputs._replace(
        ql_nope=ql_nope, q_pe=torch.zeros_like(inputs.q_pe), kv_cache=kv_cache, softmax_scale=1.0
    )
    backend = simulated(case.problem, Numerics(dot_roundings=0.0), schedule)
    out = backend.fn(*inputs).out

    def holds(numerics: Numerics) -> bool:
        want = ADMISSIBLE[case.problem](inputs, numerics)["out"]
        return within("out", out, want, contract.output_shapes["out"], inputs).ok

    assert holds(backend.numerics)
    assert not holds(replace(backend.numerics, slack=0.0))


def test_kernels_declare_how_far_their_maximum_lags():
    pytest.importorskip("triton.experimental.gluon")
    kernel = importlib.import_module("mla_fast._gluon_decode_kernel")
    for name in ("gluon_decode", "gluon_decode_fp8"):
        assert find_backend(f"mla_fast.{name}").numerics.slack == kernel.SLACK.value
    few = importlib.import_module("mla_fast._gluon_decode_few_kernel")
    assert find_backend("mla_fast.gluon_decode_few").numerics.slack == few.SLACK.value
    assert find_backend("evals.flash_latent").numerics.slack == flash_latent.SLACK
    assert find_backend("mla_fast.gluon_prefill").numerics.slack == math.inf


def rejected(count: int, seed: int) -> list[str]:
    draws, failures = random.Random(seed), []
    for i in range(count):
        name = draws.choice(("latent_attention", "attention"))
        case, backend = draw(name, seed, i), random_kernel(draws, name)
        for verdict in judge(backend, case, oracles=("value", "lse", "empty_rows")):
            if verdict.status != PASS:
                failures.append(f"{verdict.detail} {backend.name} {backend.numerics} {case.to_json()}")
    return failures


def test_no_right_kernel_is_rejected():
    assert rejected(60, 1) == []


@pytest.mark.slow
def test_no_right_kernel_is_rejected_in_ten_thousand_cases():
    assert rejected(int(os.environ.get("MLA_VERIFY_CASES", "10000")), 2) == []


def uncovered(got: torch.Tensor, want: Admissible) -> float:
    """The largest error over its bound, what the output's own rounding explains taken off."""
    error = (got.double() - want.mid).abs()
    half = 0.5 * spacing(torch.maximum(got.double().abs(), want.mid.abs()), want.dtype)
    ratio = (error - half).clamp(min=0.0) / want.radius
    return float(ratio[want.radius > 0].max())


def worst_weights_case() -> Case:
    """Two keys whose weights round the same way, with values of both signs: see the test."""
    config = MLAConfig(
        name="two keys",
        hidden_size=16,
        num_heads=1,
        q_lora_rank=None,
        kv_lora_rank=2,
        qk_nope_head_dim=2,
        qk_rope_head_dim=2,
        v_head_dim=2,
    )
    return Case(
        problem="latent_attention",
        config=config,
        q_lens=(1,),
        kv_lens=(65,),
        dtype="float32",
        cache_format="fp32",
    )


def test_the_bound_is_reached_within_a_factor_of_two():
    """64 keys whose weight bfloat16 rounds up by its whole roundoff, against one that is exact."""
    case = worst_weights_case()
    inputs = problem("latent_attention").materialize(case, CPU)
    query = torch.tensor([[[1.0, 0.0]]])
    # exp(s) just above 1 + 2^-8: the middle between the two neighbours 1 and 1 + 2^-7, seen from 0.5.
    score = math.log((1.0 + 2.0**-8 + 2.0**-20) / 2.0) / inputs.softmax_scale
    entries = torch.tensor([[0.0, -1.0, 0.0, 0.0]] + [[score, 1.0, 0.0, 0.0]] * 64)
    for i, entry in enumerate(entries):
        block = int(inputs.block_table[0, i // case.block_size])
        inputs.kv_cache[block, i % case.block_size] = entry
    inputs = inputs._replace(ql_nope=query, q_pe=torch.zeros(1, 1, 2))
    kernel = simulated("latent_attention", Numerics(p="bfloat16", sum_rounded_p=False), Schedule(tile=128))
    want = ADMISSIBLE["latent_attention"](inputs, kernel.numerics)["out"]
    ratio = uncovered(kernel.fn(*inputs).out, want)
    assert 0.5 < ratio <= 1.0


@pytest.mark.parametrize(("least", "status"), [(0.0, PASS), (2.0**-30, FAIL)])
def test_a_key_is_missed_that_weighs_next_to_nothing(least, status):
    """In a channel of its own an error is a share of the key's weight, and not of the weight's root."""
    contract = problem("latent_attention")
    run = kernel(exp=lambda weight, request: weight.masked_fill(weight < least, 0.0))
    backend = Backend("light", contract.name, lambda *args: run(contract.inputs(*args)), NUMERICS)
    case = replace(MANY, config=preset("a.x-k2").shard(16), kv_lens=(300, 83))  # whose steps reach 2^-33
    (verdict,) = judge(backend, case, oracles=("graded",))
    assert verdict.status == status
    assert verdict.worst.ratio < 1.0 if status == PASS else verdict.worst.ratio > 50.0


def test_a_form_that_the_problem_does_not_have_is_refused():
    latent = problem("latent_attention").materialize(LATENT, CPU)
    with pytest.raises(ValueError, match="form is 'absorbed', must be latent for LatentAttentionInputs"):
        ADMISSIBLE["latent_attention"](latent, Numerics(form="absorbed"))
    expanded = problem("attention").materialize(replace(LATENT, problem="attention"), CPU)
    with pytest.raises(
        ValueError, match="form is 'latent', must be absorbed or expanded for AttentionInputs"
    ):
        ADMISSIBLE["attention"](expanded, Numerics())


def test_ill_conditioned_rows_are_counted_and_bounded_by_their_values():
    case = replace(LATENT, regime="huge", dtype="bfloat16")
    inputs = problem("latent_attention").materialize(case, CPU)
    sharp = attended(inputs, Numerics(), torch.bfloat16)
    coarse = attended(inputs, Numerics(accumulate="bfloat16"), torch.bfloat16)
    rows = sum(case.q_lens) * case.config.num_heads
    assert sharp[2] == 0
    assert coarse[2] == rows
    assert coarse[0].radius.isfinite().any()


def test_the_declared_roundings_widen_the_bound():
    inputs = problem("latent_attention").materialize(LATENT, CPU)
    radius = ADMISSIBLE["latent_attention"](inputs, Numerics())["out"].radius
    for change in (
        {"p": "bfloat16"},
        {"partial": "bfloat16"},
        {"max_splits": 8},
        {"min_tile": 1},
        {"exp_error": 64.0},
        {"log_error": 64.0},
        {"dot_roundings": 2.0},
        {"accumulate": "bfloat16"},
    ):
        wider = ADMISSIBLE["latent_attention"](inputs, replace(Numerics(), **change))["out"].radius
        assert (wider > radius).all(), change


def test_a_dropped_rounding_of_the_operand_type_is_noticed():
    """A cache that is dequantised to bfloat16 is judged with bfloat16 operands, and with no others."""
    case = replace(LATENT, cache_format="fp8_e4m3", kv_scale=0.037, dtype="float32")
    exact = simulated("latent_attention", Numerics(), Schedule())
    narrow = simulated("latent_attention", Numerics(kv="bfloat16"), Schedule())
    for backend, numerics in ((exact, narrow.numerics), (narrow, exact.numerics)):
        assert {v.status for v in judge(backend, case, oracles=("value",))} == {PASS}
        (verdict,) = judge(replace(backend, numerics=numerics), case, oracles=("value",))
        assert verdict.status != PASS
