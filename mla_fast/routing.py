"""Which form of attention is faster: absorbed over the latent ("decode") or expanded ("prefill").

Absorbed queries multiply 2 c + r channels a key, expanded ones p + r + v; but expansion multiplies each key
by c (p + v) numbers first, whatever the number of queries. So few queries are faster absorbed, many expanded.
Where the two meet was measured for some GPUs; for others the count of operations decides.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from mla_ref.config import MLAConfig

Path = Literal["decode", "prefill"]


class Widths(NamedTuple):
    """The channels that decide the work of a head: latent, nope, rope and value."""

    c: int
    p: int
    r: int
    v: int


# Device name -> heads -> (cached tokens, query length at which one request of both paths takes equally long).
# Source: docs/results/prefill-h200.json, "routing", by ``equal_time``: mla_fast.gluon_decode with absorbed
# projections and mla_fast.gluon_prefill in one run, bfloat16, blocks of 64.
MEASURED: Mapping[str, Mapping[int, Sequence[tuple[int, int]]]] = {
    "NVIDIA H200": {
        16: ((1024, 178), (4096, 371), (32768, 436), (131072, 436)),
        32: ((8192, 285),),
        64: ((8192, 216),),
        128: ((1024, 153), (4096, 211), (16384, 225), (32768, 210)),
    }
}
MEASURED_WIDTHS = Widths(512, 128, 64, 128)


def prefer(config: MLAConfig, q_len: int, kv_len: int, device: str) -> Path:
    """The faster path for requests of ``q_len`` new and ``kv_len`` cached tokens, the new ones included.

    config: the rank's shard. device: as ``torch.cuda.get_device_name`` calls it.
    """
    return "decode" if q_len < crossover(config, kv_len, device) else "prefill"


def crossover(config: MLAConfig, kv_len: int, device: str) -> int:
    """The least query length for which the prefill path is preferred.

    Between measured lengths and numbers of heads it is interpolated in their logarithms; beyond, it stays.
    """
    if device not in MEASURED or widths(config) != MEASURED_WIDTHS:
        return break_even(config)
    points = [
        (heads, _interpolated(by_length, kv_len)) for heads, by_length in sorted(MEASURED[device].items())
    ]
    return round(_interpolated(points, config.num_heads))


def break_even(config: MLAConfig) -> int:
    """The query length from which expanded attention needs fewer operations, for any number of keys.

    Raises: ValueError if it never does.
    """
    c, p, r, v = widths(config)
    saved = (2 * c + r) - (p + r + v)
    if saved <= 0:
        raise ValueError(
            f"{config.name}: expanded heads of {p + r + v} channels save nothing over {2 * c + r}"
        )
    return math.ceil(c * (p + v) / saved)


def widths(config: MLAConfig) -> Widths:
    """What of a model matters here."""
    return Widths(config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)


def equal_time(points: Sequence[tuple[int, float, float]]) -> int:
    """Where decode, in time, falls behind prefill for good: of rising (query length, decode, prefill).

    Raises: ValueError if it is behind at all lengths, or ahead at the last.
    """
    ratios = [math.log(decode / prefill) for _, decode, prefill in points]
    ahead = [i for i, ratio in enumerate(ratios) if ratio < 0]
    if not ahead or ahead[-1] == len(points) - 1:
        raise ValueError(f"points: the paths do not cross at {', '.join(str(q) for q, *_ in points)} queries")
    i = ahead[-1]
    share = ratios[i] / (ratios[i] - ratios[i + 1])
    (before, *_), (after, *_) = points[i], points[i + 1]
    return round(before * math.pow(after / before, share))


def _interpolated(points: Sequence[tuple[int, float]], x: int) -> float:
    """The value at x of a function that is linear in log x between points, and constant beyond them."""
    places = [place for place, _ in points]
    i = bisect_right(places, x)
    if i in (0, len(points)):
        return points[max(i - 1, 0)][1]
    (x_0, y_0), (x_1, y_1) = points[i - 1], points[i]
    return y_0 + (y_1 - y_0) * math.log(x / x_0) / math.log(x_1 / x_0)
