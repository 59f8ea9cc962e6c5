"""One key's value times one factor: right arithmetic is admitted, and a last bit of a channel is not."""

import random
from dataclasses import replace

import pytest
import torch
from random_trials import random_kernel
from simulated_kernel import Schedule, simulated

from mla_ref.numerics import FLOAT32, INPUT, Numerics
from mla_ref.problem import problem
from oracles.bounds import factors, nearest, number_format, shares_a_factor
from oracles.coverage import draw
from oracles.exact import attention
from oracles.mutants import LATENT, mutants
from oracles.precision_mutants import NUMERICS
from oracles.rules.single import shortest
from oracles.verdict import FAIL, PASS, UNSUPPORTED
from oracles.verify import judge

HEADS = 64
CASE = replace(
    LATENT, config=replace(LATENT.config, num_heads=HEADS), q_lens=(1, 1), kv_lens=(1, 1), regime="plain"
)
CPU = torch.device("cpu")


def divided(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return x / total


def inverted(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return x * (1.0 / total)


def merged(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Beside splits without a key, whose weight is 0, under a maximum that is not this one's."""
    weight = torch.exp(torch.log(total) - 3.0)
    return (x / total) * weight * (1.0 / weight)


@pytest.mark.parametrize("finish", [divided, inverted, merged], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("p", ["bfloat16", "float16", "float32"])
def test_a_weight_of_any_size_is_one_factor(p, dtype, finish, seed):
    """Maxima may lag, so that a lone key's weight is any number; its rounding may be the largest there is."""
    case = replace(CASE, dtype=dtype, cache_format="fp32" if dtype == "float32" else "bf16", seed=seed)
    inputs = problem(case.problem).materialize(case, CPU)
    value = attention(inputs)[0].float()
    weight = torch.exp(8.0 * torch.rand(2, HEADS, 1, generator=torch.Generator().manual_seed(seed)) - 4.0)
    weight[0, 0] = 1.0 + 2.0**-8  # a tie of bfloat16
    narrow = weight.to(getattr(torch, p)).float()
    for total in (weight, narrow):
        out = finish(narrow * value, total).to(inputs.ql_nope.dtype)
        low, high = factors(inputs, Numerics(p=p, max_splits=2, slack=8.0), out)
        assert (low.amax(-1) <= high.amin(-1)).all()
        within = (narrow.double() / total.double())[..., 0]
        assert (low.amax(-1) <= within).all()
        assert (within <= high.amin(-1)).all()


@pytest.mark.parametrize("p", ["bfloat16", "float8_e4m3fn"])
def test_a_projected_value_is_off_before_its_weight_multiplies_it(p, seed):
    """By its own rounding, and the weight by the most there is."""
    config = replace(CASE.config, num_heads=64)
    case = replace(CASE, problem="attention", config=config, q_lens=(1,) * 16, kv_lens=(1,) * 16, seed=seed)
    inputs = problem(case.problem).materialize(case, CPU)
    numerics = Numerics(p=p, form="expanded", operand=INPUT)
    exact = attention(inputs)[0]
    value = nearest(exact, torch.bfloat16)
    width = number_format(p, torch.bfloat16).roundoff
    weight = 1.0 + width * (1.0 + 2.0**-8)
    narrow = float(torch.tensor(weight).to(getattr(torch, p)))
    assert narrow > weight
    out = (narrow * value / weight).bfloat16()
    least, most = factors(inputs, numerics, out)
    assert (least.amax(-1) <= most.amin(-1)).all()
    assert (least.amax(-1) <= narrow / weight).all()
    assert (narrow / weight <= most.amin(-1)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_factors_are_those_whose_products_round_to_what_was_returned(dtype, seed):
    """Their ends are next to where the product rounds to another number, subnormal numbers and 0 included."""
    case = replace(CASE, dtype=dtype, seed=seed)
    inputs = problem(case.problem).materialize(case, CPU)
    value = attention(inputs)[0]
    sizes = torch.exp2(torch.arange(HEADS, dtype=torch.float64)[:, None] * -0.5)
    for factor in (sizes, -sizes):
        out = nearest(value * factor, inputs.ql_nope.dtype).to(inputs.ql_nope.dtype)
        low, high = factors(inputs, Numerics(p=INPUT), out)
        assert (low <= factor).all()
        assert (factor <= high).all()
        slack = 2.0**-16 * factor.abs()
        below, above = (nearest(value * x, out.dtype) for x in (low - slack, high + slack))
        assert (below != out).all()
        assert (above != out).all()


def test_another_factor_in_one_channel_is_none():
    inputs = problem(CASE.problem).materialize(CASE, CPU)
    value = attention(inputs)[0].bfloat16()
    out = value.clone()
    out.view(torch.int16)[:, :, 5] += 1
    low, high = factors(inputs, NUMERICS, out)
    known = value[..., 5] != 0.0
    assert (low.amax(-1) > high.amin(-1))[known].float().mean() > 0.9
    low, high = factors(inputs, NUMERICS, value)
    assert (low.amax(-1) <= 1.0).all()
    assert (high.amin(-1) >= 1.0).all()


def test_nothing_is_excluded_where_there_is_no_telling():
    """Rows that see two keys, values of 0, numbers that are none, roundings without end."""
    case = replace(CASE, q_lens=(1, 2), kv_lens=(1, 2))
    inputs = problem(case.problem).materialize(case, CPU)
    inputs.kv_cache[inputs.block_table[0, 0], 0, 3] = 0.0
    out = attention(inputs)[0].bfloat16()
    out[0, 1, 4], out[0, 2, 6] = torch.inf, torch.nan
    low, high = factors(inputs, NUMERICS, out)
    for index in ((2,), (0, slice(None), 3), (0, 1, 4), (0, 2, 6)):
        assert low[index].isneginf().all()
        assert high[index].isposinf().all()
    assert low[0, 0, 7].isfinite()
    assert low[1].isfinite().all()
    low, high = factors(inputs, replace(NUMERICS, accumulate="bfloat16"), out)
    assert (low.amax(-1) < 0.75).all()
    assert (high.amin(-1) > 1.25).all()


@pytest.mark.parametrize(
    ("change", "status"),
    [({}, FAIL), ({"shared_p": False}, PASS), ({"p": INPUT}, FAIL), ({"sum_rounded_p": True}, FAIL)],
)
def test_last_bits_of_a_lone_key_are_seen_where_all_channels_share_a_weight(change, status):
    mutant = next(x for x in mutants() if x.name == "last_bits_off_a_lone_key")
    backend = replace(mutant.backend, numerics=replace(NUMERICS, **change))
    (verdict,) = judge(backend, mutant.case, oracles=["single"])
    assert verdict.status == status
    if status == FAIL:
        assert "rows are no multiple of their key's value: at request 0, query 0, head" in verdict.detail
        assert verdict.detail.startswith("with one key in every request: out: ")


def test_the_claim_is_made_where_it_holds():
    assert shares_a_factor(Numerics(p=INPUT))
    assert shares_a_factor(Numerics(p=FLOAT32, form="expanded"))
    for change in ({"p": "exact"}, {"shared_p": False}, {"form": "absorbed"}):
        assert not shares_a_factor(replace(NUMERICS, **change))


@pytest.mark.parametrize("finish", ["in pairs", "partial results in bfloat16"])
def test_kernels_that_round_more_are_right_as_they_declare_it(finish, seed):
    """Copies of their own, or a partial result: neither fails, whatever the schedule."""
    declared = Numerics(p="bfloat16", sum_rounded_p=False)
    schedule = Schedule(tile=1, splits=3, folded=True, slack=8.0)
    if finish == "in pairs":
        schedule = replace(schedule, paired=True)
    else:
        declared = replace(declared, partial="bfloat16")
    case = replace(LATENT, seed=seed)
    (verdict,) = judge(simulated("latent_attention", declared, schedule), case, oracles=["single"])
    assert verdict.status == PASS


def test_right_kernels_are_admitted_whatever_they_round(seed):
    draws = random.Random(seed)
    for i in range(20):
        name = draws.choice(("latent_attention", "attention"))
        backend, case = random_kernel(draws, name), draw(name, seed, i)
        if not shares_a_factor(backend.numerics):
            continue
        (verdict,) = judge(backend, case, oracles=["single"])
        assert verdict.status in (PASS, UNSUPPORTED), f"{verdict.detail} {backend.numerics}"


def test_the_probe_has_one_key_a_request():
    assert shortest(LATENT).kv_lens == (1,) * len(LATENT.kv_lens)
