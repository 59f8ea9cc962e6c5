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
    """The questions of ``train`` (7,473) or ``test`` (1,319)."""
    with (folder(data) / f"{split}.jsonl").open(encoding="utf-8") as lines:
        return [Row(**json.loads(line)) for line in lines]
