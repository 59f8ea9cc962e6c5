"""Logical token ⇄ (block, slot): the one place that knows how a block table is read."""

import torch

from mla_ref.layout import CacheLayout
from mla_ref.values import permutation

# What fills block-table entries that no kernel may follow.
DEAD_BLOCK = 2_147_480_000


def num_blocks_of(length: int, block_size: int) -> int:
    """Blocks that ``length`` tokens occupy."""
    return -(-length // block_size)


def block_table(
    kv_lens: tuple[int, ...], block_size: int, layout: CacheLayout, seed: int
) -> tuple[torch.Tensor, int]:
    """(block table [b m] int32, blocks in the pool).

    The table is one column wider than its longest request; entries past a request's last block hold
    ``DEAD_BLOCK``.
    """
    counts = [num_blocks_of(length, block_size) for length in kv_lens]
    total = sum(counts) + layout.spare_blocks
    order = permutation(seed, "pages", total) if layout.shuffled else torch.arange(total)
    table = torch.full((len(counts), max(counts, default=0) + 1), DEAD_BLOCK, dtype=torch.int32)
    start = 0
    for i, count in enumerate(counts):
        table[i, :count] = order[start : start + count].to(torch.int32)
        start += count
    return table, max(total, 1)


def slots(table_row: torch.Tensor, start: int, stop: int, block_size: int) -> torch.Tensor:
    """Flat slots (block · block_size + offset) of tokens start … stop-1 of one request, int64."""
    token = torch.arange(start, stop, device=table_row.device)
    return table_row[token // block_size].to(torch.int64) * block_size + token % block_size


def gather(kv_cache: torch.Tensor, table_row: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Entries [stop-start e] of tokens start … stop-1 of one request; reads no other slot."""
    block_size = kv_cache.shape[1]
    slot = slots(table_row, start, stop, block_size)
    return kv_cache[slot // block_size, slot % block_size]


def scatter(kv_cache: torch.Tensor, slot_mapping: torch.Tensor, entries: torch.Tensor) -> None:
    """Write entries [t e] to their slots, in place; a negative slot writes nothing."""
    block_size = kv_cache.shape[1]
    live = slot_mapping >= 0
    slot = slot_mapping[live]
    kv_cache[slot // block_size, slot % block_size] = entries[live]
