"""One claim that every right implementation of a problem satisfies."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.problem import Problem
from mla_ref.scan import scan
from oracles.bounds import Admissible
from oracles.verdict import Finding

Run = Callable[[Any], Any]  # inputs -> output of the implementation on trial


class Raised(Exception):
    """The implementation on trial raised its cause; whatever else is raised is a defect of the judge."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Whatever the implementation raises says what was different about the call."""
    try:
        yield
    except Raised as error:
        raise Raised(f"{what}: {error}") from error.__cause__


@dataclass(frozen=True)
class Trial:
    """What an oracle may look at.

    run: calls the implementation on a private copy of any inputs of its problem, and returns a copy of what
        it returned, since the next call may be made in the same memory; the result for ``inputs`` themselves
        is remembered.
    call: the same on the very tensors given, and what was returned itself: memory made for one call, to be
        looked at after it.
    inputs: the case's tensors; an oracle changes copies, never these.
    left: ``inputs`` as the implementation left them, gaps and padding of every storage included.
    expected: what each field of the output may be, under the numerics that the backend declares.
    device: where the inputs are, and what is returned.
    runs_on: where the implementation is called; empty: there.
    backend: whose function is on trial; of a variant, with that as its own function.
    disturbed: what calls so far changed that belongs to the whole process; the judge has put it back.
    """

    run: Run
    call: Run
    inputs: Any
    case: Case
    backend: Backend
    problem: Problem
    left: Callable[[], Any]
    expected: Callable[[], Mapping[str, Admissible]]
    device: str = "cpu"
    runs_on: str = ""
    disturbed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Oracle:
    """A claim, the problems that it judges (empty: all of them), and the mutants that it kills.

    on_device: it is judged where the implementation runs, even if others are not.
    last: it is judged when all others are, since it looks at what their calls left.
    """

    name: str
    check: Callable[[Trial], Finding]
    problems: tuple[str, ...] = ()
    kills: tuple[str, ...] = ()
    on_device: bool = False
    last: bool = False


@cache
def rules() -> dict[str, Oracle]:
    """Every oracle by name."""
    return {oracle.name: oracle for oracle in scan("oracles.rules", "ORACLE").values()}


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Oracles in the order in which they are judged: as they are named, but for those that come last."""
    return tuple(sorted(names, key=lambda name: rules()[name].last))


def foul(outputs: Mapping[str, Admissible], device: str) -> None:
    """Leave NaN in the memory that an output is likely to get: the allocator's last frees of its size.

    Otherwise a row that is never stored may show what an earlier, right call left there.
    """
    for want in outputs.values():
        torch.full(want.mid.shape, torch.nan, dtype=want.dtype, device=device)


def private_copy(inputs: Any) -> Any:
    """The same inputs in memory of their own: strides, offsets and every byte between elements included.

    Tensors that share memory share their copy.
    """
    storages: dict[int, torch.Tensor] = {}
    return type(inputs)(*(_copied(value, storages) for value in inputs))


def _copied(value: Any, storages: dict[int, torch.Tensor]) -> Any:
    """A field of inputs; storages: those copied so far, by their address."""
    if isinstance(value, torch.Tensor):
        return _clone(value, storages)
    if isinstance(value, Mapping):
        return {name: _copied(x, storages) for name, x in value.items()}
    return value


def _clone(tensor: torch.Tensor, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    whole = storage_bytes(tensor)
    if whole.data_ptr() not in storages:
        storages[whole.data_ptr()] = whole.clone()
    return seen_as(tensor, storages[whole.data_ptr()])


def seen_as(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The same view of other memory."""
    empty = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def named_tensors(inputs: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a tuple of inputs by name, those of a mapping by their own."""
    found: dict[str, torch.Tensor] = {}
    for name, value in inputs._asdict().items():
        found |= value if isinstance(value, Mapping) else {name: value}
    return {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory that a tensor is a view of, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
