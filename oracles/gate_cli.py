"""``mla-verify gate``: the gsm8k gate of ``evals``, which is imported only when it is asked for."""

import importlib

import typer
from typer.exceptions import TyperException

from oracles.exits import NOTHING_RAN, complain

MISSING = "needs scipy and more: pip install 'mla-verify[evals]'"


def gate(context: typer.Context) -> int:
    """Pair two lm_eval runs of gsm8k, baseline and candidate, and decide whether anything was lost.

    Exit codes: 0 PASS; 1 FAIL; 2 INCONCLUSIVE; 3 it cannot decide: no such option, a run
    that cannot be read or compared, a package that is not installed.
    """
    try:
        app = importlib.import_module("evals.cli").app
        return int(app(["gate", *context.args], prog_name="mla-verify", standalone_mode=False) or 0)
    except ImportError as error:
        return complain(f"gate: {MISSING} ({error})", NOTHING_RAN)
    except TyperException as error:  # its own code, 2, is a verdict here
        return complain(f"gate: {error.format_message()}", NOTHING_RAN)
