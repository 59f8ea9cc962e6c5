"""``mla-verify mutants``: which oracle kills which mutant, how soon, and what other projects' rules see."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from oracles.exits import UsageError, said
from oracles.field import RULES
from oracles.kill_matrix import (
    Killed,
    every_mutant,
    matching,
    measure,
    put_on_record,
    to_json,
    why_no_record,
)
from oracles.oracle import rules
from oracles.source_mutants import why_not
from oracles.verify import use_device

Names = list[str] | None


def mutants(
    name: Annotated[Names, typer.Option("--mutant", help="Only this mutant; repeatable.")] = None,
    problem: Annotated[Names, typer.Option(help="Only mutants of this problem; repeatable.")] = None,
    oracle: Annotated[Names, typer.Option(help="Only by this oracle; repeatable.")] = None,
    cases: Annotated[int, typer.Option(min=1, help="Cases that each mutant is tried on.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="The whole matrix as JSON.")] = False,
    record: Annotated[
        bool, typer.Option(help="Put these mutants' rows into the record that the docs show.")
    ] = False,
) -> int:
    """Try every mutant on its own case and on others: what kills it, after how many cases, in what time.

    Exit codes: 0 every mutant was killed; 1 one survived all its cases, or an oracle failed what is right;
    2 usage.
    """
    use_device("cpu")
    try:
        found = matching(every_mutant(), name, problem, oracle)
        if not found:
            raise ValueError("no mutant is of these names and problems and judged by these oracles")
        if record and (reason := why_no_record()):
            raise ValueError(reason)
    except ValueError as error:
        raise UsageError(said(error)) from None
    console = Console(stderr=True)
    shown = track(found, "mutants", console=console, disable=not console.is_terminal, transient=True)
    rows: list[Killed] = []
    try:
        for mutant in shown:
            of = mutant.case.problem
            rows.append(measure(mutant.name, of, cases, _judging(of, oracle)))
    finally:  # however that ends, what was measured took long
        if record and rows:
            put_on_record(rows)
    if as_json:
        sys.stdout.write(to_json(rows))
    else:
        _print(rows)
    return int(any(not row.killed or row.false_alarms for row in rows))


def _judging(of: str, names: Names) -> list[str] | None:
    return names and [name for name in names if not rules()[name].problems or of in rules()[name].problems]


def _print(rows: Sequence[Killed]) -> None:
    titles = ("mutant", "problem", "killed", "cases 50, 95 %", "quickest", *RULES, "by oracles beyond values")
    lines = [titles, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(padded).rstrip() + "\n")
    survivors = [f"{row.mutant} of {row.problem}" for row in rows if not row.killed]
    sys.stdout.write(f"{len(rows)} mutants, {len(survivors)} survived\n")
    for name in survivors:
        sys.stdout.write(f"survived: {name}\n")
    for row in rows:
        for oracle, count in row.false_alarms.items():
            found = f"{oracle} failed it and the right implementation alike, on {count} of {row.cases} cases"
            sys.stdout.write(f"no kill: {row.mutant} of {row.problem}: {found}\n")
    if reason := why_not():
        sys.stdout.write(f"edited kernels were not tried: {reason}\n")


def cells(row: Killed) -> tuple[str, ...]:
    """A row of the printed matrix: counts are of cases."""
    median, most = row.cases_to_kill(0.5), row.cases_to_kill(0.95)
    quickest = f"{row.quickest[0]} {row.quickest[1]:.3f} s" if row.quickest else "-"
    beyond = ", ".join(f"{name} {row.by[name]}" for name in row.beyond_values) or "-"
    field = (str(row.field[name]) if name in row.field else "" for name in RULES)
    needed = f"{median}, {most}" if median else "never"
    return row.mutant, row.problem, f"{row.killed}/{row.cases}", needed, quickest, *field, beyond
