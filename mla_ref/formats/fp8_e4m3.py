"""One e4m3 byte a channel, latent and rope alike, under one scale for the whole cache.

offset   bytes  type   meaning
0        c      e4m3   latent / kv_scale
c        r      e4m3   rope / kv_scale

``kv_scale`` is a float32 outside the cache, one for each layer, and serves the latent in both of its roles,
key and value. Codes are the nearest to the float32 quotient, ties to even, saturated at ±448; NaN stays NaN.

Source: ``concat_and_cache_mla`` with kv_cache_dtype fp8_e4m3, vLLM 0.8 to 0.33.
"""

import torch

from mla_ref.formats import CacheFormat
from mla_ref.formats._e4m3 import E4M3, E4M3_ROUNDOFF, dequantize, quantize


def encode(kv_c: torch.Tensor, k_pe: torch.Tensor, kv_scale: torch.Tensor) -> torch.Tensor:
    """Entries [… c+r] of e4m3."""
    return quantize(torch.cat([kv_c, k_pe], dim=-1), kv_scale)


def decode(
    entries: torch.Tensor, c: int, r: int, kv_scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """code · kv_scale, of the latent and of the rope part."""
    channels = dequantize(entries[..., : c + r], kv_scale, dtype)
    return channels[..., :c], channels[..., c:]


FORMAT = CacheFormat(
    name="fp8_e4m3",
    dtype=E4M3,
    entry_width=lambda c, r: c + r,
    encode=encode,
    decode=decode,
    latent_roundoff=E4M3_ROUNDOFF,
    per_tensor_scale=True,
)
