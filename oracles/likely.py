"""What a right implementation returns but for one check in 10⁹: roundings of the weights do not conspire.

bounds.py lets every rounded weight err by its whole roundoff u_P, in whatever direction is worst for an
element. Here the errors δ of different weights are independent, of mean 0 and within ±u_P. Everything else is
what it was: sums, scores, exponentials, splits and partial results may be as coherent as they like, since
matrix units truncate, and truncation is a bias. With p the exact weights and o the exact output, rounding
moves an element by Σ p δ v, of which

    Σ p δ (v - o)   stays in any case, and
    o · Σ p δ       cancels where the denominator sums the same rounded weights.

By Hoeffding's inequality a sum Σ c δ is beyond λ u_P sqrt(Σ c²) with a probability of at most 2 exp(-λ²/2).
λ makes that FALSE_ALARM for all of a check's sums together. Two things keep independence honest:

- cells: weights within a quarter of u_P of each other may share one δ. Errors of equal correlation ρ ≥ 0 in a
  cell have the variance (1 - ρ) Σ c² + ρ (Σ c)², so a cell counts with the larger of the two.
- audit: apart from the maximum that was subtracted, rounding is no chance at all. It is carried out for
  several maxima, and no less is allowed than twice what the worst of them gives.

Accumulators as narrow as the weights, and rows whose shared errors are no perturbation, keep bounds.py's
radius; nothing here is ever larger than that.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from mla_ref.numerics import Numerics
from oracles.bounds import (
    ILL_CONDITIONED,
    INFLATION,
    Admissible,
    Ball,
    Mixture,
    Shared,
    Weighing,
    accumulator,
    attended,
    certainly,
    intersection,
    number_format,
    type_named,
)
from oracles.exact import Rows, mix

# The probability with which one check rejects a right implementation.
FALSE_ALARM = 1e-9

# Weights closer than this share of their roundoff may be rounded alike.
CELL = 0.25

# Maxima within an octave for which rounding is carried out, and how much more than the worst is allowed.
PHASES = 8
AUDIT = 2.0

# Weights this much coarser than the accumulator: below, their rounding is one among many.
COARSER = 16.0

# Elements of one temporary.
CHUNK = 2**22


def claimed(numerics: Numerics, query: torch.dtype) -> bool:
    """Whether weights are rounded to a type coarse enough for its roundings to be told from all others."""
    weights = number_format(numerics.p, query)
    return weights.roundoff >= COARSER * accumulator(numerics, query).roundoff


def deviations(checks: int) -> float:
    """λ: no sum of the ``checks`` is beyond λ of its own scale, but with probability FALSE_ALARM."""
    return math.sqrt(2.0 * math.log(2.0 * max(checks, 1) / FALSE_ALARM))


def bits_kept_from(movement: float, roundings: int, roundoff: float) -> float:
    """From which magnitude on a movement leaves every bit of results as it is, but for one check in 10⁹.

    A movement shows where it crosses a boundary between two roundings, with a chance that is its share of
    their distance, which just below a power of two is ``roundoff`` of a magnitude; it then becomes that
    distance, so that a later, coarser rounding sees on average what came in.
    """
    return movement * roundings / (roundoff * FALSE_ALARM)


def elements(inputs: Any, numerics: Numerics, certain: Mapping[str, Admissible]) -> dict[str, Admissible]:
    """Likely ``out`` and ``lse``. certain: what bounds.py admits."""
    dtype = inputs[0].dtype
    if not claimed(numerics, dtype):
        return dict(certain)
    out = certain["out"].mid
    latent = inputs.w_uk.shape[2] if hasattr(inputs, "w_uk") else 0
    checks = 2 * (out.numel() + math.prod(out.shape[:2]) * (latent + 1))
    balls = attended(inputs, numerics, dtype, weighing=_weighing(numerics, dtype, deviations(checks)))
    return {name: _within(certain[name], ball) for name, ball in zip(("out", "lse"), balls[:2], strict=True)}


def _within(certain: Admissible, ball: Ball) -> Admissible:
    both = intersection(Ball(certain.mid, certain.radius), ball)
    same = ball.mid == certain.mid
    mid = torch.where(same, certain.mid, both.mid)
    radius = torch.where(same, torch.minimum(ball.radius, certain.radius), both.radius)
    # Rows outside every request are NaN in both, and a radius beyond claim is no news.
    keep = ball.mid.isnan() | ~both.radius.isfinite()
    return certain._replace(
        mid=torch.where(keep, certain.mid, mid), radius=torch.where(keep, certain.radius, radius)
    )


def _weighing(numerics: Numerics, query: torch.dtype, scale: float) -> Weighing:
    """What independent roundings of the weights do; scale: λ."""
    roundoff, worst = number_format(numerics.p, query).roundoff, certainly(numerics, query)
    cancels = numerics.sum_rounded_p is True and numerics.shared_p

    def moved(
        rows: Rows,
        shared: Shared,
        values: torch.Tensor,
        mean: torch.Tensor,
        mixture: Mixture,
        reach: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        most, beyond = worst.moved(rows, shared, values, mean, mixture, reach)
        projected = numerics.form == "absorbed" and values is rows.operands.values
        if not values.shape[1] or (projected and not numerics.shared_p):
            return most, beyond  # each channel of the latent has weights of its own
        total = shared.total[..., None].clamp(max=ILL_CONDITIONED)
        deltas = roundings(rows.weights, rows.scores, rows.top, numerics, query)
        chance = (
            scale
            * roundoff
            * torch.sqrt(squares_by_channel(rows.weights, values, mean, cells(rows.scores, roundoff)))
        )
        audited = torch.zeros_like(chance)
        for delta in deltas:
            error = mix(delta, values) - mean * delta.sum(-1, keepdim=True)
            audited = torch.maximum(audited, error.abs())
        deviation = torch.sqrt(centred(rows.weights, values, mean))
        second = 2.0 * mixture.shift + total / (1.0 - total) * (deviation + 2.0 * mean.abs())
        sum_ = torch.maximum(chance, AUDIT * audited) + roundoff * second
        if not cancels:
            sum_ = sum_ + _own(rows, numerics, query, scale)[..., None] * mean.abs()
        ill = shared.total >= ILL_CONDITIONED
        return torch.where(ill[..., None], most, sum_ * INFLATION), beyond.where(ill, 0.0)

    def lse(rows: Rows, shared: Shared) -> torch.Tensor:
        most = worst.lse(rows, shared)
        if not shared.summed or not rows.scores.shape[-1]:
            return most
        total = shared.total.clamp(max=ILL_CONDITIONED)
        own = _own(rows, numerics, query, scale) + roundoff * 2.0 * total / (1.0 - total)
        return torch.where(shared.total >= ILL_CONDITIONED, most, torch.minimum(most, own))

    return Weighing(moved, lse)


def _own(rows: Rows, numerics: Numerics, query: torch.dtype, scale: float) -> torch.Tensor:
    """[h s] how far rounding moves the sum of the weights, relative to it: |Σ p δ|."""
    roundoff = number_format(numerics.p, query).roundoff
    spread = torch.sqrt(squares(rows.weights, cells(rows.scores, roundoff)))
    audited = torch.zeros_like(spread)
    for delta in roundings(rows.weights, rows.scores, rows.top, numerics, query):
        audited = torch.maximum(audited, delta.sum(-1).abs())
    return torch.maximum(scale * roundoff * spread, AUDIT * audited).clamp(max=roundoff)


def roundings(
    weights: torch.Tensor, scores: torch.Tensor, top: torch.Tensor, numerics: Numerics, query: torch.dtype
) -> Iterator[torch.Tensor]:
    """p δ [… j] for several maxima: what rounding exp(s - m) does to the weight p."""
    raised = torch.exp(scores - top.masked_fill(top.isneginf(), 0.0)[..., None])
    dtype = type_named(numerics.p, query)
    for phase in range(PHASES):
        x = raised * 2.0 ** (phase / PHASES)
        yield weights * ((x.to(dtype).double() - x) / x).nan_to_num(nan=0.0)


class Cells(NamedTuple):
    """Keys of one row that may be rounded alike, where there are several.

    row, key [i]: which they are, the row counted over all but the last axis. cell [i]: the cell of each.
    of [g]: the row of each cell. distinct [rows]: cells of each row, those of one key included.
    """

    row: torch.Tensor
    key: torch.Tensor
    cell: torch.Tensor
    of: torch.Tensor
    distinct: torch.Tensor


def cells(scores: torch.Tensor, roundoff: float) -> Cells:
    """Cells of scores [… j], -inf where unseen."""
    flat = scores.flatten(0, -2)
    row, key = flat.isfinite().nonzero(as_tuple=True)
    level = torch.floor(flat[row, key] / (CELL * roundoff)).to(torch.int64)
    level = level - (level.min() if len(level) else 0)
    span = int(level.max()) + 1 if len(level) else 1
    occupied, cell, count = torch.unique(row * span + level, return_inverse=True, return_counts=True)
    distinct = torch.bincount(occupied // span, minlength=len(flat))
    several = count > 1
    number = several.cumsum(0) - 1
    member = several[cell]
    return Cells(row[member], key[member], number[cell[member]], (occupied // span)[several], distinct)


def squares(terms: torch.Tensor, found: Cells) -> torch.Tensor:
    """[…] Σ over cells of the larger of Σ c² and (Σ c)², for terms c [… j]."""
    flat = terms.flatten(0, -2)
    own = flat.square().sum(-1)
    if len(found.row):
        more = _excess(flat[found.row, found.key][:, None], found)[:, 0]
        own = own.index_add(0, found.of, more)
    return own.reshape(terms.shape[:-1])


def _excess(terms: torch.Tensor, found: Cells) -> torch.Tensor:
    """[g x] by how much (Σ c)² of a cell is above its Σ c², for the terms [i x] of its members."""
    zero = terms.new_zeros(len(found.of), terms.shape[1])
    sums = zero.index_add(0, found.cell, terms)
    return (sums.square() - zero.index_add(0, found.cell, terms.square())).clamp(min=0.0)


def centred(weights: torch.Tensor, values: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """[h s v] Σ w (v - o)² for weights [h s j] ≥ 0."""
    square = mix(weights, values.square()) + mean.square() * weights.sum(-1, keepdim=True)
    return (square - 2.0 * mean * mix(weights, values)).clamp(min=0.0) + 2.0**-40 * square


def squares_by_channel(
    weights: torch.Tensor, values: torch.Tensor, mean: torch.Tensor, found: Cells
) -> torch.Tensor:
    """[h s v] Σ over cells of the larger of Σ c² and (Σ c)², for c = p (v - o) and weights p [h s j]."""
    squares = centred(weights.square(), values, mean)
    if not len(found.row):
        return squares
    h, s, v = mean.shape
    weight = weights.flatten(0, 1)[found.row, found.key][:, None]
    head = found.row // s if values.shape[0] > 1 else torch.zeros_like(found.row)
    width = max(CHUNK // len(found.row), 1)
    for start in range(0, v, width):
        part = slice(start, start + width)
        at, flat = values[..., part], mean[..., part].flatten(0, 1)
        terms = weight * (at[head, found.key] - flat[found.row])
        more = torch.zeros_like(flat).index_add(0, found.of, _excess(terms, found))
        squares[..., part] += more.reshape(h, s, -1)
    return squares
