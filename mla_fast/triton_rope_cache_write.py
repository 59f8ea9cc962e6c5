"""Queries and keys rotated, and the new tokens into the paged cache, in one plain Triton kernel.

Contract: every cache format and input type, both pairings, YaRN, any strides of the inputs, any strides, gaps
and offsets of the pool, any block size; aligned scales where each tile has its own. Slots and positions are
64-bit and stay on the device, so the launch can be captured in a CUDA graph, after a first call with its
configuration. Nothing but the slots named is written.

An angle is a product in float64, of which only what exceeds a whole number of quarter turns is rounded to
float32: it is as exact at position 1,000,000 as at 1, without a table. Keys are quantised from what was
rotated in float32 (float64 for float64 inputs), with no rounding between; codes and scales of latents are the
encoder's, byte for byte.
"""

import functools
import math
from collections.abc import Callable

import torch

from mla_fast._split_keys import launching, requires
from mla_fast._stored_entries import SCALINGS, channels, constants, converts_e4m3, entries, supports
from mla_fast.triton_cache_write import BACKEND as WITHOUT_ROTATION
from mla_fast.triton_cache_write import INTERPRETED, TILES
from mla_ref.backend import Backend
from mla_ref.config import RopeConfig
from mla_ref.formats import CacheFormat
from mla_ref.frequencies import inv_freq
from mla_ref.numerics import Numerics
from mla_ref.problem import implements
from mla_ref.problems.rope_cache_write import PROBLEM, RopeCacheWriteOutput


@functools.cache  # a captured launch keeps no more than the address
def quarter_turns(rope: RopeConfig, r: int, device: torch.device) -> torch.Tensor:
    """Quarter turns per position of each pair, [r/2] float64."""
    return (inv_freq(rope, r) * (2.0 / math.pi)).to(device)


def _implementation(native: bool | None) -> Callable[..., RopeCacheWriteOutput]:
    """native: use instructions for e4m3; None: where there are any."""
    write = WITHOUT_ROTATION.fn if native is None else WITHOUT_ROTATION.variants["by_bits"]

    @implements(PROBLEM, values=False)
    def triton_rope_cache_write(
        q_pe: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        positions: torch.Tensor,
        rope: RopeConfig,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache_format: CacheFormat,
        kv_scale: torch.Tensor,
    ) -> RopeCacheWriteOutput:
        """Every query is rotated, and every token with a slot is stored there with its key rotated.

        kv_cache[slot // k, slot % k] = encode(kv_c, rotate(k_pe))

        Where nothing is rotated, q_pe is returned itself.

        Raises: ValueError for what ``supports`` declines. Slots and positions are the caller's promise.
        Error: the rotation's, tables and products in float32 (float64 for float64 inputs); then the format's.
        Source: the contract alone; vLLM's ``concat_and_cache_mla_rope_fused`` does the same.
        """
        from mla_fast._triton_rope_write_kernel import _rope_cache_write_kernel

        (num_tokens, num_heads, r), c = q_pe.shape, kv_c.shape[1]
        if not rope.rotate or r == 0:
            write(kv_c, k_pe, kv_cache, slot_mapping, cache_format, kv_scale)
            return RopeCacheWriteOutput(q_pe, kv_cache)
        parts = entries(kv_cache, cache_format, c, r)
        turned = torch.empty(q_pe.shape, dtype=q_pe.dtype, device=q_pe.device)
        if num_tokens == 0:
            return RopeCacheWriteOutput(turned, kv_cache)
        scaling = SCALINGS[cache_format.name]
        widths = channels(c, r, scaling.kind)
        tile = TILES[scaling.kind] if q_pe.device.type == "cuda" else INTERPRETED
        rows = max(1, tile.elements // (widths.TILES * widths.TILE))
        heads = max(1, min(tile.elements // (rows * widths.R_PADDED), 1 << (num_heads - 1).bit_length()))
        by_instruction = converts_e4m3(q_pe.device) if native is None else native
        with launching(q_pe.device):
            _rope_cache_write_kernel[(-(-num_tokens // rows), 1 + -(-num_heads // heads))](
                q_pe,
                kv_c,
                k_pe,
                positions.contiguous(),
                quarter_turns(rope, r, q_pe.device),
                turned,
                parts.latent,
                parts.rope,
                parts.scales,
                kv_scale,
                slot_mapping.contiguous(),
                num_tokens,
                parts.block_bytes,
                parts.slot_bytes,
                *q_pe.stride(),
                *kv_c.stride(),
                *k_pe.stride(),
                NUM_HEADS=num_heads,
                HEADS=heads,
                MAGNITUDE=rope.table_scale,
                INTERLEAVED=rope.interleaved,
                **constants(widths, scaling, kv_cache.shape[1], by_instruction),
                ROWS=rows,
                num_warps=tile.warps,
            )
        return RopeCacheWriteOutput(turned, kv_cache)

    return triton_rope_cache_write


triton_rope_cache_write = _implementation(None)

BACKEND = Backend(
    "mla_fast.triton_rope_cache_write",
    "rope_cache_write",
    triton_rope_cache_write,
    Numerics(),
    requires=requires,
    supports=supports,
    variants={"by_bits": _implementation(False)},
)
