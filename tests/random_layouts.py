"""Random layouts: every order of the axes, unequal widths, alignments, gaps and offsets."""

from dataclasses import dataclass

import hypothesis.strategies as st

from mla_ref.layout import CacheLayout
from mla_ref.layout_algebra import Placement

ORDER = "l2nkg"


@dataclass(frozen=True)
class Pool:
    """One random placement, and what it was made of."""

    order: str
    sizes: dict[str, int]
    widths: tuple[int, ...]
    itemsize: int
    layout: CacheLayout

    def placement(self) -> Placement:
        return self.layout.place(self.order, self.sizes, self.widths, self.itemsize)


def orders() -> st.SearchStrategy[str]:
    """Any nesting of layers, fields, blocks, slots and heads; shrinks towards key-value first."""
    return st.permutations(ORDER).map(lambda axes: "".join(axes) + "x")


def layouts(itemsize: int) -> st.SearchStrategy[CacheLayout]:
    """Alignments, gap and offset in whole elements; shrinks towards a packed pool."""
    return st.builds(
        CacheLayout,
        entry_align=st.sampled_from([1, 2, 3, 16]).map(lambda n: n * itemsize),
        block_align=st.sampled_from([1, 5, 64]).map(lambda n: n * itemsize),
        block_gap=st.integers(0, 9).map(lambda n: n * itemsize),
        offset=st.integers(0, 9).map(lambda n: n * itemsize),
    )


@st.composite
def pools(draw: st.DrawFn, *, num_layers: int = 3, max_blocks: int = 5) -> Pool:
    """Small pools with at least two of everything, so that a wrong stride shows."""
    itemsize = draw(st.sampled_from([1, 2, 4]))
    sizes = {
        "l": draw(st.integers(2, num_layers)),
        "n": draw(st.integers(2, max_blocks)),
        "k": draw(st.integers(2, 5)),
        "g": draw(st.integers(2, 3)),
    }
    widths = (draw(st.integers(2, 5)), draw(st.integers(2, 5)))
    return Pool(draw(orders()), sizes, widths, itemsize, draw(layouts(itemsize)))
