"""Which verdict or case is meant: one in a run directory, in a file, in a recording, or spelled out."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mla_ref.case import Case
from mla_ref.recording import PROBLEMS, read
from oracles.corpus import corpus
from oracles.run_directory import RunDirectory
from oracles.verdict import BROKEN, Verdict
from oracles.verify import backends

RECORDINGS = ".safetensors"
LINES = ".jsonl"
CORPUS = "corpus"


def cases_in(given: str, problems: Collection[str], formats: Sequence[str] | None) -> list[Case]:
    """The case in a file, or spelled out; a recording in every one of the problems that it serves.

    "corpus" is every case of the corpus. A file of lines has a case in each, or something that has one.

    formats: cache formats in which a recording's entries are stored, instead of the model's own type.

    Raises: ValueError in one line; OSError if a file cannot be read.
    """
    if given == CORPUS or given.endswith(LINES):
        found = [entry.case for entry in corpus()] if given == CORPUS else _of_lines(Path(given))
        return [case for case in found if case.problem in problems]
    if not given.endswith(RECORDINGS):
        return [Case.from_json(given) if given.lstrip().startswith("{") else _case_of(Path(given))]
    case = read(given).case
    stored_as = formats or [case.cache_format]
    return [
        replace(case, problem=name, cache_format=form)
        for name in PROBLEMS
        if name in problems
        for form in stored_as
    ]


def _of_lines(path: Path) -> list[Case]:
    cases = []
    for number, text in enumerate(_text_of(path).splitlines(), 1):
        with _named(f"{path}, line {number}"):
            line = json.loads(text)
            case = line["case"] if isinstance(line, dict) and "case" in line else line
            cases.append(Case.from_json(json.dumps(case)))
    if not cases:
        raise ValueError(f"{path}: holds no case")
    return cases


def _case_of(path: Path) -> Case:
    text = _text_of(path)
    with _named(str(path)):
        return Case.from_json(text)


def _text_of(path: Path) -> str:
    """Raises: ValueError naming a file that is no text."""
    with _named(str(path)):
        return path.read_text(encoding="utf-8")


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Whatever is wrong within is said with its place."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None


def recipe(given: str, index: int | None, backend: str) -> tuple[Case, str, str]:
    """The case, the backend to try, and the status of the verdict if there was one.

    The backend is the one named, or else the verdict's own if it is one of the house: what is given may be a
    stranger's, and cannot have a module imported that the user has not named.

    Raises: ValueError in one line, also where no backend is named; OSError if a file cannot be read.
    """
    path = None if given.lstrip().startswith("{") else Path(given)
    directory = path is not None and path.is_dir()
    if path is not None and path.suffix == RECORDINGS:
        if not backend:
            raise ValueError("a recording names no backend: say --backend NAME")
        return read(path).case, backend, ""
    text = "" if directory else given if path is None else _text_of(path)
    if directory or not _is_case(text):
        _, verdict = stored(path, index) if path is not None else _pick(text, index, "verdicts")
        if not backend and verdict.backend not in backends():
            raise ValueError(
                f"the verdict is on {verdict.backend!r}, whose module is only run if you name it: --backend"
            )
        return verdict.case, backend or verdict.backend, verdict.status
    if not backend:
        raise ValueError("a case names no backend: say --backend NAME")
    return _case_of(path) if path is not None else Case.from_json(text), backend, ""


def stored(path: Path, index: int | None) -> tuple[str, Verdict]:
    """A verdict of a run directory or of a file, and where it is. Without an index, the first that is broken.

    Of a campaign it is the first failure that was made small; indices count the verdicts before that.
    """
    if not path.is_dir():
        number, verdict = _pick(_text_of(path), index, str(path))
        return f"{path}, line {number}", verdict
    directory = RunDirectory(path)
    if directory.manifest and index is None and (failures := directory.failures()):
        return f"{path}, its first failure made small", failures[0]
    first, count = None, 0
    for verdict in directory.verdicts():
        if count == index or (index is None and verdict.status in BROKEN):
            return f"{path}, verdict {count}", verdict
        first = first or verdict
        count += 1
    if first is None or index is not None:
        raise ValueError(f"{path}: holds {count} verdicts, counted from 0")
    return f"{path}, verdict 0", first


def _is_case(text: str) -> bool:
    """Whether ``text`` is meant as one case: a single object that holds none, as a verdict does."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return len(text.splitlines()) == 1
    return not (isinstance(data, dict) and "case" in data)


def _pick(text: str, index: int | None, where: str) -> tuple[int, Verdict]:
    """Line ``index`` of verdicts as JSON; without one the first that is broken, or else the first."""
    lines = text.splitlines()
    if not lines:
        raise ValueError(f"{where}: no verdicts: the file is empty")
    if index is not None and index >= len(lines):
        raise ValueError(f"--index {index}: {where}: there are {len(lines)} lines, counted from 0")
    verdicts = []
    for line, text in enumerate(lines, 1):
        with _named(f"{where}, line {line}"):
            verdicts.append(Verdict.from_json(text))
    broken = (i for i, verdict in enumerate(verdicts) if verdict.status in BROKEN)
    number = index if index is not None else next(broken, 0)
    return number, verdicts[number]
