"""What a contract is: the fields of its inputs, their shapes, and how a case becomes tensors."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch

from mla_ref.case import Case
from mla_ref.formats import cache_format
from mla_ref.recording import why_not_recorded
from mla_ref.scan import scan

F = TypeVar("F", bound=Callable[..., Any])


class AttentionOutput(NamedTuple):
    """out: [t h v] (or [t h c]) in the query's dtype; 0 on a row that sees no key.

    lse: [t h] float32, natural log of the summed exponentials of the scaled scores; -inf on such a row.
    """

    out: torch.Tensor
    lse: torch.Tensor


def why_not_stored(case: Case) -> str | None:
    """Why the case's format cannot hold the model's latent and rope channels, or None.

    A recording that has no such channels counts as well.
    """
    return why_not_recorded(case) or cache_format(case.cache_format).why_not_dims(
        case.config.kv_lora_rank, case.config.qk_rope_head_dim
    )


@dataclass(frozen=True)
class Problem:
    """One contract.

    inputs: the NamedTuple whose field order is every implementation's signature.
    output: the NamedTuple that every implementation returns.
    shapes, output_shapes: field -> letters of the dimension key, for tensors.
    check: raises ValueError on a shape, dtype or device that breaks the contract; never waits.
    check_values: likewise for lengths, indices and offsets; reads them back to the host.
    materialize: (case, device) -> inputs. Dead memory is NaN.
    writes: the inputs that an implementation changes in place; every other one stays as it was.
    why_not: why ``materialize`` cannot make inputs of a case, or None.
    """

    name: str
    inputs: Callable[..., Any]
    output: Callable[..., Any]
    shapes: Mapping[str, str]
    output_shapes: Mapping[str, str]
    check: Callable[[Any], None]
    check_values: Callable[[Any], None]
    materialize: Callable[[Case, torch.device], Any]
    writes: tuple[str, ...] = ()
    why_not: Callable[[Case], str | None] = why_not_stored


@functools.cache
def problems() -> dict[str, Problem]:
    """Every problem by name."""
    return {p.name: p for p in scan("mla_ref.problems", "PROBLEM").values()}


def problem(name: str) -> Problem:
    """The problem called ``name``. Raises: ValueError that lists the known ones."""
    if name not in problems():
        raise ValueError(f"problem {name!r} is not one of {', '.join(problems())}")
    return problems()[name]


def implements(contract: Problem, *, values: bool = True) -> Callable[[F], F]:
    """Give an implementation its contract's checks.

    values: also check lengths and indices. A GPU path passes False: reading them back would stall the
    stream and break graph capture, so there they are the caller's promise, as for any kernel.
    """

    def decorate(fn: F) -> F:
        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            inputs = contract.inputs(*args, **kwargs)
            contract.check(inputs)
            if values:
                contract.check_values(inputs)
            return fn(*inputs)

        return cast("F", checked)

    return decorate


def bind_shapes(shapes: Mapping[str, str], tensors: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the letters in ``shapes``. A letter "b+1" stands for one more than "b".

    Raises: ValueError, for example "q_pe: h=8, but h=16 elsewhere (contract [t h r])".
    """
    sizes: dict[str, int] = {}
    for name, contract in shapes.items():
        tensor = tensors[name]
        letters = contract.split()
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: expected a tensor [{contract}], got {type(tensor).__name__}")
        if tensor.dim() != len(letters):
            raise ValueError(
                f"{name}: shape {list(tensor.shape)} has {tensor.dim()} axes (contract [{contract}])"
            )
        for letter, size in zip(letters, tensor.shape, strict=True):
            base, plus, extra = letter.partition("+")
            value = size - int(extra) if plus else size
            if value != sizes.setdefault(base, value):
                raise ValueError(
                    f"{name}: {base}={value}, but {base}={sizes[base]} elsewhere (contract [{contract}])"
                )
    return sizes
