"""The plainest case that still fails: one head, one token, one block, unless the failure needs more.

A case is two dozen integers and a few names, so it is made plainer field by field, in a fixed order, by
greedy descent: deterministic, with a bounded number of trials, and from any case, wherever it came from.
On the way nothing odd comes in: a kernel that is wrong about ordinary requests is not shown to be wrong where
somebody asks for more tokens than there are keys.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mla_ref.case import Case
from mla_ref.config import MLAConfig, RopeConfig
from mla_ref.layout import CacheLayout
from mla_ref.problem import problem as find_problem

PLAIN_LAYOUT = CacheLayout(shuffled=False, spare_blocks=0)

# The field's plainest value; nothing below is tried, since no model is smaller.
PLAIN_SIZES = {
    "num_heads": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "hidden_size": 8,
    "num_layers": 1,
}
PLAIN_CONFIG = {
    "rope": RopeConfig(),
    "q_lora_rank": None,
    "attention_bias": False,
    "q_lora_scale": 1.0,
    "kv_lora_scale": 1.0,
    "llama4_beta": 0.0,
    "llama4_max_position": 8192,
    "max_position": 4096,
    "rms_norm_eps": 1e-6,
    "name": "plain",
    "beyond": "",
    "source": "",
}
PLAIN_CASE = {
    "layout": PLAIN_LAYOUT,
    "dtype": "bfloat16",
    "cache_format": "bf16",
    "block_size": 64,
    "kv_layout": "l2nkgx",
    "num_kv_heads": 1,
}
SEEDS = 4

Changes = Mapping[str, Any]


def smallest(case: Case, still_fails: Callable[[Case], bool], budget: int = 500) -> Case:
    """The plainest case on the way down from ``case`` that still fails; ``case`` itself if none does.

    Every candidate is valid for its problem, none is odd in a way that ``case`` is not, and none is tried
    twice.

    still_fails: whether a case shows the failure. budget: how often it may be asked.
    """
    why_not = find_problem(case.problem).why_not
    tried = {case}

    def plainer(step: Callable[[Case], Iterator[Changes]]) -> Case | None:
        for changes in step(case):
            candidate = _with(case, changes)
            if candidate is None or candidate in tried or why_not(candidate) is not None:
                continue
            if not oddities(candidate) <= oddities(case):
                continue
            if len(tried) > budget:
                return None
            tried.add(candidate)
            if still_fails(candidate):
                return candidate
        return None

    improved = True
    while improved:
        improved = False
        for step in STEPS:
            while (found := plainer(step)) is not None:
                case, improved = found, True
    return case


def oddities(case: Case) -> frozenset[str]:
    """What a case has that no engine's ordinary step has."""
    found = set()
    if not case.q_lens:
        found.add("no request")
    if 0 in case.q_lens:
        found.add("a request without new tokens")
    attends = "cu_seqlens_q" in find_problem(case.problem).shapes
    if attends and any(q_len > kv_len for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)):
        found.add("tokens that see no key")
    return frozenset(found)


def _with(case: Case, changes: Changes) -> Case | None:
    """The case with other fields, or None where they contradict each other."""
    try:
        return replace(case, **changes)
    except ValueError:
        return None


def _in_config(case: Case, **changes: Any) -> Changes:
    try:
        return {"config": replace(case.config, **changes)}
    except ValueError:
        return {}


def _lower(value: int, least: int) -> Iterator[int]:
    """Numbers below ``value``, the least first, then by ever smaller steps."""
    step = value - least
    while step > 0:
        yield value - step
        step //= 2


def _requests(case: Case) -> Iterator[Changes]:
    """Fewer requests: half of them, then without one."""
    n = len(case.q_lens)
    for size in _halves(n):
        for start in range(0, n, size):
            yield _picked(case, [i for i in range(n) if not start <= i < start + size])


def _halves(n: int) -> Iterator[int]:
    while n > 1:
        n = -(-n // 2)
        yield n
    if n == 1:
        yield 1


def _picked(case: Case, kept: list[int]) -> Changes:
    return {name: tuple(getattr(case, name)[i] for i in kept) for name in ("q_lens", "kv_lens")}


def _ordinary(case: Case) -> Iterator[Changes]:
    """Fewer oddities, even of a case that is longer for it."""
    odd = oddities(case)
    new = [i for i, q_len in enumerate(case.q_lens) if q_len]
    q_lens = tuple(max(q_len, 1) for q_len in case.q_lens)
    for changes in (
        _picked(case, new),
        {"kv_lens": tuple(map(max, case.q_lens, case.kv_lens))},
        {"q_lens": q_lens, "kv_lens": tuple(map(max, q_lens, case.kv_lens))},
    ):
        candidate = _with(case, changes)
        if candidate is not None and oddities(candidate) < odd:
            yield changes


def _lengths(case: Case) -> Iterator[Changes]:
    """Shorter requests: whole blocks of keys, then old tokens, then new ones with them, then alone."""
    for i, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        for blocks in _lower(kv_len // case.block_size, 0):
            yield _resized(case, i, q_len, blocks * case.block_size + kv_len % case.block_size)
        for fewer in _lower(kv_len, 0):
            yield _resized(case, i, q_len, fewer)
        for fewer in _lower(q_len, 1):
            yield _resized(case, i, fewer, max(kv_len - q_len + fewer, 0))
            yield _resized(case, i, fewer, kv_len)
        yield _resized(case, i, 0, kv_len)


def _resized(case: Case, i: int, q_len: int, kv_len: int) -> Changes:
    if (q_len, kv_len) == (case.q_lens[i], case.kv_lens[i]):
        return {}
    q_lens, kv_lens = list(case.q_lens), list(case.kv_lens)
    q_lens[i], kv_lens[i] = q_len, kv_len
    return {"q_lens": tuple(q_lens), "kv_lens": tuple(kv_lens)}


def _heads(case: Case) -> Iterator[Changes]:
    """Fewer heads; the key/value heads still divide them."""
    now = case.config.num_heads
    divisors = [n for n in range(1, now) if now % n == 0]
    for num_heads in (*divisors, *_lower(now, 1)):
        groups = math.gcd(num_heads, case.num_kv_heads)
        yield {**_in_config(case, num_heads=num_heads), "num_kv_heads": groups}


def _plain(case: Case) -> Iterator[Changes]:
    """One field, or values that belong together, as plain as can be."""
    yield {"regime": "plain", "recording": None}
    yield {"kv_scale": 1.0, "v_scale": 1.0}
    for name, value in PLAIN_CASE.items():
        yield {name: value}
    for name, value in PLAIN_CONFIG.items():
        yield _in_config(case, **{name: value})


def _layout(case: Case) -> Iterator[Changes]:
    """One field of the layout as plain as can be, or a smaller number of bytes or blocks."""
    for name in ("shuffled", "spare_blocks", "entry_align", "block_gap", "offset", "block_align"):
        value, plain = getattr(case.layout, name), getattr(PLAIN_LAYOUT, name)
        # Whole elements of every type.
        smaller = [n for n in _lower(int(value), int(plain)) if n % 8 == 0 and name != "shuffled"]
        for candidate in (plain, *smaller):
            changes: dict[str, Any] = {name: candidate}
            yield {"layout": replace(case.layout, **changes)}


def _sizes(case: Case) -> Iterator[Changes]:
    """A smaller model, all of it and then one size after the other; ranks also by whole tiles."""
    config: MLAConfig = case.config
    smaller = {name: min(getattr(config, name), least) for name, least in PLAIN_SIZES.items()}
    yield _in_config(case, **{**smaller, "num_heads": config.num_heads})
    for name, least in PLAIN_SIZES.items():
        if name == "num_heads":
            continue
        value = getattr(config, name)
        steps = [128 * n for n in _lower(-(-value // 128), 1)] if name == "kv_lora_rank" else []
        for size in [*_lower(value, least), *steps]:
            yield _in_config(case, **{name: size})


def _seed(case: Case) -> Iterator[Changes]:
    """One of the first seeds."""
    for seed in range(min(case.seed, SEEDS)):
        yield {"seed": seed}


STEPS = (_ordinary, _requests, _lengths, _heads, _plain, _layout, _sizes, _seed)
