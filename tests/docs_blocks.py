"""The code blocks of the README and the docs: found, run, compared with what they show, and made anew.

- ``python``: runs, in one namespace a page. A ``text`` block right below it is what it prints.
- ``python title="PATH"`` or ``text``: a file that a reader would write. The page then runs on a copy of the
  packages with those files in it, in a process of its own.
- ``console``: ``$ mla-verify …`` or ``$ pytest …`` and what it prints. With a title it is too slow to run in
  the suite.
- any other language is not run.

``python tests/docs_blocks.py [PAGE …]`` pastes the real output of every block of these pages (none named: of
all), the slow ones included.
"""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from oracles.command import main
from oracles.tables import pages

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r'^```(\w+)(?: title="([^"\n]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
COMMANDS = ("$ mla-verify ", "$ pytest ")


class Block(NamedTuple):
    """One fenced block; ``start`` … ``stop`` is its text in the page."""

    language: str
    title: str
    text: str
    start: int
    stop: int


class Step(NamedTuple):
    """Something to run, and the block and lines that show what it prints (None: nothing is shown)."""

    kind: str
    source: str
    shown: str | None
    start: int
    stop: int
    slow: bool


def blocks(text: str) -> list[Block]:
    return [Block(m[1], m[2] or "", m[3], *m.span(3)) for m in BLOCK.finditer(text)]


def files(text: str) -> dict[str, str]:
    """The files that a page's reader writes, by path."""
    return {b.title: b.text for b in blocks(text) if b.language in ("python", "text") and b.title}


def steps(text: str) -> list[Step]:
    """What a page runs, in order."""
    found = blocks(text)
    result = []
    for block, below in zip_longest(found, found[1:]):
        if block.language == "python" and not block.title:
            # Nothing but a blank line between the two fences.
            near = below is not None and below.language == "text" and below.start - block.stop < 20
            shown, start, stop = (below.text, below.start, below.stop) if near else (None, 0, 0)
            result.append(Step("python", block.text, shown, start, stop, False))
        elif block.language == "console":
            result += _sessions(block)
    return result


def _sessions(block: Block) -> Iterator[Step]:
    at = [m.start() for m in re.finditer(r"^\$ ", block.text, re.MULTILINE)]
    assert at[:1] == [0], f"a console block starts with a command: {block.text[:60]!r}"
    for begin, end in zip(at, [*at[1:], len(block.text)], strict=True):
        command, _, shown = block.text[begin:end].partition("\n")
        assert command.startswith(COMMANDS), f"only mla-verify and pytest run in console blocks: {command!r}"
        start = block.start + begin + len(command) + 1
        stop = block.start + end
        yield Step("console", command.removeprefix("$ "), shown, start, stop, bool(block.title))


def run(todo: Sequence[tuple[str, str]]) -> list[str]:
    """What each (kind, source) prints, one after another in this process."""
    scope: dict[str, object] = {}
    return [_printed(kind, source, scope) for kind, source in todo]


def _printed(kind: str, source: str, scope: dict[str, object]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        if kind == "python":
            exec(compile(source, "<docs>", "exec"), scope)
        elif source.startswith("pytest "):
            out.write(_pytest(shlex.split(source)[1:]))
        else:
            main(shlex.split(source)[1:])
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _pytest(words: list[str]) -> str:
    """What pytest prints about the reader's suite, in a process of its own."""
    command = [sys.executable, "-m", "pytest", *words, "-p", "no:cacheprovider"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def run_page(text: str, todo: Sequence[Step]) -> list[str]:
    """What each step of a page prints; beside the reader's files, if the page has any."""
    pairs = [(step.kind, step.source) for step in todo]
    return _run_on_a_copy(files(text), pairs) if files(text) else run(pairs)


def _run_on_a_copy(written: dict[str, str], pairs: list[tuple[str, str]]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for package in ("mla_ref", "mla_fast", "oracles"):
            shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        for path, source in written.items():
            assert not (copy / path).exists(), f"{path} exists already"
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            (copy / path).write_text(source, encoding="utf-8")
        code = (
            f"import json, sys; sys.path[:0] = [{folder!r}, {str(ROOT / 'tests')!r}]\n"
            "from docs_blocks import run\n"
            "outputs = run(json.load(sys.stdin))\n"
            "sys.stdout.write(json.dumps(outputs))"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            input=json.dumps(pairs),
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        outputs: list[str] = json.loads(ran.stdout)
        return outputs


def agree(step: Step, got: str) -> bool:
    """Whether a step printed what the page shows. "…" stands for anything, alone on a line for any lines.

    Where the judge prints figures that depend on the processor, they are not compared: ratios and seconds,
    and every number where a claim failed, since which elements are outside follows from the last bit.
    """
    if step.shown is None:
        return got == ""
    words = step.source.split()
    judged = step.kind == "console" and (words[0] == "pytest" or words[1] in ("run", "replay", "probe"))
    figures = r"-?\d+(\.\d+)?(e[+-]\d+)?" if "\nFAIL " in step.shown else r"-?\d+\.\d+(e[+-]\d+)?"

    def plain(text: str) -> str:
        lines = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        return re.sub(r" +", " ", re.sub(figures, "#", lines)) if judged else lines

    parts = re.split(r"^…\n|…", plain(step.shown), flags=re.MULTILINE)
    return re.fullmatch("(?s:.*?)".join(map(re.escape, parts)), plain(got)) is not None


def refreshed(text: str) -> str:
    """The page with real output below every step that shows some, unless lines of it are left out by hand."""
    todo = [step for step in steps(text) if "\n…\n" not in f"\n{step.shown}"]
    outputs = run_page(text, todo)
    for step, got in reversed(list(zip(todo, outputs, strict=True))):
        if step.shown is not None and not agree(step, got):
            text = text[: step.start] + _shortened(got) + text[step.stop :]
    return text


def _shortened(got: str) -> str:
    """Lines that end in a case's JSON end where it begins."""
    return re.sub(r"^(.{100}).{20,}$", r"\1…", got, flags=re.MULTILINE)


if __name__ == "__main__":
    named = {Path(word).resolve() for word in sys.argv[1:]}
    if unknown := named.difference(pages(ROOT)):
        sys.exit(f"{min(unknown)} is no page; they are the README and docs/*.md")
    for page in pages(ROOT):
        if named and page not in named:
            continue
        old = page.read_text(encoding="utf-8")
        if (new := refreshed(old)) != old:
            page.write_text(new, encoding="utf-8")
            sys.stdout.write(f"{page.name}: outputs made anew\n")
