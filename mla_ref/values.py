"""Random values that are the same bits on every machine, and the regimes they are shaped into.

Bits come from the standard library's Mersenne Twister, whose output is part of Python's promise; everything
after it is a sum, product or comparison in float64, which IEEE 754 fixes. No ``exp``, no ``randn``.
"""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch

# Bytes that are drawn at once: whole words of the generator, so that pieces join to one stream, and far from
# the 2^28 that it refuses.
PIECE = 2**24


def integers(seed: int, name: str, high: int, *shape: int) -> torch.Tensor:
    """int64 uniform on [0, high), one stream for each (seed, name)."""
    raw = _bits(seed, name, math.prod(shape), torch.int32).to(torch.int64)
    return (raw & 0x7FFFFFFF).remainder(high).reshape(shape)


def bell(seed: int, name: str, *shape: int) -> torch.Tensor:
    """float64 with mean 0 and variance 1: the sum of four uniforms, within ±3.47."""
    parts = _bits(seed, name, math.prod(shape) * 4, torch.int16).to(torch.float64).reshape(*shape, 4)
    return (parts.sum(-1) + 2.0) * (math.sqrt(3.0) / 2.0**16)


def signs(seed: int, name: str, *shape: int) -> torch.Tensor:
    """float64, -1 or +1 with equal chance."""
    return integers(seed, name, 2, *shape).to(torch.float64) * 2.0 - 1.0


def permutation(seed: int, name: str, n: int) -> torch.Tensor:
    """int64 [n], a random order of 0 … n-1."""
    order = list(range(n))
    random.Random(f"{seed}/{name}").shuffle(order)
    return torch.tensor(order, dtype=torch.int64)


def _bits(seed: int, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    stream, raw = random.Random(f"{seed}/{name}"), bytearray(count * dtype.itemsize)
    for start in range(0, len(raw), PIECE):
        raw[start : start + PIECE] = stream.randbytes(min(PIECE, len(raw) - start))
    return torch.frombuffer(raw, dtype=dtype) if count else torch.empty(0, dtype=dtype)


class Raw(NamedTuple):
    """Queries and keys of all requests, concatenated, float64, before any rounding.

    q_nope [t h x]: before (x = p) or after (x = c) absorption. q_pe [t h r]. kv_c [n c]. k_pe [n r].
    position [n]: of each key in its request. length [n]: of the request that the key belongs to.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    position: torch.Tensor
    length: torch.Tensor


def _plain(seed: int, raw: Raw) -> Raw:
    """Unit variance everywhere."""
    return raw


def _scaled_queries(factor: float) -> Callable[[int, Raw], Raw]:
    def regime(seed: int, raw: Raw) -> Raw:
        return raw._replace(q_nope=raw.q_nope * factor, q_pe=raw.q_pe * factor)

    regime.__doc__ = f"Queries, and so scores, {factor:g} times larger."
    return regime


def _small(seed: int, raw: Raw) -> Raw:
    """An eighth of everything: near-uniform attention, what most tests use."""
    q_nope, q_pe, kv_c, k_pe = (x * 0.125 for x in raw[:4])
    return Raw(q_nope, q_pe, kv_c, k_pe, raw.position, raw.length)


def _flat(seed: int, raw: Raw) -> Raw:
    """Nearly equal weights over values that share a large mean: every rounding of P is coherent."""
    mean = 3.0 * signs(seed, "flat", raw.kv_c.shape[1])
    return _scaled_queries(2.0**-6)(seed, raw._replace(kv_c=raw.kv_c * 0.25 + mean))


def _sink(seed: int, raw: Raw) -> Raw:
    """Token 0 of every request takes most of the weight and has a small value."""
    direction = signs(seed, "sink", raw.k_pe.shape[1])
    first = (raw.position == 0)[:, None]
    return raw._replace(
        q_pe=raw.q_pe + 0.5 * direction,
        kv_c=torch.where(first, raw.kv_c * 0.0625, raw.kv_c),
        k_pe=torch.where(first, 4.0 * direction, raw.k_pe),
    )


def _recency(seed: int, raw: Raw) -> Raw:
    """Scores rise towards the newest key, so the running maximum moves in every tile."""
    direction = signs(seed, "recency", raw.k_pe.shape[1])
    ramp = ((raw.position + 1) / raw.length.clamp(min=1)).square().square()
    return raw._replace(q_pe=raw.q_pe + 0.9 * direction, k_pe=raw.k_pe + 2.0 * ramp[:, None] * direction)


def _outlier(seed: int, raw: Raw) -> Raw:
    """A few latent channels sixteen times larger, and a common mean, as in trained models."""
    c = raw.kv_c.shape[1]
    gain = torch.ones(c, dtype=torch.float64)
    gain[integers(seed, "outlier", c, 4)] = 16.0
    return raw._replace(kv_c=(raw.kv_c + 0.75 * bell(seed, "mean", c)) * gain)


def _ties(seed: int, raw: Raw) -> Raw:
    """Keys repeat eight rows: exact ties, and rounding errors that never average out."""
    n = raw.kv_c.shape[0]
    pick = integers(seed, "ties", min(8, n), n) if n else torch.empty(0, dtype=torch.int64)
    return raw._replace(kv_c=raw.kv_c[pick], k_pe=raw.k_pe[pick])


def _tiny(seed: int, raw: Raw) -> Raw:
    """Latent channels over six decades, some entries -0."""
    n, c = raw.kv_c.shape
    exponent = integers(seed, "tiny", 21, c).to(torch.float64)
    zero = integers(seed, "zero", 20, n, c) == 0
    return raw._replace(kv_c=torch.where(zero, -0.0, raw.kv_c * torch.exp2(-exponent)))


def _tiles(seed: int, raw: Raw) -> Raw:
    """Every 32 channels of every token have a magnitude of their own: quantisation scales differ."""
    n, c = raw.kv_c.shape
    exponent = integers(seed, "tiles", 9, n, -(-c // 32)).to(torch.float64) - 4.0
    return raw._replace(kv_c=raw.kv_c * torch.exp2(exponent).repeat_interleave(32, dim=1)[:, :c])


def _negative(seed: int, raw: Raw) -> Raw:
    """Every score is hugely negative: a maximum that starts at 0 or -1e4 loses everything."""
    direction = signs(seed, "negative", raw.k_pe.shape[1])
    return raw._replace(q_pe=raw.q_pe - 8.0 * direction, k_pe=raw.k_pe + 8.0 * direction)


def _cancelling(seed: int, raw: Raw) -> Raw:
    """Nearly equal weights over values of both signs, sixty-four times larger than their sum."""
    row = 64.0 * signs(seed, "cancelling", raw.kv_c.shape[1])
    parity = 1.0 - 2.0 * (raw.position % 2).to(torch.float64)
    return _scaled_queries(2.0**-12)(seed, raw._replace(kv_c=raw.kv_c + parity[:, None] * row))


def _limits(seed: int, raw: Raw) -> Raw:
    """Latents around the largest fp8 code, a third of them beyond it; queries as much smaller."""
    return raw._replace(q_nope=raw.q_nope * 2.0**-9, kv_c=raw.kv_c * 2.0**9)


def _denormal(seed: int, raw: Raw) -> Raw:
    """Every other latent and rope channel is below the normal numbers of bfloat16 and float32."""
    return raw._replace(**{name: _every_other(getattr(raw, name), 2.0**-129) for name in ("kv_c", "k_pe")})


def _every_other(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.where(torch.arange(x.shape[1]) % 2 == 0, x, x * factor)


def _zeros(seed: int, raw: Raw) -> Raw:
    """Whole tokens, whole tiles of 128 channels and single channels are zeros of both signs."""
    n, c = raw.kv_c.shape
    token = integers(seed, "token", 4, n) == 0
    tile = (integers(seed, "tile", 3, n, -(-c // 128)) == 0).repeat_interleave(128, dim=1)[:, :c]
    zero = 0.0 * signs(seed, "zeros", n, c)
    kv_c = torch.where(token[:, None] | tile | (integers(seed, "channel", 8, n, c) == 0), zero, raw.kv_c)
    return raw._replace(kv_c=kv_c, k_pe=torch.where(token[:, None], -0.0, raw.k_pe))


def _heavy(seed: int, raw: Raw) -> Raw:
    """Heavy tails: one channel in two is doubled, one in four doubled twice, and so on up to 2^10."""
    return raw._replace(**{name: _tailed(seed, name, getattr(raw, name)) for name in ("kv_c", "k_pe")})


def _tailed(seed: int, name: str, x: torch.Tensor) -> torch.Tensor:
    level = integers(seed, f"heavy/{name}", 1 << 10, *x.shape)
    doublings = sum((level < (1 << (10 - k))).to(torch.float64) for k in range(1, 11))
    return 0.5 * x * torch.exp2(torch.as_tensor(doublings))


def _peak(seed: int, raw: Raw) -> Raw:
    """One key of every request, five eighths in, takes all the weight that it can; the others share none."""
    direction = signs(seed, "peak", raw.k_pe.shape[1])
    peak = (raw.position == raw.length * 5 // 8)[:, None]
    return raw._replace(q_pe=raw.q_pe + 4.0 * direction, k_pe=torch.where(peak, 8.0 * direction, raw.k_pe))


def _stairs(seed: int, raw: Raw) -> Raw:
    """Every sixteen keys the scores rise so far that all earlier ones vanish: merges of unequal masses."""
    direction = signs(seed, "stairs", raw.k_pe.shape[1])
    step = (raw.position // 16).to(torch.float64)[:, None]
    return raw._replace(q_pe=raw.q_pe + 8.0 * direction, k_pe=raw.k_pe + 4.0 * step * direction)


def _uneven(seed: int, raw: Raw) -> Raw:
    """Queries of every token and head have a magnitude of their own, from 2^-10 to 2^6."""
    t, h = raw.q_nope.shape[:2]
    factor = torch.exp2(integers(seed, "uneven", 17, t, h).to(torch.float64) - 10.0)[..., None]
    return raw._replace(q_nope=raw.q_nope * factor, q_pe=raw.q_pe * factor)


REGIMES: dict[str, Callable[[int, Raw], Raw]] = {
    "plain": _plain,
    "small": _small,
    "peaky": _scaled_queries(4.0),
    "huge": _scaled_queries(64.0),
    "flat": _flat,
    "sink": _sink,
    "recency": _recency,
    "outlier": _outlier,
    "ties": _ties,
    "tiny": _tiny,
    "tiles": _tiles,
    "negative": _negative,
    "cancelling": _cancelling,
    "limits": _limits,
    "denormal": _denormal,
    "zeros": _zeros,
    "heavy": _heavy,
    "peak": _peak,
    "stairs": _stairs,
    "uneven": _uneven,
}
