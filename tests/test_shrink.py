"""Shrunk cases still fail, are as plain as the failure allows, and take a bounded number of trials."""

import random
from dataclasses import replace

import pytest

from mla_ref.config import YARN
from mla_ref.layout import CacheLayout
from mla_ref.problem import problem, problems
from oracles.coverage import draw
from oracles.mutants import mutants
from oracles.shrink import PLAIN_LAYOUT, oddities, smallest
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
        drawn = draw(name, seed, i)
        case = smallest(drawn, lambda case: True, budget=1000)
        assert case.q_lens in ((0,), (1,)) if drawn.q_lens else case.q_lens == ()
        assert not oddities(case) or case.q_lens == ()
        assert sum(case.kv_lens) <= 1
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
    assert (found.q_lens, found.block_size, found.regime) == ((1,), 64, "plain")


WRONG_AT = {
    # what the failure is of, and the lengths that are left
    "a mask that is a key off": (lambda q_len, kv_len: q_len > 1, (2,), (2,)),
    "a row without a key": (lambda q_len, kv_len: q_len > kv_len, (1,), (0,)),
    "a request without new tokens": (lambda q_len, kv_len: q_len == 0, (0,), (0,)),
    "long contexts": (lambda q_len, kv_len: kv_len > 40, (1,), (41,)),
}


@pytest.mark.parametrize("what", WRONG_AT)
def test_only_what_is_wrong_there_is_left_with_odd_requests(what):
    """Tokens without keys show a wrong mask, too, but nobody would look for it there."""
    wrong, q_lens, kv_lens = WRONG_AT[what]
    case = draw("latent_attention", 0, 0)
    case = replace(case, q_lens=(3, 0, 2, 4, 7), kv_lens=(1, 33, 90, 0, 200))
    assert oddities(case) == {"a request without new tokens", "tokens that see no key"}
    found = smallest(case, lambda c: any(map(wrong, c.q_lens, c.kv_lens)))
    assert (found.q_lens, found.kv_lens) == (q_lens, kv_lens)


def test_lengths_of_what_attends_to_nothing_are_not_odd():
    merge = draw("merge_states", 0, 0)
    assert oddities(replace(merge, q_lens=(9,), kv_lens=(2,))) == frozenset()


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
