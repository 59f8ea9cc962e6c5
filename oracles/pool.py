"""Judging in worker processes: the same verdicts as here, and whatever ends or stops a worker is one too.

A job is judged function by function. If the process ends under one, the claims that were decided stand, the
claim that it was about to decide is a crash, a timeout or an error, its other claims are not tried, and the
next function is judged in a fresh process. A claim is decided before anybody looks for what would explain it.
What a claim leaves behind that nobody can put back ends the process, too, but nothing else.
"""

import contextlib
import gc
import hashlib
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_ref.backend import Backend, supports_all
from mla_ref.case import Case
from mla_ref.problem import problems
from oracles import kernel_keys
from oracles.asked import Declined, missing, told_later
from oracles.exits import first_line
from oracles.matrix import Job, load, trials
from oracles.narrow import Dealing, own_cases_of
from oracles.oracle import Raised, rules
from oracles.process_state import BEYOND_REPAIR
from oracles.sources import BACKEND_PACKAGES, digest_of
from oracles.verdict import CRASH, ERROR, TIMEOUT, Verdict
from oracles.verify import DEFAULT, Broken, find_backend, judgements, unexplained, use_device
from oracles.worker import (
    CRASHED,
    DONE,
    ITEM,
    PATIENCE,
    RAISED,
    STEP,
    TIMED_OUT,
    Engine,
    Limits,
    Outcome,
    Pool,
    Replace,
    Say,
    Task,
)

STATUS = {CRASHED: CRASH, TIMED_OUT: TIMEOUT, RAISED: ERROR}

# What the import of a backend may take, whatever its functions may.
IMPORT_SECONDS = 60.0

# Questions are asked by the thousand; so many seconds of them are one step.
AT_ONCE = 1.0

# Of a GPU's memory, what all workers together may take.
GPU_SHARE = 0.9


def judge_job(job: Job) -> list[Verdict]:
    """Every verdict of one job, backend by backend, under the names by which they were asked for.

    What the judge's own code raises is an error under the claim that was to be decided, as in a worker.
    """
    found: list[Verdict] = []
    for spec in job.specs:
        backend = find_backend(spec)
        for name, oracles in trials(job, tuple(backend.variants), told_later(backend)):
            left = list(oracles)
            try:
                for verdict in _blamed(_claims(job, spec, backend, name, oracles)):
                    found.append(verdict)
                    left.remove(verdict.oracle)
            except InTheJudge as error:
                why = f"{InTheJudge.__name__}: {error}"
                found.append(_broken(ERROR, job, spec, name, why, next(iter(left), "")))
    return found


def _claims(
    job: Job,
    spec: str,
    backend: Backend,
    name: str,
    oracles: Sequence[str],
    broken: Broken | None = None,
) -> Iterator[Verdict]:
    """The verdicts on one function of a backend: its own, or that of a variant.

    broken: as of ``judgements``.
    """
    alone = replace(backend, variants={})
    if name:
        alone = replace(alone, fn=backend.variants[name], prepare=None)

    def named(verdict: Verdict) -> Verdict:
        return replace(verdict, backend=spec, variant=name or DEFAULT)

    told = None if broken is None else lambda verdict: broken(named(verdict))
    for verdict in judgements(
        alone, job.case, device=job.device, oracles=oracles, judge_on=job.judge_on, broken=told
    ):
        yield named(verdict)


def judge_all(
    jobs: Sequence[Job], workers: int, limits: Limits | None
) -> Iterator[tuple[int, list[Verdict]]]:
    """The index of each job and its verdicts, as the jobs end.

    limits: None judges in this process, where an implementation that dies takes the judge along.
    """
    if limits is None or not jobs:
        for index, job in enumerate(jobs):
            yield index, judge_job(job)
        return
    with judges(workers, jobs[0].device, limits) as pool:
        yield from judge_in(pool, jobs)


def judge_in(pool: Pool, jobs: Sequence[Job]) -> Iterator[tuple[int, list[Verdict]]]:
    """Likewise, in workers that ``judges`` has made."""
    todo = [(index, Part(job)) for index, job in enumerate(jobs)][::-1]
    running: dict[int, Part] = {}

    def source(slot: int) -> Task | None:
        if not todo:
            return None
        index, part = todo.pop()
        running[index] = part
        return part.task(index)

    for outcome in pool.outcomes(source):
        if outcome is None:
            continue
        index = outcome.task.key
        part = running.pop(index).after(outcome)
        if part.job.specs:
            todo.append((index, part))
        else:
            yield index, part.verdicts()


@lru_cache(maxsize=64)
def _plain(case: Case) -> dict[str, Any]:
    """A case as JSON holds it; shared, so never to be changed."""
    plain: dict[str, Any] = json.loads(case.to_json())
    return plain


class Part(NamedTuple):
    """What is left of a job, and what is known of it already.

    tried: of functions of the first backend, the claims that are not to be tried again, by name: turns may be
        dealt otherwise next time. known: ``Verdict.without_case``.
    unasked: the first backend did not survive being asked about other cases, and counts as taking them all.
    """

    job: Job
    tried: Mapping[str, Sequence[str]] = {}
    known: tuple[Mapping[str, Any], ...] = ()
    unasked: bool = False

    @property
    def case(self) -> dict[str, Any]:
        """The job's, as JSON holds it."""
        return _plain(self.job.case)

    def task(self, key: int) -> Task:
        """What a worker is to do."""
        more = {"case": self.case, "tried": self.tried, "unasked": self.unasked, PATIENCE: IMPORT_SECONDS}
        argument = {**self.job._asdict(), **more}
        return Task("oracles.pool:judged", argument, key)

    def after(self, outcome: Outcome) -> "Part":
        """What is left, no backend if that is nothing, once a worker has ended with it, in whatever way."""
        at, trial, asked, decided, found, known = 0, None, False, 0, None, list(self.known)
        before, tried, more = dict(self.tried), dict(self.tried), False
        for kind, body in outcome.messages:
            if kind == ITEM:
                known.append(body)
                decided, found = decided + 1, None
            elif "backend" in body:
                at, trial, asked = body["backend"], None, False
                tried = {} if at else tried
            elif "asked" in body:
                asked = True
            elif "function" in body:
                trial, decided, before = body, 0, dict(tried)
                tried[body["function"]] = [*tried.get(body["function"], ()), *body["oracles"]]
            elif "found" in body:
                found = body["found"]
            elif "spoilt" in body:
                more = True
        if outcome.end in (CRASHED, TIMED_OUT) and asked and trial is None:
            return Part(self.job._replace(specs=self.job.specs[at:]), tried, tuple(known), unasked=True)
        if outcome.end in STATUS and found is not None:
            known.append({**found, "detail": f"{found['detail']}; {unexplained(outcome.why)}"})
        elif outcome.end in STATUS:
            known.append(self._ended(outcome, self.job.specs[at], trial, decided))
        if trial is not None and more:
            so_far = trial["oracles"][:decided]
            tried = {**before, trial["function"]: [*before.get(trial["function"], ()), *so_far]}
        left = self.job.specs[at + (trial is None) :] if outcome.end != DONE else ()
        unasked = self.unasked and at == 0 and trial is not None
        return Part(self.job._replace(specs=left), tried if trial is not None else {}, tuple(known), unasked)

    def _ended(
        self, outcome: Outcome, spec: str, trial: Mapping[str, Any] | None, decided: int
    ) -> dict[str, Any]:
        """The verdict on the claim that was being decided; on no variant where it was the import."""
        return Verdict(
            status=STATUS[outcome.end],
            backend=spec,
            variant="" if trial is None else trial["function"] or DEFAULT,
            oracle="" if trial is None else next(iter(trial["oracles"][decided:]), ""),
            case=self.job.case,
            device=self.job.device,
            detail=outcome.why,
        ).without_case()

    def verdicts(self) -> list[Verdict]:
        """What is known."""
        return [Verdict.on(self.job.case, plain) for plain in self.known]


def judged(argument: Mapping[str, Any], say: Say) -> None:
    """In a worker: the verdicts on what is left of a job, each as soon as it is known.

    A device that can no longer be used is a crash of the claim under which that was found.
    """
    job, patience = _job(argument), {PATIENCE: argument[PATIENCE]}
    for at, spec in enumerate(job.specs):
        say(STEP, {"backend": at, **patience})
        backend = find_backend(spec)
        unasked = at == 0 and argument["unasked"]
        supports = supports_all if unasked else _supports(backend, say, patience)
        for name, oracles in trials(job, tuple(backend.variants), supports):
            tried = argument["tried"].get(name, ()) if at == 0 else ()
            left = [oracle for oracle in oracles if oracle not in tried]
            if not left:
                continue
            say(STEP, {"function": name, "oracles": left})
            for verdict in _blamed(_claims(job, spec, backend, name, left, partial(_found, say))):
                lost = why_lost(job.device) if verdict.status == ERROR else None
                if lost is not None:
                    say(ITEM, replace(verdict, status=CRASH, detail=lost).without_case())
                    raise Replace(lost)
                say(ITEM, verdict.without_case())
                if BEYOND_REPAIR:
                    say(STEP, {"spoilt": True})
                    raise Replace(BEYOND_REPAIR[0])
            if (lost := why_lost(job.device)) is not None:
                say(ITEM, _broken(CRASH, job, spec, name, lost).without_case())
                raise Replace(lost)


def _found(say: Say, verdict: Verdict) -> None:
    """What did not hold is known, whatever becomes of the process that explains it."""
    say(STEP, {"found": verdict.without_case()})


def _supports(backend: Backend, say: Say, patience: Mapping[str, float]) -> Declined:
    """A backend's, where it is asked about other cases than the one that is judged: each time it is a step.

    What it does then, to its process, too, is told where the other case is judged, and not here.
    """
    ask = told_later(backend, KeyboardInterrupt)

    def supports(case: Case) -> str | None:
        say(STEP, {"asked": True, **patience})
        return ask(case)

    return supports


class InTheJudge(RuntimeError):
    """What the judge's own code raised, and where, while it judged a backend."""


def _blamed(verdicts: Iterator[Verdict]) -> Iterator[Verdict]:
    """The same; an error that is none of the backend's is told from one that is. Raises: InTheJudge."""
    try:
        yield from verdicts
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.name}, {Path(place.filename).name}:{place.lineno}"
        raise InTheJudge(f"{type(error).__name__} in {where}: {first_line(error)}") from error


def _job(argument: Mapping[str, Any]) -> Job:
    case = Case.from_json(json.dumps(argument["case"]))
    fields = {name: argument[name] for name in Job._fields}
    tuples = {name: tuple(fields[name]) for name in ("specs", "oracles", "only", "mates")}
    turn = None if fields["turn"] is None else tuple(fields["turn"])
    return Job(**{**fields, **tuples, "case": case, "turn": turn})


def _broken(status: str, job: Job, spec: str, name: str, why: str, oracle: str = "") -> Verdict:
    """A verdict on one function, where nobody looked at what it returned."""
    return Verdict(
        status=status,
        backend=spec,
        variant=name or DEFAULT,
        oracle=oracle,
        case=job.case,
        device=job.device,
        detail=why,
    )


def why_lost(device: str) -> str | None:
    """Why nothing runs on a device any more: after some errors a CUDA context answers with them for ever."""
    if torch.device(device).type != "cuda":
        return None
    try:
        torch.ones(1, device=device).item()
    except RuntimeError as error:
        return f"the CUDA context is lost: {first_line(error)}"
    return None


def judges(workers: int, device: str, limits: Limits, threads: int | None = None) -> Pool:
    """Workers that are ready to judge on a device. threads: of torch, in each; None shares the cores out."""
    cpu = torch.device(device).type == "cpu"
    threads = threads or max(1, (os.cpu_count() or 1) // workers)
    argument = {"device": device, "threads": threads, "gpu_share": GPU_SHARE / workers}
    # numpy, in which Triton's interpreter computes, reads it when it is loaded, and else takes every core.
    defaults = {"OPENBLAS_NUM_THREADS": str(threads)}
    return Pool(workers, limits, Task("oracles.pool:ready", argument), cpu, defaults)


def ready(argument: Mapping[str, Any], say: Say) -> None:
    """In a worker: load the judge and make the device's context, before any case's time is counted."""
    torch.set_num_threads(argument["threads"])
    use_device(argument["device"])
    device = torch.device(argument["device"])
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(argument["gpu_share"], index)
        why_lost(argument["device"])
        kernel_keys.settle()
    rules()
    problems()
    gc.freeze()  # what is loaded by now stays: whoever looks for cycles need not look at it


class Described(NamedTuple):
    """What a backend is. unavailable: why it cannot run on the device, or None.

    source: ``sources.digest_of`` a stranger's; of the house's, "", since ``run_directory.versions`` has that.
    own: the cases that ``narrow`` deals to it, as text, where that was asked for and it can run.
    undealt: what ended the worker that was to deal them; empty if nothing did.
    """

    problem: str
    unavailable: str | None
    source: str
    own: Sequence[str] = ()
    undealt: str = ""

    def own_cases(self) -> list[Case]:
        """As cases."""
        return [Case.from_json(text) for text in self.own]


def described(
    specs: Sequence[str], device: str, limits: Limits | None, dealing: Dealing | None = None
) -> dict[str, Described]:
    """What each backend is; a stranger's is imported in a worker, if limits are given.

    dealing: the matrix of which ``own`` cases are wanted.

    Raises: ValueError in one line that names the backend, whatever its import does.
    """
    here = [spec for spec in specs if limits is None or _of_the_house(spec)]
    found = {spec: _described(spec, device, dealing) for spec in here}
    if limits is not None and len(found) < len(specs):
        with judges(1, device, limits) as pool:
            found |= describe_all(pool, [spec for spec in specs if spec not in found], device, dealing)
    return {spec: found[spec] for spec in specs}


def sources_of(found: Mapping[str, Described]) -> dict[str, str]:
    """The digest of each stranger's backend, as a manifest holds it."""
    return {spec: of.source for spec, of in found.items() if of.source}


def own_of(found: Mapping[str, Described]) -> dict[str, str]:
    """The digest of each backend's own cases, where it has any, as a manifest holds it."""
    texts = {spec: "\n".join(of.own) for spec, of in found.items() if of.own}
    return {spec: hashlib.sha256(text.encode()).hexdigest()[:12] for spec, text in texts.items()}


def _of_the_house(spec: str) -> bool:
    return spec.partition(":")[0].partition(".")[0] in BACKEND_PACKAGES


def describe_all(
    engine: Engine, specs: Sequence[str], device: str, dealing: Dealing | None = None
) -> dict[str, Described]:
    """What each backend is, asked in a worker. Raises: ValueError as ``described`` does."""
    argument = {"device": device, "dealing": dealing, PATIENCE: IMPORT_SECONDS}
    todo = [Task("oracles.pool:describe", {**argument, "spec": spec}) for spec in specs]

    def source(_: int) -> Task | None:
        return todo.pop(0) if todo else None

    found = {}
    for outcome in engine.outcomes(source):
        if outcome is None:
            continue
        spec = outcome.task.argument["spec"]
        said = [body for kind, body in outcome.messages if kind == ITEM]
        if not said:
            told = outcome.why.removeprefix("ValueError: ")
            ours = outcome.end == RAISED and told != outcome.why
            raise ValueError(told if ours else f"backend {spec!r}: its import: {told}")
        # What ended it before, as it was asked what it misses, is told where it is judged.
        undealt = outcome.why if outcome.end != DONE and len(said) > 1 else ""
        found[spec] = Described(*said[-1])._replace(undealt=undealt)
    return {spec: found[spec] for spec in specs}


def describe(argument: Mapping[str, Any], say: Say) -> None:
    """In a worker: what a backend is, and each time again with one answer more, if it survives the question.

    Those are what it misses, and which cases are its own.
    """
    spec, dealing = argument["spec"], argument["dealing"]
    say(STEP, {PATIENCE: argument[PATIENCE]})
    found = _imported(spec)
    say(ITEM, found)
    found = found._replace(unavailable=_missing(spec, argument["device"], KeyboardInterrupt))
    say(ITEM, found)
    if dealing is not None:
        step = partial(say, STEP, {PATIENCE: argument[PATIENCE]})
        seed, *names = dealing
        asked = Dealing(seed, *map(tuple, names))
        say(ITEM, found._replace(own=_own(spec, found.unavailable, asked, step, KeyboardInterrupt)))


def _described(spec: str, device: str, dealing: Dealing | None) -> Described:
    """Asked here."""
    unavailable = _missing(spec, device)
    found = _imported(spec)._replace(unavailable=unavailable)
    if dealing is None:
        return found
    return found._replace(own=_own(spec, unavailable, dealing, lambda: None))


def _own(
    spec: str,
    unavailable: str | None,
    dealing: Dealing,
    step: Callable[[], None],
    *more: type[BaseException],
) -> list[str]:
    """Nothing where the backend cannot run: that is told of the matrix's cases, and once is enough.

    step: begins the time of one question, but for those that follow at once.
    """
    if unavailable is not None:
        return []
    backend = load(spec)
    ask, begun = told_later(backend, *more), [-math.inf]

    def supports(case: Case) -> str | None:
        if time.monotonic() - begun[0] > AT_ONCE:
            step()
            begun[0] = time.monotonic()
        return ask(case)

    return [case.to_json() for case in own_cases_of(backend.problem, supports, dealing)]


def _imported(spec: str) -> Described:
    return Described(load(spec).problem, None, "" if _of_the_house(spec) else digest_of(spec))


def _missing(spec: str, device: str, *more: type[BaseException]) -> str | None:
    """A backend that raises when it is asked what it requires will do so when it is judged."""
    with contextlib.suppress(Raised, *more):
        return missing(load(spec), device)
    return None
