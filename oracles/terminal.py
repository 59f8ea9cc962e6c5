"""How commands print: as wide as the terminal, and nothing of what strangers say obeyed by it."""

import sys

from rich.console import Console
from rich.text import Text

from oracles.exits import printable


def to_stdout() -> Console:
    """Where commands print their results: as wide as the terminal if that is one."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def write(console: Console, *lines: str) -> None:
    """Print lines as they are: no markup, no emoji, and no wrapping, so that each can be pasted."""
    for line in lines:
        console.print(printable(line), markup=False, emoji=False, soft_wrap=True)


def cell(text: str) -> Text:
    """What stands in a table."""
    return Text(printable(text))
