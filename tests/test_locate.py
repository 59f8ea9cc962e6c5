"""Failures are localised: the pattern is named, what explains all of it is guessed, and nothing else is."""

import json
import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from mla_ref.problem import problems
from mla_ref.values import bell
from oracles.bounds import Admissible
from oracles.compare import within
from oracles.coverage import draw
from oracles.locate import locate
from oracles.mutants import LATENT, LOG2_E, Mutant, departing, given, mutants, returning
from oracles.verdict import FAIL, Pattern, Verdict
from oracles.verify import judge


class Batch(NamedTuple):
    """Three requests: one new token over 40 cached ones, three of 3, and two after 70."""

    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    kv_scale: torch.Tensor
    softmax_scale: float


BATCH = Batch(torch.tensor([0, 1, 4, 6]), torch.tensor([41, 3, 72]), torch.tensor(0.037), 0.125)


def found(got, want, letters="t h v", name="out", inputs=BATCH, bound=1e-6):
    """The pattern of everything farther off than ``bound``."""
    bound = torch.full_like(want, bound)
    inside = (got == want) | ((got - want).abs() <= bound) | (got.isnan() & want.isnan())
    return locate(name, letters, got, want, bound, inside, inputs)


def truth(seed, *shape):
    return bell(seed, "truth", *(shape or (6, 4, 256)))


def spoiled(want, at, value=9.0):
    got = want.clone()
    got[at] = value
    return got


PLACES = {
    "every element": ((...,), "every request, every head, every channel"),
    "a request": (
        (slice(1, 4),),
        "request 1 of 3, exactly the rows of requests without older tokens, every head, every channel",
    ),
    "its newest query": (
        (3,),
        "request 1 of 3, the newest query, every head, every channel",
    ),
    "rows that see much": ((slice(4, 6),), "request 2 of 3, exactly the rows that see more than 41 keys"),
    "one head": ((slice(None), 2), "every request, head 2 of 4, every channel"),
    "half of the heads": ((slice(None), slice(2, 4)), "heads 2..3 of 4"),
    "every other head": ((slice(None), slice(0, 4, 2)), "heads 0, 2 of 4"),
    "a tile": ((..., slice(128, 256)), "channels 128..255 of 256 (tile 1 of 128)"),
    "no tile": ((..., slice(127, 255)), "channels 127..254 of 256"),
    "every fourth channel": ((..., slice(1, 256, 4)), "every 4. channel from 1 on, of 256"),
    "one element": ((4, 3, 17), "request 2 of 3, query 0, head 3 of 4, channel 17 of 256"),
}


@pytest.mark.parametrize("what", PLACES)
def test_places_are_named(what, seed):
    at, text = PLACES[what]
    want = truth(seed)
    noise = 1.0 + bell(seed, "noise", 6, 4, 256).abs()
    got = want.clone()
    got[at] += noise[at]
    pattern = found(got, want)
    assert text in pattern.where
    assert pattern.guess == ""
    assert "%" not in pattern.where


def test_a_part_of_a_box_is_told_from_all_of_it(seed):
    want = truth(seed)
    got = spoiled(want, (torch.arange(6) % 2 == 0)[:, None, None] & (bell(seed, "some", 6, 4, 256) > 0.0))
    assert "50 % of their elements" in found(got, want).where or "49 %" in found(got, want).where


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "all NaN"), (math.inf, "all +inf"), (0.0, "all 0")],
)
def test_what_all_bad_elements_are_is_said(value, text, seed):
    want = truth(seed)
    pattern = found(spoiled(want, (slice(1, 4),), value), want)
    assert pattern.where.endswith(text)
    assert pattern.guess == ""
    mixed = spoiled(spoiled(want, (1,), value), (2,), 5.0)
    assert "all" not in found(mixed, want).where


def shifted(want):
    return want.roll(1, 0)


SCALE = float(BATCH.kv_scale)
GUESSES = {
    "twice": (lambda x: 2.0 * x, "out is 2 times the right one"),
    "a scale forgotten": (lambda x: x / SCALE, "out is 1 / kv_scale = 27.03 times the right one"),
    "a scale too often": (lambda x: x * SCALE, "out is kv_scale = 0.037 times the right one"),
    "a scale the wrong way": (
        lambda x: x * SCALE * SCALE,
        "out is (kv_scale)² = 0.001369 times the right one",
    ),
    "one percent": (lambda x: 1.01 * x, "out is 1.01 times the right one"),
    "another sign": (lambda x: -x, "out is -1 times the right one"),
    "rows late": (shifted, "every bad row is the one 1 before it"),
    "heads swapped": (lambda x: x[:, [1, 0, 2, 3]], "heads 0 and 1 are exchanged"),
    "heads reversed": (
        lambda x: x.flip(1),
        "heads are in each other's place: 0 is 3, 1 is 2, 2 is 1, 3 is 0",
    ),
    "channels late": (lambda x: x.roll(8, 2), "every bad channel is the one 8 before it"),
    "one head for all": (lambda x: x[:, :1].expand_as(x), "every bad head is head 0"),
    "another request": (
        lambda x: torch.cat([x[:4], x[1:3]]),
        "rows of request 2 are those of request 1",
    ),
}


@pytest.mark.parametrize("what", GUESSES)
def test_what_explains_everything_is_guessed(what, seed):
    change, text = GUESSES[what]
    want = truth(seed)
    assert found(change(want), want).guess == text


@pytest.mark.parametrize("what", GUESSES)
def test_what_does_not_explain_everything_is_not(what, seed):
    """The same, but for one element that is something else."""
    change, _ = GUESSES[what]
    want = truth(seed)
    got = change(want).clone()
    row, head = ((got - want).abs() > 1e-3).any(2).nonzero()[-1].tolist()
    got[row, head, 100] = 3.25
    assert found(got, want).guess == ""


def test_what_explains_bad_elements_but_not_their_neighbours_is_not_guessed(seed):
    """Every fourth value is doubled, and those beside it are right: nothing is twice as large."""
    want = truth(seed)
    got = torch.where(torch.rand_like(want) < 0.25, 2.0 * want, want)
    assert found(got, want).guess == ""


def test_truncated_values_are_not_taken_for_scaled_ones():
    mutant = next(m for m in mutants() if m.name == "output_truncated")
    (verdict,) = judge(mutant.backend, mutant.case, oracles=["value"])
    assert verdict.status == FAIL
    assert verdict.pattern.guess == ""


def test_two_explanations_are_none(seed):
    want = truth(seed)
    inputs = BATCH._replace(kv_scale=torch.tensor(2.0), softmax_scale=0.5)
    assert found(2.0 * want, want, inputs=inputs).guess == "out is 2 times the right one"
    loose = found(2.0 * want, want, inputs=inputs._replace(kv_scale=torch.tensor(2.001)), bound=0.02)
    assert loose.guess == ""


def test_a_row_that_any_other_would_explain_is_not_guessed(seed):
    """Where bounds are wider than rows differ, a wrong row is near everything."""
    want = truth(seed)
    bound = torch.full_like(want, 1e-6)
    bound[1:] = 50.0
    got = spoiled(want, (0,), 5.0) + 0.1 * torch.rand_like(want)
    inside = (got - want).abs() <= bound
    assert locate("out", "t h v", got, want, bound, inside, BATCH).guess == ""


LSES = {
    "base 2": (lambda x: x * LOG2_E, "lse is log2(e), as in base 2, times the right one"),
    "keys twice": (lambda x: x + math.log(2.0), "lse is larger by ln(2), as if every key counted twice"),
    "half lost": (lambda x: x - math.log(2.0), "lse is smaller by ln(2), as if half of the weight were lost"),
    "a constant": (lambda x: x + 0.3, "lse is off by 0.3 everywhere"),
    "none": (lambda x: x + torch.linspace(0.1, 0.2, x.numel()).reshape(x.shape).double(), ""),
}


@pytest.mark.parametrize("what", LSES)
def test_logarithms(what, seed):
    change, text = LSES[what]
    want = truth(seed, 6, 4) + 3.0
    assert found(change(want), want, "t h", "lse").guess == text


def test_equal_logarithms_tell_a_factor_from_a_constant_no_more():
    want = torch.full((6, 4), 2.0, dtype=torch.float64)
    assert found(want * LOG2_E, want, "t h", "lse").guess == ""


def test_logarithms_with_their_axes_exchanged(seed):
    want = truth(seed, 6, 6)
    assert found(want.T.clone(), want, "t h", "lse").guess == "lse has its two axes exchanged"
    got = want.T.clone()
    got[2, 3] += 0.5
    assert found(got, want, "t h", "lse").guess == ""


@pytest.mark.parametrize(("value", "word"), [(0.0, "0"), (math.inf, "+inf")])
def test_rows_without_keys(value, word, seed):
    want = truth(seed, 6, 4)
    want[1:3] = -math.inf
    inputs = BATCH._replace(cache_seqlens=torch.tensor([41, 1, 72]))
    pattern = found(spoiled(want, (slice(1, 3),), value), want, "t h", "lse", inputs)
    assert pattern.guess == f"lse of a row without keys is {word} where -inf is due"
    assert "exactly the rows that see no key" in pattern.where
    other = spoiled(spoiled(want, (1,), value), (2,), 7.0)
    assert found(other, want, "t h", "lse", inputs).guess == ""


def test_the_map_counts_by_request_and_head(seed):
    want = truth(seed)
    pattern = found(spoiled(want, (slice(1, 4), 2)), want)
    assert (pattern.row, pattern.column, pattern.row_step, pattern.column_step) == ("request", "head", 1, 1)
    assert pattern.shares == ((0, 0, 0, 0), (0, 0, 100, 0), (0, 0, 0, 0))
    little = found(spoiled(want, (1, 2, 3)), want)
    assert little.shares[1] == (0, 0, 1, 0)
    wide = truth(seed, 6, 128, 8)
    many = found(spoiled(wide, (slice(None), slice(64, 128))), wide)
    assert many.shares == ((0,) * 8 + (100,) * 8,) * 3
    assert many.column_step == 8


def test_idle_requests_are_rows_of_the_map_that_hold_nothing(seed):
    inputs = BATCH._replace(
        cu_seqlens_q=torch.tensor([0, 3, 3, 6, 6]), cache_seqlens=torch.tensor([9, 4, 8, 5])
    )
    want = truth(seed)
    pattern = found(spoiled(want, (slice(3, 6),)), want, inputs=inputs)
    assert "request 2 of 4" in pattern.where
    assert [row[0] for row in pattern.shares] == [0, 0, 100, 0]


def test_a_verdict_carries_its_pattern_and_old_lines_still_load():
    mutant = next(m for m in mutants() if m.name == "lse_base_2")
    (verdict,) = judge(mutant.backend, mutant.case, oracles=["lse"])
    assert verdict.pattern.guess == "lse is log2(e), as in base 2, times the right one"
    assert verdict.pattern.text() in verdict.detail
    assert Verdict.from_json(verdict.to_json()) == verdict
    old = json.loads(verdict.to_json())
    del old["pattern"]
    assert Verdict.from_json(json.dumps(old)) == replace(verdict, pattern=None)
    assert len(json.dumps(json.loads(verdict.to_json())["pattern"])) < 1500


def test_a_claim_that_held_has_no_pattern():
    (verdict,) = judge(Mutant("right", LATENT, departing()).backend, LATENT, oracles=["value"])
    assert verdict.pattern is None


PLANTED = {
    "an index of another request": (
        given(block_table=lambda x: x.block_table[[0, 0, 2, 3]]),
        "value",
        "request 1 of 4, exactly the rows that see fewer than 37 keys, every head",
        "",
    ),
    "the last head not stored": (
        returning(lambda _, o: o._replace(out=o.out.index_fill(1, torch.tensor([3]), math.nan))),
        "value",
        "every request, head 3 of 4, every channel, all NaN",
        "",
    ),
    "keys beyond sixty-four forgotten": (
        departing(mask=lambda mask, _: mask & (torch.arange(mask.shape[1]) < 64)),
        "lse",
        "request 2 of 4, exactly the rows that see more than 37 keys, every head",
        "",
    ),
    "rows of the first request": (
        returning(lambda _, o: type(o)(*(x.index_copy(0, torch.tensor([4]), x[:1]) for x in o))),
        "value",
        "request 2 of 4, query 0, every head, every channel",
        "query 0 of request 2 is query 0 of request 0",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_bugs_are_localised(what):
    run, oracle, where, guess = PLANTED[what]
    (verdict,) = judge(Mutant(what, LATENT, run).backend, LATENT, oracles=[oracle])
    assert verdict.status == FAIL
    assert where in verdict.pattern.where
    assert verdict.pattern.guess == guess


@pytest.mark.parametrize("name", sorted(problems()))
def test_every_mutant_is_localised_on_every_kind_of_case(name, seed):
    """Whatever the case, a pattern is found, has a map, and passes through JSON."""
    wrong = [m for m in mutants() if m.case.problem == name]
    patterns = 0
    for i, mutant in enumerate(wrong[:: 1 + len(wrong) // 16]):
        case = draw(name, seed, i)
        try:
            verdicts = judge(
                replace(mutant, case=case).backend, case, oracles=None if i % 4 else ["contract"]
            )
        except (IndexError, RuntimeError, ZeroDivisionError):
            continue  # a mutant whose edit is one of its own case
        for verdict in verdicts:
            if verdict.pattern is not None:
                patterns += 1
                assert Verdict.from_json(verdict.to_json()).pattern == verdict.pattern
                assert any(any(row) for row in verdict.pattern.shares)
                assert isinstance(verdict.pattern, Pattern)
    assert patterns or name == "cache_capacity"


def test_within_looks_at_all_bad_elements_only_when_asked(monkeypatch, seed):
    want = truth(seed, 6, 4)
    asked = []
    monkeypatch.setattr("oracles.compare.locate", lambda *args: asked.append(args))
    finding = within(
        "lse", (want + 1.0).float(), Admissible(want, torch.zeros_like(want), torch.float32), "t h", BATCH
    )
    assert not finding.ok
    assert asked == []
    finding.pattern()
    assert len(asked) == 1


def test_memory_that_nobody_wrote():
    want = torch.zeros(4, 8, dtype=torch.uint8)
    got = want.clone()
    got[1] = 255
    inside = got == want
    pattern = locate("codes", "n e", got, want, torch.zeros(4, 8), inside, None)
    assert pattern.where == "block 1 of 4, every element, all 0xFF"
