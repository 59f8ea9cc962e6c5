"""Layouts as arithmetic: named axes → (sizes, strides, offset, itemsize) → intervals of bytes.

Everything here is about addresses; no memory is touched until ``View.tensor``. The letters are those of the
dimension key, and in an order string such as "l2nkgx" (outermost first):

    l layer   2 key or value   n block   k slot   g key/value head   x channel, always last
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

Interval = tuple[int, int]  # bytes start … stop-1

# Physical orders of K/V pages that engines use. Axes that an engine's tensor does not have are of size 1.
KV_ORDERS: dict[str, str] = {
    "kv_first_nhd": "l2nkgx",  # (2, n, k, h, d), one tensor a layer: vLLM FlashAttention until 2025
    "kv_first_hnd": "l2ngkx",
    "blocks_first_nhd": "ln2kgx",  # (n, 2, k, h, d): FlashInfer
    "blocks_first_hnd": "ln2gkx",
    "unified_nhd": "nl2kgx",  # one buffer for all layers, a block's layers side by side
    "unified_hnd": "nl2gkx",
    "packed_lbhnc": "lngk2x",  # (n, h, k, 2d): key and value side by side in one row
    "packed_lbnhc": "lnkg2x",
    "packed_lhbnc": "lgnk2x",
    "packed_blhnc": "nlgk2x",
    "packed_blnhc": "nlkg2x",
    "packed_bhlnc": "nglk2x",
}


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class View:
    """Which bytes of a pool each logical element occupies.

    axes: one letter an axis, in logical order. sizes, strides: per axis; strides in bytes.
    offset: byte of element (0, …, 0). itemsize: bytes of an element.
    """

    axes: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    itemsize: int

    def __post_init__(self) -> None:
        if not len(self.axes) == len(set(self.axes)) == len(self.sizes) == len(self.strides):
            raise ValueError(f"view: axes {self.axes!r} with sizes {self.sizes} and strides {self.strides}")

    def size(self, axis: str) -> int:
        """Elements along ``axis``."""
        return self.sizes[self._position(axis)]

    def stride(self, axis: str) -> int:
        """Bytes from one index of ``axis`` to the next."""
        return self.strides[self._position(axis)]

    @property
    def payload_bytes(self) -> int:
        """Bytes of all elements, gaps not counted."""
        return math.prod(self.sizes) * self.itemsize

    @property
    def hull(self) -> Interval:
        """From the first byte of any element to behind the last; empty where there is none."""
        if 0 in self.sizes:
            return self.offset, self.offset
        spans = [(size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)]
        low, high = (sum(pick(span, 0) for span in spans) for pick in (min, max))
        return self.offset + low, self.offset + high + self.itemsize

    def address(self, **index: int) -> int:
        """First byte of one element. Raises: ValueError on a missing axis or an index out of range."""
        if set(index) != set(self.axes):
            raise ValueError(f"view: index over {''.join(index)!r}, but the axes are {self.axes!r}")
        return self.select(**index).offset

    def select(self, **index: int) -> "View":
        """The view at one index of each axis named; those axes are gone."""
        offset = self.offset
        for axis, i in index.items():
            if not 0 <= i < self.size(axis):
                raise ValueError(f"view: index {axis}={i}, but {axis} has {self.size(axis)} elements")
            offset += i * self.stride(axis)
        return self._keep([i for i, axis in enumerate(self.axes) if axis not in index], offset)

    def permute(self, axes: str) -> "View":
        """The same bytes with the axes in another logical order."""
        if sorted(axes) != sorted(self.axes):
            raise ValueError(f"view: {axes!r} is no order of {self.axes!r}")
        return self._keep([self._position(axis) for axis in axes], self.offset)

    def unbind(self, axis: str) -> tuple["View", ...]:
        """One view for each index of ``axis``."""
        return tuple(self.select(**{axis: i}) for i in range(self.size(axis)))

    def addresses(self) -> torch.Tensor:
        """First byte of every element, int64, in the logical shape."""
        total = torch.full([1] * len(self.axes), self.offset, dtype=torch.int64)
        for i, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            shape = [1] * len(self.axes)
            shape[i] = size
            total = total + (torch.arange(size) * stride).reshape(shape)
        return total

    def intervals(self) -> list[Interval]:
        """The bytes of all elements: disjoint, sorted, and merged where they touch."""
        if 0 in self.sizes:
            return []
        starts, length = [self.offset], self.itemsize
        for size, stride in sorted(zip(self.sizes, self.strides, strict=True), key=lambda s: abs(s[1])):
            if abs(stride) <= length and len(starts) == 1:
                starts = [starts[0] + min((size - 1) * stride, 0)]
                length += (size - 1) * abs(stride)
            else:
                starts = [start + i * stride for start in starts for i in range(size)]
        return merged((start, start + length) for start in sorted(starts))

    def why_not_bijective(self) -> str | None:
        """Every element has bytes of its own; otherwise how many bytes are claimed twice."""
        missing = self.payload_bytes - num_bytes(self.intervals())
        return f"{missing} bytes belong to more than one element" if missing else None

    def tensor(self, pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """This view of a byte pool as a torch tensor, sharing its memory.

        Raises: ValueError if a stride or the offset is no multiple of the element size, or bytes lie outside.
        """
        if dtype.itemsize != self.itemsize:
            raise ValueError(f"view: {dtype} has {dtype.itemsize} bytes, but elements have {self.itemsize}")
        named = zip(
            [f"stride of {a}" for a in self.axes] + ["offset"], [*self.strides, self.offset], strict=True
        )
        for name, value in named:
            if value % self.itemsize:
                raise ValueError(
                    f"layout: {name} of {value} bytes is no multiple of {dtype}'s {self.itemsize}"
                )
        low, high = self.hull
        if low < high and not 0 <= low < high <= pool.numel():
            raise ValueError(f"layout: bytes {low} … {high - 1} in a pool of {pool.numel()}")
        usable = pool[: pool.numel() // self.itemsize * self.itemsize]
        strides = [stride // self.itemsize for stride in self.strides]
        return torch.as_strided(usable.view(dtype), self.sizes, strides, self.offset // self.itemsize)

    def _position(self, axis: str) -> int:
        if axis not in self.axes or len(axis) != 1:
            raise ValueError(f"view: axis {axis!r} is not one of {self.axes!r}")
        return self.axes.index(axis)

    def _keep(self, positions: Sequence[int], offset: int) -> "View":
        axes = "".join(self.axes[i] for i in positions)
        sizes, strides = (tuple(values[i] for i in positions) for values in (self.sizes, self.strides))
        return View(axes, sizes, strides, offset, self.itemsize)


class Placement(NamedTuple):
    """Views that share one pool, and how many bytes that pool has."""

    views: tuple[View, ...]
    pool_bytes: int


def place(
    order: str,
    sizes: Mapping[str, int],
    widths: Sequence[int],
    itemsize: int,
    *,
    entry_align: int = 1,
    block_align: int = 1,
    block_gap: int = 0,
    offset: int = 0,
) -> Placement:
    """Where an engine that nests its axes as ``order`` says puts every element.

    order: axes, outermost first, ending in "x". "2" counts the fields and is needed for more than one.
    sizes: of every axis but "2" and "x". widths: "x" of each field, so that keys and values may differ.
    entry_align: bytes that every entry is rounded up to; an entry is one row of channels, or, where "2" is
        innermost, the row of all fields. block_align, block_gap: rounding of a block, then bytes after it.
    Returns: one view a field, axes in their order of ``order`` without the "2", and the bytes of the pool.
    """
    check_order(order, sizes, len(widths))
    extents = [width * itemsize for width in widths]  # bytes of all that is inside, for each field
    starts = [0] * len(widths)
    strides: list[dict[str, int]] = [{"x": itemsize} for _ in widths]
    entry_axis = next((axis for axis in reversed(order[:-1]) if axis != "2"), "")
    for axis in reversed(order[:-1]):
        if axis == "2":
            starts = [0, *accumulate(extents)][:-1]
            extents = [sum(extents)] * len(extents)
            continue
        if axis == entry_axis:
            extents = [round_up(extent, entry_align) for extent in extents]
        if axis == "n":
            extents = [round_up(extent, block_align) + block_gap for extent in extents]
        for field, extent in zip(strides, extents, strict=True):
            field[axis] = extent
        extents = [extent * sizes[axis] for extent in extents]
    axes = order.replace("2", "")
    views = tuple(
        View(
            axes,
            tuple({**sizes, "x": width}[axis] for axis in axes),
            tuple(field[axis] for axis in axes),
            offset + start,
            itemsize,
        )
        for width, field, start in zip(widths, strides, starts, strict=True)
    )
    return Placement(views, offset + extents[0])


def check_order(order: str, sizes: Mapping[str, int], num_fields: int) -> None:
    """Raises: ValueError unless ``order`` names every axis once and ends in "x"."""
    wanted = set(sizes) | {"x"} | ({"2"} if num_fields > 1 or "2" in order else set())
    if len(order) != len(set(order)) or set(order) != wanted or not order.endswith("x"):
        raise ValueError(
            f"layout: order {order!r} must name each of {''.join(sorted(wanted))!r} once, x last"
        )


def stacked(views: Sequence[View]) -> View:
    """The view with a leading axis "2" whose ``unbind`` gives ``views``.

    Raises: ValueError where their sizes or strides differ, or they are not evenly spaced.
    """
    first = views[0]
    step = views[1].offset - first.offset if len(views) > 1 else 0
    for i, view in enumerate(views):
        expected = View(first.axes, first.sizes, first.strides, first.offset + i * step, first.itemsize)
        if view != expected:
            raise ValueError(f"layout: field {i} is {view}, but one tensor needs {expected}")
    sizes, strides = (len(views), *first.sizes), (step, *first.strides)
    return View("2" + first.axes, sizes, strides, first.offset, first.itemsize)


def block_bytes(views: Sequence[View], **index: int) -> list[Interval]:
    """The bytes that all ``views`` have at an index; (views, l=3, n=7) gives one block of one layer."""
    return merged(sorted(run for view in views for run in view.select(**index).intervals()))


def merged(runs: Iterable[Interval]) -> list[Interval]:
    """The union of intervals sorted by their starts, as disjoint ones; neighbours that touch become one."""
    result: list[Interval] = []
    for start, stop in runs:
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def num_bytes(intervals: Sequence[Interval]) -> int:
    """Bytes in disjoint intervals."""
    return sum(stop - start for start, stop in intervals)


def shared_bytes(a: Sequence[Interval], b: Sequence[Interval]) -> int:
    """Bytes that two sets of disjoint intervals have in common."""
    return num_bytes(a) + num_bytes(b) - num_bytes(merged(sorted([*a, *b])))


def why_not_shareable(a: Sequence[View], b: Sequence[View]) -> str | None:
    """Block i of one group and block i of the other may take turns in the same bytes, for every i.

    That needs every byte which both groups use to belong to the same block number in both: then a block
    that is free in one group is free for the other. It fails for a state-space group beside keys and values
    in kv-first order, where a block's values lie half a pool away from its keys.
    """
    pages = {name: _tagged(group) for name, group in (("a", a), ("b", b))}
    stops = [stop for _, stop, _ in pages["b"]]
    for start, stop, block in pages["a"]:
        for other_start, other_stop, other in pages["b"][bisect_left(stops, start + 1) :]:
            if other_start >= stop:
                break
            if other != block:
                count = min(stop, other_stop) - max(start, other_start)
                return f"block {block} of one group shares {count} bytes with block {other} of the other"
    for block in range(min(a[0].size("n"), b[0].size("n"))):
        if not shared_bytes(block_bytes(a, n=block), block_bytes(b, n=block)):
            return f"block {block} shares no byte between the groups"
    return None


def _tagged(views: Sequence[View]) -> list[tuple[int, int, int]]:
    """(start, stop, block) of every run of a group, sorted."""
    blocks = range(views[0].size("n"))
    return sorted((start, stop, n) for n in blocks for start, stop in block_bytes(views, n=n))
