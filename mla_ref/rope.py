"""Rotary position embedding: tables of cosines and sines, and the rotation in both pairings."""

import torch

from mla_ref.backend import Backend
from mla_ref.config import RopeConfig
from mla_ref.frequencies import inv_freq
from mla_ref.numerics import Numerics
from mla_ref.problem import implements
from mla_ref.problems.rope import PROBLEM, RopeOutput
from mla_ref.rows import compute_dtype


def cos_sin(rope: RopeConfig, positions: torch.Tensor, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [t r/2] float64, times ``table_scale``. The angle is never rounded below float64."""
    angle = positions.to(torch.float64)[:, None] * inv_freq(rope, r, positions.device)
    return angle.cos() * rope.table_scale, angle.sin() * rope.table_scale


@implements(PROBLEM)
def rotate(x: torch.Tensor, positions: torch.Tensor, rope: RopeConfig) -> RopeOutput:
    """Each pair (a, b) of channels becomes (a cos - b sin, b cos + a sin); NoPE models keep x.

    Pairs are (0, 1), (2, 3), … where interleaved and (0, r/2), (1, r/2 + 1), … otherwise, and both keep their
    channels. transformers' DeepSeek-V3 reads interleaved pairs and writes them half-split: products q · k are
    the same, cached bytes are a permutation of these.

    Error: tables and products in float32 (float64 for float64 inputs), rounded once at the end.
    Source: RoFormer, arXiv 2104.09864, equation 15.
    """
    if not rope.rotate or x.shape[-1] == 0:
        return RopeOutput(x)
    cos, sin = (table[:, None].to(compute_dtype(x)) for table in cos_sin(rope, positions, x.shape[-1]))
    wide = x.to(compute_dtype(x))
    a, b = (wide[..., 0::2], wide[..., 1::2]) if rope.interleaved else wide.chunk(2, dim=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    out = torch.stack(turned, dim=-1).flatten(-2) if rope.interleaved else torch.cat(turned, dim=-1)
    return RopeOutput(out.to(x.dtype))


BACKEND = Backend("mla_ref.rope", "rope", rotate, Numerics())
