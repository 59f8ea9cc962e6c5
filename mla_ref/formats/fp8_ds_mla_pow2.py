"""DeepSeek-V3.2's 656-byte entry, each tile under a power of two.

offset   bytes    type   meaning                          at c=512, r=64
0        c        e4m3   latent / scale of its tile       0 … 511
c        c/32     fp32   one scale for 128 channels       512 … 527
c+c/32   2·r      bf16   rope, not quantised              528 … 655

scale = 2^⌈log2(max(amax / 448, 10⁻⁴))⌉, which is never below 2⁻¹³. The bytes mean what they mean in
``fp8_ds_mla``, and readers need not know which of the two wrote them; but a reader that keeps only a scale's
exponent is right on these alone. Scales are found on the bits, so they are exact where a float32 log2 may be
one off.

Source: FlashMLA 9241ae3 (2026-04), tests/quant.py.
"""

import torch

from mla_ref.formats._e4m3 import over_largest
from mla_ref.formats._tiled import tiled_format

FLOOR = 2.0**-13


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is at least amax / 448 and at least the floor."""
    bits = over_largest(amax).clamp(min=FLOOR).view(torch.int32)
    # Adding the largest mantissa carries into the exponent unless the mantissa is 0.
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


FORMAT = tiled_format("fp8_ds_mla_pow2", scale_of)
