"""``mla-verify bench``: the races of ``evals.speed``, which is imported only when it is asked for."""

import importlib

import typer


def bench(context: typer.Context) -> int:
    """Time backends on the same inputs in turns, each under the judge at the shape that is timed.

    Exit codes: 0 somebody was timed and nobody was wrong; 1 one was wrong, or raised; 3 nobody ran.
    """
    app = importlib.import_module("evals.speed.cli").app
    return int(app(context.args, prog_name="mla-verify bench", standalone_mode=False) or 0)
