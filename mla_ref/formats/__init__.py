"""Cache formats: how one token's latent and rope channels are stored. One file each.

A format that another package brings is an entry point of it, in the group ``mla_verify.formats``.

Padding, block order and strides belong to the cache tensor (``mla_ref.layout``), not to its format.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

import torch

from mla_ref.scan import scan


def _no_reason(c: int, r: int) -> str | None:
    return None


@dataclass(frozen=True)
class CacheFormat:
    """Latent ⇄ stored entry.

    dtype: element type of the cache tensor; ``torch.uint8`` where an entry mixes types.
    entry_width: (c, r) -> elements of one entry.
    encode: (kv_c [… c], k_pe [… r], kv_scale) -> entries [… e] of ``dtype``. Values beyond the largest
        finite code saturate; NaN stays NaN.
    decode: (entries [… e], c, r, kv_scale, dtype) -> (kv_c, k_pe) in ``dtype``. The product code · scale is
        exact in float64, and rounded to float32 first for every narrower ``dtype``.
    latent_roundoff: unit roundoff of a stored latent channel relative to its tile's largest magnitude.
    per_tensor_scale: whether ``kv_scale`` is part of the format; where it is not, it is never read.
    """

    name: str
    dtype: torch.dtype
    entry_width: Callable[[int, int], int]
    encode: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, int, int, torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    latent_roundoff: float
    per_tensor_scale: bool = False
    why_not_dims: Callable[[int, int], str | None] = _no_reason

    def entry_bytes(self, c: int, r: int) -> int:
        """Bytes of one token in one layer."""
        return self.entry_width(c, r) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"CacheFormat({self.name!r})"


# Where other packages name theirs: [project.entry-points."mla_verify.formats"], name = "module:FORMAT".
GROUP = "mla_verify.formats"


@cache
def formats() -> dict[str, CacheFormat]:
    """Every cache format by name: those of this folder, then those that installed packages name.

    Raises: ValueError where an entry point is no format, or has a name that is taken.
    """
    found: dict[str, CacheFormat] = {fmt.name: fmt for fmt in scan("mla_ref.formats", "FORMAT").values()}
    for point in sorted(entry_points(group=GROUP)):
        fmt = point.load()
        if not isinstance(fmt, CacheFormat):
            raise ValueError(f"{GROUP}: {point.value} is {type(fmt).__name__}, not CacheFormat")
        if fmt.name in found:
            raise ValueError(
                f"{GROUP}: {point.value} is called {fmt.name!r}, as a format that there is already"
            )
        found[fmt.name] = fmt
    return found


def cache_format(name: str) -> CacheFormat:
    """The format called ``name``. Raises: ValueError that lists the known ones."""
    if name not in formats():
        raise ValueError(f"cache format {name!r} is not one of {', '.join(formats())}")
    return formats()[name]
