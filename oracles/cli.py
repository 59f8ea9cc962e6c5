"""``mla-verify run``, ``replay``, ``show`` and ``list``: they parse, call the judge, and print.

Exit codes: 0 every claim held; 1 one failed, or a required backend did not run; 2 usage; 3 nothing ran, or
the judge itself does not work.
"""

import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, TextIO

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mla_ref.backend import missing
from mla_ref.formats import cache_format, formats
from mla_ref.presets import PRESETS
from mla_ref.presets import preset as find_preset
from mla_ref.problem import problem as find_problem
from mla_ref.problem import problems
from mla_ref.recording import served
from oracles import fuzz_cli
from oracles.console import (
    FEW,
    GROUPINGS,
    describe,
    distinct,
    label,
    left_out,
    main_reasons,
    more_kinds,
    one_line,
    python_code,
    summary,
)
from oracles.exits import FAILED, NOTHING_RAN, OK, UsageError, said
from oracles.junit import to_junit
from oracles.lookup import cases_in, recipe, stored
from oracles.matrix import Job, job_of, jobs_of, jobs_on
from oracles.narrow import Dealing
from oracles.pool import described, judge_all, own_of, sources_of
from oracles.run_directory import Journal, manifest_of, open_run, record_of
from oracles.tables import TABLES, contract
from oracles.terminal import cell, to_stdout, write
from oracles.verdict import BROKEN, CRASH, HELD, NOT_RUN, TIMEOUT, Verdict
from oracles.verify import backends, use_device
from oracles.worker import Limits, share_of_memory

MAX_FAILURES = 10
PATIENCE = "10m"
LISTED = ("problems", "backends", "formats", "presets", "oracles", "regimes")

Names = list[str] | None
Device = Annotated[str, typer.Option(help="Where implementations run: cpu, cuda, cuda:1 …")]
OnlyOracles = Annotated[Names, typer.Option("--oracle", help="Only this claim; repeatable.")]
Isolate = Annotated[
    bool | None, typer.Option("--isolate/--no-isolate", help="Judge in a process of its own, or in this one.")
]
Index = Annotated[int | None, typer.Option(min=0, help="Which line of the file; else its first failure.")]


@contextmanager
def _typed_by_user() -> Iterator[None]:
    """Names, files and cases come from a person: what is wrong with them is no fault of the program."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(said(error)) from None


def list_command(
    what: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(TABLES)}; without it, the first six. Of a problem or format: its contract."
        ),
    ] = "",
    device: Device = "cpu",
) -> None:
    """Show what there is, and why a backend cannot run here."""
    _use_device(device)
    console = to_stdout()
    with _typed_by_user():
        agreed = contract(what)
    if agreed:
        write(console, *agreed.splitlines())
        return
    if what and what not in TABLES:
        raise UsageError(
            f"table {what!r} is not one of {', '.join(TABLES)}, nor is it a problem or a cache format"
        )
    for name in [what] if what else LISTED:
        if not what:
            write(console, "")
        with _typed_by_user():
            header, rows = TABLES[name]()
        table = Table(*header, box=None, header_style="bold", pad_edge=False)
        for row in rows:
            table.add_row(*map(cell, row))
        console.print(table)
        if name == "backends":
            for backend in backends().values():
                if reason := missing(backend, device):
                    write(console, f"unavailable on {device}: {backend.name}: {reason}")


def run(
    backend: Annotated[Names, typer.Option(help="A listed name, or module:NAME; repeatable. All.")] = None,
    problem: Annotated[Names, typer.Option(help="Only this problem; repeatable.")] = None,
    preset: Annotated[Names, typer.Option(help="Only this model; repeatable.")] = None,
    format_: Annotated[Names, typer.Option("--format", help="Only this cache format; repeatable.")] = None,
    oracle: OnlyOracles = None,
    case: Annotated[Names, typer.Option(help="A file, a case or corpus, not the matrix; repeatable.")] = None,
    device: Device = "cpu",
    judge_on: fuzz_cli.JudgeOn = fuzz_cli.ON_DEVICE,
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="Variants and oracles take no turns.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. Every core for cpu, 1 else.")] = None,
    by: Annotated[str, typer.Option(help=f"A line of the table: {', '.join(GROUPINGS)}.")] = "problem",
    require: Annotated[Names, typer.Option(help="Fail unless this backend ran; repeatable.")] = None,
    timeout: fuzz_cli.Timeout = "",
    memory: fuzz_cli.Memory = "",
    isolate: Isolate = None,
    out: Annotated[Path | None, typer.Option(help="A run directory: begin it, or go on with it.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write each verdict as a line.")] = None,
    junit_file: Annotated[Path | None, typer.Option("--junit", help="Write a JUnit report.")] = None,
) -> int:
    """Judge backends on the conformance matrix: problems x presets x lengths x formats."""
    start = time.perf_counter()
    _use_device(device)
    if by not in GROUPINGS:
        raise UsageError(f"--by {by!r} is not one of {', '.join(GROUPINGS)}")
    if json_file and junit_file and json_file.resolve() == junit_file.resolve():
        raise UsageError(f"--json and --junit are one file: {json_file}")
    with ExitStack() as files:
        with _typed_by_user():
            specs = list(dict.fromkeys([*(backend or backends()), *(require or [])]))
            workers = _workers(jobs, device)
            limits = _limits(workers, device, isolate, timeout, memory)
            asked = {
                "problems": _once(problem) or list(problems()),
                "presets": _once(preset) or list(PRESETS),
                "formats": _once(format_) or list(formats()),
            }
            oracle = _once(oracle)
            dealing = Dealing(seed, *(tuple(names) for names in asked.values()))
            asked_of = described(specs, device, limits, None if case else dealing)
            implemented = {spec: of.problem for spec, of in asked_of.items()}
            if case:
                found = (
                    found for name in case for found in cases_in(name, asked["problems"], _once(format_))
                )
                given = list(dict.fromkeys(found))
                asked["cases"] = [found.to_json() for found in given]
                todo = jobs_on(given, implemented, oracle, device)
            else:
                todo = jobs_of(
                    specs=specs,
                    problems=[find_problem(name) for name in asked["problems"]],
                    configs=[find_preset(name) for name in asked["presets"]],
                    formats=[cache_format(name) for name in asked["formats"]],
                    oracles=oracle,
                    device=device,
                    seed=seed,
                    full=full,
                    implemented=implemented,
                    own={spec: of.own_cases() for spec, of in asked_of.items()},
                )
            todo = [job._replace(judge_on=fuzz_cli.judging_on(judge_on)) for job in todo]
            lines, report = (files.enter_context(_output(path)) for path in (json_file, junit_file))
            journal, known = None, {}
            if out is not None:
                identity: dict[str, object] = {"kind": "run", "backends": specs, **asked, "oracles": oracle}
                identity |= {"seed": seed, "full": full, "sources": sources_of(asked_of)}
                identity["own cases"] = own_of(asked_of)
                manifest = manifest_of(
                    identity, {"engine": "processes", "jobs": workers, "judge_on": judge_on}, device
                )
                journal = files.enter_context(open_run(out, manifest))
                known = {record.number: record.judged() for record in journal.records()}
            if lines:
                _empty(lines)
        try:
            verdicts = _judged(todo, min(workers, max(len(todo), 1)), limits, known, journal, lines)
        except Exception as error:
            if isinstance(error, OSError) and error.filename:  # a file that was named is wrong: one line
                raise
            # Ours: what was judged until then is told all the same.
            judged_yet = [verdict for number in sorted(known) for verdict in known[number]]
            if judged_yet:
                to_stdout().print(summary(judged_yet, by))
                _write_failures(to_stdout(), judged_yet)
            raise
        if report:
            _empty(report)
            report.write(to_junit(verdicts))
    console = to_stdout()
    console.print(summary(verdicts, by))
    named = dict.fromkeys([*(backend or []), *(require or [])])
    write(console, "", *main_reasons(verdicts), *_not_tried(list(named), implemented, problem, oracle, todo))
    undealt = {spec: of.undealt for spec, of in asked_of.items() if of.undealt}
    write(console, *(f"{spec}: no cases of its own could be dealt: {why}" for spec, why in undealt.items()))
    _write_failures(console, verdicts)
    return _close(console, verdicts, require or [], time.perf_counter() - start)


def _write_failures(console: Console, verdicts: Sequence[Verdict]) -> None:
    """One of each kind, and how many there are like it."""
    kinds = distinct(verdicts)
    for verdict, count in kinds[:MAX_FAILURES]:
        write(console, "", *describe(verdict), *([f"  and   {count - 1} more like it"] if count > 1 else []))
    if len(kinds) > MAX_FAILURES:
        write(console, "", f"and {more_kinds(len(kinds) - MAX_FAILURES)}; --json FILE keeps them all")
    if kinds:
        write(console, "")


def _once(names: Names) -> Names:
    return names and list(dict.fromkeys(names))


def _not_tried(
    named: Sequence[str], implemented: Mapping[str, str], problem: Names, oracle: Names, jobs: Sequence[Job]
) -> list[str]:
    """A line for each backend that was named, but that no case is for."""
    judged = {spec for job in jobs for spec in job.specs}
    return [
        f"{spec}: {left_out(of, problem, oracle) or f'not tried, no case is of {of}, which it implements'}"
        for spec in named
        if spec not in judged
        for of in (implemented[spec],)
    ]


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO | None]:
    """A file to write to, of which nothing is lost yet: see ``_empty``. Raises: OSError if it cannot be."""
    if path is None:
        yield None
        return
    new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        try:
            yield file
        except BaseException:
            if new and not path.stat().st_size:
                path.unlink()
            raise


def _empty(file: TextIO) -> None:
    """What was in it gives way to what is written now; a pipe or a terminal holds nothing."""
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.truncate(0)


def _workers(asked: int | None, device: str) -> int:
    return asked or (os.cpu_count() or 1 if torch.device(device).type == "cpu" else 1)


def _limits(workers: int, device: str, isolate: bool | None, timeout: str, memory: str) -> Limits | None:
    """None: judge in this process. Raises: ValueError on limits that are none, or that need a process."""
    limited = bool(timeout or memory)
    if isolate is False and (limited or workers > 1):
        what = "--timeout and --memory" if limited else f"--jobs {workers}"
        raise ValueError(f"--no-isolate: {what} need processes of their own")
    if not (isolate or limited or workers > 1 or torch.device(device).type != "cpu") or isolate is False:
        return None
    return Limits(
        fuzz_cli.duration(timeout or PATIENCE),
        fuzz_cli.memory_size(memory) if memory else share_of_memory(workers),
    )


def show(
    verdicts: Annotated[Path, typer.Argument(help="A run directory, or what `run --json` wrote.")],
    index: Index = None,
) -> None:
    """Show one verdict, the command that repeats it, and Python to paste."""
    with _typed_by_user():
        where, verdict = stored(verdicts, index)
    console = to_stdout()
    write(console, f"{where}:", *describe(verdict), "", *python_code(verdict).splitlines(), "")


def replay(
    case: Annotated[
        str,
        typer.Argument(help="A case as JSON, a file of one or of verdicts, a recording, a run directory."),
    ],
    backend: Annotated[str, typer.Option(help="A listed name, or module:NAME; else the verdict's.")] = "",
    oracle: OnlyOracles = None,
    device: Device = "cpu",
    judge_on: fuzz_cli.JudgeOn = fuzz_cli.ON_DEVICE,
    index: Index = None,
    timeout: fuzz_cli.Timeout = "",
    memory: fuzz_cli.Memory = "",
    isolate: Isolate = None,
) -> int:
    """Judge one backend on one case again, and print every verdict."""
    start = time.perf_counter()
    _use_device(device)
    with _typed_by_user():
        found, spec, status = recipe(case, index, backend)
        deadly = status in (CRASH, TIMEOUT)
        limits = _limits(1, device, True if isolate is None and deadly else isolate, timeout, memory)
        implemented = described([spec], device, limits)[spec].problem
        found = served(found, implemented)
        job = job_of(found, spec, oracle, device, implemented)
        job = job._replace(judge_on=fuzz_cli.judging_on(judge_on))
    [(_, verdicts)] = judge_all([job], 1, limits)
    console = to_stdout()
    write(console, label(found))
    for v in verdicts:
        write(console, *(describe(v) if v.status in BROKEN else [one_line(v)]))
    return _close(console, verdicts, [spec], time.perf_counter() - start)


def _use_device(device: str) -> None:
    """Raises: UsageError if torch has no such device."""
    try:
        use_device(device)
    except ValueError as error:
        raise UsageError(f"--device {error}") from None


def _judged(
    jobs: Sequence[Job],
    workers: int,
    limits: Limits | None,
    known: dict[int, list[Verdict]],
    journal: Journal | None,
    lines: TextIO | None,
) -> list[Verdict]:
    """Every verdict, job by job; what is known already is not judged again."""
    todo = [number for number in range(len(jobs)) if number not in known]
    columns = (TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    written = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("cases", total=len(jobs), completed=len(known))
        for at, verdicts in judge_all([jobs[number] for number in todo], workers, limits):
            number = todo[at]
            known[number] = verdicts
            if journal is not None:
                journal.append(record_of(number, jobs[number].case, verdicts))
            progress.advance(task)
            written = _write_in_turn(lines, known, written)
        _write_in_turn(lines, known, written)
    return [verdict for number in range(len(jobs)) for verdict in known[number]]


def _write_in_turn(lines: TextIO | None, known: Mapping[int, Sequence[Verdict]], written: int) -> int:
    """Write the verdicts whose turn it is, and return how many jobs are written now."""
    while written in known:
        if lines is not None:
            try:
                lines.writelines(f"{verdict.to_json()}\n" for verdict in known[written])
                lines.flush()
            except OSError as error:
                raise OSError(error.errno, os.strerror(error.errno or 0), lines.name) from None
        written += 1
    return written


def _close(console: Console, verdicts: Sequence[Verdict], required: Sequence[str], seconds: float) -> int:
    """Print the closing line and return the exit code."""
    held, broken, not_run = (sum(v.status in kind for v in verdicts) for kind in (HELD, BROKEN, NOT_RUN))
    ran = {v.backend for v in verdicts if v.claims}
    for name in required:
        if name not in ran:
            write(console, f"required backend {name} did not run")
    if held and not ran:
        whys = dict.fromkeys(v.detail for v in verdicts if v.status in HELD)
        write(console, f"no claim says anything of these cases: {'; '.join(islice(whys, FEW))}")
    write(console, f"{held} claims held, {broken} failed, {not_run} not run, in {seconds:.1f} s")
    if broken or not ran.issuperset(required):
        return FAILED
    return OK if ran else NOTHING_RAN
