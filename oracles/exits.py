"""How a command ends: its exit code, and one line for what is wrong."""

import os
import sys

OK, FAILED, USAGE, NOTHING_RAN, INTERRUPTED, UNREAD = 0, 1, 2, 3, 130, 141


class UsageError(Exception):
    """What is wrong with a command, in one line."""


class WorkersError(RuntimeError):
    """The judge's own processes do not work, so that nothing is known of any backend."""


def printable(text: str) -> str:
    """The same text, but what a terminal would obey or not show is an escape sequence of Python's."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def said(error: Exception) -> str:
    """What is wrong, in words: of a file its name and why, without the number of the error."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; empty, too, where that cannot be had."""
    try:
        return (str(error).splitlines() or [""])[0]
    except Exception:  # of a stranger's __str__
        return ""


def unread() -> int:
    """Nobody reads what is printed, as after ``| head``: say no more, at the end of the process either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UNREAD


def complain(message: str, code: int) -> int:
    """Say in one line of stderr what is wrong; returns the exit code."""
    print(f"mla-verify: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
