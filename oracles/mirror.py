"""An implementation on another device than its judge: what is sent there, and what comes back.

On a GPU the judge's truth, bounds and edits are thousands of small operations in float64, and the processes
that share the GPU wait for each other's. Judged on the host, only what an implementation is given goes to its
device, and what it returns or leaves there comes back.

A storage goes as bytes, whole: strides, offsets, gaps, poison and the payload of every NaN arrive as they
were, and tensors that share memory share it there. Memory has a twin, so that a rule about memory means what
it means on one device: what is given once more has the same address, an output that is a view of an input
comes back as one, and what a call does to the output of the call before is seen here.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from oracles.oracle import seen_as, storage_bytes


class _Twins(NamedTuple):
    """The same bytes, with the judge and on the implementation's device."""

    here: torch.Tensor
    there: torch.Tensor


class Mirror:
    """Memory on ``here``, and its twins on ``device``: of one call, and what the call before it returned."""

    def __init__(self, here: str, device: str) -> None:
        self.here, self.device = (torch.empty(0, device=name).device for name in (here, device))
        self._given: list[_Twins] = []
        self._returned: list[_Twins] = []
        self._before: list[_Twins] = []

    def sent(self, inputs: Any) -> Any:
        """The inputs on the device, as they are here now. Begins a call."""
        known = [*self._given, *self._returned]
        self._given, self._returned, self._before = [], [], self._returned
        return type(inputs)(*_each(inputs, lambda tensor: self._sent(tensor, known)))

    def _sent(self, tensor: torch.Tensor, known: list[_Twins]) -> torch.Tensor:
        here = storage_bytes(tensor)
        twins = _with(here, self._given, 0)
        if twins is None:
            old = _with(here, known, 0)
            there = torch.empty_like(here, device=self.device) if old is None else old.there
            twins = _Twins(here, there.copy_(here))
            self._given.append(twins)
        return seen_as(tensor, twins.there)

    def back(self, output: Any) -> Any:
        """The output here, and what the call did to what it was given and to what the last one returned.

        A tensor that is not on the device, or not made of strides, stays what it is.
        """
        for twins in (*self._before, *self._given):
            twins.here.copy_(twins.there)
        return type(output)(*_each(output, self._back))

    def _back(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != self.device or tensor.layout != torch.strided:
            return tensor
        there = storage_bytes(tensor)
        twins = _with(there, [*self._given, *self._returned], 1)
        if twins is None:
            twins = _with(there, self._before, 1)
            if twins is None:
                here = torch.empty_like(there, device=self.here)
                twins = _Twins(here.copy_(there), there)
            self._returned.append(twins)
        return seen_as(tensor, twins.here).requires_grad_(tensor.requires_grad)


def _each(values: Any, do: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Any]:
    """Every field of a tuple, its tensors and those of its mappings replaced."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield do(value)
        elif isinstance(value, Mapping):
            yield {name: do(x) if isinstance(x, torch.Tensor) else x for name, x in value.items()}
        else:
            yield value


def _with(memory: torch.Tensor, among: list[_Twins], side: int) -> _Twins | None:
    """The twins of which this very memory is one; memory without a byte is nobody's."""
    if not memory.numel():
        return None
    return next((twins for twins in among if twins[side].data_ptr() == memory.data_ptr()), None)
