"""Questions to a backend: what comes of them instead of an answer is a verdict that names the question."""

import re
import textwrap
from dataclasses import replace

import numpy
import pytest
import torch

from evals.speed.race import _admitted
from mla_ref.formats import formats
from mla_ref.presets import PRESETS
from mla_ref.problem import problems
from oracles.asked import declined, missing, told_later
from oracles.coverage import draw
from oracles.matrix import Job, jobs_of, stage_of, trials
from oracles.narrow import own_cases
from oracles.pool import described, judge_all
from oracles.verdict import CRASH, ERROR, FAIL, PASS, TIMEOUT, UNAVAILABLE
from oracles.verify import find_backend, judge
from oracles.worker import Limits


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self):
        raise RuntimeError("no words")


RIGHT = find_backend("mla_ref.latent")
LIMITS = Limits(20.0)


def jobs(spec, oracles=("value", "causal"), stage="mtp"):
    """The matrix's jobs of one stage, as a run makes them: each knows the others."""
    return [
        job
        for job in jobs_of(
            specs=[spec],
            problems=[problems()["latent_attention"]],
            configs=[PRESETS["a.x-k2"]],
            formats=[formats()["bf16"]],
            oracles=oracles,
            device="cpu",
            seed=0,
            implemented={spec: "latent_attention"},
        )
        if stage_of(job.case) == stage
    ]


CASE = jobs("mla_ref.latent")[0].case


def raising(error):
    def ask(_):
        raise error

    return ask


@pytest.mark.parametrize("question", ["requires", "supports"])
@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (raising(LookupError("lost\nand more")), "raised LookupError: lost"),
        (raising(SystemExit(3)), "raised SystemExit: 3"),
        (raising(GeneratorExit()), "raised GeneratorExit: "),
        (lambda _: False, "returned bool, must return a reason or None"),
        (lambda _: True, "returned bool, must return a reason or None"),
        (lambda _: "", "returned an empty reason, must return a reason or None"),
        (lambda _: numpy.arange(2), "returned ndarray, must return a reason or None"),
        (raising(Mute()), "raised Mute: "),
    ],
)
def test_what_is_no_answer_is_an_error_that_names_the_question(question, ask, told):
    verdicts = judge(replace(RIGHT, variants={}, **{question: ask}), CASE, oracles=["value", "lse"])
    assert [(v.oracle, v.status, v.detail) for v in verdicts] == [
        (name, ERROR, f"{question} {told}") for name in ("value", "lse")
    ]


def test_who_interrupts_the_judge_while_it_asks_is_obeyed():
    for question in ("requires", "supports"):
        asked = replace(RIGHT, **{question: raising(KeyboardInterrupt())})
        with pytest.raises(KeyboardInterrupt, match=f"in {question}: "):
            judge(asked, CASE, oracles=["value"])
    with pytest.raises(KeyboardInterrupt):
        told_later(replace(RIGHT, supports=raising(KeyboardInterrupt())))(CASE)


def test_an_answer_is_passed_on():
    asked = replace(RIGHT, requires=lambda device: f"no {device}", supports=lambda case: case.problem)
    assert (missing(asked, "cpu"), declined(asked, CASE)) == ("no cpu", "latent_attention")
    assert (missing(RIGHT, "cpu"), declined(RIGHT, CASE)) == (None, None)
    assert told_later(asked)(CASE) == "latent_attention"


@pytest.mark.parametrize("question", ["requires", "supports"])
def test_what_a_question_does_to_the_process_is_told_and_put_back(question):
    def ask(_):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(3)

    asked = replace(RIGHT, variants={}, **{question: ask})
    before = torch.get_rng_state()
    value, state = judge(asked, CASE, oracles=["value", "process_state"])
    assert (value.status, state.status) == (PASS, FAIL)
    assert state.detail == f"a call changed the default dtype: is torch.float64, in {question}"
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), before)


def test_what_supports_does_when_a_rule_asks_it_is_told_too():
    def supports(case):
        torch.set_grad_enabled(case == CASE)

    asked = replace(RIGHT, variants={}, supports=supports)
    layout, state = judge(asked, CASE, oracles=["layout", "process_state"])
    assert (layout.status, state.status) == (PASS, FAIL)
    assert state.detail == "a call changed the gradient mode: is False, in supports"
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("many", ["trials", "draw", "own_cases"])
def test_many_questions_leave_the_process_as_it_was(many):
    def supports(case):
        torch.set_default_dtype(torch.float64)
        return "one request" if len(case.kv_lens) == 1 else None

    ask, [job, *_] = told_later(replace(RIGHT, supports=supports)), jobs("mla_ref.naive")
    asked = {
        "trials": lambda: trials(job, (), ask),
        "draw": lambda: draw("latent_attention", 0, 0, ask),
        "own_cases": lambda: own_cases(
            problems()["latent_attention"], [PRESETS["a.x-k2"]], [formats()["bf16"]], ask
        ),
    }
    try:
        asked[many]()
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("oracle", ["page_size", "layout", "call_sequence"])
def test_an_exception_about_a_case_that_an_oracle_makes_is_the_backends(oracle):
    """Not the judge's, which only asks whether inputs of its own are taken."""

    def supports(case):
        if case != CASE:
            raise LookupError("what is this")

    [verdict] = judge(replace(RIGHT, variants={}, supports=supports), CASE, oracles=[oracle])
    assert (verdict.status, verdict.detail) == (ERROR, "supports raised LookupError: what is this")


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, GeneratorExit])
def test_what_supports_raises_leaves_every_claim_its_turn(error):
    todo = jobs("mla_ref.naive", oracles=None)
    unasked = [trials(job, ()) for job in todo]
    assert [trials(job, (), told_later(replace(RIGHT, supports=raising(error())))) for job in todo] == unasked


# Its supports does something to the process when it is asked about a case of so many requests.
STRANGER = """
import ctypes, os, time
from dataclasses import replace
from mla_ref.latent import BACKEND as RIGHT

def end():
    {end}

def supports(case):
    if len(case.kv_lens) == {requests}:
        end()

def requires(device):
    if {requires}:
        end()

BACKEND = replace(RIGHT, name="stranger", variants={{}}, supports=supports, requires=requires)
"""

ENDS = {
    "dies": ("os.kill(os.getpid(), 11)", CRASH, r"the process died of SIGSEGV in end, dies\.py:\d+"),
    "hangs": ("time.sleep(1000)", TIMEOUT, r"took longer than 2 s in end, hangs\.py:\d+"),
    "interrupts": ("raise KeyboardInterrupt('stop')", ERROR, r"KeyboardInterrupt: in supports: stop"),
    "exits": ("raise SystemExit(0)", ERROR, r"supports raised SystemExit: 0"),
}


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("oracles.pool.IMPORT_SECONDS", 6.0)

    def written(name, *, requests=-1, requires=False):
        end = textwrap.indent(ENDS[name][0], " ")
        text = STRANGER.format(end=end.strip(), requests=requests, requires=requires)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return written


@pytest.mark.parametrize("name", ENDS)
def test_supports_is_blamed_on_the_case_that_it_was_asked_about(name, stranger):
    """Turns are dealt over all cases of a stage, so it is asked about this one before another is judged."""
    spec = stranger(name, requests=6)
    _, status, detail = ENDS[name]
    todo = jobs(spec)
    [bad] = [i for i, job in enumerate(todo) if len(job.case.kv_lens) == 6]
    other, own = dict(judge_all([todo[bad - 1], todo[bad]], 1, LIMITS._replace(seconds=2.0))).values()
    assert {v.status for v in other} == {PASS}
    first = own[0]
    assert (first.status, first.variant, first.oracle) == (status, "default", "value")
    assert re.fullmatch(detail, first.detail), first.detail
    assert {v.status for v in own} == {status}


@pytest.mark.parametrize("name", ["dies", "interrupts"])
def test_what_requires_does_is_a_verdict_and_no_fault_of_the_import(name, stranger):
    spec = stranger(name, requires=True)
    limits = LIMITS._replace(seconds=2.0)
    assert described([spec], "cpu", limits)[spec][:2] == ("latent_attention", None)
    _, status, detail = ENDS[name]
    [(_, [verdict])] = judge_all([Job(CASE, (spec,), ("value",), "cpu")], 1, limits)
    assert verdict.status == status
    assert re.fullmatch(detail.replace("supports", "requires"), verdict.detail), verdict.detail


def test_a_reason_that_was_given_before_is_kept(stranger, tmp_path):
    spec = stranger("exits", requires=False)
    source = (tmp_path / f"{spec}.py").read_text()
    (tmp_path / f"{spec}.py").write_text(source.replace("if False:", "return 'a GPU'\n    if False:"))
    assert described([spec], "cpu", LIMITS)[spec].unavailable == "a GPU"
    [(_, [verdict])] = judge_all([Job(CASE, (spec,), ("value",), "cpu")], 1, LIMITS)
    assert (verdict.status, verdict.detail) == (UNAVAILABLE, "a GPU")


@pytest.mark.parametrize("question", ["requires", "supports"])
def test_a_race_asks_alike(question):
    asked = replace(RIGHT, **{question: raising(SystemExit(3))})
    assert _admitted(asked, CASE, torch.device("cpu")) == (ERROR, f"{question} raised SystemExit: 3")
