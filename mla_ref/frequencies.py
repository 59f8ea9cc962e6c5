"""How fast each pair of rotary channels turns: what a model's configuration says, for whoever rotates."""

import math

import torch

from mla_ref.config import YARN, RopeConfig


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
