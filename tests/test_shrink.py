"""Shrunk cases still fail, are as plain as the failure allows, and take a bounded number of trials."""

import random
from dataclasses import replace

import pytest

from mla_ref.config import YARN
from mla_ref.layout import CacheLayout
from mla_ref.problem import problem, problems
from oracles.coverage import draw
from oracles.mutants import mutants
from oracles.shrink import PLAIN_LAYOUT, smallest
from oracles.verdict import FAIL
from oracles.verify import judge

PROBLEMS = tuple(problems())


def large(name, seed, wanted):
    """A drawn case, not a small one, that has what is wanted."""
    found = (draw(name, seed, i) for i in range(2000))
    return next(case for case in found if wanted(case))


def fails_as(name, contract, oracle):
    mutant = next(m for m in mutants() if (m.name, m.case.problem) == (name, contract))
    return lambda case: judge(mutant.backend, case, oracles=[oracle])[0].status == FAIL


@pytest.mark.parametrize("name", PROBLEMS)
def test_nothing_is_left_where_everything_fails(name, seed):
    for i in range(10):
        case = smallest(draw(name, seed, i), lambda case: True, budget=1000)
        assert case.q_lens in ((), (0,), (1,))
        assert sum(case.kv_lens) == 0
        assert (case.config.num_heads, case.num_kv_heads, case.block_size, case.seed) == (1, 1, 64, 0)
        assert (case.dtype, case.cache_format, case.regime) == ("bfloat16", "bf16", "plain")
        assert case.layout == PLAIN_LAYOUT
        assert (case.config.kv_lora_rank, case.config.q_lora_rank, case.config.beyond) == (16, None, "")
        assert case.config.rope.scaling != YARN


def test_what_it_takes_is_what_is_left():
    """Two splits and 129 keys of three heads in fp16, behind a gap: all of that, and nothing else."""

    def fails(case):
        return (
            max(case.kv_lens, default=0) >= 129
            and case.config.num_heads % 3 == 0
            and case.dtype == "float16"
            and case.layout.block_gap > 0
        )

    case = large("latent_attention", 4, lambda case: len(case.kv_lens) > 3 and case.config.num_heads == 20)
    case = replace(case, kv_lens=(700, *case.kv_lens[1:]), dtype="float16")
    case = replace(case, config=replace(case.config, num_heads=24), layout=CacheLayout(block_gap=512))
    found = smallest(case, fails)
    assert (found.kv_lens, found.config.num_heads, found.dtype) == ((129,), 3, "float16")
    assert found.layout == replace(PLAIN_LAYOUT, block_gap=8)
    assert (found.q_lens, found.block_size, found.regime) == ((0,), 64, "plain")


PLANTED = {
    # mutant, problem, oracle, what the case must have, what is left
    "a scale": ("scale_one_percent", "latent_attention", "value", lambda c: sum(c.q_lens) > 9, (1, 1)),
    "a base": ("lse_base_2", "attention", "lse", lambda c: sum(c.q_lens) > 9, (1, 1)),
    "an empty row": (
        "empty_row_lse_zero",
        "latent_attention",
        "empty_rows",
        lambda c: any(q and not kv for q, kv in zip(c.q_lens, c.kv_lens, strict=True)) and len(c.q_lens) > 2,
        (1, 1),
    ),
    "a mask": ("causal_one_less", "attention", "value", lambda c: min(c.kv_lens, default=0) > 20, (1, 1)),
    "heads": ("heads_swapped", "attention", "value", lambda c: c.config.num_heads == 8, (1, 2)),
    "values one row late": (
        "value_one_row_late",
        "latent_attention",
        "value",
        lambda c: max(c.kv_lens, default=0) > 100,
        (1, 1),
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_bug_is_left_with_one_token(what, seed):
    mutant, contract, oracle, wanted, (tokens, heads) = PLANTED[what]
    fails = fails_as(mutant, contract, oracle)
    case = large(contract, seed, lambda case: wanted(case) and fails(case))
    found = smallest(case, fails)
    assert fails(found)
    assert (sum(found.q_lens), found.config.num_heads) == (tokens, heads)
    assert (found.block_size, found.dtype, found.cache_format) == (64, "bfloat16", "bf16")
    assert (found.layout, found.regime) == (PLAIN_LAYOUT, "plain")
    keys = {"value_one_row_late": 17, "empty_row_lse_zero": 0}.get(mutant, 2)
    assert sum(found.kv_lens) <= keys + 1
    assert smallest(case, fails) == found


def test_a_bug_of_one_format_and_its_scale_keeps_both(seed):
    fails = fails_as("fp8_scale_ignored", "latent_attention", "value")
    case = large("latent_attention", seed, lambda c: sum(c.q_lens) > 5 and fails(c))
    found = smallest(case, fails)
    assert found.cache_format == "fp8_e4m3"
    assert found.kv_scale == case.kv_scale != 1.0
    assert (found.q_lens, found.kv_lens, found.config.num_heads) == ((1,), (1,), 1)
    assert (found.regime, found.dtype, found.config.kv_lora_rank) == ("plain", "bfloat16", 16)


def test_every_candidate_is_valid_new_and_counted(seed):
    draws = random.Random(seed)
    for name in PROBLEMS:
        case, asked = draw(name, seed, 31), []

        def sometimes(candidate, asked=asked, name=name):
            assert problem(name).why_not(candidate) is None
            asked.append(candidate)
            return draws.random() < 0.2

        smallest(case, sometimes, budget=60)
        assert len(asked) == len(set(asked)) <= 60
        assert case not in asked


def test_a_case_that_no_longer_fails_is_returned_as_it_came(seed):
    case = draw("layer", seed, 31)
    assert smallest(case, lambda candidate: False) == case
