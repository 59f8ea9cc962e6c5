"""New tokens into the paged cache in plain Triton, quantised on the way where the format is.

Contract: every cache format and input type, any strides, gaps and offsets of the pool, any block size;
aligned scales where each tile has its own. Slots are 64-bit and stay on the device, so the launch can be
captured in a CUDA graph. Nothing but the slots named is written.

Codes and scales are the encoder's, byte for byte: every quotient is rounded as an IEEE division rounds, where
a mere product with a reciprocal would differ in one code of some thousands.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from mla_fast._split_keys import launching, requires
from mla_fast._stored_entries import SCALINGS, channels, constants, converts_e4m3, entries, supports
from mla_ref.backend import Backend
from mla_ref.formats import CacheFormat
from mla_ref.numerics import Numerics
from mla_ref.problem import implements
from mla_ref.problems.cache_write import PROBLEM, CacheWriteOutput


class Tile(NamedTuple):
    """Latent channels of one program, and the warps that share them."""

    elements: int
    warps: int


# By how entries are scaled; the fastest of twelve on an H200.
TILES = {"none": Tile(2048, 2), "tensor": Tile(2048, 1), "tile": Tile(1024, 1)}
INTERPRETED = Tile(2**16, 1)  # the interpreter's time goes by operations, not by elements


def _implementation(native: bool | None) -> Callable[..., CacheWriteOutput]:
    """native: use instructions for e4m3; None: where there are any."""

    @implements(PROBLEM, values=False)
    def triton_cache_write(
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache_format: CacheFormat,
        kv_scale: torch.Tensor,
    ) -> CacheWriteOutput:
        """Every token with a slot is stored there as its format says; all other memory stays.

        kv_cache[slot // k, slot % k] = encode(kv_c, k_pe)

        Raises: ValueError for what ``supports`` declines. Slots are the caller's promise.
        Error: the format's, which is part of the result.
        Source: the contract alone; vLLM's ``concat_and_cache_mla`` does the same.
        """
        from mla_fast._triton_copy_kernels import _cache_write_kernel

        (num_tokens, c), r = kv_c.shape, k_pe.shape[1]
        parts = entries(kv_cache, cache_format, c, r)
        if num_tokens == 0:
            return CacheWriteOutput(kv_cache)
        scaling = SCALINGS[cache_format.name]
        widths = channels(c, r, scaling.kind)
        tile = TILES[scaling.kind] if kv_c.device.type == "cuda" else INTERPRETED
        rows = max(1, tile.elements // (widths.TILES * widths.TILE))
        by_instruction = converts_e4m3(kv_c.device) if native is None else native
        with launching(kv_c.device):
            _cache_write_kernel[(-(-num_tokens // rows),)](
                kv_c,
                k_pe,
                parts.latent,
                parts.rope,
                parts.scales,
                kv_scale,
                slot_mapping.contiguous(),
                num_tokens,
                parts.block_bytes,
                parts.slot_bytes,
                *kv_c.stride(),
                *k_pe.stride(),
                **constants(widths, scaling, kv_cache.shape[1], by_instruction),
                ROWS=rows,
                num_warps=tile.warps,
            )
        return CacheWriteOutput(kv_cache)

    return triton_cache_write


triton_cache_write = _implementation(None)

BACKEND = Backend(
    "mla_fast.triton_cache_write",
    "cache_write",
    triton_cache_write,
    Numerics(),
    requires=requires,
    supports=supports,
    variants={"by_bits": _implementation(False)},
)
