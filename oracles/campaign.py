"""A campaign: numbered cases, drawn, judged in workers and written down, until time or numbers are up.

Of B backends, number n is case n // B of backend n % B: it follows from the seed alone, whoever judges it
and when. Workers draw cases, too, those of a backend by one of them a few at a time, since a case may follow
from those before it. Cases that are alike go to one worker, which has their kernels loaded. A kind of failure
that is new is made small at once, in a worker as well.
"""

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from mla_ref.case import Case
from oracles.asked import Declined, told_later
from oracles.coverage import NothingFound, draw
from oracles.exits import WorkersError, first_line
from oracles.matrix import Job
from oracles.pool import IMPORT_SECONDS, Part, judge_in, judge_job, judges
from oracles.process_state import BEYOND_REPAIR
from oracles.run_directory import Failure, Journal, Record, RunDirectory
from oracles.shrink import smallest
from oracles.tally import Kind, Tally
from oracles.verdict import CRASH, TIMEOUT, Verdict
from oracles.verify import DEFAULT, find_backend
from oracles.worker import (
    DONE,
    ITEM,
    PATIENCE,
    RAISED,
    START_SECONDS,
    STEP,
    Engine,
    Limits,
    Outcome,
    Replace,
    Say,
    Task,
)

# Cases of one drawing, and how many of a backend are to wait for each worker.
DRAWN, AHEAD = 16, 2

# A first case may follow from thousands of tries.
DRAWING = {PATIENCE: 120.0}

# Kinds of failure that are made small, and how long that may take.
MAX_SMALL, SMALL_SECONDS = 16, 30.0

# Turns without end, as ``matrix.trials`` counts them.
TURNS = 1 << 40


class Plan(NamedTuple):
    """What decides every case of a campaign, and how it is judged.

    problems: what each backend implements, in the order in which numbers are dealt. oracles: of each problem.
    num_cases: numbers are below it; None: there is no end. judge_on: as in ``Job``. alike: as in ``draw``.
    """

    problems: Mapping[str, str]
    oracles: Mapping[str, tuple[str, ...]]
    seed: int
    device: str
    limits: Limits
    num_cases: int | None = None
    judge_on: str | None = None
    alike: int = 1

    def backend(self, number: int) -> str:
        """The one that number ``number`` belongs to."""
        return list(self.problems)[number % len(self.problems)]

    def run(self, number: int) -> int:
        """Which of its backend's runs of cases that are alike a number belongs to."""
        return number // len(self.problems) // self.alike

    def job(self, number: int, case: Case) -> Job:
        """A backend's own function or a variant, with the oracles whose turn it is."""
        spec, index = self.backend(number), number // len(self.problems)
        oracles = self.oracles[self.problems[spec]]
        turn = (index, TURNS)
        return Job(case, (spec,), oracles, self.device, turn, by_lot=True, judge_on=self.judge_on)


class _Drawing(NamedTuple):
    """Cases to be drawn; with ``careless``, without asking the backend which ones it supports."""

    numbers: tuple[int, ...]
    careless: bool = False


class _Judging(NamedTuple):
    number: int
    part: Part


class _Shrinking(NamedTuple):
    kind: Kind
    verdict: Verdict


_Work = _Drawing | _Judging | _Shrinking


def _task_of(work: _Work, plan: Plan, key: int) -> Task:
    if isinstance(work, _Judging):
        return work.part.task(key)
    if isinstance(work, _Shrinking):
        return Task("oracles.campaign:shrunk", _to_shrink(work.verdict, plan), key)
    spec = plan.backend(work.numbers[0])
    argument = {
        "problem": plan.problems[spec],
        "seed": plan.seed,
        "indices": [number // len(plan.problems) for number in work.numbers],
        "backend": None if work.careless else spec,
        "alike": plan.alike,
    }
    return Task("oracles.campaign:drawn", argument, key)


def _to_shrink(verdict: Verdict, plan: Plan) -> dict[str, Any]:
    return {
        "verdict": json.loads(verdict.to_json()),
        "oracles": [verdict.oracle] if verdict.oracle else plan.oracles[verdict.case.problem],
        "limits": plan.limits,
        "judge_on": plan.judge_on,
    }


@dataclass
class _Backend:
    """One backend's share. next: the index to be drawn next. ready: cases to be judged. dealt: how many were.

    drawing: whether somebody draws for it now. over: there are no more cases, or none can be found.
    """

    next: int = 0
    ready: deque[_Judging] = field(default_factory=deque)
    dealt: int = 0
    drawing: bool = False
    over: bool = False


@dataclass
class _Deck:
    """Which numbers are dealt. first: what goes before; backends: in the order of the plan.

    hands: the rest of each slot's run of cases that are alike.
    """

    plan: Plan
    size: int
    done: frozenset[int]
    first: deque[_Work] = field(default_factory=deque)
    backends: list[_Backend] = field(default_factory=list)
    hands: dict[int, deque[_Judging]] = field(default_factory=dict)

    def next(self, slot: int, over: bool) -> _Work | None:
        """What a free slot is to do. When it is over, numbers that were begun are ended, and no more."""
        while self.first:
            work = self.first.popleft()
            if not over or isinstance(work, _Judging):
                return work
        if over:
            return None
        own = [at for at in range(len(self.backends)) if at % self.size == slot]
        runs = -(-self.size // max(len(self.backends), 1))
        if (drawing := self._draw(own, max(AHEAD * self.size, runs * self.plan.alike))) is not None:
            return drawing
        if not self.hands.get(slot):
            self.hands[slot] = self._run()
        if not self.hands[slot]:
            if (drawing := self._draw(range(len(self.backends)), 1)) is not None:
                return drawing
            if not any(backend.drawing for backend in self.backends):
                self.hands[slot] = self._half()
        return self.hands[slot].popleft() if self.hands[slot] else None

    def _run(self) -> deque[_Judging]:
        """What waits of one run, of the backend of which the fewest cases were dealt."""
        waiting = [backend for backend in self.backends if backend.ready]
        if not waiting:
            return deque()
        backend = min(waiting, key=lambda backend: backend.dealt)
        run, hand = self.plan.run(backend.ready[0].number), deque[_Judging]()
        while backend.ready and self.plan.run(backend.ready[0].number) == run:
            hand.append(backend.ready.popleft())
        backend.dealt += len(hand)
        return hand

    def _half(self) -> deque[_Judging]:
        """The later half of the longest hand, or nothing: at the end some have none of their own."""
        longest = max(self.hands.values(), key=len)
        kept = len(longest) // 2
        half = deque(itertools.islice(longest, kept, None))
        while len(longest) > kept:
            longest.pop()
        return half

    def _draw(self, candidates: Sequence[int], enough: int) -> _Drawing | None:
        """The next numbers of a backend for which fewer cases wait than are enough, and nobody draws.

        Of each backend by one slot where that can be: what its first case costs is not paid again.
        """
        of = len(self.backends)
        for at in sorted(candidates, key=lambda at: len(self.backends[at].ready)):
            backend = self.backends[at]
            while len(backend.ready) < enough and not backend.drawing and not backend.over:
                drawn = -(-DRAWN // self.plan.alike) * self.plan.alike  # whole runs
                indices = range(backend.next, backend.next + drawn)
                backend.next += drawn
                numbers = [index * of + at for index in indices]
                if self.plan.num_cases is not None:
                    numbers = [number for number in numbers if number < self.plan.num_cases]
                    backend.over = len(numbers) < drawn
                todo = tuple(number for number in numbers if number not in self.done)
                if todo:
                    backend.drawing = True
                    return _Drawing(todo)
        return None


def known(plan: Plan, journal: Journal, tally: Tally) -> frozenset[int]:
    """Count in what a run directory holds already, and return its numbers.

    Raises: ValueError naming the file and the line that cannot be read.
    """
    for failure in RunDirectory(journal.path).kinds():
        tally.first[failure.kind] = failure.verdict
        tally.small.add(failure.kind)
    done = set()
    for record in journal.records():
        done.add(record.number)
        tally.add(plan.backend(record.number), record)
    tally.resumed = len(done)
    return frozenset(done)


def campaign(
    plan: Plan,
    engine: Engine,
    journal: Journal | None,
    tally: Tally,
    over: Callable[[], bool],
    done: frozenset[int] = frozenset(),
) -> Iterator[Failure | None]:
    """Judge number after number but those that are done; what is found is in ``tally`` at any time.

    Yields each kind of failure once it is as small as it gets, and None very often, so that the caller can
    show how far it is.

    over: whether no more numbers are to be begun.
    """
    deck, keys = _Deck(plan, engine.size, done), itertools.count()
    deck.backends = [_Backend() for _ in plan.problems]
    late = [kind for kind in list(tally.found)[:MAX_SMALL] if kind not in tally.small]
    deck.first += [_Shrinking(kind, tally.first[kind]) for kind in late]
    running: dict[int, _Work] = {}

    def source(slot: int) -> Task | None:
        work = deck.next(slot, over())
        if work is None:
            return None
        key = next(keys)
        running[key] = work
        return _task_of(work, plan, key)

    for outcome in engine.outcomes(source):
        work = running.pop(outcome.task.key) if outcome is not None else None
        if outcome is None or work is None:
            yield None
        elif isinstance(work, _Drawing):
            _deal(deck, work, outcome, tally)
        elif isinstance(work, _Shrinking):
            failure = _smaller(work, outcome)
            tally.first[failure.kind] = failure.verdict
            if journal is not None:
                journal.append_failure(failure)
            yield failure
        elif (part := work.part.after(outcome)).job.specs:
            deck.first.append(work._replace(part=part))
        else:
            record = Record(work.number, part.case, part.known)
            if journal is not None:
                journal.append(record)
            for kind in tally.add(plan.backend(work.number), record):
                if len(tally.found) <= MAX_SMALL:
                    deck.first.append(_Shrinking(kind, tally.first[kind]))
            yield None


def _deal(deck: _Deck, work: _Drawing, outcome: Outcome, tally: Tally) -> None:
    """Take in the cases that were drawn; where a backend's own code stops that, draw without it."""
    spec = deck.plan.backend(work.numbers[0])
    backend = deck.backends[list(deck.plan.problems).index(spec)]
    if outcome.end == DONE:
        backend.drawing = False
        for number, (_, body) in zip(
            work.numbers, (message for message in outcome.messages if message[0] == ITEM), strict=False
        ):
            if isinstance(body, str):
                backend.over = True
                tally.reasons[spec] = body
            else:
                case = Case.from_json(json.dumps(body))
                backend.ready.append(_Judging(number, Part(deck.plan.job(number, case))))
    elif work.careless or (outcome.end == RAISED and (STEP, DRAWING) in outcome.messages):
        # A backend's own code raises nothing there, and is not even called where no care is taken.
        raise WorkersError(f"drawing cases of {deck.plan.problems[spec]} for {spec}: {outcome.why}")
    else:
        deck.first.append(work._replace(careless=True))


def _smaller(work: _Shrinking, outcome: Outcome) -> Failure:
    """The last case that still failed, however the search for a smaller one ended; if by us, it is told."""
    found = [body for kind, body in outcome.messages if kind == ITEM]
    verdict = Verdict.from_json(json.dumps(found[-1])) if found else work.verdict
    if outcome.end == RAISED:
        verdict = replace(verdict, detail=f"{verdict.detail}; it was not made smaller: {outcome.why}")
    return Failure(work.kind, verdict)


def drawn(argument: Mapping[str, Any], say: Say) -> None:
    """In a worker: cases, one after the other, and, instead of the first that cannot be found, why.

    Whatever is raised here is raised by our own code: what the backend raises is told where it is judged.
    """
    say(STEP, {PATIENCE: IMPORT_SECONDS})
    spec = argument["backend"]
    supports = None if spec is None else _supports(spec)
    say(STEP, DRAWING)
    for index in argument["indices"]:
        try:
            case = draw(argument["problem"], argument["seed"], index, supports, argument["alike"])
        except NothingFound as error:
            say(ITEM, str(error))
            return
        except MemoryError as error:
            raise Replace(f"no memory to draw in: {first_line(error)}") from None
        say(STEP, DRAWING)
        say(ITEM, json.loads(case.to_json()))


@cache
def _supports(spec: str) -> Declined:
    """A backend's, always the same: what follows from its answers is kept."""
    return told_later(find_backend(spec), KeyboardInterrupt)


def shrunk(argument: Mapping[str, Any], say: Say) -> None:
    """In a worker: verdicts on ever smaller cases that fail alike: same function, claim and status.

    Those that end the process are judged in a worker's worker.
    """
    verdict = Verdict.from_json(json.dumps(argument["verdict"]))
    variant = "" if verdict.variant == DEFAULT else verdict.variant
    limits, deadly = Limits(*argument["limits"]), verdict.status in (CRASH, TIMEOUT)
    # A worker's worker starts and imports before it judges, and is to be out of time before its parent is.
    patience = {PATIENCE: START_SECONDS + IMPORT_SECONDS + limits.seconds} if deadly else {}
    end = time.monotonic() + SMALL_SECONDS

    def fails(judged: Callable[[Job], list[Verdict]], case: Case) -> bool:
        if time.monotonic() > end:
            return False
        say(STEP, patience)
        job = Job(case, (verdict.backend,), tuple(argument["oracles"]), verdict.device, function=variant)
        job = job._replace(judge_on=argument["judge_on"])
        try:
            verdicts = judged(job)
        except BaseException:  # what it means on this case was told when the first of its kind was judged
            return False
        for found in verdicts:
            if found.status == verdict.status:
                say(ITEM, json.loads(found.to_json()))
                return True
        return False

    if not deadly:
        try:
            smallest(verdict.case, lambda case: fails(judge_job, case))
        except MemoryError as error:
            raise Replace(f"no memory to make it small in: {first_line(error)}") from None
        if BEYOND_REPAIR:
            raise Replace(BEYOND_REPAIR[0])
        return
    with judges(1, verdict.device, limits) as pool:
        smallest(verdict.case, lambda case: fails(lambda job: next(judge_in(pool, [job]))[1], case))
