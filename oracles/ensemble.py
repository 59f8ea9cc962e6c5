"""What right kernels of one declaration do to a case: some of them, and whether an output is one of theirs.

A kernel rounds its weights relative to a maximum that it has seen, so two right kernels round differently,
and nobody knows how the one on trial does. Here MEMBERS of them are played through in float64: their weights
rounded for one maximum or for one in every block of keys, multiplied by the values, rounded to the output's
type. A statistic of the output then has a mean and a spread among them, made by the case's own data: repeated
keys, outlier channels and few keys are in it, and need no assumption.

- gain, slope: as in ``directions.py``, over all sampled rows.
- roughness: the root mean square of the error, channels divided by their noise. Any further rounding adds.

A statistic is suspect when it is farther from the mean than Student's distribution reaches with probability
SUSPICION, beyond what all other errors could do to it at worst. The members are a guess at what a kernel
does, so a suspicion is no verdict: it has to come back, with the same sign, on each of REPLAYS cases with
other seeds. Were all looks independent, a right kernel would fail one of 10¹⁶ cases; it would fail one of 10⁹
if the members' mean were off by twice their spread. Recorded values have no other seed: there a single look
has to be as rare as a false alarm.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.numerics import Numerics
from mla_ref.values import integers
from oracles.bounds import nearest, number_format, type_named
from oracles.directions import Reading, Sample, gain_and_slope, of, sure_along, sure_apart, whitening

MEMBERS = 32
SUSPICION = 1e-4
REPLAYS = 3

# Keys that are rounded relative to the same maximum, in half of the members.
BLOCK = 64


class _Stacked(NamedTuple):
    """One statistic of the output and of every member, summed over rows; and what is sure."""

    got: torch.Tensor
    members: torch.Tensor
    sure: torch.Tensor
    unit: torch.Tensor


def readings(
    found: list[Sample],
    got: torch.Tensor,
    numerics: Numerics,
    query: torch.dtype,
    seed: int,
    suspicion: float = SUSPICION,
) -> list[Reading]:
    """Gain, slope and roughness, each less its mean among the members. got: [t h v]."""
    if not found:
        return []
    sums: dict[str, _Stacked] = {}
    count = sum(sample.out.numel() for sample in found)
    for number, sample in enumerate(found):
        exact = torch.stack(list(_members(sample, numerics, query, f"{seed}/{number}")))
        members = nearest(exact, query)
        roundoff = number_format(numerics.p, query).roundoff
        for name, part in _statistics(sample, of(got, sample), members, roundoff).items():
            before = sums.get(name)
            sums[name] = part if before is None else _Stacked(*map(torch.add, before, part))
    reach = student(suspicion / (2 * len(sums)), MEMBERS - 1) * math.sqrt(1.0 + 1.0 / MEMBERS)
    found_out = []
    for name, (value, members, sure, unit) in sums.items():
        if name == "roughness":
            value, members, sure = (torch.sqrt(x / count) for x in (value, members, sure))
            unit = members.mean()
        limit = reach * float(members.std()) + float(sure)
        beyond = float(value - members.mean())
        found_out.append(Reading(name, beyond, limit, beyond / (float(unit) or math.nan)))
    return found_out


def _statistics(
    sample: Sample, got: torch.Tensor, members: torch.Tensor, roundoff: float
) -> dict[str, _Stacked]:
    """Sums over the rows of one sample. members: [m n v]."""
    white = whitening(sample)
    error, errors = got - sample.out, members - sample.out
    apart = sure_apart(sample, roundoff) / white
    parts = {
        "roughness": _Stacked(
            (error / white).square().sum(),
            (errors / white).square().sum((1, 2)),
            apart.square().sum(),
            apart.new_zeros(()),
        )
    }
    for name, unit in gain_and_slope(sample).items():
        w = unit / white.square()
        parts[name] = _Stacked(
            (error * w).sum(),
            (errors * w).sum((1, 2)),
            sure_along(sample, w, roundoff).sum(),
            (unit * w).sum(),
        )
    return parts


def _members(sample: Sample, numerics: Numerics, query: torch.dtype, seed: str) -> Iterator[torch.Tensor]:
    """What MEMBERS right kernels return for the rows [n v], before it is rounded to the output's type."""
    top = sample.scores.amax(-1, keepdim=True)
    raised = torch.exp(sample.scores - top)
    deltas = [
        sample.weights * _relative(raised * maximum, type_named(numerics.p, query))
        for maximum in _maxima(raised.shape[0], raised.shape[1], seed, raised.device)
    ]
    half = sample.out.shape[1] // 2
    moved = [delta @ sample.values for delta in deltas]
    for number, (delta, error) in enumerate(zip(deltas, moved, strict=True)):
        if not numerics.shared_p:  # half of the channels have another copy
            error = torch.cat([error[:, :half], moved[number - 1][:, half:]], dim=1)
        if numerics.sum_rounded_p or (numerics.sum_rounded_p is None and number % 2):
            error = error - sample.out * delta.sum(-1, keepdim=True)
        yield sample.out + error


def _relative(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return ((x.to(dtype).double() - x) / x).nan_to_num(nan=0.0)


def _maxima(rows: int, keys: int, seed: str, device: torch.device) -> Iterator[torch.Tensor]:
    """By what the weights were divided before they were rounded: one number, or one for each block."""
    alike = MEMBERS // 2
    for number in range(alike):
        yield torch.full((rows, keys), 2.0 ** (number / alike), dtype=torch.float64, device=device)
    blocks = -(-keys // BLOCK)
    steps = integers(0, f"maxima/{seed}", 2**20, MEMBERS - alike, rows, blocks).to(device)
    for step in steps:
        yield torch.exp2(step / 2.0**20).repeat_interleave(BLOCK, dim=1)[:, :keys]


@cache
def student(probability: float, freedom: int) -> float:
    """What Student's t exceeds with this probability."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))

    def beyond(x: float) -> float:
        """By Simpson's rule in y = 1 / t, where the density falls to 0 as y does."""
        steps = 2000
        total = 0.0
        for i in range(steps + 1):
            y = i / steps / x
            weight = 1 if i in (0, steps) else 4 if i % 2 else 2
            total += weight * (
                scale * (1 + 1 / (freedom * y * y)) ** (-(freedom + 1) / 2) / (y * y) if i else 0
            )
        return total / (3 * steps * x)

    low, high = 1.0, 2.0
    while beyond(high) > probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > probability else (low, middle)
    return high


def replays(case: Case) -> list[int]:
    """Seeds for the cases that a suspicion is repeated on."""
    return integers(case.seed, "replays", 2**31 - 1, REPLAYS).tolist()
