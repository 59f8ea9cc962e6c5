"""What is prepared and what a graph holds: with a stand-in for graphs, which are a GPU's."""

from dataclasses import replace

import pytest

from mla_ref.backend import Prepared
from oracles.engine_mutants import prepared_mutants
from oracles.mutants import LATENT, Mutant, mutants, right
from oracles.rules import captured
from oracles.rules.captured import Graph, _tensors
from oracles.verdict import ERROR, FAIL, PASS
from oracles.verify import backends, judge


def stand_in(replays=True):
    """A graph that makes the call again, and leaves what it returns where the first call did."""

    def graph_of(call, device):
        result = call()

        def replay():
            if replays:
                for old, new in zip(_tensors(result), _tensors(call()), strict=True):
                    old.copy_(new)

        return Graph(replay, result)

    return graph_of


def divided(backend):
    """The backend with everything left to be done in each run."""
    prepare = lambda inputs: Prepared(lambda: backend.fn(*inputs), lambda output: output)  # noqa: E731
    return replace(backend, variants={}, prepare=prepare)


def verdict(backend, case=LATENT):
    [found] = judge(backend, case, oracles=["captured"])
    return found


def wrong(name):
    return next(m for m in mutants() if (m.name, m.case.problem) == (name, "latent_attention")).backend


@pytest.mark.parametrize("of", sorted(captured.ORACLE.problems))
def test_what_is_right_holds(of, monkeypatch):
    case = next(mutant.case for mutant in mutants() if mutant.case.problem == of)
    backend = next(b for b in backends().values() if b.problem == of and b.name.startswith("mla_ref."))
    monkeypatch.setattr(captured, "graph_of", stand_in())
    found = verdict(divided(backend), case)
    assert (found.status, found.detail) == (PASS, "")
    assert found.num_checked > 0


def test_without_a_graph_and_a_plan_nothing_is_claimed():
    found = verdict(wrong("key_dropped"))
    assert found.status == PASS
    assert found.detail == "the backend prepares nothing; there are graphs on a GPU alone"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("prepared_for_one_run", "prepared, run 2: out: "),
        ("prepared_without_the_last_key", "prepared, run 1: "),
    ],
)
def test_a_plan_that_is_wrong_is_told_from_a_call_that_is(name, told):
    mutant = next(mutant for mutant in prepared_mutants(LATENT) if mutant.name == name)
    found = verdict(mutant.backend)
    assert (found.status, found.detail[: len(told)]) == (FAIL, told)
    [value] = judge(mutant.backend, LATENT, oracles=["value"])
    assert value.status == PASS


def test_what_a_graph_does_not_see_is_nan_when_it_is_replayed(monkeypatch):
    monkeypatch.setattr(captured, "graph_of", stand_in(replays=False))
    run, numerics = right(LATENT)
    found = verdict(Mutant("none", LATENT, run, numerics).backend)
    assert found.status == FAIL
    assert found.detail.startswith("replayed from a graph, over other values: ")


def test_a_value_that_is_baked_in_is_that_of_the_step_before(monkeypatch):
    monkeypatch.setattr(captured, "graph_of", stand_in())
    assert verdict(wrong("cache_decoded_once")).detail.startswith(
        "replayed from a graph, over other values: "
    )


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda inputs: 1 / 0, "prepare raised ZeroDivisionError: division by zero"),
        (lambda inputs: Prepared(lambda: 1 / 0, lambda output: output), "prepare raised ZeroDivisionError"),
    ],
)
def test_what_a_plan_raises_is_the_backends(prepare, told):
    found = verdict(replace(wrong("key_dropped"), prepare=prepare))
    assert found.status == ERROR
    assert found.detail.startswith(told)


def test_what_is_no_output_is_told():
    prepare = lambda inputs: Prepared(lambda: inputs.ql_nope, lambda output: output)  # noqa: E731
    found = verdict(replace(wrong("key_dropped"), prepare=prepare))
    assert (found.status, found.detail) == (FAIL, "prepared, run 1: output is no tuple of (out, lse)")


def test_a_variant_has_no_plan_of_the_backends_own_function():
    backend = wrong("prepared_without_the_last_key")
    found = judge(replace(backend, variants={"again": backend.fn}), LATENT, oracles=["captured"])
    assert [(v.variant, v.status) for v in found] == [("default", FAIL), ("again", PASS)]
