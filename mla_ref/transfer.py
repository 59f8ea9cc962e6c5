"""Blocks from one pool to another of a different layout: what disaggregated serving puts on the wire."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from mla_ref.layout_algebra import View


class Descriptor(NamedTuple):
    """``num_bytes`` from byte ``source`` of one pool to byte ``target`` of the other."""

    source: int
    target: int
    num_bytes: int


def descriptors(
    source: Sequence[View],
    target: Sequence[View],
    blocks: Iterable[tuple[int, int]],
    layers: Iterable[int] | None = None,
) -> list[Descriptor]:
    """The fewest runs that carry blocks from one layout to the other, element by element.

    source, target: the fields of each pool in the same order, each with axes l, n and the rest in any order.
    blocks: (block in the source, block in the target). layers: all of them where None.
    A run ends where the next element is not the next in both pools, so one block of one layer takes two
    descriptors where either side keeps keys and values apart, one where neither does, and up to one for every
    row of channels where the axes inside a block are ordered differently.

    Raises: ValueError if the pools differ in fields, sizes or element size, a block is out of range, or a
        target block is written twice.
    """
    check_same_contents(source, target)
    pairs = list(blocks)
    if len({to for _, to in pairs}) != len(pairs):
        raise ValueError(f"transfer: target blocks {[to for _, to in pairs]} are not distinct")
    chosen = range(source[0].size("l")) if layers is None else list(layers)
    return [run for pair in pairs for run in _block_runs(source, target, pair, chosen)]


def check_same_contents(source: Sequence[View], target: Sequence[View]) -> None:
    """Raises: ValueError unless both pools hold the same fields, whatever their number of blocks."""
    if len(source) != len(target):
        raise ValueError(f"transfer: source has {len(source)} fields, target {len(target)}")
    for i, (a, b) in enumerate(zip(source, target, strict=True)):
        here, there = ({**dict(zip(v.axes, v.sizes, strict=True)), "n": 0} for v in (a, b))
        if here != there or a.itemsize != b.itemsize:
            raise ValueError(
                f"transfer: field {i} is {here} × {a.itemsize} B, but target {there} × {b.itemsize} B"
            )


def copy(runs: Iterable[Descriptor], source_pool: torch.Tensor, target_pool: torch.Tensor) -> None:
    """Carry out descriptors between two byte pools; no other byte of the target changes."""
    for source, target, num_bytes in runs:
        target_pool[target : target + num_bytes] = source_pool[source : source + num_bytes]


def _block_runs(
    source: Sequence[View], target: Sequence[View], pair: tuple[int, int], layers: Iterable[int]
) -> list[Descriptor]:
    starts = [
        torch.stack([a.select(n=pair[0], l=layer).addresses().flatten(), there.addresses().flatten()])
        for layer in layers
        for a, b in zip(source, target, strict=True)
        for there in [b.select(n=pair[1], l=layer).permute(a.select(n=0, l=0).axes)]
    ]
    if not starts:
        return []
    item = source[0].itemsize
    both = torch.cat(starts, dim=1)
    both = both[:, both[1].argsort()]
    breaks = (both.diff(dim=1) != item).any(dim=0).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), both.shape[1]]
    return [Descriptor(int(both[0, a]), int(both[1, a]), (b - a) * item) for a, b in pairwise(bounds)]
