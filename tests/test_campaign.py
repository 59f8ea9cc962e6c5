"""Campaigns: numbers follow from the seed, counts add up however often it was killed, failures are small."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import pytest

from mla_ref.case import Case
from mla_ref.presets import PRESETS
from oracles import campaign as campaign_module
from oracles.campaign import Plan, campaign, drawn, known, shrunk
from oracles.command import main
from oracles.corpus import read as corpus_entries
from oracles.coverage import draw
from oracles.fuzz_cli import at_most, budget_of, duration, memory_size, summarise
from oracles.pool import Part, judge_job, judged
from oracles.run_directory import VERDICTS, Record, RunDirectory, manifest_of, open_run
from oracles.tally import Count, Tally, kind_of
from oracles.terminal import to_stdout
from oracles.verdict import BROKEN, CRASH, ERROR, FAIL, PASS, TIMEOUT, UNSUPPORTED, Verdict, Worst
from oracles.verify import judge
from oracles.worker import (
    CRASHED,
    DONE,
    ITEM,
    PATIENCE,
    RAISED,
    REPLACED,
    STEP,
    Limits,
    Outcome,
    Task,
    WorkersError,
)

ROOT = Path(__file__).parent.parent
LIMITS = Limits(60.0)
NUMBERS = 141
HANDLERS = {"drawn": drawn, "judged": judged, "shrunk": shrunk}

# A kernel of rope that is wrong, raises, dies or hangs on some numbers of heads, and says so on import.
STRANGER = """
import os, sys, time
from mla_ref.backend import Backend
from mla_ref.rope import BACKEND as RIGHT

def fn(x, *rest):
    heads = x.shape[1]
    if heads == {wrong}:
        out = RIGHT.fn(x, *rest)
        return out._replace(**{{out._fields[0]: out[0] + 1}})
    if heads == {raises}:
        raise LookupError("lost")
    if heads == {dies}:
        os.write(2, b"a last word")
        os.abort()
    if heads == {hangs}:
        time.sleep(1000)
    print("a line that does not end", end="", flush=True)
    return RIGHT.fn(x, *rest)

BACKEND = Backend("stranger", "rope", fn, RIGHT.numerics)
"""


class Inline:
    """An engine of so many slots in this process; slots end in an order of its own."""

    def __init__(self, size=2):
        self.size = size

    def outcomes(self, source):
        while tasks := [task for slot in range(self.size) if (task := source(slot)) is not None]:
            for task in reversed(tasks):
                messages = []
                argument = json.loads(json.dumps(task.argument))
                handler = HANDLERS[task.handler.partition(":")[2]]
                handler(
                    argument, lambda kind, body, to=messages: to.append((kind, json.loads(json.dumps(body))))
                )
                yield Outcome(task, messages, DONE)
            yield None


def plan_of(num_cases, specs=("mla_ref.rope",), oracles=("value",), seed=3):
    problems = {spec: spec.removeprefix("mla_ref.") for spec in specs}
    return Plan(problems, dict.fromkeys(problems.values(), oracles), seed, "cpu", LIMITS, num_cases)


def run(plan, path=None, engine=None, over=lambda: False):
    tally = Tally({spec: Count() for spec in plan.problems})
    engine = engine or Inline()
    if path is None:
        return tally, list(campaign(plan, engine, None, tally, over))
    manifest = manifest_of({"backends": list(plan.problems), "seed": plan.seed}, {"jobs": engine.size}, "cpu")
    with open_run(path, manifest) as journal:
        done = known(plan, journal, tally)
        return tally, list(campaign(plan, engine, journal, tally, over, done))


def cases_of(path):
    return {record.number: Case.from_json(json.dumps(record.case)) for record in RunDirectory(path).records()}


def counts(tally):
    return {spec: vars(count) | {"worst": None} for spec, count in tally.counts.items()}


def test_number_n_is_the_same_case_whoever_judges_it(tmp_path):
    specs = ("mla_ref.rope", "mla_ref.merge_states")
    for name, slots in (("one", 1), ("five", 5)):
        run(plan_of(NUMBERS, specs), tmp_path / name, Inline(slots))
    one, five = cases_of(tmp_path / "one"), cases_of(tmp_path / "five")
    assert sorted(one) == list(range(NUMBERS))
    assert one == five
    for number in (0, 1, 77, NUMBERS - 1):
        problem = ("rope", "merge_states")[number % 2]
        supports = campaign_module._supports(specs[number % 2])
        assert one[number] == draw(problem, 3, number // 2, supports)
    assert cases_of(tmp_path / "one") != {n: draw("rope", 4, n) for n in one}


class Dealt(Inline):
    """Notes which numbers went to which slot, in order; slots take turns."""

    def __init__(self, size, backends):
        super().__init__(size)
        self.backends, self.numbers = backends, {slot: [] for slot in range(size)}

    def outcomes(self, source):
        def noted(slot):
            task = source(slot)
            if task is not None and "turn" in task.argument:
                spec = task.argument["specs"][0]
                self.numbers[slot].append((spec, task.argument["turn"][0]))
            return task

        return super().outcomes(noted)


@pytest.mark.parametrize(("slots", "num_specs"), [(1, 1), (3, 1), (3, 2), (2, 3)])
def test_cases_that_are_alike_go_to_one_worker_one_after_the_other(slots, num_specs, tmp_path):
    specs = ("mla_ref.rope", "mla_ref.merge_states", "mla_ref.cache_gather")[:num_specs]
    runs, alike = 4, 6
    plan = plan_of(runs * alike * num_specs, specs)._replace(alike=alike)
    engine = Dealt(slots, num_specs)
    run(plan, tmp_path / "run", engine)
    cases = cases_of(tmp_path / "run")
    assert sorted(cases) == list(range(runs * alike * num_specs))
    for number, case in cases.items():
        supports = campaign_module._supports(specs[number % num_specs])
        assert case == draw(case.problem, 3, number // num_specs, supports, alike)
    begun = 0
    for dealt in engine.numbers.values():
        neighbours = [a == (b[0], b[1] - 1) and b[1] % alike for a, b in itertools.pairwise(dealt)]
        begun += len(dealt) - sum(map(bool, neighbours))
    # Each run is begun once, but at the end, when who has none takes half of what another has left.
    assert runs * num_specs <= begun <= runs * num_specs + (slots - 1) * alike.bit_length()


def test_whole_runs_are_drawn():
    deck = campaign_module._Deck(plan_of(None)._replace(alike=5), 1, frozenset())
    deck.backends = [campaign_module._Backend()]
    assert deck.next(0, over=False) == campaign_module._Drawing(tuple(range(20)))


def test_who_has_none_takes_the_later_half_of_what_another_has():
    case = draw("rope", 3, 0)
    hand = [campaign_module._Judging(n, Part(plan_of(9).job(n, case))) for n in range(3)]
    deck = campaign_module._Deck(plan_of(9), 2, frozenset())
    deck.hands = {0: deque(hand), 1: deque()}
    assert list(deck._half()) == hand[1:]
    assert list(deck._half()) == hand[:1]
    assert not deck.hands[0]
    assert not deck._half()


def test_when_it_is_over_what_was_begun_is_ended_and_nothing_else():
    case = draw("rope", 3, 0)
    begun = campaign_module._Judging(7, Part(plan_of(9).job(7, case)))
    deck = campaign_module._Deck(plan_of(9), 1, frozenset())
    deck.backends = [campaign_module._Backend()]
    deck.first += [campaign_module._Drawing((8,)), begun]
    assert deck.next(0, over=True) == begun
    assert deck.next(0, over=True) is None
    assert not deck.first


def test_a_run_of_alike_cases_goes_on_where_it_was_ended(tmp_path):
    plan = plan_of(40, ("mla_ref.rope", "mla_ref.merge_states"))._replace(alike=8)
    whole, _ = run(plan, tmp_path / "whole", Inline(3))
    asked = itertools.count()
    run(plan, tmp_path / "again", Inline(3), lambda: next(asked) > 20)
    begun = len(cases_of(tmp_path / "again"))
    assert 0 < begun < 40
    tally, _ = run(plan, tmp_path / "again", Inline(2))
    assert (tally.resumed, tally.total("cases")) == (begun, 40)
    assert cases_of(tmp_path / "again") == cases_of(tmp_path / "whole")
    assert counts(tally) == counts(whole)


def test_functions_and_claims_take_turns():
    plan = plan_of(None, ("mla_ref.split",))._replace(problems={"mla_ref.split": "attention"})
    plan = plan._replace(
        oracles={"attention": ("value", "poison", "causal", "likely", "row_norm", "matched_filters")}
    )
    case = Case(problem="attention", config=PRESETS["a.x-k2"].shard(16), q_lens=(1,), kv_lens=(2,))
    met = Counter(
        (verdict.variant, verdict.oracle) for n in range(160) for verdict in judge_job(plan.job(n, case))
    )
    variants = {variant for variant, _ in met}
    assert len(variants) == 1 + len(set(variants) - {"default"})
    assert len(variants) > 2
    assert all(met[variant, "value"] >= 8 for variant in variants)
    assert met["default", "value"] > 60
    for variant in variants:
        claims = {oracle for of, oracle in met if of == variant}
        assert claims == {"value", "poison", "causal", "likely", "row_norm", "matched_filters"}
        costly = [met[variant, name] for name in ("likely", "row_norm", "matched_filters")]
        assert 0.25 * met[variant, "value"] < sum(costly) < 0.75 * met[variant, "value"]


@pytest.mark.parametrize("times", [1, 3])
def test_counts_add_up_when_it_is_ended_and_goes_on(times, tmp_path):
    plan = plan_of(90)
    whole, _ = run(plan, tmp_path / "whole")
    for _ in range(times):
        asked = itertools.count()
        run(plan, tmp_path / "parts", over=lambda asked=asked: next(asked) > 20)
        assert len(cases_of(tmp_path / "parts")) < 90
    parts, _ = run(plan, tmp_path / "parts", Inline(3))
    assert counts(parts) == counts(whole)
    assert cases_of(tmp_path / "parts") == cases_of(tmp_path / "whole")
    assert parts.resumed > 0


# Where in the writing of a line the process is killed: after so many bytes of the n-th line.
KILLED = [(1, 0), (1, 1), (4, 100), (7, 10**6)]


@pytest.mark.parametrize(("line", "size"), KILLED)
def test_counts_add_up_when_it_is_killed_in_a_write(line, size, tmp_path):
    plan = plan_of(24)
    if (child := os.fork()) == 0:
        written = itertools.count(1)
        write = os.write

        def deadly(file, data):
            if next(written) == line:
                write(file, bytes(data)[:size])
                os.kill(os.getpid(), signal.SIGKILL)
            return write(file, data)

        campaign_module.RunDirectory  # noqa: B018, what is patched is the module below
        os.write = deadly
        run(plan, tmp_path / "parts")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    parts, _ = run(plan, tmp_path / "parts")
    whole, _ = run(plan)
    assert counts(parts) == counts(whole)
    assert parts.resumed == (line if size == 10**6 else line - 1)
    assert sorted(cases_of(tmp_path / "parts")) == list(range(24))


def test_a_backend_whose_supports_dies_is_judged_on_cases_drawn_without_it():
    class Dying(Inline):
        def outcomes(self, source):
            def deadly(slot):
                task = source(slot)
                asked = task is not None and task.argument.get("backend") is not None
                return task._replace(handler="x:died") if asked else task

            HANDLERS["died"] = lambda argument, say: None
            for outcome in super().outcomes(deadly):
                died = outcome is not None and outcome.task.handler == "x:died"
                yield outcome._replace(end=CRASHED, why="SIGSEGV") if died else outcome

    tally, _ = run(plan_of(5), engine=Dying())
    assert tally.total("cases") == 5


def test_a_backend_for_which_no_case_is_found_is_not_tried():
    class Nothing(Inline):
        def outcomes(self, source):
            for outcome in super().outcomes(source):
                drawing = outcome is not None and outcome.task.handler.endswith("drawn")
                yield Outcome(outcome.task, [(ITEM, "rope: none")], DONE) if drawing else outcome

    tally, _ = run(plan_of(None), engine=Nothing())
    assert tally.reasons == {"mla_ref.rope": "rope: none"}
    assert tally.total("cases") == 0


def told(handler, argument):
    said = []
    HANDLERS[handler](argument, lambda kind, body: said.append((kind, body)))
    return said


def test_why_no_case_is_found_is_told_after_those_that_were(monkeypatch):
    def some(problem, seed, index, *rest):
        if index == 2:
            raise campaign_module.NothingFound("rope: none")
        return draw(problem, seed, index, *rest)

    monkeypatch.setattr(campaign_module, "draw", some)
    tally, _ = run(plan_of(None))
    assert tally.reasons == {"mla_ref.rope": "rope: none"}
    assert tally.total("cases") == 2


@pytest.mark.parametrize("what", ["KeyboardInterrupt", "SystemExit", "LookupError", "GeneratorExit"])
def test_what_supports_raises_is_left_to_the_judge(what, tmp_path, monkeypatch):
    source = STRANGER.format(wrong=0, raises=0, dies=0, hangs=0)
    asked = (
        f"def asked(case):\n    raise {what}('asked')\nBACKEND = Backend('s', 'rope', fn, supports=asked)\n"
    )
    (tmp_path / f"liar_{what}.py").write_text(source + asked)
    monkeypatch.syspath_prepend(tmp_path)
    asked_of = {"backend": f"liar_{what}", "problem": "rope", "seed": 0, "indices": [0, 1], "alike": 1}
    said = told("drawn", asked_of)
    assert [json.dumps(body) for kind, body in said if kind == ITEM] == [
        json.dumps(json.loads(draw("rope", 0, index).to_json())) for index in (0, 1)
    ]


class Raising(Inline):
    """What a handler raises is its task's end, as in a worker."""

    def outcomes(self, source):
        while (task := source(0)) is not None:
            messages = []
            try:
                HANDLERS[task.handler.partition(":")[2]](
                    json.loads(json.dumps(task.argument)),
                    lambda kind, body, to=messages: to.append((kind, json.loads(json.dumps(body)))),
                )
                yield Outcome(task, messages, DONE)
            except campaign_module.Replace as error:
                yield Outcome(task, messages, REPLACED, str(error))
            except Exception as error:
                yield Outcome(task, messages, RAISED, f"{type(error).__name__}: {error}")


def test_a_defect_of_ours_while_a_case_is_drawn_ends_the_campaign(monkeypatch):
    """It is no reason for which a backend is not tried, nor is the case drawn without the backend."""
    monkeypatch.setattr(campaign_module, "draw", lambda *_: [][0])
    with pytest.raises(
        WorkersError, match=r"drawing cases of rope for mla_ref\.rope: IndexError: list index"
    ):
        run(plan_of(3), engine=Raising())


def test_cases_are_drawn_without_a_backend_only_if_its_own_code_stopped_that():
    work = campaign_module._Drawing((0, 1))
    began = [(STEP, {PATIENCE: 60.0}), (STEP, campaign_module.DRAWING)]
    for messages, end, ours in ((began, RAISED, True), (began[:1], RAISED, False), (began, CRASHED, False)):
        deck, outcome = campaign_module._Deck(plan_of(9), 1, frozenset()), Outcome(Task("x"), messages, end)
        deck.backends = [campaign_module._Backend()]
        if ours:
            with pytest.raises(WorkersError, match=r"drawing cases of rope for mla_ref\.rope"):
                campaign_module._deal(deck, work, outcome, Tally({}))
        else:
            campaign_module._deal(deck, work, outcome, Tally({}))
            assert list(deck.first) == [work._replace(careless=True)]


def test_want_of_memory_while_a_case_is_drawn_is_no_defect_of_ours(monkeypatch):
    """What a backend's supports() keeps may be the cause, so it is drawn again without it."""

    def starved(problem, seed, index, supports, alike):
        if supports is not None:
            raise MemoryError
        return draw(problem, seed, index)

    monkeypatch.setattr(campaign_module, "draw", starved)
    tally, _ = run(plan_of(3), engine=Raising())
    assert (tally.total("cases"), tally.reasons) == (3, {})


def test_a_defect_of_ours_while_a_failure_is_made_small_ends_no_campaign(tmp_path, monkeypatch):
    """What was found stands, and who goes on with the campaign does not come to the same end."""
    (tmp_path / "liar_defect.py").write_text(STRANGER.format(wrong=4, raises=0, dies=0, hangs=0))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(campaign_module, "smallest", lambda *_: [][0])
    plan = plan_of(40)._replace(problems={"liar_defect": "rope"})
    tally, _ = run(plan, engine=Raising())
    assert tally.total("cases") == 40
    details = [verdict.detail for verdict in tally.first.values()]
    assert details
    assert all("; it was not made smaller: IndexError: list index" in detail for detail in details)


def test_what_the_judge_itself_raises_is_told_from_what_a_backend_does(monkeypatch):
    def broken(*_, **__):
        raise LookupError("lost")
        yield

    monkeypatch.setattr("oracles.pool.judgements", broken)
    tally, _ = run(plan_of(1), engine=Raising())
    [kind] = tally.found
    detail = tally.first[kind].detail
    assert re.fullmatch(r"InTheJudge: LookupError in broken, test_campaign\.py:\d+: lost", detail)


def test_a_run_does_not_go_on_once_a_strangers_source_was_edited(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kernel, part = tmp_path / "edited_kernel.py", tmp_path / "edited_part.py"
    kernel.write_text("from edited_part import BACKEND\n")
    part.write_text(STRANGER.format(wrong=0, raises=0, dies=0, hangs=0))
    words = ["--backend", "edited_kernel", "--oracle", "value", "--jobs", "1", "--out"]
    run_words = ["run", "--preset", "a.x-k2", "--format", "bf16", *words, "run"]
    fuzz_words = ["fuzz", "--budget", "2cases", *words, "fuzz"]
    isolated = ["run", "--isolate", *run_words[1:]]
    for command in (run_words, fuzz_words, isolated):
        assert main(command) == 0
    before = RunDirectory(tmp_path / "run").manifest["run"]["sources"]
    assert RunDirectory(tmp_path / "fuzz").manifest["run"]["sources"] == before
    capsys.readouterr()
    text = part.read_text()
    part.write_text(text + "\n# edited\n")
    for command in (run_words, fuzz_words, isolated):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert re.search(
            r'its sources is \{"edited_kernel": "(\w+)"\}, not \{"edited_kernel": "(?!\1)\w+"\}', told
        )
    part.write_text(text)
    assert main(run_words) == 0


def failing(case, oracle="value", variant="default"):
    return Verdict(status=FAIL, backend="liar", variant=variant, oracle=oracle, case=case, device="cpu")


def test_a_failure_is_made_small_and_stays_of_its_kind(tmp_path, monkeypatch):
    (tmp_path / "liar_small.py").write_text(STRANGER.format(wrong=4, raises=0, dies=0, hangs=0))
    monkeypatch.syspath_prepend(tmp_path)
    plan = plan_of(40)._replace(problems={"liar_small": "rope"})
    tally, events = run(plan, tmp_path / "run")
    failures = [event for event in events if event is not None]
    assert failures
    assert tally.counts["liar_small"].failed == sum(tally.found.values())
    for failure in failures:
        case, verdict = failure.verdict.case, failure.verdict
        assert (verdict.status, verdict.oracle, verdict.backend) == (FAIL, "value", "liar_small")
        assert (case.config.num_heads, case.q_lens, case.regime) == (4, (1,), "plain")
        assert judge(__import__("liar_small").BACKEND, case, oracles=["value"])[0].status == FAIL
        assert tally.first[failure.kind] == verdict
    assert [v.case for v in RunDirectory(tmp_path / "run").failures()] == [f.verdict.case for f in failures]
    again, events = run(plan, tmp_path / "run")
    assert not any(events), "what was made small is not made small again"
    assert again.first == tally.first


def test_a_kind_that_was_not_made_small_in_time_is_when_it_goes_on(tmp_path, monkeypatch):
    (tmp_path / "liar_late.py").write_text(STRANGER.format(wrong=4, raises=0, dies=0, hangs=0))
    monkeypatch.syspath_prepend(tmp_path)
    plan = plan_of(40)._replace(problems={"liar_late": "rope"})
    monkeypatch.setattr(campaign_module, "MAX_SMALL", 0)
    tally, events = run(plan, tmp_path / "run")
    assert not any(events)
    _, events = run(plan, tmp_path / "run")
    assert not any(events), "more kinds were made small than may be"
    monkeypatch.setattr(campaign_module, "MAX_SMALL", len(tally.found))
    _, events = run(plan, tmp_path / "run")
    assert {event.kind for event in events if event} == set(tally.found)
    _, events = run(plan, tmp_path / "other")
    assert {event.kind for event in events if event} == set(tally.found), "as many as may be"


def test_failures_of_one_kind_are_counted_once():
    case = Case(problem="rope", config=PRESETS["a.x-k2"], q_lens=(1,), kv_lens=(1,))

    def verdict(place, num_bad=60, **changes):
        worst = Worst(tensor="out", index=(0,), got=1.0, want=0.0, bound=0.1, ratio=10.0, place=place)
        fields = {"num_bad": num_bad, "num_checked": 100, "worst": worst, **changes}
        return Verdict(
            **{
                "status": FAIL,
                "backend": "b",
                "variant": "v",
                "oracle": "o",
                "case": case,
                "device": "cpu",
                **fields,
            }
        )

    same = {kind_of(verdict("head 1")), kind_of(verdict("head 2", num_bad=70))}
    assert len(same) == 1
    assert kind_of(verdict("head 1", num_bad=2)) == kind_of(verdict("head 1", num_bad=50))
    others = [
        verdict("head 1", num_bad=1),
        verdict("head 1", num_bad=2),
        verdict("head 1", oracle="p"),
        verdict("head 1", variant="w"),
        verdict("head 1", backend="c"),
        verdict("head 1", status=ERROR),
        verdict("head 1", case=Case(problem="rope", config=PRESETS["a.x-k2"], q_lens=(9,), kv_lens=(9,))),
    ]
    assert len(same | {kind_of(other) for other in others}) == 1 + len(others)


def test_the_worst_error_is_that_of_any_claim():
    """As in every other table: not only of claims that held."""
    config = PRESETS["a.x-k2"]
    case = Case(problem="rope", config=config, q_lens=(1,), kv_lens=(1,))
    tally = Tally({"b": Count()})
    for number, (status, ratio) in enumerate(((PASS, 0.5), (FAIL, 7.0), (PASS, 0.9))):
        worst = Worst(tensor="x", index=(0,), got=1.0, want=0.0, bound=0.1, ratio=ratio, place="token 0")
        verdict = Verdict(
            status=status, backend="b", variant="v", oracle="o", case=case, device="cpu", worst=worst
        )
        tally.add("b", Record(number, json.loads(case.to_json()), [verdict.without_case()]))
    assert tally.counts["b"].worst == (7.0, "o")


def test_a_case_counts_once_however_many_claims_it_breaks():
    """And runs where something is claimed of it: neither where nothing was looked at, nor unsupported."""
    case = Case(problem="rope", config=PRESETS["a.x-k2"], q_lens=(1,), kv_lens=(1,))
    broken, empty, declined = (
        Verdict(status=status, backend="b", variant="v", oracle="o", case=case, device="cpu", detail=detail)
        for status, detail in ((FAIL, "wrong"), (PASS, "no row has a key"), (UNSUPPORTED, "no"))
    )
    tally = Tally({"b": Count()})
    for number, verdicts in enumerate(([broken, broken], [empty], [declined])):
        plain = [verdict.without_case() for verdict in verdicts]
        tally.add("b", Record(number, json.loads(case.to_json()), plain))
    assert tally.counts["b"] == Count(cases=3, ran=1, failed=1, held=1, broken=2, not_run=1)


def test_a_deadly_case_is_made_small_in_a_workers_worker(tmp_path, monkeypatch):
    (tmp_path / "liar_deadly.py").write_text(STRANGER.format(wrong=0, raises=0, dies=2, hangs=0))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(campaign_module, "SMALL_SECONDS", 4.0)
    config = PRESETS["a.x-k2"].shard(PRESETS["a.x-k2"].num_heads // 2)
    case = Case(problem="rope", config=config, q_lens=(7, 5), kv_lens=(7, 5), regime="peaky")
    verdict = Verdict(
        status=CRASH, backend="liar_deadly", variant="default", oracle="value", case=case, device="cpu"
    )
    said = []
    argument = {
        "verdict": json.loads(verdict.to_json()),
        "oracles": ["value"],
        "limits": [20.0, None],
        "judge_on": None,
    }
    shrunk(argument, lambda kind, body: said.append((kind, body)))
    smaller = [Verdict.from_json(json.dumps(body)) for kind, body in said if kind == ITEM]
    assert smaller
    assert {v.status for v in smaller} == {CRASH}
    assert re.search(
        r'died of SIGABRT in fn, liar_deadly\.py:\d+; it last printed ".*a last word"', smaller[-1].detail
    )
    assert sum(smaller[-1].case.q_lens) < 12
    steps = [body for kind, body in said if kind == STEP]
    assert all(body[PATIENCE] > 20.0 for body in steps), "out of time before its own worker is"


def test_every_fault_of_a_stranger_is_a_verdict_and_the_campaign_goes_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "liar_all.py").write_text(STRANGER.format(wrong=3, raises=5, dies=64, hangs=20))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(campaign_module, "MAX_SMALL", 0)
    words = ["fuzz", "--backend", "liar_all", "--oracle", "value", "--timeout", "1s", "--budget", "24cases"]
    assert main([*words, "--jobs", "1", "--out", "run", "--corpus", "corpus"]) == 1
    assert Path("corpus").read_text() == "", "nothing was made small"
    out = capsys.readouterr().out
    ends = {3: FAIL, 5: ERROR, 64: CRASH, 20: TIMEOUT}
    found, verdicts = {number: [] for number in range(24)}, []
    for record in RunDirectory(tmp_path / "run").records():
        verdicts += record.verdicts
        heads = record.case["config"]["num_heads"]
        found[record.number] = [verdict["status"] for verdict in record.verdicts]
        # Nothing is wrong with no tokens.
        wrong = PASS if heads == 3 and not sum(record.case["q_lens"]) else ends.get(heads, PASS)
        assert found[record.number] == [wrong]
    met = Counter(status for statuses in found.values() for status in statuses)
    # A case without a token, or without channels, has nothing to look at, and does not count.
    claimed = sum(verdict["status"] in BROKEN or verdict["num_checked"] > 0 for verdict in verdicts)
    assert set(met) == {PASS, *ends.values()}
    assert claimed < 24
    for words in (
        "LookupError: lost",
        "died of SIGABRT in fn, liar_all.py:",
        "took longer than 1 s in fn, liar_all.py:",
    ):
        assert words in out
    broken = sum(met[status] for status in BROKEN)
    assert re.search(rf"^24 cases, {met[PASS]} claims held, {broken} failed, 0 not run, in ", out, re.M)
    assert re.search(rf"; {broken} of {claimed} cases fail: {broken / claimed:.2g} seen$", out, re.M)
    assert out.count("  again mla-verify replay ") == len(
        {line for line in out.splitlines() if "  case  " in line}
    )

    assert main(["show", "run"]) == 0
    assert "liar_all" in capsys.readouterr().out
    assert main(["replay", "run"]) == 2
    assert "only run if you name it" in capsys.readouterr().err
    first = next(number for number, [status] in sorted(found.items()) if status == CRASH)
    order = [record.number for record in RunDirectory(tmp_path / "run").records()]
    index = ["--index", str(order.index(first)), "--oracle", "value"]
    assert main(["replay", "run", *index, "--backend", "liar_all"]) == 1
    assert "CRASH liar_all default value" in capsys.readouterr().out


def test_kinds_that_are_the_same_small_failure_are_told_as_one(capsys):
    case = draw("rope", 0, 0)
    found = Verdict(status=FAIL, backend="b", variant="default", oracle="value", case=case, device="cpu")
    kinds = {("b", stage): 2 for stage in ("decode", "mtp", "prefill")}
    first = dict.fromkeys(kinds, found) | {("b", "mtp"): replace(found, oracle="lse")}
    summarise(to_stdout(), Tally({"b": Count()}, found=kinds, first=first), 1.0)
    out = capsys.readouterr().out
    assert re.findall(r"^FAIL b default (\w+)$", out, re.M) == ["value", "lse"]
    assert re.findall(r"^  and   (\d+) more like it$", out, re.M) == ["3", "1"]


def test_interrupted_then_killed_then_run_to_its_end(tmp_path):
    """With processes of its own, and the signals of a terminal and of what kills for want of memory."""
    for package in ("mla_ref", "mla_fast", "oracles"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / "code" / package, ignore=ignored)
    command = [
        *(sys.executable, "-c", "import sys; from oracles.command import main\nsys.exit(main())"),
        *("fuzz", "--backend", "mla_ref.rope", "--oracle", "value", "--budget", "400cases", "--jobs", "1"),
        *("--out", str(tmp_path / "run")),
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "code")}
    file = tmp_path / "run" / VERDICTS

    def begun(lines, number):
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < lines):
            time.sleep(0.005)
        process.send_signal(number)
        return process, *process.communicate()

    process, out, err = begun(5, signal.SIGINT)
    interrupted = len(cases_of(tmp_path / "run"))
    assert process.returncode == 130, err
    assert re.search(rf"^{interrupted} cases, {interrupted} claims held, 0 failed, 0 not run, in ", out, re.M)
    process, _, _ = begun(interrupted + 10, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    killed = len(cases_of(tmp_path / "run"))
    assert interrupted < killed < 400
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(
        r"^400 cases, 400 claims held, 0 failed, .*; 0 of 263 cases fail: below 0.011$", ended.stdout, re.M
    )
    assert sorted(cases_of(tmp_path / "run")) == list(range(400))


def test_what_is_made_small_is_kept_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "liar_kept.py").write_text(STRANGER.format(wrong=4, raises=0, dies=0, hangs=0))
    monkeypatch.chdir(tmp_path)
    words = ["fuzz", "--backend", "liar_kept", "--oracle", "value", "--budget", "12cases", "--jobs", "1"]
    for _ in range(2):
        assert main([*words, "--corpus", "corpus"]) == 1
        entries = list(corpus_entries(Path("corpus").read_text().splitlines()))
        assert entries
        assert (
            len({entry.name for entry in entries}) == len({entry.case for entry in entries}) == len(entries)
        )
        assert all(entry.oracles == ("value",) and entry.case.config.num_heads == 4 for entry in entries)
    assert "FAIL liar_kept default value" in capsys.readouterr().out
    Path("corpus").write_text("{}\n")
    assert main([*words, "--corpus", "corpus"]) == 2
    assert "corpus: line 1: corpus: " in capsys.readouterr().err


EVIL = """
from pathlib import Path
Path("it_ran").touch()
from mla_ref.rope import BACKEND
"""


def test_what_a_stranger_sends_runs_no_code_unless_its_module_is_named(tmp_path, monkeypatch, capsys):
    """A verdict, a file of them, a run directory: none of them is enough to have a module imported."""
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    case = Case(problem="rope", config=PRESETS["a.x-k2"].shard(32), q_lens=(1,), kv_lens=(1,))
    verdict = Verdict(
        status=CRASH, backend="evil", variant="default", oracle="value", case=case, device="cpu"
    )
    with open_run(Path("run"), manifest_of({"backends": ["evil"], "seed": 0}, {}, "cpu")) as journal:
        journal.append(campaign_module.Record(0, json.loads(case.to_json()), [verdict.without_case()]))
    Path("verdicts").write_text(verdict.to_json() + "\n")
    for given in ("run", "verdicts", verdict.to_json()):
        assert main(["replay", given]) == 2
        assert "only run if you name it" in capsys.readouterr().err
    for given in ("run", "verdicts"):
        assert main(["show", given]) == 0
    assert main(["replay", case.to_json()]) == 2
    assert not Path("it_ran").exists()
    assert main(["replay", "verdicts", "--backend", "evil", "--no-isolate", "--oracle", "value"]) == 0
    assert Path("it_ran").exists()


RUN = [
    "run",
    "--backend",
    "mla_ref.rope",
    "--preset",
    "a.x-k2",
    "--format",
    "bf16",
    "--oracle",
    "value",
    "--jobs",
    "1",
]


def test_run_goes_on_in_its_directory_and_its_lines_are_the_same(tmp_path, capsys):
    plain, kept = tmp_path / "plain", tmp_path / "kept"
    assert main([*RUN, "--json", str(plain)]) == 0
    assert main([*RUN, "--out", str(tmp_path / "run")]) == 0
    file = tmp_path / "run" / VERDICTS
    os.truncate(file, file.stat().st_size // 2)
    half = len(cases_of(tmp_path / "run"))
    capsys.readouterr()
    assert main([*RUN, "--out", str(tmp_path / "run"), "--json", str(kept)]) == 0
    assert "36 claims held, 0 failed" in capsys.readouterr().out
    assert 0 < half < len(cases_of(tmp_path / "run")) == 36

    def untimed(path):
        return [re.sub(r'"seconds":[^,]+', "", line) for line in path.read_text().splitlines()]

    assert untimed(kept) == untimed(plain)


def test_a_run_directory_in_use_or_of_another_run_is_one_line(tmp_path, capsys):
    path = str(tmp_path / "run")
    assert main([*RUN, "--out", path]) == 0
    capsys.readouterr()
    for words, message in (
        ([*RUN, "--seed", "1", "--out", path], "its seed is 0, not 1: not the same run"),
        ([*RUN, "--full", "--out", path], "its full is false, not true: not the same run"),
    ):
        assert main(words) == 2
        assert re.fullmatch(rf"mla-verify: [^\n]*{re.escape(message)}\n", capsys.readouterr().err)
    with open_run(tmp_path / "run", RunDirectory(tmp_path / "run").manifest):
        assert main([*RUN, "--out", path]) == 2
    assert f"process {os.getpid()} is writing here" in capsys.readouterr().err
    file = tmp_path / "run" / VERDICTS
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:4], lines[4][:50], *lines[5:]]) + b"\n")
    assert main([*RUN, "--out", path]) == 2
    assert f"{file}, line 5: " in capsys.readouterr().err


def test_a_full_disk_ends_a_run_in_one_line_and_it_goes_on(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run"
    write = os.write

    def full(file, data):
        if os.fstat(file).st_size > 20_000:
            write(file, bytes(data)[:50])
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("oracles.run_directory.os.write", full)
    assert main([*RUN, "--out", str(path)]) == 2
    assert re.fullmatch(
        r"mla-verify: [^\n]*verdicts\.jsonl: No space left on device\n", capsys.readouterr().err
    )
    written = len(cases_of(path))
    monkeypatch.setattr("oracles.run_directory.os.write", write)
    assert main([*RUN, "--out", str(path)]) == 0
    assert 0 < written < len(cases_of(path)) == 36


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--budget", "never"],
            r"budget 'never' is neither a time, such as 10m, nor a number, such as 5000cases",
        ),
        (["--budget", "0cases"], r"budget '0cases'"),
        (["--timeout", "0s"], r"time '0s' is no length of time"),
        (["--memory", "much"], r"size 'much'"),
        (["--engine", "steam"], r"--engine 'steam' is not one of processes, ray"),
        (["--problem", "nope"], r"problem 'nope' is not one of attention"),
        (["--oracle", "nope"], r"oracle 'nope' is not one of "),
        (["--jobs", "0"], r"0 is not in the range|greater than or equal to 1"),
        (["--device", "nope"], r"'nope': "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, capsys):
    assert main(["fuzz", "--backend", "mla_ref.rope", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"mla-verify: [^\n]+\n", captured.err), captured.err
    assert re.search(message, captured.err)


def test_imports_that_fail_die_or_hang_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oracles.pool.IMPORT_SECONDS", 3.0)
    for name, source, message in (
        (
            "import_fails",
            "import no_such_package",
            r"cannot import 'import_fails': No module named 'no_such_package'",
        ),
        (
            "import_dies",
            "import os\nos.abort()",
            r"backend 'import_dies': its import: the process died of SIGABRT",
        ),
        (
            "import_exits",
            "import sys\nsys.exit(0)",
            r"backend 'import_exits': its import raised SystemExit: 0",
        ),
        (
            "import_hangs",
            "import time\ntime.sleep(1000)",
            r"backend 'import_hangs': its import: took longer than 3 s",
        ),
    ):
        Path(f"{name}.py").write_text(source)
        assert main(["fuzz", "--backend", name, "--budget", "1cases", "--jobs", "1", "--timeout", "1s"]) == 2
        err = capsys.readouterr().err
        assert re.fullmatch(rf"mla-verify: [^\n]*{message}[^\n]*\n", err), err


def test_lengths_of_time_and_sizes():
    assert [duration(text) for text in ("90s", "10m", "2h", "1.5", "200ms")] == [
        90.0,
        600.0,
        7200.0,
        1.5,
        0.2,
    ]
    assert budget_of("5000cases") == (None, 5000)
    assert budget_of("1 case") == (None, 1)
    assert budget_of("10m") == (600.0, None)
    assert memory_size("8G") == memory_size("8GiB") == 8 << 30
    assert memory_size("512m") == 512 << 20


def test_the_rule_of_three():
    assert at_most(0, 1000) == "below 0.003"
    assert at_most(0, 2) == "below 1"
    assert at_most(0, 0) == "-"
    assert at_most(3, 1000) == "0.003 seen"
