"""The command ``mla-verify``: its words, its exit code, and one line for whatever ends it.

A command is imported when it is asked for: help, ``gate`` and ``doctor`` answer in less time than torch takes
to import, and where torch does not.
"""

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.exceptions import Abort, TyperException

from oracles.exits import (
    INTERRUPTED,
    NOTHING_RAN,
    OK,
    USAGE,
    UsageError,
    WorkersError,
    complain,
    said,
    unread,
)


class Command(NamedTuple):
    """What is known of a command before it is asked for.

    function: "module:name". short: what it does, in as many words as a line of the list takes. own_parser: it
    reads every word itself.
    """

    function: str
    short: str
    own_parser: bool = False


# In the order in which they are listed.
COMMANDS = {
    "run": Command("oracles.cli:run", "Judge backends on the conformance matrix."),
    "fuzz": Command("oracles.fuzz_cli:fuzz", "Judge backends on drawn cases; make small what fails."),
    "replay": Command("oracles.cli:replay", "Judge one backend on one case again."),
    "show": Command("oracles.cli:show", "Show one verdict, and how to see it again."),
    "report": Command("oracles.report_cli:report", "Write a run as one page of HTML, or its counts."),
    "probe": Command(
        "oracles.probe_cli:probe", "Find out how an unknown kernel is called; write its adapter."
    ),
    "record": Command(
        "oracles.record_cli:record_command", "Store what a model's attention is given, as cases."
    ),
    "bench": Command("oracles.bench_cli:bench", "Time backends beside their verdicts.", own_parser=True),
    "mutants": Command("oracles.mutants_cli:mutants", "Try what is wrong on purpose: which claim kills it."),
    "gate": Command(
        "oracles.gate_cli:gate", "Compare two lm_eval runs, question by question.", own_parser=True
    ),
    "plan": Command("oracles.plan_cli:plan", "How many tokens fit in a GPU's memory.", own_parser=True),
    "list": Command("oracles.cli:list_command", "Show what there is, and why a backend cannot run here."),
    "doctor": Command("oracles.doctor_cli:doctor", "Explain this machine: libraries, devices, known traps."),
}
OWN_PARSER = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # behind what is installed: a folder called evals there is another one
    try:
        # No option that may stand before a command takes a value.
        asked = next((word for word in words if not word.startswith("-")), "")
        code = int(app_with(asked)(words, prog_name="mla-verify", standalone_mode=False) or OK)
        sys.stdout.flush()
        return complain("interrupted", INTERRUPTED) if code == INTERRUPTED else code
    except TyperException as error:
        return complain(error.format_message(), USAGE)
    except (BrokenPipeError, SystemExit):  # the latter is rich's, and for the same reason
        return unread()
    except (UsageError, OSError) as error:
        return complain(said(error), USAGE)
    except WorkersError as error:
        return complain(str(error), NOTHING_RAN)
    except (Abort, KeyboardInterrupt):
        return complain("interrupted", INTERRUPTED)
    except Exception as error:
        traceback.print_exc()
        return complain(f"a defect of its own: {type(error).__name__}: {error}", NOTHING_RAN)


def app_with(asked: str) -> typer.Typer:
    """The application, in which one command can be run and the others are listed."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Hold implementations of multi-head latent attention to the truth.",
    )
    app.callback()(_options)
    for name, command in COMMANDS.items():
        function = _loaded(command.function) if name == asked else _listed
        context = OWN_PARSER if command.own_parser else {}
        app.command(name, context_settings=context, short_help=command.short)(function)
    return app


def _loaded(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _listed() -> None:
    """Stands for a command that was not asked for, and is never run."""
    raise AssertionError


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mla-verify {version('mla-verify')}")
        raise typer.Exit


def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What may stand before a command."""
