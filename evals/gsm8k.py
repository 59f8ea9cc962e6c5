"""The gsm8k questions, read by path: grade-school-math's two files, one JSON object a line."""

import json
import os
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = "MLA_VERIFY_GSM8K"
BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"


class Row(NamedTuple):
    """One question and its worked answer, which ends with ``#### number``."""

    question: str
    answer: str


def folder(given: Path | None = None) -> Path:
    """Where train.jsonl and test.jsonl are: ``given``, else $MLA_VERIFY_GSM8K, else beside the project.

    Raises: ValueError that names the folder and the file that is missing from it.
    """
    path = given or Path(os.environ.get(ENVIRONMENT, BESIDE))
    for name in ("train.jsonl", "test.jsonl"):
        if not (path / name).is_file():
            raise ValueError(f"gsm8k: {path / name} is missing; pass --data or set {ENVIRONMENT}")
    return path


def why_not() -> str | None:
    """Why the questions cannot be read here, or None."""
    try:
        folder()
    except ValueError as error:
        return str(error)
    return None


def rows(split: str, data: Path | None = None) -> list[Row]:
    """The questions of ``train`` (7,473) or ``test`` (1,319).

    Raises: ValueError that names a line which is no question, or a file without any.
    """
    file = folder(data) / f"{split}.jsonl"
    found = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                read = json.loads(line)
                row = Row(read["question"], read["answer"])
            except (ValueError, TypeError, KeyError):  # JSONDecodeError and UnicodeDecodeError, too
                row = Row("", "")
            if not (row.question and row.answer and {type(each) for each in row} == {str}):
                raise ValueError(f"{file}:{number}: is no JSON object with the texts question and answer")
            found.append(row)
    if not found:
        raise ValueError(f"{file}: holds no questions")
    return found
