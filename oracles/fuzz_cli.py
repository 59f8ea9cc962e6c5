"""``mla-verify fuzz``: a campaign of drawn cases, for so long or so many."""

import re
from typing import Annotated

import typer

from oracles.plan_cli import size

SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

Timeout = Annotated[str, typer.Option(help="Most for one function of a backend on one case: 60s, 10m.")]
Memory = Annotated[
    str, typer.Option(help="Most of one process, such as 8G; else its share of the machine's.")
]


def duration(text: str) -> float:
    """Seconds: "90s", "10m", "2h", "1.5". Raises: ValueError that shows the text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(ms|s|m|h)?", text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"time {text!r} is no length of time, such as 90s, 10m or 2h")
    return float(match[1]) * SECONDS[match[2] or "s"]


def memory_size(text: str) -> int:
    """Bytes: "8G" and "8GiB" alike. Raises: ValueError that shows the text."""
    return size(re.sub(r"(?<=[KMGkmg])$", "iB", text.strip()))
