"""Thirty-two-bit float: a cache whose rounding cannot be what is wrong.

offset   bytes  type   meaning
0        4·c    fp32   latent
4·c      4·r    fp32   rope

Source: the layout of bf16 in the wider type; what engines store for a float32 model.
"""

import torch

from mla_ref.formats._plain import plain_format

FORMAT = plain_format("fp32", torch.float32, 2.0**-24)
