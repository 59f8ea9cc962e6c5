"""Every tolerance of the project: how far a right implementation may be from the truth, element by element.

Nothing here is tuned. A bound follows from the number formats that a backend declares (``Numerics``), from
the lengths, and from the magnitudes of the case's own data; ``docs/bounds.md`` has the derivation in full.
All bounds are schedule-free: any order of sums, any tile, any split that the numerics allow.

Write u for the accumulator's unit roundoff and γ(k) = k·u / (1 - k·u). One row computes

    out = Σ ŵ_j (1 + α_j) v_j / Σ ŵ_j (1 + β_j),     ŵ_j = w_j (1 + θ_j),   |θ_j| ≤ τ_j

θ collects what numerator and denominator share (scores, exponentials, rescaling, split weights), α what only
the numerator has (rounded weights, the products with the values), β what only the denominator has. With o the
exact result and p the exact weights, the shared errors move it by at most

    Δ = sqrt(Σ p τ) · sqrt(Σ p τ (v - o)²) / (1 - Σ p τ)         (centring, then Cauchy-Schwarz)

and never out of the convex hull of the values; where Σ p τ ≥ 1/2 the hull is all that is guaranteed.

The truth's own float64 error has the same form, so u is enlarged by float64's roundoff and covers both.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mla_ref.numerics import EXACT, Numerics
from oracles.exact import Rows, attention_rows, mix, operand_dtype

FLOAT64_ROUNDOFF = 2.0**-53

# Roundings that do not grow with any length: padding of a matrix unit's blocks, conversions, a last division.
SPARE_ROUNDINGS = 20

# A bound is itself computed in float64, with a relative error far below this.
INFLATION = 1.0 + 2.0**-20

# From here on the shared error is no longer a perturbation and only the convex hull is claimed.
ILL_CONDITIONED = 0.5


class Admissible(NamedTuple):
    """What a right implementation may return: roundings to ``dtype`` of all within ``radius`` of ``mid``.

    mid, radius: float64. ill: rows of which only the convex hull of the values is claimed.
    """

    mid: torch.Tensor
    radius: torch.Tensor
    dtype: torch.dtype
    ill: int = 0

    def interval(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and greatest admissible value, float64: rounding is monotone, so no further error enters."""
        return nearest(self.mid - self.radius, self.dtype), nearest(self.mid + self.radius, self.dtype)


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 ``x`` rounded once to ``dtype``, ties to even, as float64; beyond the largest value, infinite.

    torch goes from float64 to 16-bit types by way of float32 and so rounds twice.
    """
    if dtype == torch.float64:
        return x
    step = spacing(x, dtype)
    rounded = torch.round(x / step) * step
    return torch.where(
        rounded.abs() > torch.finfo(dtype).max, torch.copysign(rounded * torch.inf, x), rounded
    )


def spacing(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of ``dtype`` in the binade of float64 ``x``, from its exponent bits."""
    info = torch.finfo(dtype)
    exponent = (x.abs().view(torch.int64) >> 52).clamp(min=math.frexp(info.tiny)[1] + 1022)
    return ((exponent + (math.frexp(info.eps)[1] - 1)).clamp(min=1) << 52).view(torch.float64)


class Format(NamedTuple):
    """A number format.

    roundoff: relative error of rounding to nearest. underflow: absolute error below the smallest normal
        number.
    flush: the same where subnormal numbers are replaced by zero.
    """

    roundoff: float
    underflow: float
    flush: float


def number_format(name: str, query: torch.dtype) -> Format:
    """The format that a field of ``Numerics`` names; nothing is lost where it is "exact"."""
    if name == EXACT:
        return Format(0.0, 0.0, 0.0)
    info = torch.finfo(operand_dtype(name, query))
    return Format(info.eps / 2, info.tiny * info.eps / 2, info.tiny)


def accumulator(numerics: Numerics, query: torch.dtype) -> Format:
    """The format of scores, softmax and sums, its roundoff enlarged by the truth's own."""
    name = numerics.accumulate
    if name == "compute":
        name = "float64" if query == torch.float64 else "float32"
    fmt = number_format(name, query)
    return fmt._replace(roundoff=fmt.roundoff + FLOAT64_ROUNDOFF)


def gamma(roundings: torch.Tensor | float, roundoff: float) -> torch.Tensor:
    """γ: the relative error of a product of ``roundings`` factors 1 + δ, |δ| ≤ roundoff."""
    total = torch.as_tensor(roundings, dtype=torch.float64) * roundoff
    return (total / (1.0 - total)).masked_fill(total >= 1.0, math.inf)


def attention(inputs: Any, numerics: Numerics) -> dict[str, Admissible]:
    """Admissible ``out`` and ``lse`` of ``latent_attention`` and ``attention``."""
    query = _query(inputs)
    width = inputs.w_uv.shape[1] if hasattr(inputs, "w_uk") else query.shape[2]
    out = query.new_full((2, *query.shape[:2], width), torch.nan, dtype=torch.float64)
    lse = query.new_full((2, *query.shape[:2]), torch.nan, dtype=torch.float64)
    ill = 0
    for rows in attention_rows(inputs, numerics):
        shared = _shared(rows, inputs, numerics)
        parts = (rows.out, _out_radius(rows, shared, inputs, numerics), rows.lse, _lse_radius(rows, shared))
        for whole, part in zip((*out, *lse), parts, strict=True):
            whole[rows.tokens, rows.heads] = part.transpose(0, 1)
        ill += int((shared.total >= ILL_CONDITIONED).sum())
    return {
        "out": Admissible(out[0], out[1], query.dtype, ill),
        "lse": Admissible(lse[0], lse[1], torch.float32),
    }


# Problem name -> (inputs, numerics) -> what each field of its output may be.
ADMISSIBLE: dict[str, Callable[[Any, Numerics], dict[str, Admissible]]] = {
    "latent_attention": attention,
    "attention": attention,
}


class _Shared(NamedTuple):
    """What one row's output and log-sum-exp have in common; [h s …].

    format: the accumulator's. keys: visible keys of each row, at least 1 [s].
    excess [h s j]: Σ over it bounds what the shared errors add to the weights' sum, p·τ. total [h s]: its
        sum.
    sums: γ of adding the weights, or their products with a channel, over all tiles and splits [s].
    normaliser: relative error of the denominator, however the row is divided by it.
    lse: error of the log-sum-exp beyond that of its weights.
    """

    format: Format
    keys: torch.Tensor
    excess: torch.Tensor
    total: torch.Tensor
    sums: torch.Tensor
    normaliser: torch.Tensor
    lse: torch.Tensor


def _query(inputs: Any) -> torch.Tensor:
    query: torch.Tensor = inputs.q_nope if hasattr(inputs, "w_uk") else inputs.ql_nope
    return query


def _dot_error(rows: Rows, inputs: Any, numerics: Numerics, acc: Format) -> torch.Tensor:
    """[h s j] |computed - exact| of q · k before scaling, projections of the query or the key included.

    A dot of D products errs by γ(D) Σ|q||k|. The absorbed query adds its own dot over p and its rounding to
    the operand type, both common to all keys; expanded keys add the dot over c and theirs, key by key.
    """
    c, r = rows.kv_c.shape[1], rows.k_pe.shape[1]
    per_product = numerics.dot_roundings
    query_size = rows.q_latent.abs()
    dot = gamma(per_product * (c + r) + SPARE_ROUNDINGS, acc.roundoff)
    nope_error, pe_error = dot * query_size, dot * rows.q_pe.abs()
    if numerics.form != "latent":
        operand = number_format(numerics.operand, _query(inputs).dtype)
        q_size = inputs.q_nope[rows.tokens, rows.heads].double().abs()
        w_size = inputs.w_uk[rows.heads].double().abs()
        reach = torch.einsum("shp,hpc->shc", q_size, w_size)
        p = q_size.shape[2]
        if numerics.form == "absorbed":
            projected = gamma(per_product * p + SPARE_ROUNDINGS, acc.roundoff) * reach
            projected = projected + operand.roundoff * (query_size + projected) + operand.underflow
            nope_error = projected + dot * (query_size + projected)
        else:
            nope_error = gamma(per_product * (c + p + r) + 2 * SPARE_ROUNDINGS, acc.roundoff) * reach
    error = torch.einsum("shc,jc->hsj", nope_error, rows.kv_c.abs())
    error = error + torch.einsum("shr,jr->hsj", pe_error, rows.k_pe.abs())
    if numerics.form == "expanded" and operand.roundoff:
        keys = torch.einsum("jc,hpc->hjp", rows.kv_c, inputs.w_uk[rows.heads].double()).abs()
        size = torch.einsum("shp,hjp->hsj", q_size, keys) + error
        error = error + (1.0 + dot) * (
            operand.roundoff * size + operand.underflow * q_size.sum(-1).T[..., None]
        )
    return error


def _shared(rows: Rows, inputs: Any, numerics: Numerics) -> _Shared:
    """The errors that numerator and denominator share, as excess weight.

    Relative error of a weight, e^η (1 + ε)^(T+1) - 1, with η of its exponent: the dot's; 4u|s| for scaling
    (the scale, a change of base, their product, its application); 3u(m - s) for subtracting the maximum and
    changing base, telescoped over T rescalings; u|m| where tiles round the scaled maximum apart; and per
    merge the rounding of the partial log-sum-exp, its subtraction and exponential. A maximum that is itself
    inexact is
    no error: any shift cancels.
    """
    acc = accumulator(numerics, _query(inputs).dtype)
    u, splits, depth = acc.roundoff, numerics.max_splits, numerics.merge_depth
    exp_error, log_error = numerics.exp_error * u, numerics.log_error * u
    keys = rows.seen.sum(-1).clamp(min=1).double()
    tiles = torch.ceil(keys / numerics.min_tile) + 1.0
    hidden = ~rows.seen
    top, lse = (x.nan_to_num(nan=torch.nan, neginf=0.0) for x in (rows.top, rows.lse))
    size = rows.scores.abs().masked_fill(hidden, 0.0)
    drop = (top[..., None] - rows.scores).masked_fill(hidden, 0.0)
    scaled = abs(inputs.softmax_scale) * _dot_error(rows, inputs, numerics, acc).masked_fill(hidden, 0.0)
    error = scaled + 4.0 * u * (size + scaled)
    largest = _largest(error)[..., None]
    error = error + u * top.abs()[..., None] + 3.0 * u * (drop + error + largest)
    log_keys = torch.log(keys)
    merge = torch.zeros_like(top)
    if splits > 1:
        lse_size = _largest(size) + largest[..., 0] + log_keys
        merge = depth * (log_error * (1.0 + log_keys) + exp_error + 10.0 * u * lse_size)
    growth = error + merge[..., None] + ((tiles + 1.0) * math.log1p(exp_error + u))[:, None]
    excess = torch.where(
        growth < 1.0, rows.weights * torch.expm1(growth), torch.exp(rows.scores - lse[..., None] + growth)
    )
    excess = (excess + ((tiles + 2.0) * acc.flush)[:, None]).masked_fill(hidden, 0.0)
    per_key = max(numerics.dot_roundings, 1.0)
    sums = gamma(per_key * keys + 2.0 * tiles + splits + 4 * depth + SPARE_ROUNDINGS, u)
    rounding = 4.0 * u * (lse.abs() + top.abs()) + log_error * (1.0 + log_keys) + exp_error
    denominator = sums
    if numerics.p != EXACT and numerics.sum_rounded_p is not False:
        p = number_format(numerics.p, _query(inputs).dtype)
        denominator = sums + p.roundoff + keys * p.underflow
    return _Shared(
        format=acc,
        keys=keys,
        excess=excess,
        total=excess.sum(-1),
        sums=sums,
        normaliser=denominator + rounding,
        lse=denominator / (1.0 - denominator) + rounding + merge,
    )


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _lse_radius(rows: Rows, shared: _Shared) -> torch.Tensor:
    """[h s] ln Σ p e^η, which holds for errors of any size, plus the rounding of the logarithm itself."""
    radius = (torch.log1p(shared.total) + shared.lse) * INFLATION
    return radius.masked_fill(~rows.seen.any(-1), 0.0)


class _Mixture(NamedTuple):
    """Weighted sums under shared errors: Δ, and the Σ p (1 + τ) |v| / (1 - Σ p τ) of relative errors."""

    shift: torch.Tensor
    mass: torch.Tensor


def _mixture(rows: Rows, shared: _Shared, values: torch.Tensor, mean: torch.Tensor) -> _Mixture:
    total = shared.total[..., None]
    room = 1.0 - total.clamp(max=ILL_CONDITIONED)
    square = mix(shared.excess, values.square()) + mean.square() * total
    centred = (square - 2.0 * mean * mix(shared.excess, values)).clamp(min=0.0) + 2.0**-40 * square
    low, high = _hull(rows.seen, values)
    hull = torch.maximum(high - mean, mean - low).clamp(min=0.0)
    ill = total >= ILL_CONDITIONED
    shift = torch.where(ill, hull, torch.minimum(torch.sqrt(total * centred) / room, hull))
    largest = torch.maximum(high.abs(), low.abs())
    mass = mix(rows.weights + shared.excess, values.abs()) / room
    return _Mixture(shift, torch.where(ill, largest, torch.minimum(mass, largest)))


def _hull(seen: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest value [1 or h, s, x] among the keys of each row; every row sees a prefix."""
    count = seen.sum(-1)
    if not values.shape[1]:
        empty = values.new_zeros(values.shape[0], seen.shape[0], values.shape[2])
        return empty, empty
    if seen.shape[0] == 1:
        return values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    last = (count - 1).clamp(min=0)
    return values.cummin(1).values[:, last], values.cummax(1).values[:, last]


def _mixed_radius(
    mixture: _Mixture,
    reach: torch.Tensor,
    rounded: torch.Tensor,
    absolute: torch.Tensor,
    mean: torch.Tensor,
    shared: _Shared,
    numerics: Numerics,
    query: torch.dtype,
) -> torch.Tensor:
    """[h s x] Δ + [u_P · rounded + ρ · reach + absolute + ν (|o| + Δ)] / (1 - ν).

    rounded, reach: magnitudes that the rounding of the weights and every rounding of a single channel act on.
    absolute: numerator errors that are no multiple of those. ν: the denominator's, common to all channels.
    """
    p = number_format(numerics.p, query)
    partial = (1.0 + number_format(numerics.partial, query).roundoff) ** numerics.merge_depth
    channel = ((1.0 + shared.sums) * partial - 1.0)[:, None] * (1.0 + p.roundoff)
    numerator = p.roundoff * rounded + channel * reach + absolute
    normaliser = shared.normaliser[..., None]
    radius = (numerator + normaliser * (mean.abs() + mixture.shift)) / (1.0 - normaliser)
    return mixture.shift + radius.masked_fill(normaliser >= 1.0, math.inf)


def _out_radius(rows: Rows, shared: _Shared, inputs: Any, numerics: Numerics) -> torch.Tensor:
    """[h s x] radius of the output before it is rounded to its own type.

    In latent space every channel's roundings act on Σ p|v|. Expanded values carry the error of their
    projection into that sum. An absorbed output is mixed as a latent first, so roundings of its channels act
    on Σ|w_uv| Σ p|c|, its own rounding and the last dot on |w_uv| |latent|; but the weights, shared by all
    channels, are still perturbed in the space of the values.
    """
    dtype, acc = _query(inputs).dtype, shared.format
    operand = number_format(numerics.operand, dtype)
    underflow = number_format(numerics.p, dtype).underflow
    room = 1.0 - shared.total.clamp(max=ILL_CONDITIONED)[..., None]
    flush = acc.flush * (2.0 * shared.keys + SPARE_ROUNDINGS)[:, None] / room
    seen = rows.seen.double().expand(rows.values.shape[0], -1, -1)
    lost = underflow * mix(seen, rows.values.abs()) / room
    mixture = _mixture(rows, shared, rows.values, rows.out)
    if numerics.form == "latent":
        absolute = lost + flush
        radius = _mixed_radius(
            mixture, mixture.mass, mixture.mass, absolute, rows.out, shared, numerics, dtype
        )
        return _finish(radius, rows)
    weight = inputs.w_uv[rows.heads].double().abs()
    latent_out = mix(rows.weights, rows.kv_c[None])
    latent = _mixture(rows, shared, rows.kv_c[None], latent_out)
    width = rows.kv_c.shape[1]
    dot = gamma(numerics.dot_roundings * width + SPARE_ROUNDINGS, acc.roundoff)

    def project(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hsc,hvc->hsv", x, weight)

    latent_reach = project(latent.mass)
    latent_sum = (rows.seen.double() @ rows.kv_c.abs())[None]
    if numerics.form == "expanded":
        relative = (1.0 + operand.roundoff) * dot
        value_error = operand.roundoff * mixture.mass + relative * latent_reach + operand.underflow / room
        lost = lost * (1.0 + operand.roundoff) + underflow * relative * project(latent_sum) / room
        reach = mixture.mass + value_error
        radius = _mixed_radius(
            mixture, reach, reach, value_error + lost + flush, rows.out, shared, numerics, dtype
        )
        return _finish(radius, rows)
    rounded = mixture.mass if numerics.shared_p else latent_reach
    if not numerics.shared_p:
        lost = underflow * project(latent_sum) / room
    weight_sum = weight.sum(-1)[:, None]
    absolute = lost + flush * (weight_sum + width)
    radius = _mixed_radius(mixture, latent_reach, rounded, absolute, rows.out, shared, numerics, dtype)
    latent_lost = underflow * latent_sum / room + flush
    latent_radius = _mixed_radius(
        latent, latent.mass, latent.mass, latent_lost, latent_out, shared, numerics, dtype
    )
    last = operand.roundoff + dot * (1.0 + operand.roundoff)
    radius = radius + last * project(latent_out.abs() + latent_radius) + operand.underflow * weight_sum
    return _finish(radius + gamma(width + SPARE_ROUNDINGS, FLOAT64_ROUNDOFF) * latent_reach, rows)


def _finish(radius: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The radius, enlarged by its own rounding; 0 on rows without a key, whose output is exactly 0."""
    radius = radius * INFLATION + 4.0 * FLOAT64_ROUNDOFF * rows.out.abs()
    return radius.masked_fill(~rows.seen.any(-1)[:, None], 0.0)
