"""The command line: it parses, calls the judge, and prints.

Exit codes: 0 every claim held; 1 one failed, or a required backend did not run; 2 usage; 3 nothing ran.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.exceptions import Abort, TyperException

from mla_ref.case import Case
from mla_ref.formats import cache_format, formats
from mla_ref.presets import PRESETS
from mla_ref.presets import preset as find_preset
from mla_ref.problem import problem as find_problem
from mla_ref.problem import problems
from oracles import gate_cli, plan_cli
from oracles.console import GROUPINGS, describe, distinct, label, one_line, python_code, reasons, summary
from oracles.junit import to_junit
from oracles.matrix import Job, job_of, jobs_of
from oracles.pool import judge_all, judge_job
from oracles.tables import TABLES
from oracles.verdict import BROKEN, HELD, NOT_RUN, Verdict
from oracles.verify import backends, use_device

OK, FAILED, USAGE, NOTHING_RAN, INTERRUPTED = 0, 1, 2, 3, 130
MAX_FAILURES = 10
LISTED = ("problems", "backends", "formats", "presets", "oracles", "regimes")

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Hold implementations of multi-head latent attention to the truth.",
)
app.command(context_settings=plan_cli.CONTEXT)(plan_cli.plan)
app.command(context_settings=gate_cli.CONTEXT)(gate_cli.gate)

Names = list[str] | None
Device = Annotated[str, typer.Option(help="Where implementations run: cpu, cuda, cuda:1 …")]
OnlyOracles = Annotated[Names, typer.Option("--oracle", help="Only this claim; repeatable.")]
Index = Annotated[int | None, typer.Option(min=0, help="Which line of the file; else its first failure.")]


class UsageError(Exception):
    """What is wrong with a command, in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return int(app(words, prog_name="mla-verify", standalone_mode=False) or OK)
    except TyperException as error:
        return _complain(error.format_message(), USAGE)
    except UsageError as error:
        return _complain(str(error), USAGE)
    except Abort:
        return _complain("interrupted", INTERRUPTED)


def _complain(message: str, code: int) -> int:
    print(f"mla-verify: {' '.join(message.split())}", file=sys.stderr)
    return code


@contextmanager
def _typed_by_user() -> Iterator[None]:
    """Names, files and cases come from a person: what is wrong with them is no fault of the program."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from None


@app.command("list")
def list_command(
    what: Annotated[str, typer.Argument(help=f"{', '.join(TABLES)}; without it, the first six.")] = "",
    device: Device = "cpu",
) -> None:
    """Show what there is, and why a backend cannot run here."""
    _use_device(device)
    if what and what not in TABLES:
        raise UsageError(f"table {what!r} is not one of {', '.join(TABLES)}")
    console = _console()
    for name in [what] if what else LISTED:
        if not what:
            _print(console, "")
        header, rows = TABLES[name]()
        table = Table(*header, box=None, header_style="bold", pad_edge=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        if name == "backends":
            for backend in backends().values():
                if reason := backend.requires(torch.device(device).type):
                    _print(console, f"unavailable on {device}: {backend.name}: {reason}")


@app.command()
def run(
    backend: Annotated[Names, typer.Option(help="A listed name, or module:NAME; repeatable. All.")] = None,
    problem: Annotated[Names, typer.Option(help="Only this problem; repeatable.")] = None,
    preset: Annotated[Names, typer.Option(help="Only this model; repeatable.")] = None,
    format_: Annotated[Names, typer.Option("--format", help="Only this cache format; repeatable.")] = None,
    oracle: OnlyOracles = None,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="Variants and oracles take no turns.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. Every core for cpu, 1 else.")] = None,
    by: Annotated[str, typer.Option(help=f"A line of the table: {', '.join(GROUPINGS)}.")] = "problem",
    require: Annotated[Names, typer.Option(help="Fail unless this backend ran; repeatable.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write each verdict as a line.")] = None,
    junit_file: Annotated[Path | None, typer.Option("--junit", help="Write a JUnit report.")] = None,
) -> int:
    """Judge backends on the conformance matrix: problems x presets x lengths x formats."""
    start = time.perf_counter()
    _use_device(device)
    if by not in GROUPINGS:
        raise UsageError(f"--by {by!r} is not one of {', '.join(GROUPINGS)}")
    with ExitStack() as files:
        with _typed_by_user():
            todo = jobs_of(
                specs=list(dict.fromkeys([*(backend or backends()), *(require or [])])),
                problems=[find_problem(name) for name in problem or problems()],
                configs=[find_preset(name) for name in preset or PRESETS],
                formats=[cache_format(name) for name in format_ or formats()],
                oracles=oracle,
                device=device,
                seed=seed,
                full=full,
            )
            lines, report = (
                files.enter_context(path.open("w", encoding="utf-8")) if path else None
                for path in (json_file, junit_file)
            )
        verdicts = _judged(todo, _workers(jobs, device, len(todo)), lines)
        if report:
            report.write(to_junit(verdicts))
    console = _console()
    console.print(summary(verdicts, by))
    _print(console, "", *reasons(verdicts))
    kinds = distinct(verdicts)
    for verdict, count in kinds[:MAX_FAILURES]:
        _print(console, "", *describe(verdict), *([f"  and   {count - 1} more like it"] if count > 1 else []))
    if len(kinds) > MAX_FAILURES:
        _print(
            console, "", f"and {len(kinds) - MAX_FAILURES} more kinds of failure; --json FILE keeps them all"
        )
    if kinds:
        _print(console, "")
    return _close(console, verdicts, require or [], time.perf_counter() - start)


def _workers(asked: int | None, device: str, num_jobs: int) -> int:
    cores = os.cpu_count() or 1
    return max(1, min(asked or (cores if torch.device(device).type == "cpu" else 1), num_jobs))


@app.command()
def show(
    verdicts: Annotated[Path, typer.Argument(help="What `run --json` wrote.")],
    index: Index = None,
) -> None:
    """Show one verdict, the command that repeats it, and Python to paste."""
    with _typed_by_user():
        number, verdict = _pick(verdicts.read_text(encoding="utf-8"), index)
    console = _console()
    _print(console, f"{verdicts}, line {number}:", *describe(verdict), "", python_code(verdict))


@app.command()
def replay(
    case: Annotated[str, typer.Argument(help="A case as JSON, or a file with one, or with verdicts.")],
    backend: Annotated[str, typer.Option(help="A listed name, or module:NAME; else the verdict's.")] = "",
    oracle: OnlyOracles = None,
    device: Device = "cpu",
    index: Index = None,
) -> int:
    """Judge one backend on one case again, and print every verdict."""
    start = time.perf_counter()
    _use_device(device)
    with _typed_by_user():
        text = case if case.lstrip().startswith("{") else Path(case).read_text(encoding="utf-8")
        recipe, spec = _recipe(text, index, backend)
        job = job_of(recipe, spec, oracle, device)
    verdicts = judge_job(job)
    console = _console()
    _print(console, label(recipe))
    for verdict in verdicts:
        _print(console, *(describe(verdict) if verdict.status in BROKEN else [one_line(verdict)]))
    return _close(console, verdicts, [spec], time.perf_counter() - start)


def _recipe(text: str, index: int | None, backend: str) -> tuple[Case, str]:
    """The case in ``text``, and the backend to try: the one named, or else the verdict's own."""
    if not _is_case(text):
        _, verdict = _pick(text, index)
        return verdict.case, backend or verdict.backend
    if not backend:
        raise UsageError("a case names no backend: say --backend NAME")
    return Case.from_json(text), backend


def _is_case(text: str) -> bool:
    """Whether ``text`` is meant as one case: a single object that holds none, as a verdict does."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return len(text.splitlines()) == 1
    return not (isinstance(data, dict) and "case" in data)


def _pick(text: str, index: int | None) -> tuple[int, Verdict]:
    """Line ``index`` of verdicts as JSON; without one the first that is broken, or else the first."""
    lines = text.splitlines()
    if not lines:
        raise ValueError("no verdicts: the file is empty")
    if index is not None and index >= len(lines):
        raise ValueError(f"--index {index}: there are {len(lines)} lines, counted from 0")
    verdicts = [Verdict.from_json(line) for line in lines]
    broken = (i for i, verdict in enumerate(verdicts) if verdict.status in BROKEN)
    number = index if index is not None else next(broken, 0)
    return number, verdicts[number]


def _use_device(device: str) -> None:
    """Raises: UsageError if torch has no such device."""
    try:
        use_device(device)
    except ValueError as error:
        raise UsageError(f"--device {error}") from None


def _judged(jobs: Sequence[Job], workers: int, lines: TextIO | None) -> list[Verdict]:
    """Every verdict, in order; each is written as soon as it is its turn."""
    columns = (TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    verdicts: list[Verdict] = []
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("cases", total=len(jobs))
        for group in judge_all(jobs, workers, lambda: progress.advance(task)):
            verdicts += group
            if lines is not None:
                lines.writelines(f"{verdict.to_json()}\n" for verdict in group)
                lines.flush()
    return verdicts


def _close(console: Console, verdicts: Sequence[Verdict], required: Sequence[str], seconds: float) -> int:
    """Print the closing line and return the exit code."""
    held, broken, not_run = (sum(v.status in kind for v in verdicts) for kind in (HELD, BROKEN, NOT_RUN))
    ran = {v.backend for v in verdicts if v.status not in NOT_RUN}
    for name in required:
        if name not in ran:
            _print(console, f"required backend {name} did not run")
    _print(console, f"{held} claims held, {broken} failed, {not_run} not run, in {seconds:.1f} s")
    if broken or not ran.issuperset(required):
        return FAILED
    return OK if ran else NOTHING_RAN


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def _print(console: Console, *lines: str) -> None:
    """Print lines as they are: no markup, and no wrapping, so that each can be pasted."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
