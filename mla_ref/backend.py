"""An implementation of one problem, and the reasons for which it may decline."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.numerics import Numerics
from mla_ref.scan import scan


def available(device: str) -> str | None:
    """Runs wherever torch runs."""
    return None


def supports_all(case: Case) -> str | None:
    """Supports its whole contract."""
    return None


class Prepared(NamedTuple):
    """A call of which everything is done but what an engine repeats in every layer of a step.

    run: the rest. finish: what ``run`` returned, as the problem's output; never timed.
    """

    run: Callable[[], Any]
    finish: Callable[[Any], Any]


@dataclass(frozen=True)
class Backend:
    """One implementation.

    name: "package.module", unique; how the judge finds it and how it is printed.
    fn: called with the fields of the problem's inputs, in their order.
    numerics: the rounding that it declares; a lie here fails.
    requires: device type -> what is missing there, or None. Asked by ``missing``, on the GPU that is meant.
    supports: case -> why it is outside the contract, or None.
    variants: further callables with the same signature (split counts, tiles, workspaces). Each is judged.
    prepare: for timing: given the problem's inputs, plans what depends on lengths alone and converts what an
        engine would keep in the form that is needed. None: nothing can be done ahead.
    """

    name: str
    problem: str
    fn: Callable[..., Any]
    numerics: Numerics = Numerics()
    requires: Callable[[str], str | None] = available
    supports: Callable[[Case], str | None] = supports_all
    variants: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    prepare: Callable[[Any], Prepared] | None = None


def missing(backend: Backend, device: str | torch.device) -> str | None:
    """What a backend misses on a device, or None.

    ``requires`` is told a type and asks torch.cuda about the current GPU, which is the one meant, meanwhile.
    """
    where = torch.device(device)
    if where.type == "cuda" and where.index is not None and where.index < torch.cuda.device_count():
        with torch.cuda.device(where):
            return backend.requires(where.type)
    return backend.requires(where.type)


def backends_in(package: str) -> dict[str, Backend]:
    """The backends of one package, by their own names."""
    return {backend.name: backend for backend in scan(package, "BACKEND").values()}
