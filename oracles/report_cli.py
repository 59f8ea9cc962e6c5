"""``mla-verify report``: a run as one page of HTML, and as a few figures in JSON."""

import json
from pathlib import Path
from typing import Annotated

import typer

from oracles.exits import UsageError, said
from oracles.report import page
from oracles.summary import summary
from oracles.whole_file import write_whole

MISSING = "needs jinja2 and matplotlib: pip install 'mla-verify[report]'"


def report(
    run: Annotated[Path, typer.Argument(help="A run directory, or what `run --json` wrote.")],
    html: Annotated[Path | None, typer.Option(help="The page to write.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="The counts to write, as JSON.")] = None,
    title: Annotated[str, typer.Option(help="Its heading; else the run's name.")] = "",
) -> int:
    """Write a run as one page of HTML that stands alone, or its counts as JSON.

    The page has no script, and nothing to load.
    """
    if html is None and as_json is None:
        raise UsageError("report: nothing to write: name --html FILE, --json FILE or both")
    try:
        if as_json is not None:
            write_whole(as_json, json.dumps(summary(run), indent=1) + "\n")
            typer.echo(as_json)
        if html is not None:
            write_whole(html, page(run, title))
            typer.echo(html)
    except ImportError as error:
        raise UsageError(f"report: {MISSING} ({error})") from None
    except (ValueError, OSError) as error:
        raise UsageError(f"report: {said(error)}") from None
    return 0
