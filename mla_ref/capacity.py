"""How many blocks fit, what a rank's cache takes, and what padding costs.

``CacheSpec.placements`` is the only source of bytes: the planner divides a budget by what it says, the
allocator takes what it says.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

from mla_ref.config import MLAConfig
from mla_ref.formats import CacheFormat
from mla_ref.layout import CacheLayout, poisoned_pool
from mla_ref.layout_algebra import Placement

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What one tensor-parallel rank stores of every token, and where.

    order: nesting of the axes, as in ``layout_algebra``; "lnkx" is a latent cache. widths: elements of each
    field of an entry. num_kv_heads: entries of a token in one layer; 1 for a latent.
    """

    order: str
    num_layers: int
    num_kv_heads: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    block_size: int
    layout: CacheLayout = CacheLayout()

    def placements(self, num_blocks: int) -> list[Placement]:
        """One pool a layer where layers are outermost, as engines allocate them; otherwise one pool."""
        apart = self.order.startswith("l")
        sizes = {"l": 1 if apart else self.num_layers, "n": num_blocks, "k": self.block_size}
        if "g" in self.order:
            sizes["g"] = self.num_kv_heads
        one = self.layout.place(self.order, sizes, self.widths, self.dtype.itemsize)
        return [one] * (self.num_layers if apart else 1)

    def pool_bytes(self, num_blocks: int) -> int:
        """Bytes of ``num_blocks`` blocks in all layers."""
        return sum(placement.pool_bytes for placement in self.placements(num_blocks))

    @property
    def block_bytes(self) -> int:
        """Bytes that one more block takes in all layers."""
        return self.pool_bytes(1) - self.pool_bytes(0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's entries in all layers, padding not counted."""
        return self.num_layers * self.num_kv_heads * sum(self.widths) * self.dtype.itemsize

    @property
    def block_padding(self) -> int:
        """Bytes of a block that hold no entry: alignment and gaps, in all layers."""
        return self.block_bytes - self.token_bytes * self.block_size

    def num_blocks(self, budget: int) -> int:
        """The most blocks whose pools fit in ``budget`` bytes."""
        return max(budget - self.pool_bytes(0), 0) // self.block_bytes

    def allocate(self, num_blocks: int, device: torch.device | str = "cpu") -> list[tuple[torch.Tensor, ...]]:
        """The pools, poisoned, as one tensor a field: [l n k x] for latents, else [l n k g x]."""
        logical = "lnkgx" if "g" in self.order else "lnkx"
        return [
            tuple(view.permute(logical).tensor(pool, self.dtype) for view in placement.views)
            for placement in self.placements(num_blocks)
            for pool in [poisoned_pool(placement.pool_bytes, device)]
        ]


def latent_spec(
    config: MLAConfig, cache_format: CacheFormat, block_size: int, layout: CacheLayout
) -> CacheSpec:
    """The latent cache of one rank, whatever the number of ranks: each holds every token whole."""
    return CacheSpec(
        order="lnkx",
        num_layers=config.num_layers,
        num_kv_heads=1,
        widths=(cache_format.entry_width(config.kv_lora_rank, config.qk_rope_head_dim),),
        dtype=cache_format.dtype,
        block_size=block_size,
        layout=layout,
    )


def budgets(block_bytes: int, num_blocks: int) -> range:
    """Every budget of which exactly ``num_blocks`` blocks of ``block_bytes`` fit."""
    return range(num_blocks * block_bytes, (num_blocks + 1) * block_bytes)


def common_budgets(published: Iterable[tuple[int, int]]) -> range:
    """Every budget that explains all of several (block bytes, number of blocks); empty where none does."""
    ranges = [budgets(*row) for row in published]
    return range(max(r.start for r in ranges), min(r.stop for r in ranges))


class Interval(NamedTuple):
    """Numbers from ``low`` to ``high``, both included."""

    low: Fraction
    high: Fraction

    def scaled(self, factor: int | Fraction) -> "Interval":
        """The interval of every product with a positive ``factor``."""
        return Interval(self.low * factor, self.high * factor)

    def meets(self, other: "Interval") -> bool:
        """Some number is in both."""
        return self.low <= other.high and other.low <= self.high


def printed(text: str) -> Interval:
    """Every number that is printed as ``text``: half a unit of its last digit either way."""
    digits = len(text.partition(".")[2])
    value, half = Fraction(text), Fraction(1, 2 * 10**digits)
    return Interval(value - half, value + half)
