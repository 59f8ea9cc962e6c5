"""What many elements show together and none shows alone: directions of a row's channels, and their length.

The noise that rounded weights leave in a row is Σ p δ (v - o), with independent δ (``likely.py``). Along a
direction w of channels, ⟨out - o, w⟩ is a sum Σ p δ ⟨v - o, w⟩ of the same kind, so Hoeffding's inequality
limits it as it does an element; but an error that has a direction adds up along it, where noise does not:

- gain: w = o. A numerator or a denominator that is too large, truncated weights, a truncated output.
- slope: w = ∂o / ∂ ln scale = Σ p s (v - o). A softmax scale or an exponential that is off.
- weight of a key: w = v_j - o for every key j. One that is lost, doubled or from elsewhere.
- length: ‖out - o‖. Any rounding more than the declared ones.

Channels are divided by their own noise first. The output's own rounding, half a spacing at most, is noise too
where the weights' noise is above the output's grid; only such rows are judged. Errors other than the weights'
may all point one way: bounds.py's, for the one channel Σ p ⟨v, w⟩ instead of each.

The length of a vector Σ δ c of independent errors within ±u is limited by (Hsu, Kakade and Zhang 2012)

    P(‖Σ δ c‖² > u² (T + 2 sqrt(T S t) + 2 S t)) ≤ e^-t,        T = Σ ‖c‖²,  S = largest eigenvalue of Σ c cᵀ

S is found by power iteration, which stays below it, and enlarged.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.numerics import Numerics
from oracles.bounds import (
    ILL_CONDITIONED,
    Admissible,
    Shared,
    channel_roundings,
    mixed,
    number_format,
    numerator_errors,
    rows_and_errors,
    spacing,
)
from oracles.compare import place
from oracles.exact import Rows
from oracles.likely import (
    AUDIT,
    FALSE_ALARM,
    Cells,
    cells,
    centred,
    claimed,
    deviations,
    elements,
    roundings,
    squares,
    squares_by_channel,
)
from oracles.probes import admitted, materialized
from oracles.verdict import Finding, Worst

# Rows that are judged, and rows × keys × channels of them in one chunk of rows, which is what it costs.
MAX_ROWS = 64
MAX_ELEMENTS = 2**24

# Rows with noise of so many half spacings, from so many independent errors, are claimed.
DITHERED = 2.0
FEWEST_CELLS = 4

# Noise of a channel, relative to the loudest of its row, below which it counts for less.
QUIETEST = 2.0**-64

# Steps of the power iteration, and how far it may be below the largest eigenvalue after them.
POWER_STEPS = 12
POWER_MARGIN = 1.3


class Sample(NamedTuple):
    """Rows of one request, for a head or for all that share their values, of which directions are judged.

    tokens, heads [n]: where in the output they are. weights, scores, excess [n j]. total [n].
    values [j v]. out [n v]: the truth. radius [n v]: the likely one. half [n v]: half the output's spacing.
    coherent [n v]: errors of single channels that may all point one way. normaliser [n]: of the denominator.
    shift [n v]: Δ. cells: of these rows. deltas: p δ [n j] for several maxima.
    """

    tokens: torch.Tensor
    heads: torch.Tensor
    weights: torch.Tensor
    scores: torch.Tensor
    excess: torch.Tensor
    total: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    radius: torch.Tensor
    half: torch.Tensor
    coherent: torch.Tensor
    normaliser: torch.Tensor
    shift: torch.Tensor
    cells: Cells
    deltas: tuple[torch.Tensor, ...]


def samples(
    inputs: Any, numerics: Numerics, certain: Mapping[str, Admissible], likely: Mapping[str, Admissible]
) -> list[Sample]:
    """About MAX_ROWS rows, scattered over tokens and heads, whose noise is known in every direction.

    None where weights are hardly rounded, and none of latent outputs that are rounded in between. Left out
    are rows that see no key, are ill-conditioned, have less noise than the output's grid, repeat another row,
    or whose channels repeat each other.
    """
    dtype, (num_tokens, num_heads, v) = inputs[0].dtype, certain["out"].mid.shape
    found: list[Sample] = []
    if not claimed(numerics, dtype) or numerics.form == "absorbed":
        return found
    share = min(MAX_ROWS / max(num_tokens * num_heads, 1), 1.0)
    for rows, shared in rows_and_errors(inputs, numerics, dtype):
        values = rows.operands.values
        errors = _errors(rows, shared, inputs, numerics, dtype)
        most = max(MAX_ELEMENTS // max(rows.scores.shape[-1] * v, 1), 1)
        tokens = torch.arange(rows.tokens.start, rows.tokens.stop, device=values.device)
        heads = torch.arange(rows.heads.start, rows.heads.stop, device=values.device)
        chosen = _scattered(heads[:, None] + num_heads * tokens, share)
        chosen &= (shared.total < ILL_CONDITIONED) & rows.lse.isfinite()
        h, s = chosen.nonzero()[:most].unbind(1)
        for head in range(len(values)):
            own = h == head if len(values) > 1 else h >= 0
            if not bool(own.any()):
                continue
            at = h[own], s[own]
            where = tokens[at[1]], heads[at[0]]
            half = 0.5 * spacing(rows.out[at].abs() + certain["out"].radius[where], dtype)
            dithered = (likely["out"].radius[where] / half).median(-1).values >= DITHERED
            kept = dithered & _unlike(rows.out[at].float()) & _many(rows.scores[at], numerics, dtype)
            if bool(kept.any()):
                at, where = (at[0][kept], at[1][kept]), (where[0][kept], where[1][kept])
                radius = likely["out"].radius[where]
                found.append(
                    _sample(rows, shared, errors, head, at, where, half[kept], radius, numerics, dtype)
                )
    return found


@lru_cache(maxsize=4)
def likely(case: Case, device: str, numerics: Numerics) -> Mapping[str, Admissible]:
    """What the fields of the output likely are."""
    certain = admitted(materialized, case, device, numerics)
    return elements(materialized(case, device), numerics, certain)


@lru_cache(maxsize=4)
def sampled(case: Case, device: str, numerics: Numerics) -> list[Sample]:
    """The rows whose directions are judged."""
    certain = admitted(materialized, case, device, numerics)
    return samples(materialized(case, device), numerics, certain, likely(case, device, numerics))


def _scattered(number: torch.Tensor, share: float) -> torch.Tensor:
    """Which of the numbers are in a share of all that has no pattern."""
    return (number * 2654435761) % 2**32 < share * 2**32


def _unlike(out: torch.Tensor) -> torch.Tensor:
    """[n] rows that repeat no row before them, and have no channel twice: equal numbers round alike."""
    channels = out.sort(-1).values
    repeats = (out[:, None] == out[None]).all(-1).tril(-1).any(-1)
    return (channels[:, 1:] != channels[:, :-1]).all(-1) & ~repeats


def _many(scores: torch.Tensor, numerics: Numerics, query: torch.dtype) -> torch.Tensor:
    """[n] rows with enough independent roundings for a sum of them to be a bell curve."""
    return cells(scores, number_format(numerics.p, query).roundoff).distinct >= FEWEST_CELLS


class _Errors(NamedTuple):
    """Of all rows of a chunk: as in ``Sample``."""

    coherent: torch.Tensor
    normaliser: torch.Tensor
    shift: torch.Tensor


def _errors(rows: Rows, shared: Shared, inputs: Any, numerics: Numerics, dtype: torch.dtype) -> _Errors:
    mixture = mixed(rows, shared, rows.operands.values, rows.out)
    absolute, reach = numerator_errors(rows, shared, mixture, inputs, numerics, dtype)
    coherent = channel_roundings(shared, numerics, dtype) * reach + absolute
    return _Errors(coherent, shared.denominator + shared.division, mixture.shift)


def _sample(
    rows: Rows,
    shared: Shared,
    errors: _Errors,
    head: int,
    at: tuple[torch.Tensor, torch.Tensor],
    where: tuple[torch.Tensor, torch.Tensor],
    half: torch.Tensor,
    radius: torch.Tensor,
    numerics: Numerics,
    dtype: torch.dtype,
) -> Sample:
    weights, scores, top = rows.weights[at], rows.scores[at], rows.top[at]
    return Sample(
        tokens=where[0],
        heads=where[1],
        weights=weights,
        scores=scores,
        excess=shared.excess[at],
        total=shared.total[at],
        values=rows.operands.values[head],
        out=rows.out[at],
        radius=radius,
        half=half,
        coherent=errors.coherent[at],
        normaliser=errors.normaliser[at],
        shift=errors.shift[at],
        cells=cells(scores, number_format(numerics.p, dtype).roundoff),
        deltas=tuple(roundings(weights, scores, top, numerics, dtype)),
    )


class Reading(NamedTuple):
    """What one statistic says of rows [n], or of all of them together.

    value: the statistic; 0 in exact arithmetic. limit: what it stays below. effect: the value over what a
    unit of the error that it looks for gives. where: (token, head) of the largest value over its limit.
    """

    name: str
    value: float
    limit: float
    effect: float
    where: tuple[int, int] | None = None

    @property
    def ratio(self) -> float:
        """The value over its limit; infinite for NaN, which is below no limit."""
        if not self.value:
            return 0.0
        ratio = abs(self.value) / self.limit if self.limit else math.inf
        return math.inf if math.isnan(ratio) else ratio


class Along(NamedTuple):
    """⟨got - out, w⟩ of each row [n], the scale of its noise, what may point one way, and ⟨unit, w⟩.

    audited [m n]: what rounding for several maxima does to it.
    """

    value: torch.Tensor
    noise: torch.Tensor
    sure: torch.Tensor
    unit: torch.Tensor
    audited: torch.Tensor


def whitening(sample: Sample) -> torch.Tensor:
    """[n v] about the noise of each channel, so that no outlier decides for all; 0 is left out."""
    noise = sample.half + sample.radius
    return torch.maximum(noise, QUIETEST * noise.amax(-1, keepdim=True))


def gain_and_slope(sample: Sample) -> dict[str, torch.Tensor]:
    """What a row moves by, for a unit of each: a factor of the output, and a relative error of its scores."""
    scores = sample.scores.masked_fill(~sample.scores.isfinite(), 0.0)
    weighted = sample.weights * scores
    slope = weighted @ sample.values - sample.out * weighted.sum(-1, keepdim=True)
    return {"gain": sample.out, "slope": slope}


def along(
    sample: Sample,
    got: torch.Tensor,
    unit: torch.Tensor,
    numerics: Numerics,
    query: torch.dtype,
    scale: float,
) -> Along:
    """The whitened direction of ``unit`` [n v]; got [n v] float64; scale: λ."""
    roundoff = number_format(numerics.p, query).roundoff
    w = unit / whitening(sample).square()
    base = (w * sample.out).sum(-1)
    x = w @ sample.values.T - base[:, None]
    noise, audited = torch.zeros_like(base), []
    for shift in _sums(numerics):
        terms = x + shift * base[:, None]
        noise = torch.maximum(noise, roundoff**2 * squares(sample.weights * terms, sample.cells))
        audited += [(delta * terms).sum(-1) for delta in sample.deltas]
    played = torch.stack(audited)
    noise = torch.maximum(noise, (AUDIT / scale * played.abs().amax(0)).square())
    noise = noise + (sample.half * w).square().sum(-1)
    return Along(
        value=((got - sample.out) * w).sum(-1),
        noise=torch.sqrt(noise),
        sure=sure_along(sample, w, roundoff),
        unit=(w * unit).sum(-1),
        audited=played,
    )


def _sums(numerics: Numerics) -> tuple[float, ...]:
    """Whether o · Σ p δ is part of an error: 1, 0 or either."""
    return {True: (0.0,), False: (1.0,), None: (0.0, 1.0)}[numerics.sum_rounded_p]


def sure_along(sample: Sample, w: torch.Tensor, roundoff: float) -> torch.Tensor:
    """[n] how far errors that may all point one way move ⟨out, w⟩: those of one channel Σ p ⟨v, w⟩."""
    base = (w * sample.out).sum(-1)
    x = (w @ sample.values.T - base[:, None]).abs()
    room = 1.0 - sample.total
    shift = (sample.excess * x).sum(-1) / room
    second = 2.0 * shift + sample.total / room * ((sample.weights * x).sum(-1) + 2.0 * base.abs())
    single = (w.abs() * sample.coherent).sum(-1)
    divided = 1.0 - sample.normaliser - roundoff
    return shift + (single + roundoff * second + sample.normaliser * (base.abs() + shift)) / divided


def sure_apart(sample: Sample, roundoff: float) -> torch.Tensor:
    """[n v] the same of every channel: bounds.py's, but for the rounding of the weights."""
    share = (sample.total / (1.0 - sample.total))[:, None]
    deviation = torch.sqrt(centred(sample.weights[None], sample.values[None], sample.out[None])[0])
    second = 2.0 * sample.shift + share * (deviation + 2.0 * sample.out.abs())
    mean = sample.normaliser[:, None] * (sample.out.abs() + sample.shift)
    divided = (1.0 - sample.normaliser - roundoff)[:, None]
    return sample.shift + (sample.coherent + roundoff * second + mean) / divided


def filters(found: list[Sample], got: torch.Tensor, numerics: Numerics, query: torch.dtype) -> list[Reading]:
    """Gain and slope of every row and of all rows, and the weight of every key. got: [t h v].

    None where warpgroups round copies of their own: which channels share a copy is not known.
    """
    if not numerics.shared_p or not found:
        return []
    keys = sum(sample.weights.numel() for sample in found)
    scale = deviations(keys + 2 * (sum(len(sample.out) for sample in found) + 1))
    readings = []
    for name in ("gain", "slope"):
        parts = []
        for sample in found:
            unit = gain_and_slope(sample)[name]
            parts.append(along(sample, of(got, sample), unit, numerics, query, scale))
        readings += _read(name, found, parts, scale)
    tokens = [_weight_of_a_key(sample, of(got, sample), numerics, query, scale) for sample in found]
    return [*readings, max(tokens, key=lambda reading: reading.ratio)]


def of(got: torch.Tensor, sample: Sample) -> torch.Tensor:
    """[n v] float64: the rows of a sample in an output [t h v]."""
    return got[sample.tokens, sample.heads].double()


def _read(name: str, found: list[Sample], parts: list[Along], scale: float) -> list[Reading]:
    """The row farthest beyond its limit, and all rows together."""
    whole = Along(*(torch.cat(part, dim=-1) for part in zip(*parts, strict=True)))
    limit = scale * whole.noise + whole.sure
    ratio = (whole.value.abs() / limit).nan_to_num(nan=math.inf)
    row = int(ratio.argmax())
    tokens = torch.cat([sample.tokens for sample in found])
    heads = torch.cat([sample.heads for sample in found])
    effect = float(whole.value[row] / whole.unit[row])
    all_units = float(whole.unit.sum()) or math.nan  # equal scores have no slope
    place = int(tokens[row]), int(heads[row])
    one = Reading(name, float(whole.value[row]), float(limit[row]), effect, place)
    value = float(whole.value.sum())
    # Rows that are nearly the same are rounded alike, which the audit of all of them shows.
    chance = max(scale * float(whole.noise.norm()), AUDIT * float(whole.audited.sum(-1).abs().max()))
    limit_all = chance + float(whole.sure.sum())
    return [one, Reading(name, value, limit_all, value / all_units)]


def _weight_of_a_key(
    sample: Sample, got: torch.Tensor, numerics: Numerics, query: torch.dtype, scale: float
) -> Reading:
    """Whether a key has another weight than it should: ⟨got - out, v - out⟩, whitened, for every key."""
    white = whitening(sample)
    error = (got - sample.out) / white
    out = sample.out / white
    w = error / white
    value = w @ sample.values.T - (w * sample.out).sum(-1, keepdim=True)
    inverse = white.square().reciprocal()
    squares = inverse @ sample.values.square().T + out.square().sum(-1, keepdim=True)
    reach = (squares - 2.0 * (sample.out * inverse) @ sample.values.T).clamp(min=0.0)
    norm = torch.sqrt(reach + 2.0**-40 * squares)
    norms = _norms(sample, numerics, query, scale)
    noise = torch.sqrt(norms.largest + (sample.half / white).square().amax(-1))
    limit = norm * (scale * noise + norms.sure)[:, None]
    unseen = sample.scores.isneginf()
    ratio = (value.abs() / limit).nan_to_num(nan=math.inf).masked_fill(unseen, 0.0)
    row, key = divmod(int(ratio.argmax()), ratio.shape[1])
    place = int(sample.tokens[row]), int(sample.heads[row])
    effect = float(value[row, key] / norm[row, key].square())
    return Reading(f"weight of key {key}", float(value[row, key]), float(limit[row, key]), effect, place)


class Norms(NamedTuple):
    """Of a row's whitened noise [n]: mean square, largest variance, and the length of what is sure."""

    trace: torch.Tensor
    largest: torch.Tensor
    sure: torch.Tensor


def _norms(sample: Sample, numerics: Numerics, query: torch.dtype, scale: float) -> Norms:
    roundoff, white = number_format(numerics.p, query).roundoff, whitening(sample)
    weights, values, out = sample.weights[None], sample.values[None], sample.out[None]
    by_channel = squares_by_channel(weights, values, out, sample.cells)[0]
    trace = (by_channel / white.square()).sum(-1)
    largest = torch.minimum(POWER_MARGIN * _largest(sample, white), trace)
    sure = (sure_apart(sample, roundoff) / white).norm(dim=-1)
    if not (numerics.sum_rounded_p is True and numerics.shared_p):
        own = scale * roundoff * torch.sqrt(squares(sample.weights, sample.cells))
        for delta in sample.deltas:
            own = torch.maximum(own, AUDIT * delta.sum(-1).abs())
        sure = sure + own.clamp(max=roundoff) * (sample.out / white).norm(dim=-1)
    return Norms(roundoff**2 * trace, roundoff**2 * largest, sure)


def _largest(sample: Sample, white: torch.Tensor) -> torch.Tensor:
    """[n] the largest eigenvalue of Σ c cᵀ over cells, c = p (v - o) in whitened channels, from below.

    Cells are taken as if they were both: one error, and independent ones.
    """
    x = torch.ones_like(white)
    size = x.new_zeros(len(x))
    for _ in range(POWER_STEPS):
        x = x / (x.norm(dim=-1, keepdim=True) * white).clamp(min=torch.finfo(x.dtype).tiny)
        y = sample.weights * (x @ sample.values.T - (x * sample.out).sum(-1, keepdim=True))
        y = sample.weights * _with_cells(y, sample.cells)
        x = (y @ sample.values - y.sum(-1, keepdim=True) * sample.out) / white
        size = x.norm(dim=-1)
    return size


def _with_cells(y: torch.Tensor, found: Cells) -> torch.Tensor:
    """y [n j], and to each member of a cell the sum over the cell besides."""
    if not len(found.row):
        return y
    sums = y.new_zeros(len(found.of)).index_add(0, found.cell, y[found.row, found.key])
    return y.index_put((found.row, found.key), sums[found.cell], accumulate=True)


def lengths(found: list[Sample], got: torch.Tensor, numerics: Numerics, query: torch.dtype) -> Reading:
    """The row whose error is longest for what it may be. got: [t h v]."""
    checks = sum(len(sample.out) for sample in found)
    rare, scale = math.log(2.0 * checks / FALSE_ALARM), deviations(2 * checks)
    readings = []
    for sample in found:
        white, norms = whitening(sample), _norms(sample, numerics, query, scale)
        half = (sample.half / white).square()
        trace, largest = norms.trace + half.sum(-1), norms.largest + half.amax(-1)
        chance = trace + 2.0 * torch.sqrt(trace * largest * rare) + 2.0 * largest * rare
        limit = torch.sqrt(chance) + norms.sure
        length = ((of(got, sample) - sample.out) / white).norm(dim=-1)
        row = int((length / limit).nan_to_num(nan=math.inf).argmax())
        place = int(sample.tokens[row]), int(sample.heads[row])
        effect = float(length[row] / torch.sqrt(trace[row]))
        readings.append(Reading("length", float(length[row]), float(limit[row]), effect, place))
    return max(readings, key=lambda reading: reading.ratio)


def finding(readings: list[Reading], inputs: Any, words: str) -> Finding:
    """The reading farthest beyond its limit, or nearest to it. words: what its effect means."""
    worst = max(readings, key=lambda reading: reading.ratio)
    index, ratio = worst.where or (), worst.ratio
    where = place("t h", index, inputs) if index else "all rows together"
    at = Worst(
        tensor="out", index=index, got=worst.value, want=0.0, bound=worst.limit, ratio=ratio, place=where
    )
    if ratio <= 1.0:
        return Finding(ok=True, worst=at, num_checked=len(readings))
    bad = sum(reading.ratio > 1.0 for reading in readings)
    detail = (
        f"out: {worst.name} at {where}: {worst.value:.4g}, where {worst.limit:.4g} is likely at most "
        f"({ratio:.3g} × the limit); {words.format(effect=worst.effect, times=1.0 + worst.effect)}"
    )
    return Finding(ok=False, detail=detail, worst=at, num_bad=bad, num_checked=len(readings))
