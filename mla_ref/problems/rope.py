"""Rotary embedding of packed tokens, in both pairings, with YaRN."""

from dataclasses import replace
from typing import NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.config import RopeConfig
from mla_ref.problem import Problem, bind_shapes
from mla_ref.problems._paged import QUERY_DTYPES, check_device, check_dtype, raw_values
from mla_ref.values import integers

# The longest sequence that DeepSeek-V3 serves; every case reaches at least this far.
LONGEST_POSITION = 163_840


class RopeInputs(NamedTuple):
    """What every implementation of ``rope`` is called with, in this order.

    x: [t h r]. The channels to rotate; any strides.
    positions: [t] int64. Position of each token, not negative.
    rope: frequencies, pairing and scaling.
    """

    x: torch.Tensor
    positions: torch.Tensor
    rope: RopeConfig


class RopeOutput(NamedTuple):
    """x: [t h r] in the input's dtype. Channels stay where they were: interleaved in, interleaved out."""

    x: torch.Tensor


SHAPES = {"x": "t h r", "positions": "t"}


def check(inputs: RopeInputs) -> None:
    """Raises: ValueError on a shape, dtype or device that breaks the contract."""
    sizes = bind_shapes(SHAPES, inputs._asdict())
    if sizes["r"] % 2:
        raise ValueError(f"x: r={sizes['r']}, must be even")
    check_dtype("x", inputs.x, *QUERY_DTYPES)
    check_dtype("positions", inputs.positions, torch.int64)
    check_device(inputs)


def check_values(inputs: RopeInputs) -> None:
    """Raises: ValueError on a negative position."""
    check_positions(inputs.positions)


def check_positions(positions: torch.Tensor) -> None:
    """Raises: ValueError on a negative one."""
    for i, position in enumerate(positions.tolist()):
        if position < 0:
            raise ValueError(f"positions[{i}]: is {position}, must not be negative")


def materialize(case: Case, device: torch.device) -> RopeInputs:
    """The tensors of a case: sum(q_lens) tokens, queries in its regime; kv_lens are not used.

    Positions are log-uniform, since errors of the angle grow with them; of several tokens the first is at 0,
    and the last at the longest position, 163,840 or the model's own if that is longer.
    """
    raw = raw_values(replace(case, kv_lens=(0,) * len(case.kv_lens)), 0)
    t = sum(case.q_lens)
    return RopeInputs(
        x=raw.q_pe.to(getattr(torch, case.dtype)).to(device),
        positions=_positions(case.seed, t, max(LONGEST_POSITION, case.config.max_position)).to(device),
        rope=case.config.rope,
    )


def _positions(seed: int, t: int, longest: int) -> torch.Tensor:
    """int64 [t] on [0, longest]: a uniform octave, then uniform within it."""
    octave = integers(seed, "octave", longest.bit_length(), t)
    position = torch.bitwise_left_shift(torch.ones_like(octave), octave)
    position = (position + integers(seed, "position", 1 << 30, t) % position).clamp(max=longest)
    if t > 1:  # a token of its own, at 0, would not be rotated
        position[0], position[-1] = 0, longest
    return position


PROBLEM = Problem(
    name="rope",
    inputs=RopeInputs,
    output=RopeOutput,
    shapes=SHAPES,
    output_shapes={"x": "t h r"},
    check=check,
    check_values=check_values,
    materialize=materialize,
)
