"""Where the entries of a paged latent cache sit in memory."""

from dataclasses import dataclass

import torch

POISON_BYTE = 0xFF  # NaN in bf16, fp16, fp32 and e4m3fn alike


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Placement of blocks and entries, all in bytes; contents belong to the cache format.

    entry_align: every entry occupies a multiple of this (256: the padding that vLLM once used).
    block_gap: unused bytes between one block and the next.
    offset: unused bytes before block 0.
    shuffled: logical blocks map to physical ones in random order, interleaved between requests.
    spare_blocks: physical blocks that belong to no request.
    """

    entry_align: int = 1
    block_gap: int = 0
    offset: int = 0
    shuffled: bool = True
    spare_blocks: int = 2

    def __post_init__(self) -> None:
        if self.entry_align < 1:
            raise ValueError(f"layout: entry_align is {self.entry_align}, must be at least 1")
        for field in ("block_gap", "offset", "spare_blocks"):
            if getattr(self, field) < 0:
                raise ValueError(f"layout: {field} is {getattr(self, field)}, must not be negative")

    def entry_stride(self, entry_bytes: int) -> int:
        """Bytes from one entry to the next."""
        return -(-entry_bytes // self.entry_align) * self.entry_align

    def block_stride(self, entry_bytes: int, block_size: int) -> int:
        """Bytes from one block to the next."""
        return self.entry_stride(entry_bytes) * block_size + self.block_gap

    def pool_bytes(self, entry_bytes: int, block_size: int, num_blocks: int) -> int:
        """Bytes of the whole pool, offset included."""
        return self.offset + self.block_stride(entry_bytes, block_size) * num_blocks


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
    itemsize = dtype.itemsize
    entry_bytes = entry_width * itemsize
    strides = (
        layout.block_stride(entry_bytes, block_size),
        layout.entry_stride(entry_bytes),
        itemsize,
    )
    for name, value in zip(
        ("block stride", "entry stride", "offset"), (*strides[:2], layout.offset), strict=True
    ):
        if value % itemsize:
            raise ValueError(f"layout: {name} of {value} bytes is no multiple of {dtype}'s {itemsize}")
    pool = torch.full(
        (layout.pool_bytes(entry_bytes, block_size, num_blocks),),
        POISON_BYTE,
        dtype=torch.uint8,
        device=device,
    )
    return torch.as_strided(
        pool.view(dtype),
        (num_blocks, block_size, entry_width),
        tuple(s // itemsize for s in strides),
        layout.offset // itemsize,
    )
