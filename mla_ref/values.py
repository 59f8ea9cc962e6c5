"""Random values that are the same bits on every machine, and the regimes they are shaped into.

Bits are those of the standard library's Mersenne Twister, whose output is part of Python's promise;
everything after it is a sum, product or comparison in float64, which IEEE 754 fixes. No ``exp``, no
``randn``.
"""

import math
import random
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch

# Elements that are drawn at once: a core's cache holds what becomes of them. Each takes whole words of the
# generator, so that pieces join to one stream.
PIECE = 2**13

# From so many on torch's generator is faster.
MANY = 2**11

# Of 31 random bits.
LARGEST = 2**31 - 1


def integers(seed: int, name: str, high: int, *shape: int) -> torch.Tensor:
    """int64 uniform on [0, high), one stream for each (seed, name)."""
    found = torch.empty(math.prod(shape), dtype=torch.int64)
    for part, raw in _pieces(seed, name, found, torch.int32):
        part.copy_(_remainder(raw & LARGEST, high))
    return found.reshape(shape)


def _remainder(number: torch.Tensor, high: int) -> torch.Tensor:
    """int32 numbers modulo ``high``. Below an integer, an exact quotient of these is so in float64 too."""
    if high & (high - 1) == 0:
        return number & (min(high, LARGEST + 1) - 1)
    exact = number.to(torch.float64)
    return exact.sub_((exact / high).floor_().mul_(high))


def bell(seed: int, name: str, *shape: int) -> torch.Tensor:
    """float64 with mean 0 and variance 1: the sum of four uniforms, within ±3.47."""
    found, ones = torch.empty(math.prod(shape), dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    for part, raw in _pieces(seed, name, found, torch.int64):
        torch.mv(raw.view(torch.int16).to(torch.float64).view(-1, 4), ones, out=part)  # exact in any order
        part.add_(2.0).mul_(math.sqrt(3.0) / 2.0**16)
    return found.reshape(shape)


def signs(seed: int, name: str, *shape: int) -> torch.Tensor:
    """float64, -1 or +1 with equal chance."""
    return integers(seed, name, 2, *shape).to(torch.float64) * 2.0 - 1.0


def permutation(seed: int, name: str, n: int) -> torch.Tensor:
    """int64 [n], a random order of 0 … n-1."""
    order = list(range(n))
    random.Random(f"{seed}/{name}").shuffle(order)
    return torch.tensor(order, dtype=torch.int64)


def _pieces(
    seed: int, name: str, found: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a vector, to be filled, and random bits [part] for each.

    dtype: int32, whose sign is not to be looked at, or int64, whose halves may be in either order.
    """
    stream = random.Random(f"{seed}/{name}")
    many = found.numel() >= MANY and _torch_draws_the_same()
    engine = _torch_stream(stream) if many else None
    for start in range(0, len(found), PIECE):
        part = found[start : start + PIECE]
        if engine is None:
            yield part, _from_python(stream, len(part), dtype)
        else:
            yield part, _from_torch(engine, len(part), dtype)


def _from_python(stream: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(stream.randbytes(count * dtype.itemsize)), dtype=dtype)


def _from_torch(stream: torch.Generator, count: int, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.empty(count, dtype=dtype)
    if dtype == torch.int32:
        return raw.random_(generator=stream)
    return raw.random_(-(2**63), None, generator=stream)


def _torch_stream(stream: random.Random) -> torch.Generator:
    """torch's generator on the CPU is a Mersenne Twister, too: one in the state of a new stream of Python's.

    A state is a seed, how many words are left, whether it was seeded, the next word, 624 words as 64 bits,
    and what is left of normal numbers.
    """
    words = stream.getstate()[1][:-1]
    state = struct.pack("<QiiQ624Q3di4xf?3x", 0, 1, 1, 0, *words, 0.0, 0.0, 0.0, 0, 0.0, False)
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


@cache
def _torch_draws_the_same() -> bool:
    """Whether this torch does: Python promises its stream, torch promises neither stream nor state."""
    try:
        theirs = _torch_stream(random.Random("stream"))
        ours = random.Random("stream")
        pairs = [
            (_from_python(ours, 700, x), _from_torch(theirs, 700, x)) for x in (torch.int64, torch.int32)
        ]
    except (RuntimeError, struct.error):
        return False
    (words, same_words), (signed, same_signed) = pairs
    halves = words.view(torch.int32).view(-1, 2).flip(1).flatten()
    return torch.equal(halves, same_words.view(torch.int32)) and torch.equal(signed & LARGEST, same_signed)


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
