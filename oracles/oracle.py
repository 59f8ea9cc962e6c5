"""One claim that every right implementation of a problem satisfies."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.scan import scan
from oracles.verdict import Finding

Run = Callable[[Any], Any]  # inputs -> output of the implementation on trial


@dataclass(frozen=True)
class Trial:
    """What an oracle may look at.

    run: calls the implementation on any inputs of its problem; the result for ``inputs`` is remembered.
    inputs: the case's tensors; an oracle changes copies, never these.
    """

    run: Run
    inputs: Any
    case: Case
    backend: Backend


@dataclass(frozen=True)
class Oracle:
    """A claim, the problems that it judges (empty: all of them), and the mutants that it kills."""

    name: str
    check: Callable[[Trial], Finding]
    problems: tuple[str, ...] = ()
    kills: tuple[str, ...] = ()


@cache
def rules() -> dict[str, Oracle]:
    """Every oracle by name."""
    return {oracle.name: oracle for oracle in scan("oracles.rules", "ORACLE").values()}
