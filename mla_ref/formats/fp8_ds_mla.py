"""DeepSeek-V3.2's 656-byte entry, each tile under the scale that just holds it.

offset   bytes    type   meaning                          at c=512, r=64
0        c        e4m3   latent / scale of its tile       0 … 511
c        c/32     fp32   one scale for 128 channels       512 … 527
c+c/32   2·r      bf16   rope, not quantised              528 … 655

scale = max(amax / 448, 2⁻¹²⁶), in float32. The floor is the smallest normal number: a tile of zeros keeps
codes of zero, where 0 / 0 would store NaN.

Source: ``concat_and_cache_ds_mla_kernel`` in vLLM's csrc/cache_kernels.cu; SGLang writes the same without
the floor.
"""

import torch

from mla_ref.formats._e4m3 import over_largest
from mla_ref.formats._tiled import tiled_format

FLOOR = 2.0**-126


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """The scale at which the largest magnitude has the largest code."""
    return over_largest(amax).clamp(min=FLOOR)


FORMAT = tiled_format("fp8_ds_mla", scale_of)
