"""Every oracle kills the mutants that it names, every mutant is named, and findings say where."""

from dataclasses import replace

import pytest
import torch

from oracles.mutants import LATENT, PER_TENSOR, Mutant, attend, departing, mutants, right
from oracles.oracle import rules
from oracles.verdict import ERROR, FAIL, PASS
from oracles.verify import judge

NAMED = [(oracle.name, name) for oracle in rules().values() for name in oracle.kills]


def judged_by(oracle: str, name: str) -> list[Mutant]:
    judges = rules()[oracle].problems
    return [m for m in mutants() if m.name == name and (not judges or m.case.problem in judges)]


@pytest.mark.parametrize(("oracle", "name"), NAMED)
def test_an_oracle_kills_what_it_names(oracle, name):
    found = judged_by(oracle, name)
    assert found, f"no mutant is called {name}"
    for mutant in found:
        (verdict,) = judge(mutant.backend, mutant.case, oracles=[oracle])
        wanted = ERROR if name.startswith("raises_") else FAIL
        assert verdict.status == wanted, (mutant.case.problem, verdict)


def test_every_mutant_is_killed_by_a_named_oracle():
    killed = {(m.case.problem, m.name) for oracle, name in NAMED for m in judged_by(oracle, name)}
    assert {(m.case.problem, m.name) for m in mutants()} == killed


def test_every_oracle_has_a_mutant():
    assert [oracle.name for oracle in rules().values() if not oracle.kills] == []


def test_what_the_mutants_were_before_their_edit_is_right():
    for case in {m.case for m in mutants()}:
        fn, numerics = right(case)
        verdicts = judge(replace(mutants()[0], case=case, run=fn, numerics=numerics).backend, case)
        assert {v.oracle: v.detail for v in verdicts if v.status != PASS} == {}


def in_request(number: int, step):
    """A step that departs in one request only."""
    first = sum(LATENT.q_lens[:number])
    return lambda value, request: step(value, request) if request.rows.start == first else value


def of_head(number: int, step):
    """A step that departs in one head of scores [h s j] only."""

    def change(scores, request):
        return torch.cat([step(x[None]) if h == number else x[None] for h, x in enumerate(scores)])

    return change


def hidden(mask, request, key=20):
    return mask & (torch.arange(mask.shape[1]) != key)


def one_more(mask, request):
    return mask | mask.roll(1, 1) & (torch.arange(mask.shape[1]) > 0)


def doubled_lse(inputs):
    output = attend(inputs, {})
    output.lse[:, 3] /= torch.log(torch.tensor(2.0))
    return output


PLACED = {
    "a scale wrong by 1 % in head 2": (
        LATENT,
        departing(scores=of_head(2, lambda x: x * 1.01)),
        "lse",
        ("head 2",),
    ),
    "a key dropped in request 2": (LATENT, departing(mask=in_request(2, hidden)), "value", ("request 2",)),
    "causal off by one in request 1": (
        LATENT,
        departing(mask=in_request(1, one_more)),
        "value",
        ("request 1, query 0", "request 1, query 1"),
    ),
    "a logarithm in base 2 in head 3": (LATENT, doubled_lse, "lse", ("head 3",)),
    "an fp8 scale ignored in request 0": (
        PER_TENSOR,
        departing(keys=in_request(0, lambda keys, request: tuple(x / PER_TENSOR.kv_scale for x in keys))),
        "value",
        ("request 0",),
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_finding_names_the_place(name):
    case, run, oracle, places = PLACED[name]
    (verdict,) = judge(Mutant(name, case, run).backend, case, oracles=[oracle])
    assert verdict.status == FAIL
    assert verdict.worst is not None
    assert any(place in verdict.worst.place for place in places), verdict.worst.place
    assert verdict.worst.place in verdict.detail
    assert verdict.worst.ratio > 1.0
