"""Where the entries of a paged cache sit in memory, and the pool that holds them.

The planner (``mla_ref.capacity``) and the allocator ask the same ``CacheLayout.place`` for bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mla_ref.layout_algebra import Placement, place

POISON_BYTE = 0xFF  # NaN in bf16, fp16, fp32 and e4m3fn alike


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Placement of blocks and entries, all in bytes; contents belong to the cache format.

    entry_align: every entry occupies a multiple of this (256: the padding that vLLM once used).
    block_gap: unused bytes between one block and the next.
    offset: unused bytes before block 0.
    shuffled: logical blocks map to physical ones in random order, interleaved between requests.
    spare_blocks: physical blocks that belong to no request.
    block_align: every block occupies a multiple of this, before the gap (576: DeepSeek-V4's pages).
    """

    entry_align: int = 1
    block_gap: int = 0
    offset: int = 0
    shuffled: bool = True
    spare_blocks: int = 2
    block_align: int = 1

    def __post_init__(self) -> None:
        for field in ("entry_align", "block_align"):
            if getattr(self, field) < 1:
                raise ValueError(f"layout: {field} is {getattr(self, field)}, must be at least 1")
        for field in ("block_gap", "offset", "spare_blocks"):
            if getattr(self, field) < 0:
                raise ValueError(f"layout: {field} is {getattr(self, field)}, must not be negative")

    def place(self, order: str, sizes: Mapping[str, int], widths: Sequence[int], itemsize: int) -> Placement:
        """``layout_algebra.place`` with this layout's alignments, gap and offset."""
        return place(
            order,
            sizes,
            widths,
            itemsize,
            entry_align=self.entry_align,
            block_align=self.block_align,
            block_gap=self.block_gap,
            offset=self.offset,
        )

    def latent(self, num_blocks: int, block_size: int, entry_width: int, itemsize: int = 1) -> Placement:
        """One layer's latent cache [n k x]."""
        return self.place("nkx", {"n": num_blocks, "k": block_size}, [entry_width], itemsize)

    def entry_stride(self, entry_bytes: int) -> int:
        """Bytes from one entry to the next."""
        return self.latent(1, 1, entry_bytes).views[0].stride("k")

    def block_stride(self, entry_bytes: int, block_size: int) -> int:
        """Bytes from one block to the next."""
        return self.latent(1, block_size, entry_bytes).views[0].stride("n")

    def why_not_aligned(self, entry_bytes: int, block_size: int, alignment: int) -> str | None:
        """Why not every entry starts at a multiple of ``alignment`` bytes, or None."""
        steps = {
            "offset": self.offset,
            "entry stride": self.entry_stride(entry_bytes),
            "block stride": self.block_stride(entry_bytes, block_size),
        }
        for name, step in steps.items():
            if step % alignment:
                return f"the {name} of {step} bytes is no multiple of {alignment}"
        return None

    def pool_bytes(self, entry_bytes: int, block_size: int, num_blocks: int) -> int:
        """Bytes of the whole pool, offset included."""
        return self.latent(num_blocks, block_size, entry_bytes).pool_bytes


def poisoned_pool(num_bytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[num_bytes] uint8, every byte poison."""
    return torch.full((num_bytes,), POISON_BYTE, dtype=torch.uint8, device=device)


def poison(num_entries: int, kv_cache: torch.Tensor) -> torch.Tensor:
    """Entries [num_entries e] as memory looks that nobody wrote."""
    width = kv_cache.shape[2] * kv_cache.element_size()
    raw = torch.full((num_entries, width), POISON_BYTE, dtype=torch.uint8, device=kv_cache.device)
    return raw.view(kv_cache.dtype)


def allocate(
    layout: CacheLayout,
    *,
    num_blocks: int,
    block_size: int,
    entry_width: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A cache [n k e] in a pool whose every byte, gaps included, is poison.

    Raises: ValueError if a stride or the offset is no multiple of the element size.
    """
    placement = layout.latent(num_blocks, block_size, entry_width, dtype.itemsize)
    return placement.views[0].tensor(poisoned_pool(placement.pool_bytes, device), dtype)
