"""Sixteen-bit brain float, as DeepSeek serves by default.

offset   bytes  type   meaning
0        2·c    bf16   latent
2·c      2·r    bf16   rope
"""

import torch

from mla_ref.formats._plain import plain_format

FORMAT = plain_format("bf16", torch.bfloat16, 2.0**-8)
