"""Drawn cases: the same everywhere, valid, cheap, and together every pair of values that there is."""

import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from mla_ref.problem import problem, problems
from oracles import coverage
from oracles.coverage import BLOCK, COMPILED, ELEMENTS, LARGE, LARGE_EVERY, covered, draw
from oracles.dimensions import DIMENSIONS, dimensions, elements, make, names_of

PROBLEMS = tuple(problems())


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_draw_depends_on_its_arguments_alone(name):
    in_order = [draw(name, 7, i) for i in range(40)]
    assert [draw(name, 7, i) for i in reversed(range(40))] == in_order[::-1]
    assert draw(name, 8, 3) != in_order[3]
    ordinary = [case for i, case in enumerate(in_order) if i % LARGE_EVERY != LARGE_EVERY - 1]
    begun, _ = coverage._begun(coverage._space(name, None, ELEMENTS), "7/False/0")
    assert begun[: len(ordinary)] == ordinary, "large cases take the place of none"


def test_a_draw_is_the_same_in_another_process():
    code = "from oracles.coverage import draw; print(draw('attention', 5, 70).to_json())"
    found = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(1)
    ]
    assert found == [draw("attention", 5, 70).to_json() + "\n"]


@pytest.mark.parametrize("name", PROBLEMS)
def test_drawn_cases_are_made_without_complaint(name, seed):
    for i in range(24):
        case = draw(name, seed, i)
        inputs = problem(name).materialize(case, torch.device("cpu"))
        problem(name).check(inputs)
        problem(name).check_values(inputs)
        assert elements(case) <= ELEMENTS * LARGE
        assert i % LARGE_EVERY == LARGE_EVERY - 1 or elements(case) <= ELEMENTS


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_value_is_drawn_early_and_every_case_has_known_ones(name):
    drawn = [dimensions(draw(name, 1, i)) for i in range(BLOCK)]
    for axis in names_of(name):
        assert {d[axis] for d in drawn} <= set(DIMENSIONS[axis].values)
        missing = set(DIMENSIONS[axis].values) - {d[axis] for d in drawn}
        assert not missing or (name == "paged_attention" and axis == "format"), (axis, missing)


def test_pairs_are_met_sooner_than_by_chance():
    drawn = [dimensions(draw("latent_attention", 3, i)) for i in range(BLOCK)]
    pairs = {pair for d in drawn for pair in combinations(sorted(d.items()), 2)}
    every = sum(
        len(DIMENSIONS[a].values) * len(DIMENSIONS[b].values)
        for a, b in combinations(names_of("latent_attention"), 2)
    )
    assert len(pairs) > 0.9 * every


@pytest.mark.parametrize("name", PROBLEMS)
def test_alike_cases_share_what_is_compiled_and_nothing_else(name):
    free = set(names_of(name)).difference(COMPILED)
    shared = [dim for dim in names_of(name) if dim in COMPILED]
    had = dict.fromkeys(free, frozenset())
    for run in range(4):
        cases = [draw(name, 7, run * 40 + turn, alike=40) for turn in range(40)]
        assert cases[0] == draw(name, 7, run)
        assert len({case.config.num_heads for case in cases}) == len({c.num_kv_heads for c in cases}) == 1
        assert len({tuple(dimensions(case)[dim] for dim in shared) for case in cases}) == 1
        assert len(set(cases)) == len(cases)
        assert all(elements(case) <= ELEMENTS * LARGE for case in cases)
        had = {dim: values | {dimensions(case)[dim] for case in cases} for dim, values in had.items()}
    assert all(len(values) > 1 for values in had.values()), had


def test_alike_cases_are_no_more_work_than_others():
    """Those of paged_attention take over the first one's key/value heads, and may be larger for it."""
    for seed in range(20, 40):
        assert all(elements(draw("paged_attention", seed, i, None, 8)) <= ELEMENTS for i in range(28))


def test_alike_cases_are_ones_that_the_backend_takes():
    def supports(case):
        return None if max(case.q_lens, default=0) == 1 and case.num_kv_heads < 4 else "no"

    cases = [draw("paged_attention", 0, i, supports, alike=8) for i in range(64)]
    assert all(supports(case) is None for case in cases)
    assert draw("paged_attention", 0, 13, supports, alike=8) == cases[13]
    assert len({max(case.kv_lens) for case in cases}) > 8


def test_only_supported_cases_are_drawn():
    def supports(case):
        return None if case.dtype == "float16" and case.config.kv_lora_rank == 512 else "no"

    drawn = [draw("latent_attention", 0, i, supports) for i in range(64)]
    assert {(case.dtype, case.config.kv_lora_rank) for case in drawn} == {("float16", 512)}
    assert len({case.cache_format for case in drawn}) > 2
    with pytest.raises(ValueError, match="none of 5000 random cases is supported"):
        draw("latent_attention", 0, 0, lambda case: "never")


def test_what_was_had_is_counted_and_nothing_else():
    one = draw("rope", 0, 3)
    first = covered("rope", [one])
    axes = len(names_of("rope"))
    assert first.cases == 1
    assert first.pairs[0] == axes * (axes - 1) // 2
    assert {had for had, _ in first.values.values()} == {1}
    twice = covered("rope", [one, replace(one, seed=5)])
    assert twice.pairs == first.pairs
    other = replace(one, dtype="float64" if one.dtype != "float64" else "float16")
    more = covered("rope", [one, other])
    assert more.pairs[0] == first.pairs[0] + axes - 1
    assert more.values["dtype"] == (2, 4)
    assert "rope: 2 cases" in more.line()


def test_values_that_are_no_dimensions_of_ours_are_not_counted():
    one = draw("rope", 0, 3)
    strange = replace(one, config=replace(one.config, num_heads=7))
    assert covered("rope", [strange]).values["heads"] == (0, 10)


@pytest.mark.parametrize("name", ["latent_attention", "cache_gather", "merge_states"])
def test_a_block_has_nearly_every_pair(name):
    found = covered(name, (draw(name, 2, i) for i in range(BLOCK)))
    had, possible = found.pairs
    assert had > 0.95 * possible
    assert all(a == b for a, b in found.values.values()), found.line()


def test_what_a_backend_does_not_take_is_not_missing():
    def supports(case):
        return None if case.dtype == "bfloat16" and case.regime == "plain" else "no"

    found = covered("rope", (draw("rope", 0, i, supports) for i in range(64)), supports)
    assert found.values["dtype"] == (1, 1)
    assert found.values["values"] == (1, 1)


def drawn_by(supports, count=6):
    return [draw("latent_attention", 11, i, supports) for i in range(count)]


def test_cases_are_made_once_for_all_backends(monkeypatch):
    """The second backend asks about those that the first had made, and they are no other for that."""

    def half_precision(case):
        return None if case.dtype in ("bfloat16", "float16") else "no"

    def no_rope(case):
        return None if case.config.rope.rotate or case.block_size < 64 else "no"

    made = []
    monkeypatch.setattr(coverage, "make", lambda *given: made.append(given) or make(*given))
    found, work = {}, {}
    for order in ((half_precision, no_rope), (no_rope, half_precision)):
        for cached in (coverage._space, coverage._possible, coverage._made, coverage._begun):
            cached.cache_clear()
        for supports in order:
            made.clear()
            found[order, supports] = drawn_by(supports)
            work[order, supports] = len(made)
    for supports in (half_precision, no_rope):
        assert len({tuple(cases) for (_, of), cases in found.items() if of == supports}) == 1
    for order in ((half_precision, no_rope), (no_rope, half_precision)):
        assert work[order, order[1]] < 0.5 * work[order, order[0]]
