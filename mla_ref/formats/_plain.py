"""Formats that store the channels as they are: latent, then rope, in one float type."""

import torch

from mla_ref.formats import CacheFormat


def plain_format(name: str, dtype: torch.dtype, roundoff: float) -> CacheFormat:
    """c latent elements, then r rope elements, each rounded to ``dtype``, ties to even.

    Values beyond the type's largest finite one saturate, as in the fp8 formats; NaN stays NaN. float64
    channels are rounded to float32 on their way to a sixteen-bit type.
    """

    def encode(kv_c: torch.Tensor, k_pe: torch.Tensor, kv_scale: torch.Tensor) -> torch.Tensor:
        channels = torch.cat([kv_c, k_pe], dim=-1)
        # Clamped in float32 at least: bf16 cannot hold fp16's limit, and 65504 would become 65536.
        wide = channels.to(torch.promote_types(channels.dtype, torch.float32))
        limit = torch.finfo(dtype).max
        return wide.clamp(-limit, limit).to(dtype)

    def decode(
        entries: torch.Tensor, c: int, r: int, kv_scale: torch.Tensor, out: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return entries[..., :c].to(out), entries[..., c : c + r].to(out)

    return CacheFormat(
        name=name,
        dtype=dtype,
        entry_width=lambda c, r: c + r,
        encode=encode,
        decode=decode,
        latent_roundoff=roundoff,
    )
