"""Sixteen-bit IEEE half precision.

offset   bytes  type   meaning
0        2·c    fp16   latent
2·c      2·r    fp16   rope

Source: the layout of bf16 in the other sixteen-bit type; what engines store for a float16 model.
"""

import torch

from mla_ref.formats._plain import plain_format

FORMAT = plain_format("fp16", torch.float16, 2.0**-11)
