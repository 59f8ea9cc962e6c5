"""Cases for hypothesis: valid, of every kind, held by the references, and plain when they are shrunk."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from mla_ref.case import DTYPES
from mla_ref.formats import formats
from mla_ref.layout import CacheLayout
from mla_ref.problem import problem, problems
from mla_ref.values import REGIMES, Raw, bell
from oracles.coverage import ELEMENTS, draw
from oracles.dimensions import DIMENSIONS, dimensions, elements
from oracles.mutants import mutants
from oracles.oracle import rules
from oracles.strategies import call_sequences, cases
from oracles.verdict import FAIL, PASS, UNSUPPORTED
from oracles.verify import backends, judge, oracles_for

CPU = torch.device("cpu")
PROBLEMS = tuple(problems())
STORED = ("layer", "cache_gather")
first = partial(find, settings=settings(derandomize=True, database=None, max_examples=500, deadline=None))


@pytest.mark.parametrize("name", PROBLEMS)
def test_cases_are_valid(name):
    @given(case=cases(name))
    def valid(case):
        assert case.problem == name
        assert problem(name).why_not(case) is None
        assert elements(case) <= ELEMENTS
        inputs = problem(name).materialize(case, CPU)
        problem(name).check(inputs)
        problem(name).check_values(inputs)

    valid()


def test_bounds_are_kept():
    @given(
        case=cases(
            "layer", dtypes=["float16"], cache_formats=["bf16", "fp8_e4m3"], max_requests=2, max_keys=9
        )
    )
    def within_them(case):
        assert case.dtype == "float16"
        assert case.cache_format in ("bf16", "fp8_e4m3")
        assert len(case.kv_lens) <= 2
        assert max(case.kv_lens, default=0) <= 64

    within_them()
    with pytest.raises(ValueError, match="none of nvfp4 is a cache format"):
        cases("layer", cache_formats=["nvfp4"])


def test_only_what_a_backend_supports():
    @settings(suppress_health_check=[HealthCheck.filter_too_much])
    @given(case=cases("latent_attention", supports=lambda case: None if case.block_size == 64 else "pages"))
    def supported(case):
        assert case.block_size == 64

    supported()


@pytest.mark.parametrize("name", STORED)
def test_of_every_kind(name):
    """Each value of the dimensions that are not lengths, and many that are."""
    seen = {axis: set() for axis in dimensions(draw(name, 0, 0))}

    @settings(max_examples=300)
    @given(case=cases(name, max_rank=512))
    def collect(case):
        for axis, value in dimensions(case).items():
            seen[axis].add(value)

    collect()
    for axis, known in (("values", REGIMES), ("dtype", DTYPES), ("format", formats())):
        assert seen[axis] <= set(known)
        assert len(set(known) - seen[axis]) <= 1, (axis, set(known) - seen[axis])
    for axis in ("mates", "new tokens", "scale", "pages", "memory", "rotation"):
        missing = set(DIMENSIONS[axis].values) - seen.get(axis, set(DIMENSIONS[axis].values))
        assert len(missing) <= 1, (axis, missing)


def test_the_plainest_case_is_found_where_nothing_more_is_asked():
    case = first(cases("paged_attention"), lambda case: sum(case.q_lens) > 0 and sum(case.kv_lens) > 0)
    assert (case.q_lens, case.kv_lens) == ((1,), (1,))
    assert (case.config.num_heads, case.num_kv_heads, case.block_size) == (1, 1, 64)
    assert (case.dtype, case.cache_format, case.regime, case.seed) == ("bfloat16", "bf16", "plain", 0)
    assert case.layout == CacheLayout(shuffled=False, spare_blocks=0)
    assert (case.kv_scale, case.v_scale) == (1.0, 1.0)


def test_what_matters_is_kept_when_a_case_is_shrunk():
    def splits_and_heads(case):
        return (
            max(case.kv_lens, default=0) > 128 and case.config.num_heads % 3 == 0 and case.layout.offset > 0
        )

    case = first(cases("attention"), splits_and_heads)
    assert (sorted(case.kv_lens), case.config.num_heads, case.layout.offset) == ([129], 3, 8)
    assert (case.dtype, case.regime, case.block_size) == ("bfloat16", "plain", 64)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_references_hold_on_them(name):
    right = [b for b in backends().values() if b.problem == name and b.name.startswith("mla_ref.")]
    claims = [o.name for o in oracles_for(problem(name))]

    @settings(max_examples=12)
    @given(
        case=cases(name, max_keys=130, max_elements=60_000),
        backend=st.sampled_from(right),
        claim=st.sampled_from(claims),
    )
    def held(case, backend, claim):
        bad = [v for v in judge(backend, case, oracles=[claim]) if v.status not in (PASS, UNSUPPORTED)]
        assert bad == [], bad[0].detail

    held()


REMEMBERING = ("lengths_remembered", "weights_remembered", "first_output_remembered", "semaphore_not_reset")


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_sequence_of_calls_finds_what_is_kept_from_one_to_the_next(name):
    """No single call shows it: each of these is right the first time it is run."""
    contract = "attention"

    def fails(calls):
        fresh = next(m for m in mutants() if m.name == name and m.case.problem == contract)
        return any(judge(fresh.backend, case, oracles=["value"])[0].status == FAIL for case in calls)

    calls = find(
        call_sequences(contract, max_requests=2, max_keys=40, max_elements=20_000),
        fails,
        settings=settings(derandomize=True, database=None, max_examples=200, phases=[Phase.generate]),
    )
    assert len(calls) >= 2
    assert not fails(calls[:1])
    assert {(case.config, case.dtype, case.cache_format, case.block_size) for case in calls[1:]} == {
        (calls[0].config, calls[0].dtype, calls[0].cache_format, calls[0].block_size)
    }


def test_a_sequence_changes_lengths_and_values_only():
    @given(calls=call_sequences("layer"))
    def one_process(calls):
        assert len(calls) >= 2
        for case in calls:
            assert (case.config, case.layout, case.regime) == (
                calls[0].config,
                calls[0].layout,
                calls[0].regime,
            )
            assert problem("layer").why_not(case) is None

    one_process()


def raw_of(name, seed):
    """Two requests of 40 and 9 keys in a regime."""
    position = torch.cat([torch.arange(40), torch.arange(9)])
    length = torch.tensor([40] * 40 + [9] * 9)
    plain = Raw(
        bell(seed, "q_nope", 6, 4, 32),
        bell(seed, "q_pe", 6, 4, 16),
        bell(seed, "kv_c", 49, 256),
        bell(seed, "k_pe", 49, 16),
        position,
        length,
    )
    return REGIMES[name](seed, plain)


def scores(raw):
    return torch.einsum("thr,nr->thn", raw.q_pe, raw.k_pe)


def test_cancelling_values_are_far_larger_than_their_mean(seed):
    kv_c = raw_of("cancelling", seed).kv_c[:40]
    assert kv_c.abs().amin() > 30.0
    assert kv_c.mean(0).abs().amax() < 2.0


def test_limits_reach_the_largest_fp8_code_and_go_beyond_it(seed):
    magnitude = raw_of("limits", seed).kv_c.abs()
    beyond = (magnitude > 448.0).double().mean()
    assert 0.2 < beyond < 0.6
    assert magnitude.amax() < 2000.0


def test_denormals_are_below_the_normal_numbers(seed):
    raw = raw_of("denormal", seed)
    small = raw.kv_c.float()[:, 1::2].abs()
    assert small.amax() < torch.finfo(torch.float32).tiny
    assert (small > 0).double().mean() > 0.9
    assert raw.kv_c[:, ::2].abs().amax() > 1.0


def test_zeros_have_both_signs_and_fill_tokens_and_tiles(seed):
    kv_c = raw_of("zeros", seed).kv_c
    zero = kv_c == 0.0
    assert zero.all(1).any()
    assert not zero.all(1).all()
    tiles = zero.unflatten(1, (2, 128)).all(2)
    assert (tiles[:, 0] & ~tiles[:, 1]).any()
    assert set(kv_c[zero].signbit().tolist()) == {True, False}


def test_heavy_tails_reach_far_while_half_stay_small(seed):
    magnitude = raw_of("heavy", seed).kv_c.abs()
    assert magnitude.median() < 1.5
    assert magnitude.amax() > 60.0


def test_a_peak_takes_all_the_weight_of_its_request(seed):
    weights = scores(raw_of("peak", seed))[..., :40].softmax(-1)
    assert weights[..., 25].amin() > 0.999


def test_stairs_make_earlier_keys_vanish(seed):
    rising = scores(raw_of("stairs", seed))[..., :40]
    assert (rising[..., 32:].amin(-1) - rising[..., :32].amax(-1)).amin() > 104.0  # exp underflows in float32


def test_uneven_queries_differ_by_powers_of_two(seed):
    spread = raw_of("uneven", seed).q_nope.square().mean(-1).sqrt()
    assert spread.amax() / spread.amin() > 64.0


def test_every_rule_of_a_problem_is_known_here():
    assert {o.name for name in PROBLEMS for o in oracles_for(problem(name))} == set(rules())
