"""The command ``mla-verify``: its words, its exit code, and one line for whatever ends it.

``gate`` decides in less time than torch takes to import, so the others are imported when one is asked for.
"""

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer
from typer.exceptions import Abort, TyperException

from oracles import gate_cli
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

gate_alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
gate_alone.command(context_settings=gate_cli.CONTEXT)(gate_cli.gate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # behind what is installed: a folder called evals there is another one
    try:
        if words[0] == "gate":
            app, words = gate_alone, words[1:]
        else:
            app = importlib.import_module("oracles.cli").app
        code = int(app(words, prog_name="mla-verify", standalone_mode=False) or OK)
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
