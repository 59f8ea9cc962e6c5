"""Failures that happened, each as one small case: what kernels got wrong in public, and what we did.

``corpus.jsonl`` beside this module has a line for each. Right implementations hold on all of them; where a
mutant makes the same mistake, the named oracles fail it on that very case.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mla_ref.case import Case
from oracles.mutants import Mutant, mutants

FILE = Path(__file__).with_name("corpus.jsonl")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One failure.

    name: unique, and says what was wrong, or on what kind of case. bugs: where it happened, as
        "owner/repository#number"; none where it is known from here alone. oracles: the claims that see it.
    mutant: the one that makes the same mistake, or "".
    """

    name: str
    bugs: tuple[str, ...]
    oracles: tuple[str, ...]
    mutant: str
    case: Case

    def to_json(self) -> str:
        """One line; ``from_json`` gives back an equal entry."""
        data = asdict(self)
        data["case"] = json.loads(self.case.to_json())
        return json.dumps(data, separators=(",", ":"), ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> "Entry":
        """Raises: ValueError that says what is wrong with the line."""
        try:
            data: dict[str, Any] = json.loads(text)
            case = Case.from_json(json.dumps(data.pop("case")))
            bugs, oracles = (tuple(data.pop(name)) for name in ("bugs", "oracles"))
            return Entry(**data, bugs=bugs, oracles=oracles, case=case)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"corpus: {error}") from None

    def wrong(self) -> Mutant | None:
        """The mutant on this case, with nothing in its memory; None where no mutant makes the mistake."""
        found = (m for m in mutants() if (m.name, m.case.problem) == (self.mutant, self.case.problem))
        mutant = next(found, None)
        return None if mutant is None else Mutant(self.mutant, self.case, mutant.run, mutant.numerics)


def read(lines: Iterable[str]) -> Iterator[Entry]:
    """The entries of a file. Raises: ValueError that names the line."""
    for number, line in enumerate(lines, 1):
        try:
            yield Entry.from_json(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


@cache
def corpus() -> tuple[Entry, ...]:
    """Every entry, in the order of the file."""
    return tuple(read(FILE.read_text(encoding="utf-8").splitlines()))
