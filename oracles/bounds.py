"""Every tolerance of the project: how far a right implementation may be from the truth, element by element.

Nothing here is tuned. A bound follows from the number formats that a backend declares (``Numerics``), from
the lengths, and from the magnitudes of the case's own data; ``docs/bounds.md`` has the derivation in full.
Bounds are schedule-free: they hold for any order of sums, any tile, any split that the numerics allow.

Write u for the accumulator's unit roundoff and γ(k) = k·u / (1 - k·u). One row of attention computes

    out = Σ ŵ_j (1 + α_j) v_j / Σ ŵ_j (1 + β_j),     ŵ_j = w_j (1 + θ_j),   |θ_j| ≤ τ_j

θ collects what numerator and denominator share (scores, exponentials, rescaling, split weights), α what only
the numerator has (rounded weights, the products with the values), β what only the denominator has. With o the
exact result and p the exact weights, the shared errors move it by at most

    Δ = sqrt(Σ p τ) · sqrt(Σ p τ (v - o)²) / (1 - Σ p τ)         (centring, then Cauchy-Schwarz)

or (Σ p τ |v| + |o| Σ p τ) / (1 - Σ p τ) where that is less, and never out of the convex hull of the values;
where Σ p τ ≥ 1/2 the hull is all that is guaranteed.

What an implementation materialises in a narrow type is known wherever its error does not reach a rounding
boundary: there the truth goes on from the rounded value, and elsewhere from the interval between the two
candidates (the stage cut).

The truth's own float64 error has the same form, so u is enlarged by float64's roundoff and covers both.

What is claimed here holds always. What holds but for one check in 10⁹, because rounding errors of the weights
do not conspire, is in ``likely.py`` and ``ensemble.py``, which have the only other tolerances.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from mla_ref.config import RopeConfig
from mla_ref.formats import CacheFormat
from mla_ref.numerics import EXACT, INPUT, Numerics
from mla_ref.problems.attention import AttentionInputs
from oracles.exact import (
    Operands,
    Rows,
    angles,
    attention_rows,
    gathered,
    merged,
    mix,
    pairs,
    unpaired,
    unprojected,
    value_width,
)

FLOAT64_ROUNDOFF = 2.0**-53

# Roundings that do not grow with any length: padding of a matrix unit's blocks, conversions, a last division.
SPARE_ROUNDINGS = 20

# A bound is itself computed in float64, with a relative error far below this.
INFLATION = 1.0 + 2.0**-20

# From here on the shared error is no longer a perturbation and only the convex hull is claimed.
ILL_CONDITIONED = 0.5

# An error that excludes nothing, and is finite so that its product with 0 is 0.
NO_CLAIM = 2.0**200

# Exponents of weights are clamped here, so that sums of them stay finite. What is cut off joins the lse.
LARGEST_GROWTH = 400.0

# Relative roundings of a frequency and of its product with the position, in the type of the angle.
ANGLE_ROUNDINGS = 16

# Outputs from here on are exactly multiplied by a power of two with the values they are made of: the smallest
# normal float32 over the last bit of 1. Products in smaller ones may be rounded at an absolute distance:
# those of small values, or of vanishing weights where the ones that count meet zeros.
LEAST_SCALED = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps


# Elements whose temporaries stay in a core's cache.
PIECE = 2**14


class Admissible(NamedTuple):
    """What a right implementation may return: roundings to ``dtype`` of all within ``radius`` of ``mid``.

    mid, radius: float64. ill: rows of which only the convex hull of the values is claimed.
    """

    mid: torch.Tensor
    radius: torch.Tensor
    dtype: torch.dtype
    ill: int = 0

    def interval(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and greatest admissible value: rounding is monotone, so no further error enters."""
        return nearest(self.mid - self.radius, self.dtype), nearest(self.mid + self.radius, self.dtype)


class Ball(NamedTuple):
    """Every float64 value within ``radius`` of ``mid``, element by element."""

    mid: torch.Tensor
    radius: torch.Tensor

    def size(self) -> torch.Tensor:
        """The largest magnitude in the ball."""
        return self.mid.abs() + self.radius


class Format(NamedTuple):
    """A number format.

    roundoff: relative error of rounding to nearest. underflow: absolute error below the smallest normal
        number.
    flush: the same where subnormal numbers are replaced by zero.
    """

    roundoff: float
    underflow: float
    flush: float


def type_named(name: str, query: torch.dtype) -> torch.dtype:
    """The type that a field of ``Numerics`` names; float64 for "exact".

    Raises: ValueError if it names none.
    """
    if name == EXACT:
        return torch.float64
    dtype = query if name == INPUT else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"numerics: {name!r} is no torch dtype, nor {INPUT!r} or {EXACT!r}")
    return dtype


def number_format(name: str, query: torch.dtype) -> Format:
    """The format that a field of ``Numerics`` names; nothing is lost where it is "exact"."""
    if name == EXACT:
        return Format(0.0, 0.0, 0.0)
    dtype = type_named(name, query)
    info = torch.finfo(dtype)
    return Format(info.eps / 2 + _twice_rounded(query, dtype), info.tiny * info.eps / 2, info.tiny)


def _twice_rounded(source: torch.dtype, target: torch.dtype) -> float:
    """What a conversion may err beyond the target's roundoff: from float64 it goes by way of float32."""
    narrow = torch.finfo(target).eps > torch.finfo(torch.float32).eps
    return torch.finfo(torch.float32).eps if source == torch.float64 and narrow else 0.0


def accumulator(numerics: Numerics, query: torch.dtype) -> Format:
    """The format of scores, softmax and sums, its roundoff enlarged by the truth's own."""
    name = numerics.accumulate
    if name == "compute":
        name = "float64" if query == torch.float64 else "float32"
    fmt = number_format(name, query)
    return fmt._replace(roundoff=fmt.roundoff + FLOAT64_ROUNDOFF)


def gamma(roundings: torch.Tensor | float, roundoff: float) -> torch.Tensor:
    """γ: the relative error of a product of ``roundings`` factors 1 + δ, |δ| ≤ roundoff."""
    return _compounded(torch.as_tensor(roundings, dtype=torch.float64) * roundoff)


def _compounded(x: torch.Tensor) -> torch.Tensor:
    """x / (1 - x), or whatever excludes nothing from 1 on."""
    return (x / (1.0 - x)).masked_fill(x >= 1.0, NO_CLAIM)


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 ``x`` rounded once to ``dtype``, ties to even, as float64; beyond the largest value, infinite.

    torch goes from float64 to 16-bit types by way of float32 and so rounds twice.
    """
    if dtype == torch.float64:
        return x
    return in_pieces(partial(_nearest, dtype=dtype), x)


def _nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float32:
        return x.to(dtype).double()
    step = spacing(x, dtype)
    rounded = (x / step).round_().mul_(step)
    if dtype in (torch.bfloat16, torch.float16):
        return rounded.to(dtype).double()  # exact as it stands, and infinite beyond the largest value
    beyond = rounded.abs() > torch.finfo(dtype).max
    return torch.where(beyond, torch.copysign(rounded * torch.inf, x), rounded)


def spacing(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of ``dtype`` in the binade of float64 ``x``, from its exponent bits."""
    info = torch.finfo(dtype)
    least = math.frexp(info.tiny)[1] + 1022
    exponent = (x.abs().view(torch.int64) >> 52).clamp_(min=least).add_(math.frexp(info.eps)[1] - 1)
    return exponent.clamp_(min=1).bitwise_left_shift_(52).view(torch.float64)


def in_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What a function makes of every element. On the CPU a piece at a time: what it makes fits in a cache."""
    if x.device.type != "cpu" or x.numel() <= PIECE:
        return function(x)
    return torch.cat([function(piece) for piece in torch.split(x.reshape(-1), PIECE)]).reshape(x.shape)


def materialised(ball: Ball, name: str, query: torch.dtype) -> Ball:
    """A ball after rounding to the type named: a single value wherever both its ends round to the same."""
    if name == EXACT:
        return ball
    dtype = type_named(name, query)
    radius = ball.radius + _twice_rounded(query, dtype) * ball.size()
    return _between(nearest(ball.mid - radius, dtype), nearest(ball.mid + radius, dtype), ball.mid)


def linear(x: Ball, weight: torch.Tensor, numerics: Numerics, acc: Format) -> Ball:
    """x weightᵀ, for x [… i] and weight [o i]: its own error, and γ of the sum of magnitudes.

    A product with a weight of 0 is 0 and changes no sum, in whatever order: only the others are rounded.
    """
    size = weight.abs()
    terms = (weight != 0.0).sum(dim=1)
    dot = gamma(numerics.dot_roundings * terms + SPARE_ROUNDINGS, acc.roundoff)
    return Ball(x.mid @ weight.T, x.radius @ size.T + dot * (x.size() @ size.T) + acc.flush)


def attention(inputs: Any, numerics: Numerics) -> dict[str, Admissible]:
    """Admissible ``out`` and ``lse`` of ``latent_attention``, ``attention`` and ``paged_attention``."""
    dtype = inputs[0].dtype
    out, lse, ill = attended(inputs, numerics, dtype)
    return {"out": Admissible(*out, dtype, ill), "lse": Admissible(*lse, torch.float32)}


def attended(
    inputs: Any,
    numerics: Numerics,
    dtype: torch.dtype,
    query_error: tuple[torch.Tensor, torch.Tensor] | None = None,
    weighing: "Weighing | None" = None,
) -> tuple[Ball, Ball, int]:
    """out [t h v] before it is rounded to its type, lse [t h], and the number of ill-conditioned rows.

    dtype: the query's. query_error: how far the two parts of the query may be from those of ``inputs``, where
    they are not given but computed. weighing: what the rounding of the weights does; None: the most it can.
    """
    query, projected = inputs[0], hasattr(inputs, "w_uk")
    if (numerics.form != "latent") != projected:
        forms = "absorbed or expanded" if projected else "latent"
        raise ValueError(f"numerics: form is {numerics.form!r}, must be {forms} for {type(inputs).__name__}")
    out = query.new_full((2, *query.shape[:2], value_width(inputs)), torch.nan, dtype=torch.float64)
    lse = query.new_full((2, *query.shape[:2]), torch.nan, dtype=torch.float64)
    weighing, ill = weighing or certainly(numerics, dtype), 0

    for rows, shared in rows_and_errors(inputs, numerics, dtype, query_error):
        judged = _Judged(rows, shared, inputs, numerics, dtype, weighing)
        parts = (*_row_out(judged), rows.lse, _lse_radius(rows, shared, weighing.lse(rows, shared)))
        for whole, part in zip((*out, *lse), parts, strict=True):
            whole[rows.tokens, rows.heads] = part.transpose(0, 1)
        ill += int((shared.total >= ILL_CONDITIONED).sum())
    return Ball(*out), Ball(*lse), ill


def rows_and_errors(
    inputs: Any,
    numerics: Numerics,
    dtype: torch.dtype,
    query_error: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Iterator[tuple[Rows, "Shared"]]:
    """Every row of an attention problem as the declared form computes it, and what it errs by."""
    acc = accumulator(numerics, dtype)
    prepare = partial(_operands, numerics=numerics, dtype=dtype, query_error=query_error)
    for rows in attention_rows(inputs, type_named(numerics.kv, dtype), prepare):
        error = abs(inputs.softmax_scale) * _dot_error(rows.operands, numerics, acc)
        yield rows, _shared(rows, error.masked_fill(~rows.seen, 0.0), numerics, dtype)


def _operands(
    inputs: Any,
    tokens: slice,
    heads: slice,
    key: torch.Tensor,
    k_pe: torch.Tensor,
    value: torch.Tensor,
    numerics: Numerics,
    dtype: torch.dtype,
    query_error: tuple[torch.Tensor, torch.Tensor] | None,
) -> Operands:
    """What the declared form multiplies, each operand rounded where that form materialises it.

    absorbed: the query times w_uk, a dot over p, rounded to the operand type; values stay latent.
    expanded: keys and values of each head, dots over c, rounded to the operand type. Where they are not
    rounded, scores are those of the latent space, and the dot over c is charged to the query.
    """
    nope_error, pe_error = (x[tokens, heads] for x in query_error) if query_error else (None, None)
    acc = accumulator(numerics, dtype)
    if numerics.form == "expanded" and numerics.operand != EXACT:
        query, q_pe = (x[tokens, heads].double() for x in inputs[:2])
        keys, values = (
            _expanded(latent, weight[heads].double(), numerics, acc, dtype)
            for latent, weight in ((key, inputs.w_uk), (value, inputs.w_uv))
        )
        return Operands(
            query, q_pe, keys.mid, k_pe, values.mid, nope_error, pe_error, keys.radius, values.radius
        )
    plain = unprojected(inputs, tokens, heads, key, k_pe, value)
    if numerics.form == "latent":
        return plain._replace(query_error=nope_error, pe_error=pe_error)
    size = inputs.w_uk[heads].double().abs()
    query = inputs[0][tokens, heads].double().abs()
    given = torch.zeros_like(plain.query)
    if nope_error is not None:
        query, given = query + nope_error, torch.einsum("shp,hpc->shc", nope_error, size)
    reach = torch.einsum("shp,hpc->shc", query, size)
    p, c = size.shape[1:]
    if numerics.form == "absorbed":
        dot = gamma(numerics.dot_roundings * p + SPARE_ROUNDINGS, acc.roundoff)
        latent = materialised(Ball(plain.query, given + dot * reach), numerics.operand, dtype)
        return plain._replace(query=latent.mid, query_error=latent.radius, pe_error=pe_error)
    dot = gamma(numerics.dot_roundings * (c + p) + 2 * SPARE_ROUNDINGS, acc.roundoff)
    return plain._replace(query_error=given + dot * reach, pe_error=pe_error)


def _expanded(
    latent: torch.Tensor, weight: torch.Tensor, numerics: Numerics, acc: Format, query: torch.dtype
) -> Ball:
    """Keys or values [h j x] of each head, in the operand type."""
    dot = gamma(numerics.dot_roundings * weight.shape[2] + SPARE_ROUNDINGS, acc.roundoff)
    exact = torch.einsum("jc,hxc->hjx", latent, weight)
    reach = torch.einsum("jc,hxc->hjx", latent.abs(), weight.abs())
    return materialised(Ball(exact, dot * reach), numerics.operand, query)


def _dot_error(operands: Operands, numerics: Numerics, acc: Format) -> torch.Tensor:
    """[h s j] |computed - exact| of q · k before scaling: γ(x + r) Σ|q||k|, and what the operands bring."""
    query, q_pe, key, k_pe = operands[:4]
    dot = gamma(numerics.dot_roundings * (key.shape[-1] + k_pe.shape[-1]) + SPARE_ROUNDINGS, acc.roundoff)
    nope = Ball(query, torch.zeros_like(query) if operands.query_error is None else operands.query_error)
    pe = Ball(q_pe, torch.zeros_like(q_pe) if operands.pe_error is None else operands.pe_error)
    key_size = key.abs() if operands.key_error is None else key.abs() + operands.key_error
    error = mix((nope.radius + dot * nope.size()).transpose(0, 1), key_size.transpose(1, 2))
    error = error + torch.einsum("shr,jr->hsj", pe.radius + dot * pe.size(), k_pe.abs())
    if operands.key_error is not None:
        error = error + mix(query.abs().transpose(0, 1), operands.key_error.transpose(1, 2))
    return error


class Shared(NamedTuple):
    """What one row's output and log-sum-exp have in common; [h s …].

    format: the accumulator's. keys: visible keys of each row, at least 1 [s].
    excess [h s j]: its sum bounds what the shared errors add to the sum of the weights, p·τ. total [h s]: it.
    share [h s]: no key's excess is more than this of what is its weight then, but for ``flushed`` [s] of all
        keys together, which a vanishing weight may be wrong by.
    sums: γ of adding the weights, or their products with a channel, over all tiles and splits [s].
    summed: roundoff of the weights that the denominator sums; 0 where they are not rounded.
    denominator [s]: relative error of the denominator beyond that.
    division [h s]: of dividing by it, however the row is divided.
    lse [h s]: error of the log-sum-exp beyond that of its weights and of their sum.
    """

    format: Format
    keys: torch.Tensor
    excess: torch.Tensor
    total: torch.Tensor
    share: torch.Tensor
    flushed: torch.Tensor
    sums: torch.Tensor
    summed: float
    denominator: torch.Tensor
    division: torch.Tensor
    lse: torch.Tensor


class Weighing(NamedTuple):
    """What the rounding of the weights may do.

    moved: (rows, shared, values, mean, mixture, reach) -> by how much it moves Σ p v [h s v], and relative to
        the mean what it does to the denominator beyond that [h s]. reach [h s v]: Σ p|v| that it acts on.
    lse: (rows, shared) -> relative to their sum, by how much it moves the sum of the weights [h s].
    """

    moved: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    lse: Callable[[Rows, Shared], torch.Tensor]


def certainly(numerics: Numerics, query: torch.dtype) -> Weighing:
    """Every weight errs by its whole roundoff, in the worst direction."""
    roundoff = number_format(numerics.p, query).roundoff

    def moved(
        rows: Rows,
        shared: Shared,
        values: torch.Tensor,
        mean: torch.Tensor,
        mixture: "Mixture",
        reach: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return roundoff * reach, lse(rows, shared)

    def lse(rows: Rows, shared: Shared) -> torch.Tensor:
        return torch.full_like(shared.total, shared.summed)

    return Weighing(moved, lse)


class _Judged(NamedTuple):
    """Rows, what they err by, and what it depends on."""

    rows: Rows
    shared: Shared
    inputs: Any
    numerics: Numerics
    dtype: torch.dtype
    weighing: Weighing


def _shared(rows: Rows, scaled: torch.Tensor, numerics: Numerics, query: torch.dtype) -> Shared:
    """The errors that numerator and denominator share, as excess weight. scaled [h s j]: the scores' own.

    Relative error of a weight, e^η (1 + ε)^(T+1) - 1, with η of its exponent: the score's; 4u|s| for scaling
    (the scale, a change of base, their product, its application); 3u(m - s + 2λ) for subtracting the maximum
    and changing base, telescoped over T rescalings, where scores may be λ above it; u of the largest maximum
    so far where tiles round the scaled maximum apart; and per merge the rounding of the partial log-sum-exp,
    its subtraction and exponential. A maximum that is itself inexact is no error: any shift cancels.
    """
    acc = accumulator(numerics, query)
    u, splits, depth = acc.roundoff, numerics.max_splits, numerics.merge_depth
    exp_error, log_error = numerics.exp_error * u, numerics.log_error * u
    keys = rows.seen.sum(-1).clamp(min=1).double()
    tiles = torch.ceil(keys / numerics.min_tile) + 1.0
    unseen = rows.scores.isneginf()
    top, lse = (x.masked_fill(x.isneginf(), 0.0) for x in (rows.top, rows.lse))
    size = rows.scores.abs().masked_fill(unseen, 0.0)
    drop = (top[..., None] - rows.scores).masked_fill(unseen, 0.0)
    error = scaled + 4.0 * u * (size + scaled)
    largest = _largest(error)[..., None]
    lag = (_largest(drop) + 2.0 * largest[..., 0]).clamp(max=numerics.slack * math.log(2.0))
    held = torch.maximum(size, top.abs()[..., None]) + lag[..., None]
    error = error + u * held + 3.0 * u * (drop + 2.0 * lag[..., None] + error + largest)
    log_keys = torch.log(keys)
    log_sum = 1.0 + log_keys + lag
    merge = torch.zeros_like(top)
    if splits > 1:
        lse_size = _largest(size) + largest[..., 0] + log_keys
        merge = depth * (log_error * log_sum + exp_error + 10.0 * u * lse_size)
    growth = error + merge[..., None] + ((tiles + 1.0) * math.log1p(exp_error + u))[:, None]
    beyond = (_largest(growth) - LARGEST_GROWTH).clamp(min=0.0)
    growth = growth.clamp(max=LARGEST_GROWTH)
    excess = torch.where(
        growth < 1.0, rows.weights * torch.expm1(growth), torch.exp(rows.scores - lse[..., None] + growth)
    )
    flushed = (tiles + 2.0) * acc.flush
    excess = (excess + flushed[:, None]).masked_fill(unseen, 0.0)
    per_key = max(numerics.dot_roundings, 1.0)
    sums = gamma(per_key * keys + 2.0 * tiles + splits + 4 * depth + SPARE_ROUNDINGS, u)
    rounding = 4.0 * u * (lse.abs() + top.abs() + lag) + log_error * log_sum + exp_error
    denominator, summed = sums, 0.0
    if numerics.p != EXACT and numerics.sum_rounded_p is not False:
        p = number_format(numerics.p, query)
        denominator, summed = sums + keys * p.underflow, p.roundoff
    return Shared(
        format=acc,
        keys=keys,
        excess=excess,
        total=excess.sum(-1),
        share=_share(_largest(growth)),
        flushed=flushed * keys,
        sums=sums,
        summed=summed,
        denominator=denominator,
        division=rounding,
        lse=rounding + merge + beyond,
    )


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _share(growth: torch.Tensor) -> torch.Tensor:
    """The most that e^growth - 1 is of e^growth; from 1 on all of it, since there the excess is e^growth."""
    return torch.where(growth < 1.0, -torch.expm1(-growth), 1.0)


def _lse_radius(rows: Rows, shared: Shared, summed: torch.Tensor) -> torch.Tensor:
    """[h s] ln Σ p e^η, which holds for errors of any size, plus the rounding of the logarithm itself.

    summed: what rounding the weights does to their sum.
    """
    own = _compounded(shared.denominator + summed)
    radius = (torch.log1p(shared.total) + own + shared.lse) * INFLATION
    return radius.masked_fill(rows.lse.isneginf(), 0.0)


class Mixture(NamedTuple):
    """Weighted sums under shared errors: Δ, and the Σ p (1 + τ) |v| / (1 - Σ p τ) of relative errors."""

    shift: torch.Tensor
    mass: torch.Tensor


def mixed(rows: Rows, shared: Shared, values: torch.Tensor, mean: torch.Tensor) -> Mixture:
    """What the shared errors do to the weighted sums of values, whose exact result is ``mean``.

    Σ p τ |v - o| by Cauchy and Schwarz, which knows what all values have in common, or term by term, as
    Σ p τ |v| + |o| Σ p τ, which knows that a channel is made of few keys.
    """
    total = shared.total[..., None]
    square = mix(shared.excess, values.square()) + mean.square() * total
    centred = (square - 2.0 * mean * mix(shared.excess, values)).clamp(min=0.0) + 2.0**-40 * square
    low, high = _hull(rows.seen, values)
    hull = torch.maximum(high - mean, mean - low).clamp(min=0.0)
    mass = _average(rows, shared, values.abs())
    largest = torch.maximum(high.abs(), low.abs())
    terms = shared.share[..., None] * (1.0 + total) * mass + shared.flushed[:, None] * largest
    apart = torch.minimum(torch.sqrt(total * centred), terms + mean.abs() * total)
    shift = torch.minimum(apart / _room(shared), hull)
    return Mixture(torch.where(total >= ILL_CONDITIONED, hull, shift), mass)


def _average(rows: Rows, shared: Shared, x: torch.Tensor) -> torch.Tensor:
    """[h s v] the most that the weighted average of x ≥ 0 [h j v] or [1 j v] is under the shared errors."""
    largest = _greatest(rows.seen, x)
    average = torch.minimum(mix(rows.weights + shared.excess, x) / _room(shared), largest)
    return torch.where(shared.total[..., None] >= ILL_CONDITIONED, largest, average)


def _room(shared: Shared) -> torch.Tensor:
    """[h s 1] what is at least left of the sum of the weights."""
    return 1.0 - shared.total.clamp(max=ILL_CONDITIONED)[..., None]


def _hull(seen: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest value [1 or h, s, v] among the keys of each row."""
    return -_greatest(seen, -values), _greatest(seen, values)


def _greatest(seen: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The greatest value [1 or h, s, v] among the keys of each row.

    Every row sees a prefix of the keys, one more than the row before it, and the last one sees all of them:
    what all rows see is looked at once.
    """
    rows, keys = seen.shape
    if not keys:
        return values.new_zeros(values.shape[0], rows, values.shape[2])
    common = max(keys - rows, 0) + 1
    first = values[:, :common].amax(1, keepdim=True)
    if rows == 1:
        return first
    last = (seen.sum(-1) - common).clamp(min=0)
    return torch.cat([first, values[:, common:]], dim=1).cummax(1).values[:, last]


def channel_roundings(shared: Shared, numerics: Numerics, query: torch.dtype) -> torch.Tensor:
    """[s 1] ρ: what every channel is rounded by: products with values, sums over keys, partial results."""
    rounded = 1.0 + number_format(numerics.p, query).roundoff
    partial = (1.0 + number_format(numerics.partial, query).roundoff) ** numerics.merge_depth
    return ((1.0 + shared.sums) * partial - 1.0)[:, None] * rounded


def _mixed_radius(
    judged: _Judged,
    values: torch.Tensor,
    mean: torch.Tensor,
    mixture: Mixture,
    reach: torch.Tensor,
    rounded: torch.Tensor,
    absolute: torch.Tensor,
) -> torch.Tensor:
    """[h s v] Δ + [u_P · rounded + ρ · reach + absolute + ν (|o| + Δ)] / (1 - ν).

    rounded, reach: magnitudes that the rounding of the weights and every rounding of a single channel act on.
    absolute: numerator errors that are no multiple of those. ν: the denominator's error, common to all
    channels.
    """
    rows, shared, _, numerics, query, weighing = judged
    moved, beyond = weighing.moved(rows, shared, values, mean, mixture, rounded)
    numerator = moved + channel_roundings(shared, numerics, query) * reach + absolute
    own = shared.denominator + shared.division
    normaliser = (own + beyond)[..., None]
    divided = (own + shared.summed)[..., None]
    radius = (numerator + normaliser * (mean.abs() + mixture.shift)) / (1.0 - divided)
    return mixture.shift + radius.masked_fill(divided >= 1.0, NO_CLAIM)


def _row_out(judged: _Judged) -> Ball:
    """[h s v] the output before it is rounded to its own type.

    In latent space every channel's roundings act on Σ p|v|. Expanded values have an error of their own, which
    is mixed like them, and roundings act on it too.
    """
    rows, shared, inputs, numerics, dtype, _ = judged
    if numerics.form == "absorbed":
        return _absorbed_out(judged)
    values = rows.operands.values
    mixture = mixed(rows, shared, values, rows.out)
    absolute, reach = numerator_errors(rows, shared, mixture, inputs, numerics, dtype)
    radius = _mixed_radius(judged, values, rows.out, mixture, reach, reach, absolute)
    return _finish(Ball(rows.out, radius), rows)


def numerator_errors(
    rows: Rows, shared: Shared, mixture: Mixture, inputs: Any, numerics: Numerics, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[h s v] errors of Σ p v that are no multiple of Σ p|v|, and the Σ p|v| that roundings act on."""
    absolute = _absolute(rows, shared, rows.operands.values, numerics, dtype)
    if numerics.form != "expanded":
        return absolute, mixture.mass
    error = _expansion_error(rows, shared, inputs, numerics)
    return absolute + error, mixture.mass + error


def _absolute(
    rows: Rows, shared: Shared, values: torch.Tensor, numerics: Numerics, query: torch.dtype
) -> torch.Tensor:
    """Underflow: of the weights in their type, of products, sums and partial results."""
    lost = number_format(numerics.p, query).underflow
    partial = number_format(numerics.partial, query).underflow * numerics.merge_depth
    flush = shared.format.flush * (2.0 * shared.keys + SPARE_ROUNDINGS)[:, None] + partial
    seen = rows.seen.double().expand(values.shape[0], -1, -1)
    return (lost * mix(seen, values.abs()) + flush) / _room(shared)


def _expansion_error(rows: Rows, shared: Shared, inputs: Any, numerics: Numerics) -> torch.Tensor:
    """[h s v] what the error of the expanded values adds to the numerator."""
    if rows.operands.value_error is not None:
        return _average(rows, shared, rows.operands.value_error)
    key = rows.operands.key
    dot = gamma(numerics.dot_roundings * key.shape[-1] + SPARE_ROUNDINGS, shared.format.roundoff)
    latent = _average(rows, shared, key.abs())
    return dot * torch.einsum("hsc,hvc->hsv", latent, inputs.w_uv[rows.heads].double().abs())


def _absorbed_out(judged: _Judged) -> Ball:
    """[h s v] the intersection of two balls, each of which holds every right output.

    The latent output is mixed and materialised before w_uv. Cut there, it is a ball of its own and w_uv is
    one more dot. Propagated, the weights perturb all channels alike, which is an error in the space of the
    values, and only what differs from channel to channel acts on Σ|w_uv| Σ p|c|. The first is sharp while the
    ball is narrower than the operand type, the second when it is not.
    """
    rows, shared, inputs, numerics, dtype, _ = judged
    operands = rows.operands
    weight = inputs.w_uv[rows.heads].double()
    size, acc = weight.abs(), shared.format

    def project(x: torch.Tensor, matrix: torch.Tensor = size) -> torch.Tensor:
        return torch.einsum("hsc,hvc->hsv", x, matrix)

    latent_out = mix(rows.weights, operands.key)
    latent = mixed(rows, shared, operands.key, latent_out)
    latent_absolute = _absolute(rows, shared, operands.key, numerics, dtype)
    latent_radius = INFLATION * _mixed_radius(
        judged, operands.key, latent_out, latent, latent.mass, latent.mass, latent_absolute
    )
    width = operands.key.shape[-1]
    dot = gamma(numerics.dot_roundings * width + SPARE_ROUNDINGS, acc.roundoff)
    cut = materialised(Ball(latent_out, latent_radius), numerics.operand, dtype)
    last = width * acc.flush
    cut_out = Ball(project(cut.mid, weight), project(cut.radius + dot * cut.size()) + last)

    mixture = mixed(rows, shared, operands.values, rows.out)
    reach = project(latent.mass)
    rounded = mixture.mass if numerics.shared_p else reach
    absolute = project(latent_absolute)
    radius = _mixed_radius(judged, operands.values, rows.out, mixture, reach, rounded, absolute)
    operand = number_format(numerics.operand, dtype)
    rounding = (operand.roundoff + dot * (1.0 + operand.roundoff)) * (latent_out.abs() + latent_radius)
    radius = radius + project(rounding + operand.underflow) + last
    radius = radius + gamma(width + SPARE_ROUNDINGS, FLOAT64_ROUNDOFF) * reach
    return intersection(_finish(cut_out, rows), _finish(Ball(rows.out, radius), rows))


def intersection(a: Ball, b: Ball) -> Ball:
    """Every value that is in both."""
    low = torch.maximum(a.mid - a.radius, b.mid - b.radius)
    high = torch.minimum(a.mid + a.radius, b.mid + b.radius)
    return _between(low, torch.maximum(low, high), b.mid)


def _between(low: torch.Tensor, high: torch.Tensor, mid: torch.Tensor) -> Ball:
    """The ball from ``low`` to ``high``; where only one of them is infinite, anything around ``mid``."""
    radius = torch.where(low == high, 0.0, (high - low) / 2.0)
    open_ended = radius == torch.inf
    return Ball(torch.where(open_ended, mid, (low + high) / 2.0), radius.masked_fill(open_ended, NO_CLAIM))


def _finish(ball: Ball, rows: Rows) -> Ball:
    """The ball enlarged by its own rounding; exactly 0 on rows without a key."""
    radius = ball.radius * INFLATION + 4.0 * FLOAT64_ROUNDOFF * ball.mid.abs()
    empty = rows.lse.isneginf()[..., None]
    return Ball(ball.mid.masked_fill(empty, 0.0), radius.masked_fill(empty, 0.0))


class Factors(NamedTuple):
    """[t h v] from which to which number a value may have been multiplied by, to become what was returned."""

    low: torch.Tensor
    high: torch.Tensor


def shares_a_factor(numerics: Numerics) -> bool:
    """Whether rounding the weights moves all channels of a row that sees one key by one factor.

    It does not where warpgroups round copies of their own, and nothing shows of it behind w_uv.
    """
    return numerics.p != EXACT and numerics.shared_p and numerics.form != "absorbed"


def factors(inputs: Any, numerics: Numerics, out: torch.Tensor) -> Factors:
    """By what the one key's value may have been multiplied, of rows of ``out`` [t h v] that see one key.

    out = RN(f v + ζ), where f is what the row's weight and its sum are, and ζ what each channel is rounded by
    on its own: its product, its sums, partial results and the division, by however many of the row's sums.
    Rounding is monotone, so f v is within ζ of the numbers that round to what was returned. No number is
    excluded where the value is 0, where what was returned is not finite, and of rows that see more keys.
    """
    dtype = inputs[0].dtype
    value, error = (torch.full_like(out, y, dtype=torch.float64) for y in (0.0, NO_CLAIM))
    heaviest = 1.0 + number_format(numerics.p, dtype).roundoff
    for rows, shared in rows_and_errors(inputs, numerics, dtype):
        mixture = mixed(rows, shared, rows.operands.values, rows.out)
        absolute, reach = numerator_errors(rows, shared, mixture, inputs, numerics, dtype)
        own = (shared.denominator + shared.division)[..., None]
        apart = (channel_roundings(shared, numerics, dtype) + heaviest * own) * reach + heaviest * absolute
        divided = own + shared.summed
        apart = (apart / (1.0 - divided)).masked_fill(divided >= 1.0, NO_CLAIM)
        single = (rows.seen.sum(-1) == 1)[:, None]
        value[rows.tokens, rows.heads] = rows.out.masked_fill(~single, 0.0).transpose(0, 1)
        error[rows.tokens, rows.heads] = apart.transpose(0, 1)
    got = out.detach().double()
    size = got.abs()
    error = error * INFLATION + 4.0 * FLOAT64_ROUNDOFF * size
    inner, outer = (0.5 * spacing(x, out.dtype) for x in (size.nextafter(torch.zeros_like(size)), size))
    # Of a value's own sign, and positive.
    got, value = got * value.sign(), value.abs()
    below, above = torch.where(got > 0.0, inner, outer), torch.where(got < 0.0, inner, outer)
    known = (value > 0.0) & got.isfinite()
    low = ((got - below - error) / value).masked_fill(~known, -torch.inf)
    return Factors(low, ((got + above + error) / value).masked_fill(~known, torch.inf))


def merge_states(inputs: Any, numerics: Numerics) -> dict[str, Admissible]:
    """Admissible ``out`` and ``lse`` of ``merge_states``: attention whose keys are the states."""
    query, (num_states, t, h, v) = inputs.outs.dtype, inputs.outs.shape
    rows = merged(inputs.outs, inputs.lses)
    declared = replace(numerics, max_splits=max(numerics.max_splits, num_states))
    shared = _shared(rows, torch.zeros_like(rows.scores), declared, query)
    values = rows.operands.values
    mixture = mixed(rows, shared, values, rows.out)
    absolute = _absolute(rows, shared, values, declared, query)
    weighing = certainly(declared, query)
    judged = _Judged(rows, shared, inputs, declared, query, weighing)
    radius = _mixed_radius(judged, values, rows.out, mixture, mixture.mass, mixture.mass, absolute)
    out = _finish(Ball(rows.out, radius), rows)
    lse = Ball(rows.lse, _lse_radius(rows, shared, weighing.lse(rows, shared)))
    return {
        "out": Admissible(out.mid.reshape(t, h, v), out.radius.reshape(t, h, v), query),
        "lse": Admissible(lse.mid.reshape(t, h), lse.radius.reshape(t, h), torch.float32),
    }


class Merged(NamedTuple):
    """A merge, in float64, of outputs as they are, and what it may be off."""

    out: Admissible
    lse: Admissible


def merge_of(outs: torch.Tensor, lses: torch.Tensor, out: Admissible, lse: Admissible) -> Merged:
    """The merge of computed states [s … v] and [s …], around its own value, given what each may be.

    With e the errors of the outputs, δ the largest of the log-sum-exps and ŵ the weights computed from them,
    a right weight is within ŵ (e^2δ - 1), and weights add up to 1 before and after. So the merge M is off by
    at most Σ ŵ e + (e^2δ - 1) Σ ŵ (|o - M| + e), and its log-sum-exp by δ.
    """
    error = out.radius + 0.5 * spacing(out.mid.abs() + out.radius, out.dtype)
    doubt = lse.radius + 0.5 * spacing(lse.mid.abs() + lse.radius, lse.dtype)
    largest = doubt.masked_fill(lse.mid.isneginf(), 0.0).amax(0)
    rows = merged(outs, lses)
    shape, states = outs.shape[1:], outs.shape[0]
    weights = rows.weights[:, 0].T.reshape(states, *shape[:-1], 1)
    mean = rows.out.reshape(shape)
    values = outs.double().masked_fill(weights == 0.0, 0.0)
    spread = (weights * ((values - mean).abs() + error)).sum(0)
    radius = (weights * error).sum(0) + torch.expm1(2.0 * largest)[..., None] * spread
    return Merged(
        Admissible(mean, radius * INFLATION, torch.float64),
        Admissible(rows.lse.reshape(shape[:-1]), largest * INFLATION, torch.float64),
    )


def cache_gather(inputs: Any, numerics: Numerics) -> dict[str, Admissible]:
    """Admissible ``kv_c`` and ``k_pe``: code · scale rounded to float32 and then to the type asked for."""

    def exactly(x: torch.Tensor) -> Admissible:
        wide = x if inputs.dtype == torch.float64 else nearest(x, torch.float32)
        return Admissible(nearest(wide, inputs.dtype), torch.zeros_like(x), inputs.dtype)

    kv_c, k_pe = gathered(inputs)
    return {"kv_c": exactly(kv_c), "k_pe": exactly(k_pe)}


def rope(inputs: Any, numerics: Numerics) -> dict[str, Admissible]:
    """Admissible ``x``, or ``q_pe`` where keys are rotated along with queries."""
    name = "x" if hasattr(inputs, "x") else "q_pe"
    x = getattr(inputs, name)
    ball = rotation(_exactly(x), inputs.positions, inputs.rope, numerics, x.dtype)
    return {name: Admissible(*ball, x.dtype)}


def rotation(
    x: Ball, positions: torch.Tensor, config: RopeConfig, numerics: Numerics, dtype: torch.dtype
) -> Ball:
    """[t h r] the pairs (a, b) turned by their angle: (a cos - b sin, b cos + a sin).

    An error of the angle is one of the table, as is the rounding of the table itself; three more roundings,
    of two products and their sum, act on |a cos| + |b sin|.
    """
    if not config.rotate or not x.mid.shape[-1]:
        return x
    acc, table = accumulator(numerics, dtype), number_format(numerics.table, dtype)
    angle = angles(config, positions, x.mid.shape[-1])[:, None]
    roundoff = number_format(numerics.angle, dtype).roundoff + FLOAT64_ROUNDOFF
    turn = (ANGLE_ROUNDINGS * roundoff * angle.abs()).clamp(max=2.0) * abs(config.table_scale)
    cos, sin = angle.cos() * config.table_scale, angle.sin() * config.table_scale
    relative = table.roundoff + 4.0 * acc.roundoff
    cos_error, sin_error = (
        turn + relative * (y.abs() + turn) + table.underflow + acc.flush for y in (cos, sin)
    )

    def total(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = pairs(x, config.interleaved)
        return unpaired(a * cos + b * sin, b * cos + a * sin, config.interleaved)

    a, b = pairs(x.mid, config.interleaved)
    mid = unpaired(a * cos - b * sin, b * cos + a * sin, config.interleaved)
    radius = total(x.radius, cos.abs(), sin.abs()) + total(x.size(), cos_error, sin_error)
    rounding = 3.0 * acc.roundoff * total(x.size(), cos.abs() + cos_error, sin.abs() + sin_error)
    return Ball(mid, (radius + rounding) * INFLATION + 4.0 * acc.flush)


def rms_norm(x: Ball, weight: torch.Tensor, eps: float, gain: float, acc: Format) -> Ball:
    """gain · weight · x / sqrt(mean x² + eps): the scale as an interval, then four products."""
    size, width = x.size(), x.mid.shape[-1]
    mean = x.mid.square().mean(-1, keepdim=True) + eps
    error = (x.radius * (x.mid.abs() + size)).mean(-1, keepdim=True)
    error = error + gamma(width + SPARE_ROUNDINGS, acc.roundoff) * (
        size.square().mean(-1, keepdim=True) + eps
    )
    scale = mean.rsqrt()
    above = (mean - error).clamp(min=eps / 2.0).rsqrt() - scale
    spread = torch.maximum(above, scale - (mean + error).rsqrt())
    factor = weight * gain
    radius = x.radius * (scale + spread) + x.mid.abs() * spread
    radius = radius + 8.0 * acc.roundoff * size * (scale + spread)
    return Ball(x.mid * scale * factor, radius * factor.abs() * INFLATION + acc.flush)


def layer(inputs: Any, numerics: Numerics) -> dict[str, Admissible]:
    """Admissible ``out`` of a layer whose cache holds what ``inputs.kv_cache`` holds: the cache is a stage
    cut.

    Every step's result is rounded to the stage type, so it is known but for the elements next to a rounding
    boundary, and the next step goes on from there.
    """
    config, dtype = inputs.config, inputs.hidden_states.dtype
    q_nope, q_pe = _layer_queries(inputs, numerics)
    h, p, c = config.num_heads, config.qk_nope_head_dim, config.kv_lora_rank
    per_head = inputs.weights["kv_b_proj.weight"].reshape(h, p + config.v_head_dim, c)
    attention_inputs = AttentionInputs(
        q_nope=q_nope.mid,
        q_pe=q_pe.mid,
        kv_cache=inputs.kv_cache,
        block_table=inputs.block_table,
        cu_seqlens_q=inputs.cu_seqlens_q,
        cache_seqlens=inputs.cache_seqlens,
        w_uk=per_head[:, :p],
        w_uv=per_head[:, p:],
        max_seqlen_q=inputs.max_seqlen_q,
        softmax_scale=config.softmax_scale,
        cache_format=inputs.cache_format,
        kv_scale=inputs.kv_scale,
    )
    out, _, ill = attended(attention_inputs, numerics, dtype, (q_nope.radius, q_pe.radius))
    out = materialised(out, numerics.stage, dtype)
    flat = Ball(out.mid.flatten(1), out.radius.flatten(1))
    return {"out": Admissible(*_project(flat, inputs, "o_proj", numerics), dtype, ill)}


def _project(x: Ball, inputs: Any, name: str, numerics: Numerics) -> Ball:
    """One of the layer's projections, its bias included, before it is rounded."""
    acc = accumulator(numerics, inputs.hidden_states.dtype)
    out = linear(x, inputs.weights[f"{name}.weight"].double(), numerics, acc)
    if f"{name}.bias" in inputs.weights:
        mid = out.mid + inputs.weights[f"{name}.bias"].double()
        out = Ball(mid, out.radius + 2.0 * acc.roundoff * (mid.abs() + out.radius))
    return Ball(out.mid, out.radius * INFLATION)


def _layer_queries(inputs: Any, numerics: Numerics) -> tuple[Ball, Ball]:
    config, dtype = inputs.config, inputs.hidden_states.dtype
    acc = accumulator(numerics, dtype)
    x = _exactly(inputs.hidden_states)
    if config.q_lora_rank is not None:
        x = materialised(_project(x, inputs, "q_a_proj", numerics), numerics.stage, dtype)
        weight = inputs.weights["q_a_layernorm.weight"].double()
        x = rms_norm(x, weight, config.rms_norm_eps, config.q_lora_scale, acc)
        x = materialised(x, numerics.stage, dtype)
    name = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    x = materialised(_project(x, inputs, name, numerics), numerics.stage, dtype)
    x = Ball(*(y.reshape(-1, config.num_heads, config.qk_head_dim) for y in x))
    if config.llama4_beta:
        steps = torch.div(inputs.positions, config.llama4_max_position, rounding_mode="floor")
        growth = (1.0 + config.llama4_beta * torch.log1p(steps.double()))[:, None, None]
        radius = x.radius * growth + (4.0 + numerics.log_error) * acc.roundoff * x.size() * growth
        x = materialised(Ball(x.mid * growth, radius * INFLATION), numerics.stage, dtype)
    p = config.qk_nope_head_dim
    nope, pe = Ball(*(y[..., :p] for y in x)), Ball(*(y[..., p:] for y in x))
    pe = rotation(pe, inputs.positions, config.rope, numerics, dtype)
    return nope, materialised(pe, numerics.stage, dtype)


def _exactly(x: torch.Tensor) -> Ball:
    return Ball(x.double(), torch.zeros_like(x, dtype=torch.float64))


def new_entries(inputs: Any, numerics: Numerics) -> tuple[Ball, Ball]:
    """kv_c [t c] and k_pe [t r] that a ``layer`` stores, or whatever writes, before they are encoded.

    Encoders go through float32, so float64 channels are rounded twice. A key that is rotated on the way is
    rounded to the stage type first.
    """
    if not hasattr(inputs, "hidden_states"):
        k_pe = _exactly(inputs.k_pe)
        if hasattr(inputs, "rope"):
            k_pe = _rotated_keys(k_pe, inputs.positions, inputs.rope, numerics, inputs.k_pe.dtype)
        return _by_way_of_float32(_exactly(inputs.kv_c)), _by_way_of_float32(k_pe)
    config, dtype = inputs.config, inputs.hidden_states.dtype
    entry = _project(_exactly(inputs.hidden_states), inputs, "kv_a_proj_with_mqa", numerics)
    entry = materialised(entry, numerics.stage, dtype)
    c = config.kv_lora_rank
    kv_c, k_pe = (Ball(*(y[:, part] for y in entry)) for part in (slice(c), slice(c, None)))
    weight = inputs.weights["kv_a_layernorm.weight"].double()
    acc = accumulator(numerics, dtype)
    kv_c = materialised(
        rms_norm(kv_c, weight, config.rms_norm_eps, config.kv_lora_scale, acc), numerics.stage, dtype
    )
    k_pe = _rotated_keys(k_pe, inputs.positions, config.rope, numerics, dtype)
    return _by_way_of_float32(kv_c), _by_way_of_float32(k_pe)


def _rotated_keys(
    k_pe: Ball, positions: torch.Tensor, config: RopeConfig, numerics: Numerics, dtype: torch.dtype
) -> Ball:
    """k_pe [t r] as it is after its rotation, in the stage type.

    What is infinite in it stands for any number beyond those that can be stored, as it does for an encoder.
    """
    turned = rotation(Ball(*(y[:, None] for y in k_pe)), positions, config, numerics, dtype)
    mid, radius = (y[:, 0] for y in materialised(turned, numerics.stage, dtype))
    return Ball(mid.clamp(-NO_CLAIM, NO_CLAIM), radius)


def _by_way_of_float32(x: Ball) -> Ball:
    same, info = nearest(x.mid, torch.float32) == x.mid, torch.finfo(torch.float32)
    # Below the smallest normal number the spacing no longer shrinks.
    error = (info.eps * x.size()).clamp(min=info.eps * info.tiny)
    return Ball(x.mid, x.radius + torch.where(same, 0.0, error))


class Part(NamedTuple):
    """Some elements of stored entries: what they hold, what they may hold, and where they begin."""

    name: str
    got: torch.Tensor
    want: Admissible
    first: int


# Tiled formats: the least scale, and whether scales are powers of two.
TILE_SCALES = {"fp8_ds_mla": (2.0**-126, False), "fp8_ds_mla_pow2": (2.0**-13, True)}

TILE = 128

# What encodes latents and then rope channels, each to its own nearest code.
PLAIN = ("mla_ref.formats._plain", "mla_ref.formats.fp8_e4m3")


def is_known(fmt: CacheFormat) -> bool:
    """Whether it is known which byte of an entry holds what, and what each may hold: not of a stranger's."""
    return fmt.encode.__module__ in PLAIN or fmt.name in TILE_SCALES


def stored_parts(
    fmt: CacheFormat, stored: torch.Tensor, kv_c: Ball, k_pe: Ball, kv_scale: torch.Tensor
) -> list[Part]:
    """What entries [t e] of new tokens may hold: every code a nearest one, every scale its format's.

    Quotients by a scale are taken in float32, by division or by a reciprocal: three roundings with that of
    the value itself. Values beyond the largest finite code saturate.

    Raises: ValueError if the format is none of those known here.
    """
    if not is_known(fmt):
        raise ValueError(f"cache format {fmt.name}: how it stores is not known to the judge")
    if fmt.name in TILE_SCALES:
        return _tiled_parts(fmt, stored, kv_c, k_pe)
    entry = Ball(*(torch.cat(part, dim=1) for part in zip(kv_c, k_pe, strict=True)))
    if fmt.per_tensor_scale:
        entry = _quotient(entry, kv_scale.double())
    return [Part("entry", stored, _code(entry, stored.dtype), 0)]


def _code(x: Ball, dtype: torch.dtype) -> Admissible:
    """The nearest finite values of a type."""
    limit = torch.finfo(dtype).max
    low, high = ((x.mid + sign * x.radius).clamp(-limit, limit) for sign in (-1.0, 1.0))
    return Admissible((low + high) / 2.0, (high - low) / 2.0, dtype)


def _quotient(x: Ball, scale: torch.Tensor) -> Ball:
    mid = x.mid / scale
    return Ball(mid, x.radius / scale + 3.0 * 2.0**-24 * mid.abs())


def _tiled_parts(fmt: CacheFormat, stored: torch.Tensor, kv_c: Ball, k_pe: Ball) -> list[Part]:
    """Codes, scales and rope channels of byte entries; a code is judged by the scale that was stored."""
    floor, power = TILE_SCALES[fmt.name]
    t, c = kv_c.mid.shape
    num_tiles = c // TILE
    scales_at, rope_at = c, c + 4 * num_tiles
    tiles = Ball(*(y.reshape(t, num_tiles, TILE) for y in kv_c))
    low, high = (tiles.mid.abs() - tiles.radius).amax(-1), tiles.size().amax(-1)
    low, high = (
        (amax / 448.0 * factor).clamp(min=floor)
        for amax, factor in ((low, 1.0 - 3.0 * 2.0**-24), (high, 1.0 + 3.0 * 2.0**-24))
    )
    if power:
        low, high = (torch.exp2(torch.ceil(torch.log2(y) - 2.0**-40)) for y in (low, high))
    scale = stored[:, scales_at:rope_at].contiguous().view(torch.float32)
    codes = stored[:, :c].contiguous().view(torch.float8_e4m3fn)
    rope = stored[:, rope_at:].contiguous().view(torch.bfloat16)
    quotient = _quotient(tiles, scale.double()[..., None])
    quotient = Ball(*(y.reshape(t, c) for y in quotient))
    return [
        Part("scale", scale, Admissible((low + high) / 2.0, (high - low) / 2.0, torch.float32), scales_at),
        Part("code", codes, _code(quotient, torch.float8_e4m3fn), 0),
        Part("rope", rope, _code(k_pe, torch.bfloat16), rope_at),
    ]


# Problem name -> (inputs, numerics) -> what fields of its output may be. What a problem writes in place is
# taken as it was written, and judged on its own.
ADMISSIBLE: dict[str, Callable[[Any, Numerics], dict[str, Admissible]]] = {
    "latent_attention": attention,
    "attention": attention,
    "paged_attention": attention,
    "merge_states": merge_states,
    "cache_gather": cache_gather,
    "rope": rope,
    "rope_cache_write": rope,
    "layer": layer,
}
