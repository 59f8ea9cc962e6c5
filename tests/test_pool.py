"""The pool: what a backend's import may take, and what its functions may."""

import json
import re
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest

from mla_ref.case import Case
from mla_ref.presets import PRESETS
from oracles.command import main
from oracles.exits import WorkersError
from oracles.matrix import Job
from oracles.oracle import rules
from oracles.pool import Part, described, judge_all, judge_job, judged
from oracles.run_directory import Record
from oracles.verdict import CRASH, ERROR, FAIL, PASS, TIMEOUT, Verdict
from oracles.verify import find_backend
from oracles.worker import CRASHED, ITEM, RAISED, REPLACED, STEP, TIMED_OUT, Limits, Outcome, Replace

# Its import takes longer than its functions may; as long as one of them takes.
SLOW = """
import time
from mla_ref.backend import Backend
from mla_ref.rope import BACKEND as RIGHT

def waiting(*inputs):
    time.sleep({seconds})
    return RIGHT.fn(*inputs)

time.sleep({seconds})
VARIANTS = {{"waiting": waiting, "again": RIGHT.fn}}
BACKEND = Backend("slow", "rope", RIGHT.fn, RIGHT.numerics, variants=VARIANTS)
"""


@pytest.mark.parametrize("patience", [60.0, 1.0])
def test_an_import_has_time_of_its_own_and_functions_have_none_of_it(patience, tmp_path, monkeypatch):
    seconds, limit = 3.0, 2.0
    (tmp_path / "slow_import.py").write_text(SLOW.format(seconds=seconds))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("oracles.pool.IMPORT_SECONDS", patience)
    config = PRESETS["a.x-k2"].shard(16)
    case = Case(problem="rope", config=config, q_lens=(1,), kv_lens=(2,))
    begun = time.monotonic()
    [(_, verdicts)] = judge_all([Job(case, ("slow_import",), ("value",), "cpu")], 1, Limits(limit))
    found = {verdict.variant: (verdict.status, verdict.detail) for verdict in verdicts}
    told = r"took longer than 2 s in {}, slow_import\.py:\d+"
    if patience < limit:
        # The greater of the two: an import is never given less than a function.
        assert set(found) == {""}
        assert found[""][0] == TIMEOUT
        assert re.fullmatch(told.format("<module>"), found[""][1]), found
        return
    assert time.monotonic() - begun > seconds
    assert [found[name][0] for name in ("default", "waiting", "again")] == [PASS, TIMEOUT, PASS]
    assert re.fullmatch(told.format("waiting"), found["waiting"][1]), found


ROPE = Case(problem="rope", config=PRESETS["a.x-k2"].shard(16), q_lens=(1,), kv_lens=(2,))
JOB = Job(ROPE, ("first", "second"), ("contract", "value", "rope_norm"), "cpu")


def begun(name, oracles=JOB.oracles):
    return STEP, {"function": name, "oracles": list(oracles)}


def decided(oracle, status=PASS):
    verdict = Verdict(
        status=status, backend="first", variant="default", oracle=oracle, case=ROPE, device="cpu"
    )
    return verdict.without_case()


def after(messages, end, why="", part=None):
    part = part or Part(JOB)
    return part.after(Outcome(part.task(0), [(STEP, {"backend": 0}), *messages], end, why))


@pytest.mark.parametrize("end", [CRASHED, TIMED_OUT, RAISED])
def test_a_claim_that_is_broken_stays_so_whatever_ends_its_explanation(end):
    found = decided("value", FAIL) | {"detail": "out: is wrong"}
    messages = [begun(""), (ITEM, decided("contract")), (STEP, {"found": found})]
    part = after(messages, end, "took longer than 2 s")
    verdicts = part.verdicts()
    assert [(v.oracle, v.status) for v in verdicts] == [("contract", PASS), ("value", FAIL)]
    assert verdicts[1].detail == "out: is wrong; it could not be explained: took longer than 2 s"
    assert dict(part.tried) == {"": list(JOB.oracles)}


def test_what_was_found_before_is_not_found_again():
    found = (STEP, {"found": decided("contract", FAIL)})
    part = after([begun(""), found, (ITEM, decided("contract", FAIL))], CRASHED, "died")
    assert [(v.oracle, v.status) for v in part.verdicts()] == [("contract", FAIL), ("value", CRASH)]


def test_a_process_that_a_claim_spoilt_is_replaced_and_no_claim_is_lost():
    spoilt = (STEP, {"spoilt": True})
    part = after([begun(""), (ITEM, decided("contract")), (ITEM, decided("value")), spoilt], REPLACED)
    assert part.job.specs == ("first", "second")
    assert dict(part.tried) == {"": ["contract", "value"]}
    again = [begun("", ["rope_norm"]), (ITEM, decided("rope_norm")), spoilt]
    part = after(again, REPLACED, part=part)
    assert dict(part.tried) == {"": list(JOB.oracles)}
    assert [v.oracle for v in part.verdicts()] == list(JOB.oracles)
    part = after([begun("v"), (ITEM, decided("contract"))], CRASHED, "died", part)
    assert dict(part.tried) == {"": list(JOB.oracles), "v": list(JOB.oracles)}
    assert [v.status for v in part.verdicts()] == [PASS] * 4 + [CRASH]


def test_what_one_backend_was_tried_on_the_next_is_tried_on_too():
    every = [(ITEM, decided(oracle)) for oracle in JOB.oracles]
    second = [(STEP, {"backend": 1}), begun(""), every[0], (STEP, {"spoilt": True})]
    part = after([begun(""), *every, *second], REPLACED)
    assert part.job.specs == ("second",)
    assert dict(part.tried) == {"": ["contract"]}


def test_a_backend_that_does_not_survive_questions_is_not_asked_and_others_are(monkeypatch):
    asked = []
    monkeypatch.setattr("oracles.pool._supports", lambda backend, *_: asked.append(backend.name))
    job = JOB._replace(specs=("mla_ref.rope", "mla_fast.sdpa"), oracles=())
    for unasked, names in ((True, ["mla_fast.sdpa"]), (False, ["mla_ref.rope", "mla_fast.sdpa"])):
        asked.clear()
        judged(Part(job, unasked=unasked).task(0).argument, lambda *_: None)
        assert asked == names


def test_turns_that_are_dealt_otherwise_next_time_leave_no_function_out(monkeypatch):
    """It answered before it died of a claim, and does not any more: turns are dealt without."""
    part = after([begun(""), begun("third")], CRASHED, "died")
    part = after([(STEP, {"asked": True})], TIMED_OUT, "took longer", part)
    assert part.unasked
    monkeypatch.setattr("oracles.pool.trials", lambda *_: [("", JOB.oracles), ("second", JOB.oracles)])
    right = find_backend("mla_ref.rope")
    monkeypatch.setattr("oracles.pool.find_backend", lambda _: replace(right, variants={"second": right.fn}))
    said = []
    one = part._replace(job=part.job._replace(specs=("first",)))
    judged(one.task(0).argument, lambda kind, body: said.append((kind, body)))
    assert [(body["variant"], body["status"]) for kind, body in said if kind == ITEM] == [
        ("second", PASS)
    ] * 3


def test_what_a_claim_leaves_beyond_repair_ends_the_process(monkeypatch):
    said = []
    monkeypatch.setattr("oracles.pool.BEYOND_REPAIR", damage := [])

    def say(kind, body):
        said.append((kind, body))
        if kind == ITEM and body["oracle"] == "value":
            damage.append("a capture")

    part = Part(Job(ROPE, ("mla_ref.rope",), ("contract", "value", "rope_norm"), "cpu"))
    with pytest.raises(Replace, match="a capture"):
        judged(part.task(0).argument, say)
    part = part.after(Outcome(part.task(0), said, REPLACED, "a capture"))
    assert [v.oracle for v in part.verdicts()] == ["contract", "value"]
    damage.clear()
    said.clear()
    judged(part.task(0).argument, say)
    assert [body["oracle"] for kind, body in said if kind == ITEM] == ["rope_norm"]


def test_what_the_judge_raises_in_this_process_is_the_verdict_that_it_is_in_a_worker(monkeypatch):
    """What was known of this and of other cases is not lost with it."""

    def broken(trial):
        raise LookupError("planted")

    check = replace(rules()["rope_norm"], check=broken)
    monkeypatch.setattr("oracles.verify.rules", lambda: rules() | {"rope_norm": check})
    verdicts = judge_job(Job(ROPE, ("mla_ref.rope",), ("value", "rope_norm", "contract"), "cpu"))
    assert [(v.oracle, v.status) for v in verdicts] == [("value", PASS), ("rope_norm", ERROR)]
    assert re.fullmatch(r"InTheJudge: LookupError in broken, test_pool\.py:\d+: planted", verdicts[1].detail)


def test_what_was_judged_before_the_workers_failed_is_told(monkeypatch, capsys):
    def broken(jobs, *_):
        verdict = Verdict(
            status=FAIL, backend="mla_ref.rope", variant="default", oracle="value", case=ROPE, device="cpu"
        )
        yield 0, [replace(verdict, detail="out: is wrong")]
        raise WorkersError("workers do not start: killed")

    monkeypatch.setattr("oracles.cli.judge_all", broken)
    assert main(["run", "--backend", "mla_ref.rope", "--preset", "a.x-k2"]) == 3
    out, err = capsys.readouterr()
    assert "out: is wrong" in out
    assert err.endswith("mla-verify: workers do not start: killed\n")


def test_a_campaign_tells_what_it_found_before_the_workers_failed(monkeypatch, capsys):
    def broken(plan, engine, journal, tally, over, done):
        tally.add("mla_ref.rope", Record(0, json.loads(ROPE.to_json()), [decided("value", FAIL)]))
        yield None
        raise WorkersError("workers do not start: killed")

    found = described(["mla_ref.rope"], "cpu", None)
    monkeypatch.setattr("oracles.fuzz_cli.campaign", broken)
    monkeypatch.setattr("oracles.fuzz_cli.describe_all", lambda *_: found)
    monkeypatch.setattr("oracles.fuzz_cli.judges", lambda *_, **__: nullcontext())
    assert main(["fuzz", "--backend", "mla_ref.rope", "--budget", "1cases", "--jobs", "1"]) == 3
    out, err = capsys.readouterr()
    assert "1 cases, 0 claims held, 1 failed" in out
    assert err.endswith("mla-verify: workers do not start: killed\n")
