"""``mla-verify gate``: the gsm8k gate of ``evals``, which is imported only when it is asked for."""

import importlib

import typer

# Every word is read by the gate's own parser.
CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

MISSING = "needs scipy and more: pip install 'mla-verify[evals]'"


def gate(context: typer.Context) -> int:
    """Pair two lm_eval runs of gsm8k, baseline and candidate, and decide whether anything was lost.

    Exit codes: 0 PASS; 1 FAIL; 2 INCONCLUSIVE; 3 the runs cannot be read or compared.
    """
    try:
        app = importlib.import_module("evals.cli").app
        return int(app(["gate", *context.args], prog_name="mla-verify", standalone_mode=False) or 0)
    except ImportError as error:
        raise typer.BadParameter(f"gate: {MISSING} ({error})") from None
