"""``mla-verify report``: a run as one page of HTML."""

from pathlib import Path
from typing import Annotated

import typer

from oracles.exits import UsageError
from oracles.report import page

MISSING = "needs jinja2 and matplotlib: pip install 'mla-verify[report]'"


def report(
    run: Annotated[Path, typer.Argument(help="A run directory, or what `run --json` wrote.")],
    html: Annotated[Path, typer.Option(help="The page to write.")],
    title: Annotated[str, typer.Option(help="Its heading; else the run's name.")] = "",
) -> int:
    """Write a run as one page of HTML that stands alone: no script, and nothing to load."""
    try:
        html.write_text(page(run, title), encoding="utf-8")
    except ImportError as error:
        raise UsageError(f"report: {MISSING} ({error})") from None
    except (ValueError, OSError) as error:
        raise UsageError(f"report: {error}") from None
    typer.echo(html)
    return 0
