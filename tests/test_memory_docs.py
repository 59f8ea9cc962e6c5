"""docs/layouts.md and docs/capacity.md: every block runs, and prints what stands below it."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from oracles.cli import main

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each block, in order."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def printed_by(action) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        action()
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


@pytest.mark.parametrize("page", ["layouts.md", "capacity.md"])
def test_python_blocks_print_the_text_below_them(page: str):
    scope: dict[str, object] = {}
    found = blocks(page)
    ran = 0
    for i, (language, text) in enumerate(found):
        if language == "python":
            got = printed_by(lambda source=text: exec(compile(source, page, "exec"), scope))
            below = found[i + 1] if i + 1 < len(found) else ("", "")
            assert got == (below[1] if below[0] == "text" else "")
            ran += 1
    assert ran >= 4


def test_console_blocks_are_what_the_command_prints():
    sessions = [text for language, text in blocks("capacity.md") if language == "console"]
    assert sessions
    for session in sessions:
        command, _, expected = session.partition("\n")
        words = shlex.split(command.removeprefix("$ "))
        assert words[0] == "mla-verify"
        assert printed_by(lambda words=words: main(words[1:])) == expected
