"""How many blocks fit, what padding costs, and what chunked prefill needs beside the cache.

``CacheSpec.placements`` is the only source of bytes: the planner divides a budget by what it says, the
allocator takes what it says. Every count is of one tensor-parallel rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

from mla_ref.backend import Backend
from mla_ref.chunk_plan import workspace_rows
from mla_ref.config import MLAConfig
from mla_ref.formats import CacheFormat
from mla_ref.layout import CacheLayout, poisoned_pool
from mla_ref.layout_algebra import Placement
from mla_ref.problem import implements
from mla_ref.problems.cache_capacity import PROBLEM, CacheCapacityOutput

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


# What chunked prefill has alive at one time for one workspace of context, by what its kernel is given. Where
# there are two phases, the larger one counts.
#   profile: what vLLM's profile run sees, which is what the cache is sized beside.
#   direct:  the kernel reads keys and values where the up-projection wrote them, and the shared rope rows.
#   joined:  each head's nope and rope channels are first concatenated into keys.
#   padded:  and its values padded to the width of the keys, for kernels with one width; the up-projection's
#            output is dead by then.
#   fused:   as direct, with queries read where they are, and each chunk merged into the running state by the
#            kernel that attends to it.
PREFILLS: dict[str, tuple[tuple[str, ...], ...]] = {
    "profile": (("workspace", "kv_b output", "hidden states"),),
    "direct": (("workspace", "kv_b output", "queries", "running state", "chunk's state"),),
    "joined": (("workspace", "kv_b output", "joined keys", "queries", "running state", "chunk's state"),),
    "padded": (
        ("workspace", "kv_b output", "joined keys", "padded values", "queries", "running state"),
        ("workspace", "joined keys", "padded values", "queries", "running state", "chunk's state"),
    ),
    "fused": (("workspace", "kv_b output", "running state"),),
}


def prefill_parts(config: MLAConfig, rows: int, tokens: int, itemsize: int, prefill: str) -> dict[str, int]:
    """Bytes of each part at the peak of ``prefill``: ``rows`` of context against ``tokens`` new ones.

    config: the rank's shard. itemsize: of activations, and of the output in a state, whose lse is float32.
    """
    if prefill not in PREFILLS:
        raise ValueError(f"prefill {prefill!r} is not one of {', '.join(PREFILLS)}")
    h, p, r, v = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    padded = max(p + r, v)
    sizes = {
        "workspace": rows * (config.kv_lora_rank + r) * itemsize,
        "kv_b output": rows * h * (p + v) * itemsize,
        "joined keys": rows * h * (p + r) * itemsize,
        "padded values": rows * h * padded * itemsize,
        "queries": tokens * h * (p + r) * itemsize,
        "running state": tokens * h * (v * itemsize + 4),
        "chunk's state": tokens * h * ((padded if prefill == "padded" else v) * itemsize + 4),
        "hidden states": tokens * config.hidden_size * itemsize,
    }
    phases = [{name: sizes[name] for name in phase} for phase in PREFILLS[prefill]]
    return max(phases, key=lambda phase: sum(phase.values()))


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a GPU leaves for the cache: total · utilization, less weights, other allocations and prefill."""

    total: int
    utilization: Fraction
    weights: int
    other: int

    def budget(self, peak: int) -> int:
        """Bytes for the cache beside an activation peak. Raises: ValueError if nothing is left."""
        left = int(self.total * self.utilization) - self.weights - self.other - peak
        if left <= 0:
            raise ValueError(
                f"budget: {self.total} · {float(self.utilization)} less {self.weights} for weights, "
                f"{self.other} for others and {peak} for prefill is {left}, must be positive"
            )
        return left


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is planned for: a model on one of ``tp`` ranks, its cache, and the memory that it may take.

    budget: bytes for the cache, or the device that it shares. host_budget: bytes for blocks swapped out.
    workspace_cap: the most rows of context that prefill expands at once. prefill: a name from ``PREFILLS``.
    step_tokens: new tokens of one step. itemsize: bytes of an activation.
    """

    config: MLAConfig
    tp: int
    cache_format: CacheFormat
    layout: CacheLayout
    block_size: int
    budget: int | Device
    host_budget: int
    max_model_len: int
    max_num_seqs: int
    workspace_cap: int
    prefill: str
    step_tokens: int
    itemsize: int = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What fits, and what it costs, in bytes, blocks and tokens.

    entry_bytes, entry_stride: of one token in one layer, and to the next; token_bytes, block_bytes: in all.
    prefill: bytes by part.
    """

    entry_bytes: int
    entry_stride: int
    token_bytes: int
    block_bytes: int
    budget: int
    num_blocks: int
    num_host_blocks: int
    num_tokens: int
    concurrency: float
    pool_bytes: int
    padding_bytes: int
    unused_bytes: int
    workspace_rows: int
    prefill: dict[str, int]
    prefill_bytes: int


def plan(setting: Setting) -> Plan:
    """What ``setting`` comes to.

    Raises: ValueError if heads do not divide over the ranks, or the workspace or the budget is too small.
    """
    shard = setting.config.shard(setting.tp)
    cache = latent_spec(shard, setting.cache_format, setting.block_size, setting.layout)
    rows = workspace_rows(
        setting.max_model_len, setting.max_num_seqs, setting.block_size, setting.workspace_cap
    )
    parts = prefill_parts(shard, rows, setting.step_tokens, setting.itemsize, setting.prefill)
    peak = sum(parts.values())
    budget = setting.budget.budget(peak) if isinstance(setting.budget, Device) else setting.budget
    num_blocks = cache.num_blocks(budget)
    num_tokens = num_blocks * setting.block_size
    pool_bytes = cache.pool_bytes(num_blocks)
    return Plan(
        entry_bytes=cache.token_bytes // cache.num_layers,
        entry_stride=cache.placements(1)[0].views[0].stride("k"),
        token_bytes=cache.token_bytes,
        block_bytes=cache.block_bytes,
        budget=budget,
        num_blocks=num_blocks,
        num_host_blocks=cache.num_blocks(setting.host_budget),
        num_tokens=num_tokens,
        concurrency=num_tokens / setting.max_model_len,
        pool_bytes=pool_bytes,
        padding_bytes=pool_bytes - num_tokens * cache.token_bytes,
        unused_bytes=budget - pool_bytes,
        workspace_rows=rows,
        prefill=parts,
        prefill_bytes=peak,
    )


@implements(PROBLEM)
def cache_capacity(
    num_layers: int,
    entry_width: int,
    cache_dtype: torch.dtype,
    model_dtype: torch.dtype,
    block_size: int,
    layout: CacheLayout,
    budget: int,
) -> CacheCapacityOutput:
    """Blocks of ``CacheSpec`` in a budget.

    Error: none.
    Source: vLLM's ``CacheEngine.get_cache_block_size``, with the allocator's own bytes.
    """
    cache = CacheSpec(
        order="lnkx",
        num_layers=num_layers,
        num_kv_heads=1,
        widths=(entry_width,),
        dtype=cache_dtype,
        block_size=block_size,
        layout=layout,
    )
    counts = cache.block_bytes, cache.num_blocks(budget)
    return CacheCapacityOutput(*(torch.tensor(count, dtype=torch.int64) for count in counts))


BACKEND = Backend("mla_ref.capacity", "cache_capacity", cache_capacity)


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
