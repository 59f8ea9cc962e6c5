"""Judging here what runs there: the same bytes arrive, the same memory is meant, and nothing else changes.

"cpu:0" is the CPU by another name, so that everything is carried from memory to memory without a GPU.
"""

import json
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from mla_ref.problem import problem
from oracles import mutants
from oracles.campaign import Plan
from oracles.command import main
from oracles.coverage import draw
from oracles.mirror import Mirror
from oracles.oracle import private_copy, rules, storage_bytes
from oracles.pool import Part, judge_job, judged
from oracles.verdict import FAIL, PASS
from oracles.verify import find_backend, judge
from oracles.worker import ITEM, Limits

HERE, THERE = "cpu:0", "cpu"
PROBLEMS = (
    "latent_attention",
    "paged_attention",
    "merge_states",
    "cache_write",
    "rope_cache_write",
    "rope",
    "layer",
)


class Output(NamedTuple):
    out: torch.Tensor
    other: torch.Tensor = torch.empty(0)


class Given(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    weights: dict[str, torch.Tensor]
    scale: float = 0.5


@pytest.fixture
def mirror():
    return Mirror(HERE, THERE)


@pytest.fixture
def given():
    """A strided view in poison, another of the same memory, and a NaN with a payload."""
    memory = torch.full((640,), 0xFF, dtype=torch.uint8)
    x = memory.view(torch.float32).as_strided((3, 5), (40, 2), 7)
    x.copy_(torch.arange(15.0).reshape(3, 5))
    x.view(torch.int32)[1, 2] = 0x7FABCDEF
    return Given(x, memory.view(torch.float16)[9:20], {"w": torch.arange(6.0)[1::2], "none": torch.empty(0)})


def tensors(given):
    return [given.x, given.y, *given.weights.values()]


def same_memory(a, b):
    return storage_bytes(a).data_ptr() == storage_bytes(b).data_ptr()


def test_every_byte_stride_and_offset_arrives_in_other_memory(mirror, given):
    there = mirror.sent(given)
    for a, b in zip(tensors(given), tensors(there), strict=True):
        assert (a.dtype, a.shape, a.stride(), a.storage_offset()) == (
            b.dtype,
            b.shape,
            b.stride(),
            b.storage_offset(),
        )
        assert torch.equal(storage_bytes(a), storage_bytes(b))
        assert not a.numel() or not same_memory(a, b)
    assert same_memory(there.x, there.y)
    assert there.scale == given.scale


@pytest.mark.parametrize("name", PROBLEMS)
def test_inputs_of_every_problem_arrive(name, mirror, seed):
    contract = problem(name)
    inputs = contract.materialize(draw(name, seed, 3), torch.device("cpu"))
    before, there = private_copy(inputs), mirror.sent(inputs)
    for field in contract.shapes:
        x, y, z = (getattr(values, field) for values in (inputs, there, before))
        assert (x.stride(), x.storage_offset()) == (y.stride(), y.storage_offset())
        assert torch.equal(storage_bytes(x), storage_bytes(y))
        assert torch.equal(storage_bytes(x), storage_bytes(z))


def test_what_a_call_stores_is_seen_here_gaps_included(mirror, given):
    there = mirror.sent(given)
    storage_bytes(there.x)[-1] = 3
    there.weights["w"][0] = 9.0
    mirror.back(Output(torch.ones(2)))
    assert int(storage_bytes(given.y)[-1]) == 3
    assert float(given.weights["w"][0]) == 9.0


def test_an_output_that_is_a_view_of_an_input_is_one_here(mirror, given):
    there = mirror.sent(given)
    back = mirror.back(Output(there.x[1:, ::2], torch.ones(3)))
    assert same_memory(back.out, given.x)
    assert back.out.stride() == (40, 4)
    assert back.out.storage_offset() == 47
    assert not same_memory(back.other, given.x)


def test_memory_given_again_has_its_address_and_its_new_contents(mirror, given):
    first = mirror.sent(given)
    mirror.back(Output(torch.ones(1)))
    given.x.fill_(4.0)
    again = mirror.sent(given)
    assert same_memory(first.x, again.x)
    assert torch.equal(again.x, torch.full((3, 5), 4.0))
    mirror.back(Output(torch.ones(1)))
    assert not same_memory(mirror.sent(private_copy(given)).x, again.x)


def test_an_output_that_the_next_call_overwrites_changes_here(mirror, given):
    mirror.sent(given)
    buffer = torch.ones(3)
    first = mirror.back(Output(buffer))
    mirror.sent(private_copy(given))
    buffer.fill_(2.0)
    second = mirror.back(Output(buffer))
    assert torch.equal(first.out, torch.full((3,), 2.0))
    assert same_memory(first.out, second.out)


def test_gradients_are_still_asked_for(mirror, given):
    mirror.sent(given)
    assert mirror.back(Output(torch.ones(2, requires_grad=True))).out.requires_grad


def test_an_output_elsewhere_stays_there(mirror):
    elsewhere = Output(torch.empty(1, device="meta"))
    assert mirror.back(elsewhere).out is elsewhere.out


def plain(verdicts):
    return [(v.variant, v.oracle, v.status, v.detail, v.worst, v.num_bad, v.num_checked) for v in verdicts]


@pytest.mark.parametrize("name", ["mla_ref.naive", "mla_ref.merge_states", "mla_ref.cache_write"])
def test_a_verdict_is_the_same(name, seed):
    backend = find_backend(name)
    case = draw(backend.problem, seed, 2, backend.supports)
    oracles = [
        o for o in ("value", "lse", "inputs_unchanged", "guard_bands", "stored", "repeat") if judges(o, case)
    ]
    here = judge(backend, case, oracles=oracles)
    assert plain(judge(backend, case, oracles=oracles, judge_on=HERE)) == plain(here)
    assert {v.device for v in here} == {"cpu"}


def judges(name, case):
    return not rules()[name].problems or case.problem in rules()[name].problems


KILLED = {
    "query_scaled_in_place": "inputs_unchanged",
    "store_past_the_end": "inputs_unchanged",
    "store_before_the_queries": "guard_bands",
    "read_before_the_queries": "guard_bands",
    "first_output_remembered": "call_sequence",
    "semaphore_not_reset": "repeat",
    "rows_not_written": "value",
    "output_buffer_shared": "reused_memory",
    "cache_decoded_once": "reused_memory",
    "weights_kept_by_address": "reused_memory",
    "table_taken_for_packed": "strides",
    "scale_of_the_default_type": "surroundings",
    "output_in_a_graph": "contract",
}


@pytest.mark.parametrize("name", KILLED)
def test_a_mutant_of_memory_is_killed(name):
    mutant = next(m for m in mutants.mutants() if m.name == name)
    verdicts = judge(mutant.backend, mutant.case, oracles=[KILLED[name]], judge_on=HERE)
    assert {v.status for v in verdicts} == {FAIL}


@pytest.mark.parametrize(("judge_on", "mirrored"), [(None, 0), ("cpu", 0), (HERE, 1)])
def test_a_job_says_where_it_is_judged(judge_on, mirrored, monkeypatch, seed):
    sent, calls = Mirror.sent, []

    def counted(mirror, inputs):
        calls.append(inputs)
        return sent(mirror, inputs)

    monkeypatch.setattr(Mirror, "sent", counted)
    case = draw("merge_states", seed, 0)
    plan = Plan({"mla_ref.merge_states": case.problem}, {case.problem: ("value",)}, seed, THERE, Limits(60.0))
    job = plan._replace(judge_on=judge_on).job(0, case)
    assert [v.status for v in judge_job(job)] == [PASS]
    argument = json.loads(json.dumps(Part(job).task(0).argument))
    said = []
    judged(argument, lambda kind, body: said.append((kind, body)))
    assert [body["status"] for kind, body in said if kind == ITEM] == [PASS]
    assert len(calls) == 2 * mirrored


@pytest.mark.parametrize("command", ["run", "replay", "fuzz"])
def test_the_commands_take_the_host_or_the_device(command, capsys):
    case = [draw("rope", 0, 0).to_json()] if command == "replay" else []
    assert main([command, *case, "--backend", "mla_ref.rope", "--judge-on", "moon"]) == 2
    assert "--judge-on 'moon' is neither device nor cpu" in " ".join(capsys.readouterr().err.split())


def test_a_claim_about_the_device_is_judged_there_among_those_on_the_host(monkeypatch, seed):
    looked_at = {}

    def check(name):
        def noted(trial):
            looked_at[name] = trial.device
            return plain_checks[name](trial)

        return noted

    names = ["value", "index_range", "poison"]
    plain_checks = {name: rules()[name].check for name in names}
    changed = {name: replace(rules()[name], check=check(name)) for name in names}
    monkeypatch.setattr("oracles.verify.rules", lambda: rules() | changed)
    backend = find_backend("mla_ref.latent")
    case = draw(backend.problem, seed, 2, backend.supports)
    verdicts = judge(backend, case, device=THERE, oracles=names, judge_on=HERE)
    assert [(v.oracle, v.status) for v in verdicts] == [(name, PASS) for name in names]
    assert looked_at == {"value": HERE, "index_range": THERE, "poison": HERE}
    assert not verdicts[1].detail


def test_an_output_on_another_device_fails(seed):
    backend = find_backend("mla_ref.naive")
    case = draw(backend.problem, seed, 0, backend.supports)

    def elsewhere(*inputs):
        output = backend.fn(*inputs)
        return output._replace(out=output.out.to("meta"))

    wrong = replace(backend, fn=elsewhere, variants={})
    for judge_on in (None, HERE):
        (verdict,) = judge(wrong, case, oracles=["value"], judge_on=judge_on)
        assert verdict.status == FAIL
        assert "out: is on meta, must be on cpu" in verdict.detail
