"""Rotary position embedding: frequencies, YaRN, and the rotation in both pairings."""

import math

import torch

from mla_ref.backend import Backend
from mla_ref.config import YARN, RopeConfig
from mla_ref.numerics import Numerics
from mla_ref.problem import implements
from mla_ref.problems.rope import PROBLEM, RopeOutput
from mla_ref.rows import compute_dtype


def inv_freq(rope: RopeConfig, r: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Radians per position of each pair: theta ** (-2 i / r), [r/2] float64.

    Under YaRN pair i is slowed down by 1 + ramp[i] · (1/factor - 1): not at all where it turns more than
    ``beta_fast`` times over the original context, by ``factor`` where it turns less than ``beta_slow`` times.

    Source: YaRN, arXiv 2309.00071, section 3.2 and appendix B.
    """
    pair = torch.arange(r // 2, dtype=torch.float64, device=device)
    frequency = rope.theta ** (-2.0 * pair / r)
    if rope.scaling != YARN:
        return frequency
    low, high = _ramp_ends(rope, r)
    ramp = ((pair - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (1.0 - ramp) + frequency / rope.factor * ramp


def _ramp_ends(rope: RopeConfig, r: int) -> tuple[float, float]:
    """The pairs between which the ramp rises, as transformers and DeepSeek clip and separate them."""
    low, high = _pair_that_turns(rope.beta_fast, rope, r), _pair_that_turns(rope.beta_slow, rope, r)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r - 1)
    return low, high + 0.001 if low == high else high


def _pair_that_turns(turns: float, rope: RopeConfig, r: int) -> float:
    """The (fractional) pair that turns so often over the original context."""
    return r * math.log(rope.original_max_position / (turns * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))


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
