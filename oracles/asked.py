"""What a backend is asked before it is tried: what it misses on a device, and why it declines a case.

An answer is a reason, or None. Whatever else comes of a question is an error of the backend's that names the
question, wherever it was asked: nobody takes silence, or an exception, for an answer. What a question changes
that belongs to the whole process is put back, as after a call.
"""

from collections.abc import Callable

import torch

from mla_ref.backend import Backend
from mla_ref.backend import missing as required
from mla_ref.case import Case
from oracles.exits import first_line
from oracles.oracle import Raised
from oracles.process_state import kept

Declined = Callable[[Case], str | None]


def missing(backend: Backend, device: str | torch.device, disturbed: list[str] | None = None) -> str | None:
    """What a backend misses on a device, or None. Raises: Raised if that is not what it answers.

    disturbed: what it changed that belongs to the whole process is appended.
    """
    return _undisturbed("requires", lambda: required(backend, device), disturbed)


def declined(backend: Backend, case: Case, disturbed: list[str] | None = None) -> str | None:
    """Why a backend does not take a case, or None. Raises: Raised if that is not what it answers.

    disturbed: as of ``missing``.
    """
    return _undisturbed("supports", lambda: backend.supports(case), disturbed)


def told_later(backend: Backend, *more: type[BaseException]) -> Declined:
    """``declined``, but None where that raises: the error is told where the case is judged.

    What it changes in the process, too, is told there, and put back by who asks: many questions in a row.

    more: what else is the backend's; in a worker, which no terminal interrupts, KeyboardInterrupt.
    """
    theirs: tuple[type[BaseException], ...] = (Raised, *more)

    def ask(case: Case) -> str | None:
        try:
            return _answer("supports", lambda: backend.supports(case))
        except theirs:
            return None

    return ask


def _undisturbed(question: str, ask: Callable[[], object], disturbed: list[str] | None) -> str | None:
    changed: list[str] = []
    try:
        with kept(changed):
            return _answer(question, ask)
    finally:
        if disturbed is not None:
            disturbed += [f"{what}, in {question}" for what in changed]


def _answer(question: str, ask: Callable[[], object]) -> str | None:
    try:
        answer = ask()
    except KeyboardInterrupt as error:  # the user's, where this is no worker
        raise KeyboardInterrupt(f"in {question}: {error}") from error
    except BaseException as error:
        raise Raised(f"{question} raised {type(error).__name__}: {first_line(error)}") from error
    if answer is None or (isinstance(answer, str) and answer):
        return answer
    what = "an empty reason" if isinstance(answer, str) else type(answer).__name__
    raise Raised(f"{question} returned {what}, must return a reason or None")
