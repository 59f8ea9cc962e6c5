"""``mla-verify bench``: parse, race, print.

Exit codes: 0 somebody was timed and nobody was wrong; 1 one was wrong, or raised; 2 usage; 3 nobody ran.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from evals.speed.cases import SUITES, Shape, case_of, cases
from evals.speed.race import CONTROL, SLOW, Pace, named, race
from evals.speed.report import check_base, load, name_of, outcome, plot, show, side_by_side
from evals.speed.work import WORK
from mla_ref.case import Case
from oracles.exits import printable
from oracles.verify import use_device
from oracles.whole_file import write_whole

Names = list[str] | None
HELD, WRONG, NOTHING_RAN = 0, 1, 3

# What --problem has and a suite brings along.
OF_A_SHAPE = ("batch", "heads", "q_len", "kv_len", "preset", "format_", "block_size", "dtype", "seed")

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    suite: Annotated[
        Names, typer.Option(help=f"{', '.join(SUITES)}; repeatable. All, without --problem.")
    ] = None,
    problem: Annotated[str, typer.Option(help=f"One shape of {', '.join(WORK)} instead.")] = "",
    batch: Annotated[int, typer.Option(min=1, help="Requests of it; states of a merge.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 16,
    q_len: Annotated[int, typer.Option(min=1, help="New tokens of a request; rows of a merge.")] = 1,
    kv_len: Annotated[int, typer.Option(min=1, help="Cached tokens, new ones included.")] = 4096,
    preset: Annotated[str, typer.Option(help="The model whose widths it has.")] = "deepseek-v3",
    format_: Annotated[str, typer.Option("--format", help="How its cache is stored.")] = "bf16",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of queries and outputs.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Everything random follows from it.")] = 0,
    backend: Annotated[
        Names, typer.Option(help="NAME, NAME/VARIANT or NAME/prepared; repeatable. All but references.")
    ] = None,
    base: Annotated[str, typer.Option(help="Ratios divide by this contestant; else by the first.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")] = "cpu",
    rounds: Annotated[int, typer.Option(min=0, help="Turns of each contestant; 0: as the device needs.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw it here: .png, .svg …")] = None,
) -> int:
    """Time backends on the same inputs in turns, each under the judge at the shape that is timed."""
    if context.invoked_subcommand is not None:
        return HELD
    try:
        where = _device(device)
        if not problem and (idle := _given(context, OF_A_SHAPE)):
            raise ValueError(
                f"--{idle[0].strip('_').replace('_', '-')}: goes with --problem; a suite has its own"
            )
        todo = _cases(
            suite or [], problem, (batch, heads, q_len, kv_len, format_), preset, block_size, dtype, seed
        )
        check_base(base.replace(CONTROL, ""), named(todo, backend or []))
        pace = Pace() if where.type == "cuda" else SLOW
        if rounds:
            pace = Pace(**{**vars(pace), "rounds": rounds})
        for path in (json_file, plot_file):
            if path is not None and not path.absolute().parent.is_dir():
                raise ValueError(f"{path}: there is no directory {path.parent}")
        record = race(todo, backend or [], device=where, pace=pace, seen=partial(_seen, path=json_file))
        if plot_file:
            plot(record).savefig(plot_file)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    _console().print(show(record, base))
    timed, wrong = outcome(record)
    return WRONG if wrong else HELD if timed else NOTHING_RAN


@app.command("show")
def show_command(
    files: Annotated[list[Path], typer.Argument(help="What --json wrote; of several, times side by side.")],
    base: Annotated[str, typer.Option(help="Ratios divide by this contestant; else by the first.")] = "",
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw it here; of one file.")] = None,
) -> int:
    """Print a record; of several, times without any ratio."""
    try:
        records = [load(path) for path in files]
        one = len({record["run"] for record in records}) == 1
        timed = [entry for case in records[0]["cases"] for entry in case["contestants"]]
        check_base(base, list(dict.fromkeys(map(name_of, timed))))
        if base and not one:
            raise ValueError(f"--base is of one run, and these are {len(records)}")
        if plot_file:
            if not one:
                raise ValueError(f"--plot draws one run, and these are {len(records)}")
            plot(records[0]).savefig(plot_file)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    _console().print(show(records[0], base) if one else side_by_side(records))
    return HELD


def _cases(
    suites: list[str],
    problem: str,
    sizes: tuple[int, int, int, int, str],
    model: str,
    block_size: int,
    dtype: str,
    seed: int,
) -> list[Case]:
    if not problem:
        return cases(suites or list(SUITES))
    if suites:
        raise ValueError("--suite and --problem: one or the other")
    return [case_of(Shape(problem, *sizes), model=model, block_size=block_size, dtype=dtype, seed=seed)]


def _given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """The parameters that somebody typed."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _device(name: str) -> torch.device:
    """Raises: ValueError if torch has no such device."""
    try:
        use_device(name)
    except ValueError as error:
        raise ValueError(f"--device {error}") from None
    return torch.device(name)


def _seen(record: dict[str, Any], path: Path | None) -> None:
    """Say what was raced, where somebody watches, and keep it, in case the rest is cut off."""
    if sys.stderr.isatty() and len(record["ceilings"]) == 1:  # the second comes with no new case
        case = record["cases"][-1]
        typer.echo(f"{printable(case['label'])}: {case['seconds']} s", err=True)
    if path:
        write_whole(path, json.dumps(record, indent=1) + "\n")


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)
