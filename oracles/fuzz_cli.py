"""``mla-verify fuzz``: a campaign of drawn cases, for so long or so many."""

import hashlib
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mla_ref.case import Case
from mla_ref.problem import problem as find_problem
from oracles.campaign import Plan, campaign, known
from oracles.console import describe, group_of, label, left_out, more_kinds, python_code, short
from oracles.corpus import Entry, read
from oracles.exits import INTERRUPTED, UsageError, said
from oracles.oracle import rules
from oracles.plan_cli import size
from oracles.pool import describe_all, judges, sources_of
from oracles.ray_engine import ray_engine
from oracles.run_directory import Failure, manifest_of, open_run
from oracles.tally import Count, Tally
from oracles.terminal import cell, to_stdout, write
from oracles.verdict import Verdict
from oracles.verify import backends, oracles_for, use_device
from oracles.worker import Engine, Limits, share_of_memory

SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
ENGINES = ("processes", "ray")
MAX_ON_GPU = 16
ALIKE_ON_GPU = 64
LEAST_MEMORY = 64 << 20  # any less, and the judge itself has no room
MAX_FAILURES, MAX_CODE = 10, 3
LINE_EVERY, FRAME_EVERY = 10.0, 0.2
ENDING = (signal.SIGINT, signal.SIGTERM)

Timeout = Annotated[str, typer.Option(help="Most for one function of a backend on one case: 60s, 10m.")]
Memory = Annotated[
    str, typer.Option(help="Most of one process, such as 8G; else its share of the machine's.")
]

JudgeOn = Annotated[
    str, typer.Option("--judge-on", help="Where inputs are made and outputs judged: device, or cpu.")
]
ON_DEVICE, ON_CPU = "device", "cpu"


def judging_on(text: str) -> str | None:
    """What a job says of it. Raises: ValueError that shows the text."""
    if text not in (ON_DEVICE, ON_CPU):
        raise ValueError(f"--judge-on {text!r} is neither {ON_DEVICE} nor {ON_CPU}")
    return ON_CPU if text == ON_CPU else None


def duration(text: str) -> float:
    """Seconds: "90s", "10m", "2h", "1.5". Raises: ValueError that shows the text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(ms|s|m|h)?", text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"time {text!r} is no length of time, such as 90s, 10m or 2h")
    return float(match[1]) * SECONDS[match[2] or "s"]


def memory_size(text: str) -> int:
    """Bytes: "8G" and "8GiB" alike. Raises: ValueError that shows the text, too little included."""
    found = size(re.sub(r"(?<=[KMGkmg])$", "iB", text.strip()))
    if found < LEAST_MEMORY:
        raise ValueError(f"memory {text!r}: nothing is judged in less than {LEAST_MEMORY >> 20} MiB")
    return found


class Budget(NamedTuple):
    """Either is None."""

    seconds: float | None
    cases: int | None


def budget_of(text: str) -> Budget:
    """What "10m" or "5000cases" allows. Raises: ValueError that shows the text."""
    if match := re.fullmatch(r"([1-9]\d*) ?cases?", text.strip()):
        return Budget(None, int(match[1]))
    try:
        return Budget(duration(text), None)
    except ValueError:
        raise ValueError(
            f"budget {text!r} is neither a time, such as 10m, nor a number, such as 5000cases"
        ) from None


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Names = list[str] | None


def fuzz(
    backend: Annotated[Names, typer.Option(help="A listed name, or module:NAME; repeatable. All.")] = None,
    problem: Annotated[Names, typer.Option(help="Only backends of this problem; repeatable.")] = None,
    oracle: Annotated[Names, typer.Option(help="Only this claim; repeatable.")] = None,
    budget: Annotated[str, typer.Option(help="How long, 10m, or how many, 5000cases.")] = "10m",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes. Every core; 16 at most on a GPU.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A run directory: begin it, or go on with it.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Append what is made small to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Every case follows from it.")] = 0,
    alike: Annotated[
        int | None, typer.Option(min=1, help="Cases in a row for which the same is compiled. 1; 64 on a GPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where implementations run: cpu, cuda, cuda:1 …")] = "cpu",
    judge_on: Annotated[
        str | None,
        typer.Option(help="Where inputs are made and outputs judged: device, or cpu, also beside a GPU."),
    ] = None,
    timeout: Timeout = "60s",
    memory: Memory = "",
    engine: Annotated[str, typer.Option(help=f"Where workers run: {', '.join(ENGINES)}.")] = "processes",
) -> int:
    """Judge backends on drawn cases, for so long or so many, and make small what fails."""
    console = to_stdout()
    with ExitStack() as stack:
        try:
            use_device(device)
            limit = budget_of(budget)
            on_cpu = torch.device(device).type == "cpu"
            judge_on = judge_on or (ON_DEVICE if on_cpu else ON_CPU)
            workers = jobs or (cores() if on_cpu else min(cores(), MAX_ON_GPU))
            limits = Limits(duration(timeout), memory_size(memory) if memory else share_of_memory(workers))
            kept = None if corpus is None else _cases_in(corpus)
            pool = stack.enter_context(_engine(engine, device, limits, workers))
            plan, reasons, sources = _plan(pool, backend, problem, oracle, seed, device, limits, limit.cases)
            plan = plan._replace(
                judge_on=judging_on(judge_on), alike=alike or (1 if on_cpu else ALIKE_ON_GPU)
            )
            tally = Tally({spec: Count() for spec in plan.problems}, reasons=reasons)
            journal, done = None, frozenset[int]()
            if out is not None and plan.problems:
                manifest = _manifest(plan, sources, {"engine": engine, "jobs": workers, "judge_on": judge_on})
                journal = stack.enter_context(open_run(out, manifest))
                done = known(plan, journal, tally)
        except ValueError as error:
            raise UsageError(said(error)) from None
        start = time.monotonic()
        end = start + limit.seconds if limit.seconds is not None else math.inf
        events = campaign(plan, pool, journal, tally, lambda: time.monotonic() > end, done)
        if corpus is not None and kept is not None:
            events = _kept(events, corpus, kept)
        try:
            interrupted = not _ended(events, plan, tally, start, end)
        except Exception:  # ours: what was found until then is told all the same
            summarise(console, tally, time.monotonic() - start)
            raise
    summarise(console, tally, time.monotonic() - start)
    if interrupted:
        return INTERRUPTED
    return 1 if tally.total("broken") else 0 if tally.total("ran") else 3


def _plan(
    engine: Engine,
    asked: Names,
    named: Names,
    oracles: Names,
    seed: int,
    device: str,
    limits: Limits,
    num_cases: int | None,
) -> tuple[Plan, dict[str, str], dict[str, str]]:
    """What is to be done, why some backends are not tried, and digests of strangers' sources.

    Raises: ValueError on a name that is none.
    """
    for name in named or ():
        find_problem(name)
    for name in oracles or ():
        if name not in rules():
            raise ValueError(f"oracle {name!r} is not one of {', '.join(rules())}")
    oracles = oracles and [name for name in rules() if name in oracles]
    described = describe_all(engine, list(dict.fromkeys(asked or backends())), device)
    idle = {spec: left_out(found.problem, named, oracles) for spec, found in described.items()}
    wanted = {spec: found for spec, found in described.items() if not idle[spec]}
    claims = {
        found.problem: tuple(
            oracle.name
            for oracle in oracles_for(find_problem(found.problem))
            if not oracles or oracle.name in oracles
        )
        for found in wanted.values()
    }
    runs = {spec: found.problem for spec, found in wanted.items() if not found.unavailable}
    reasons = {spec: why for spec, why in idle.items() if why and asked}
    reasons |= {
        spec: f"unavailable, {found.unavailable}" for spec, found in wanted.items() if found.unavailable
    }
    return (
        Plan(runs, claims, seed, device, limits, num_cases),
        reasons,
        sources_of({spec: described[spec] for spec in runs}),
    )


def _manifest(plan: Plan, sources: dict[str, str], partition: dict[str, object]) -> dict[str, object]:
    run = {
        "kind": "fuzz",
        "backends": list(plan.problems),
        "oracles": {name: list(oracles) for name, oracles in plan.oracles.items()},
        "seed": plan.seed,
        "alike": plan.alike,
        "sources": sources,
    }
    return manifest_of(run, partition, plan.device)


def _cases_in(corpus: Path) -> set[Case]:
    """Raises: ValueError that names the file and the line; OSError if it cannot be written."""
    with corpus.open("a+", encoding="utf-8") as lines:
        lines.seek(0)
        try:
            return {entry.case for entry in read(lines)}
        except ValueError as error:
            raise ValueError(f"{corpus}: {error}") from None


def _kept(events: Iterator[Failure | None], corpus: Path, cases: set[Case]) -> Iterator[Failure | None]:
    """The same, each small failure being appended to the file unless its case is there."""
    for failure in events:
        if failure is not None and failure.verdict.case not in cases:
            verdict = failure.verdict
            cases.add(verdict.case)
            digest = hashlib.sha256(verdict.case.to_json().encode()).hexdigest()[:8]
            entry = Entry(
                name=f"{verdict.backend} {verdict.variant}, {verdict.oracle or verdict.status}, {digest}",
                bugs=(),
                oracles=(verdict.oracle,) if verdict.oracle else (),
                mutant="",
                case=verdict.case,
            )
            with corpus.open("a", encoding="utf-8") as lines:
                lines.write(f"{entry.to_json()}\n")
        yield failure


def _engine(name: str, device: str, limits: Limits, workers: int) -> AbstractContextManager[Engine]:
    """Raises: ValueError if there is no such engine."""
    if name == "processes":
        return judges(workers, device, limits, threads=1)
    if name == "ray":
        return ray_engine(workers, device, limits)
    raise ValueError(f"--engine {name!r} is not one of {', '.join(ENGINES)}")


def _ended(events: Iterator[Failure | None], plan: Plan, tally: Tally, start: float, end: float) -> bool:
    """Run to the end, showing how far it is. False if it was interrupted before."""
    screen = Console(stderr=True, highlight=False)
    live = Live(console=screen, transient=True, auto_refresh=False) if screen.is_terminal else None
    shown, told = start, set[tuple[object, ...]]()
    with _interruptible(), live or nullcontext():
        try:
            for failure in events:
                now = time.monotonic()
                if failure is not None:
                    found = failure.verdict
                    if (one := _one(found)) not in told:
                        told.add(one)
                        write(screen, f"new: {describe(found)[0]}", f"  {label(found.case)}")
                if now - shown > (LINE_EVERY if live is None else FRAME_EVERY):
                    shown = now
                    line = _progress(tally, plan, now - start, end - now)
                    if live is None:
                        write(screen, line)
                    else:
                        live.update(Text(line), refresh=True)
        except KeyboardInterrupt:
            return False
    return True


def _one(verdict: Verdict) -> tuple[object, ...]:
    """What failures have in common that are one to whoever reads of them: kind by kind they may come from
    different cases, and be the same once these are small.
    """
    return *group_of(verdict), verdict.case


def _progress(tally: Tally, plan: Plan, seconds: float, left: float) -> str:
    cases = tally.total("cases")
    goal = f" of {plan.num_cases}" if plan.num_cases is not None else f", {max(left, 0.0):.0f} s left"
    return (
        f"{cases} cases{goal}, {(cases - tally.resumed) / seconds:.1f} a second: "
        f"{tally.total('held')} claims held, {len(tally.found)} kinds of failure"
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """What schedulers send to end a process is Ctrl-C; and so is SIGINT, where a shell has it ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def summarise(console: Console, tally: Tally, seconds: float) -> None:
    """Counts by backend, why some were not tried, a failure of each kind, and one line for all."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("backend", no_wrap=True)
    for name in ("cases", "held", "failed", "not run"):
        table.add_column(name, justify="right")
    for name in ("worst error / bound", "cases that fail, with 95 %"):
        table.add_column(name, no_wrap=True)
    for spec, count in tally.counts.items():
        worst = f"{short(count.worst[0])} {count.worst[1]}" if count.worst[1] else "-"
        numbers = (count.cases, count.held, count.broken, count.not_run)
        table.add_row(cell(spec), *map(str, numbers), cell(worst), at_most(count.failed, count.ran))
    if tally.counts:
        console.print(table)
    write(console, "", *(f"{spec}: {reason}" for spec, reason in tally.reasons.items()))
    counts: dict[tuple[object, ...], tuple[Verdict, int]] = {}
    for kind, often in tally.found.items():
        first = tally.first[kind]
        verdict, before = counts.get(_one(first), (first, 0))
        counts[_one(first)] = verdict, before + often
    failures = list(counts.values())
    for number, (verdict, often) in enumerate(failures[:MAX_FAILURES]):
        write(console, *describe(verdict), *([f"  and   {often - 1} more like it"] if often > 1 else []), "")
        if number < MAX_CODE:
            write(console, *python_code(verdict).splitlines(), "")
    if len(failures) > MAX_FAILURES:
        write(console, f"and {more_kinds(len(failures) - MAX_FAILURES)}; --out DIR keeps them all", "")
    cases, ran, failed = (tally.total(name) for name in ("cases", "ran", "failed"))
    held, broken, not_run = (tally.total(name) for name in ("held", "broken", "not_run"))
    speed = (cases - tally.resumed) / seconds
    write(
        console,
        f"{cases} cases, {held} claims held, {broken} failed, {not_run} not run, in {seconds:.1f} s "
        f"({speed:.1f} cases/s); {failed} of {ran} cases fail: {at_most(failed, ran)}",
    )


def at_most(failed: int, ran: int) -> str:
    """What the share of failing cases is below with 95 % confidence, were none found: the rule of three."""
    if not ran:
        return "-"
    return f"{failed / ran:.2g} seen" if failed else f"below {min(3.0 / ran, 1.0):.2g}"
