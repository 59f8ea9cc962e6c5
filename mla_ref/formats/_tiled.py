"""Entries of a latent in e4m3 tiles, their float32 scales, and an unquantised rope part, as bytes."""

from collections.abc import Callable

import torch

from mla_ref.formats import CacheFormat
from mla_ref.formats._e4m3 import E4M3, E4M3_ROUNDOFF, dequantize, quantize

TILE = 128

# Latent channels saturate here, so that the largest code times its scale is finite in float32.
_LIMIT = 2.0**127


def tiled_format(name: str, scale_of: Callable[[torch.Tensor], torch.Tensor]) -> CacheFormat:
    """c codes, c/128 little-endian float32 scales, r bf16 rope channels.

    scale_of: the largest magnitude of a tile, float32 → its scale, float32, never 0. A NaN channel does not
    take part in its tile's maximum; it alone decodes to NaN.
    """

    def why_not_dims(c: int, r: int) -> str | None:
        return f"{name} needs c to be a multiple of {TILE}, got {c}" if c % TILE else None

    def encode(kv_c: torch.Tensor, k_pe: torch.Tensor, kv_scale: torch.Tensor) -> torch.Tensor:
        tiles = _in_tiles(kv_c.to(torch.float32).clamp(-_LIMIT, _LIMIT))
        scale = scale_of(tiles.abs().nan_to_num(nan=0.0).amax(-1))
        codes = quantize(tiles, scale[..., None]).flatten(-2)
        limit = torch.finfo(torch.bfloat16).max
        rope = k_pe.to(torch.float32).clamp(-limit, limit).to(torch.bfloat16)
        return torch.cat([part.view(torch.uint8) for part in (codes, scale, rope)], dim=-1)

    def decode(
        entries: torch.Tensor, c: int, r: int, kv_scale: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales, rope = c, c + 4 * (c // TILE)
        codes = _in_tiles(_typed(entries[..., :scales], E4M3))
        scale = _typed(entries[..., scales:rope], torch.float32)
        k_pe = _typed(entries[..., rope : rope + 2 * r], torch.bfloat16).to(dtype)
        return dequantize(codes, scale[..., None], dtype).flatten(-2), k_pe

    return CacheFormat(
        name=name,
        dtype=torch.uint8,
        entry_width=lambda c, r: c + 4 * (c // TILE) + 2 * r,
        encode=encode,
        decode=decode,
        latent_roundoff=E4M3_ROUNDOFF,
        why_not_dims=why_not_dims,
    )


def _in_tiles(channels: torch.Tensor) -> torch.Tensor:
    """[… c] as [… c/128 128]."""
    return channels.reshape(*channels.shape[:-1], channels.shape[-1] // TILE, TILE)


def _typed(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes [… x·itemsize] as [… x] of ``dtype``, whatever the offset and the strides of ``raw``."""
    # A copy starts on an aligned address, and one axis has no other whose stride could be odd.
    packed = raw.clone(memory_format=torch.contiguous_format).flatten().view(dtype)
    return packed.reshape(*raw.shape[:-1], raw.shape[-1] // dtype.itemsize)
