"""Formats that store the channels as they are: latent, then rope, in one float type."""

import torch

from mla_ref.formats import CacheFormat


def plain_format(name: str, dtype: torch.dtype, roundoff: float) -> CacheFormat:
    """c latent elements, then r rope elements, each rounded to ``dtype``.

    Values beyond the type's largest finite one saturate, as in the fp8 formats.
    """

    def encode(kv_c: torch.Tensor, k_pe: torch.Tensor, kv_scale: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(dtype).max
        return torch.cat([kv_c, k_pe], dim=-1).clamp(-limit, limit).to(dtype)

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
