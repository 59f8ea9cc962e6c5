"""In what ways cases differ: named dimensions, each with few values, and the case that has given ones.

A value of a dimension can be read off any case (``dimensions``), wherever the case came from, and a case can
be made that has any combination that makes sense (``make``). Lengths are named by the request with the most
keys, the first of them if there are several; the others are its mates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, NamedTuple

from mla_ref.case import DTYPES, Case
from mla_ref.config import YARN, MLAConfig, RopeConfig
from mla_ref.formats import formats
from mla_ref.layout import CacheLayout
from mla_ref.layout_algebra import KV_ORDERS
from mla_ref.values import REGIMES

# c, p, r, v: ranks and head sizes, no two of a line alike where no model has them so.
MODELS = (
    (128, 32, 16, 48),
    (16, 8, 4, 12),
    (64, 24, 0, 16),
    (256, 64, 32, 64),
    (384, 96, 64, 80),
    (512, 128, 64, 128),
    (512, 192, 64, 256),
    (512, 256, 0, 256),
)

ROPES = {
    "interleaved": RopeConfig(),
    "half-split": RopeConfig(interleaved=False, theta=50000.0),
    # Unequal magnitudes, so that the tables and the softmax scale both show.
    "yarn": RopeConfig(scaling=YARN, factor=40.0, mscale=1.0, mscale_all_dim=0.7),
    "yarn, half-split": RopeConfig(
        scaling=YARN, factor=4.0, interleaved=False, mscale=0.5, mscale_all_dim=1.0, truncate=False
    ),
    "none": RopeConfig(rotate=False),
}

# Bytes. Offsets and gaps in sixteens keep vectors aligned; the odd ones are single elements of eight bytes.
MEMORY = {
    "packed": CacheLayout(),
    "entries padded": CacheLayout(entry_align=256),
    "blocks apart": CacheLayout(block_gap=512),
    "offset": CacheLayout(offset=1024),
    "blocks aligned": CacheLayout(block_align=576),
    "everything": CacheLayout(entry_align=128, block_gap=256, offset=512),
    "unaligned": CacheLayout(entry_align=8, block_gap=8, offset=24),
}

PAGES = {
    "shuffled": CacheLayout(),
    "in order": CacheLayout(shuffled=False, spare_blocks=0),
    "no spare block": CacheLayout(spare_blocks=0),
    "many spare blocks": CacheLayout(spare_blocks=31),
}

SCALES = {"1": 1.0, "below 1": 0.0173, "above 1": 3.7, "saturating": 0.0041}
SATURATING = 1.0 / 128.0

PROJECTIONS: dict[str, dict[str, Any]] = {
    "one": {},
    "low rank": {"q_lora_rank": 24},
    "biased": {"q_lora_rank": 24, "attention_bias": True},
    "gains": {
        "q_lora_rank": 24,
        "q_lora_scale": 1.5,
        "kv_lora_scale": 1.25,
        "llama4_beta": 0.1,
        "llama4_max_position": 16,
    },
}

KEYS = ("33", "0", "1", "2", "15", "16", "17", "63", "64", "65", "127", "128", "129", "other", "long")
NEW = ("1", "0", "2", "3", "4", "8", "17", "other", "all")
MATES = ("none", "alike", "ragged", "idle", "without keys", "more tokens than keys")

PRIMES = (5, 7, 11, 19, 37, 53, 89, 97, 101, 131, 191, 193, 211, 251, 257, 307, 383, 421, 509)
LONG = (513, 640, 1023, 1024, 1025, 1031)
OTHER_NEW = (5, 6, 7, 13, 16, 31, 33)


class Dimension(NamedTuple):
    """values: names, the plainest first. of: the value that a case has; may be none of them."""

    values: tuple[str, ...]
    of: Callable[[Case], str]


def _named(number: int, names: tuple[str, ...]) -> str:
    return str(number) if str(number) in names else "other"


def _longest(case: Case) -> int:
    return max(range(len(case.kv_lens)), key=lambda i: case.kv_lens[i], default=-1)


def _keys(case: Case) -> str:
    most = max(case.kv_lens, default=0)
    return "long" if most > 512 else _named(most, KEYS)


def _new(case: Case) -> str:
    i = _longest(case)
    if i < 0:
        return "0"
    q_len, kv_len = case.q_lens[i], case.kv_lens[i]
    return "all" if q_len == kv_len > 0 else _named(q_len, NEW)


def _mates(case: Case) -> str:
    lead = _longest(case)
    mates = [pair for i, pair in enumerate(zip(case.q_lens, case.kv_lens, strict=True)) if i != lead]
    if not mates:
        return "none"
    if any(q_len and not kv_len for q_len, kv_len in mates):
        return "without keys"
    if any(q_len > kv_len for q_len, kv_len in mates):
        return "more tokens than keys"
    if any(not q_len for q_len, _ in mates):
        return "idle"
    return "alike" if set(mates) == {(case.q_lens[lead], case.kv_lens[lead])} else "ragged"


def _tokens(case: Case) -> str:
    return _named(sum(case.q_lens), TOKENS)


def _empty(case: Case) -> str:
    zero = sum(kv_len == 0 for kv_len in case.kv_lens)
    return "none" if not zero else "all" if zero == len(case.kv_lens) else "some"


def _rotation(case: Case) -> str:
    rope = case.config.rope
    if not rope.rotate:
        return "none"
    yarn = "yarn, half-split" if not rope.interleaved else "yarn"
    return yarn if rope.scaling == YARN else "interleaved" if rope.interleaved else "half-split"


def _pages(case: Case) -> str:
    layout = case.layout
    if not layout.shuffled:
        return "in order"
    spare = layout.spare_blocks
    return "no spare block" if not spare else "many spare blocks" if spare > 8 else "shuffled"


def _memory(case: Case) -> str:
    x = case.layout
    parts = (x.entry_align > 1, x.block_gap > 0, x.offset > 0, x.block_align > 1)
    if any(step % 16 for step in (x.block_gap, x.offset)) or 1 < x.entry_align < 16:
        return "unaligned"
    if sum(parts) != 1:
        return "everything" if any(parts) else "packed"
    return ("entries padded", "blocks apart", "offset", "blocks aligned")[parts.index(True)]


def _scale(case: Case) -> str:
    scale = case.kv_scale
    if scale == 1.0:
        return "1"
    return "above 1" if scale > 1.0 else "saturating" if scale <= SATURATING else "below 1"


def _projections(case: Case) -> str:
    config = case.config
    if config.attention_bias:
        return "biased"
    if config.llama4_beta or config.q_lora_scale != 1.0 or config.kv_lora_scale != 1.0:
        return "gains"
    return "one" if config.q_lora_rank is None else "low rank"


def _kv_heads(case: Case) -> str:
    g = case.num_kv_heads
    return "one" if g == 1 else "each" if g == case.config.num_heads else "groups"


def _kv_layout(case: Case) -> str:
    return next((name for name, order in KV_ORDERS.items() if order == case.kv_layout), case.kv_layout)


def _model(case: Case) -> str:
    config = case.config
    return "/".join(
        str(x)
        for x in (
            config.kv_lora_rank,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
    )


TOKENS = ("1", "0", "2", "3", "4", "17", "64", "other")

DIMENSIONS: dict[str, Dimension] = {
    "model c/p/r/v": Dimension(tuple("/".join(map(str, dims)) for dims in MODELS), _model),
    "heads": Dimension(
        ("4", "1", "2", "3", "5", "8", "16", "20", "64", "128"), lambda case: str(case.config.num_heads)
    ),
    "keys": Dimension(KEYS, _keys),
    "new tokens": Dimension(NEW, _new),
    "mates": Dimension(MATES, _mates),
    "tokens": Dimension(TOKENS, _tokens),
    "states": Dimension(("2", "1", "3", "4", "8", "33", "259"), lambda case: str(len(case.kv_lens))),
    "empty states": Dimension(("none", "some", "all"), _empty),
    "block": Dimension(("64", "1", "2", "16", "24", "32", "128", "256"), lambda case: str(case.block_size)),
    "pages": Dimension(tuple(PAGES), _pages),
    "memory": Dimension(tuple(MEMORY), _memory),
    "axes of the pool": Dimension(tuple(KV_ORDERS), _kv_layout),
    "key/value heads": Dimension(("one", "groups", "each"), _kv_heads),
    "dtype": Dimension(DTYPES, lambda case: case.dtype),
    "format": Dimension(tuple(sorted(formats())), lambda case: case.cache_format),
    "scale": Dimension(tuple(SCALES), _scale),
    "values": Dimension(tuple(REGIMES), lambda case: case.regime),
    "rotation": Dimension(tuple(ROPES), _rotation),
    "projections": Dimension(tuple(PROJECTIONS), _projections),
    "layers": Dimension(("1", "3", "61"), lambda case: str(case.config.num_layers)),
}

PLAINEST = {name: dimension.values[0] for name, dimension in DIMENSIONS.items()}

_LENGTHS = ("keys", "new tokens", "mates", "block", "pages", "memory")
_STORED = ("dtype", "format", "scale", "values")
_ATTENTION = ("model c/p/r/v", "heads", *_LENGTHS, *_STORED, "rotation")

# What a case of each problem depends on.
OF_PROBLEM: dict[str, tuple[str, ...]] = {
    "latent_attention": _ATTENTION,
    "attention": _ATTENTION,
    "paged_attention": (*_ATTENTION, "key/value heads", "axes of the pool"),
    "layer": (*_ATTENTION, "projections"),
    "cache_write": ("model c/p/r/v", *_LENGTHS, *_STORED),
    "rope_cache_write": ("model c/p/r/v", "heads", *_LENGTHS, *_STORED, "rotation"),
    "cache_gather": ("model c/p/r/v", *_LENGTHS, *_STORED),
    "merge_states": ("model c/p/r/v", "heads", "tokens", "states", "empty states", "dtype"),
    "rope": ("model c/p/r/v", "heads", "tokens", "dtype", "values", "rotation"),
    "cache_capacity": ("model c/p/r/v", "block", "memory", "dtype", "format", "layers"),
}


def names_of(problem: str) -> tuple[str, ...]:
    """The dimensions of a problem; those of attention where it has none of its own."""
    return OF_PROBLEM.get(problem, _ATTENTION)


def dimensions(case: Case) -> dict[str, str]:
    """The value of every dimension that the case's problem has."""
    return {name: DIMENSIONS[name].of(case) for name in names_of(case.problem)}


def pick(stream: Random, values: Sequence[Any]) -> int:
    """An index into ``values``, by the one method whose stream Python promises never to change."""
    return int(stream.random() * len(values))


def make(problem: str, values: Mapping[str, str], stream: Random) -> Case:
    """A case that has the given values, the plainest where none is given; the rest follows from ``stream``.

    Where the values contradict each other, as 8 new tokens of all 2, the case has others.
    """
    of = {**PLAINEST, **values}
    projections = of["projections"] if "projections" in names_of(problem) else "one"
    config = _config(of["model c/p/r/v"], int(of["heads"]), of["rotation"], int(of["layers"]), projections)
    heads = config.num_heads
    groups = _groups(heads)
    q_lens, kv_lens = _lengths(problem, of, stream)
    scale = SCALES[of["scale"]]
    return Case(
        problem=problem,
        config=config,
        q_lens=q_lens,
        kv_lens=kv_lens,
        dtype=of["dtype"],
        cache_format=of["format"],
        block_size=int(of["block"]),
        layout=_layout(of["memory"], of["pages"]),
        regime=of["values"],
        kv_scale=scale,
        seed=int(stream.random() * 2**31),
        num_kv_heads={"one": 1, "each": heads}.get(
            of["key/value heads"], groups[pick(stream, range(len(groups)))] if groups else 1
        ),
        v_scale=scale if scale == 1.0 else 1.25 * scale,
        kv_layout=KV_ORDERS[of["axes of the pool"]],
    )


@cache
def _config(model: str, heads: int, rotation: str, layers: int, projections: str) -> MLAConfig:
    dims = tuple(int(x) for x in model.split("/"))
    return config_of(dims, heads, ROPES[rotation], layers, PROJECTIONS[projections])


def config_of(
    dims: Sequence[int], num_heads: int, rope: RopeConfig, num_layers: int, projections: Mapping[str, Any]
) -> MLAConfig:
    """The model of a drawn case. dims: c, p, r and v. projections: one of the values of ``PROJECTIONS``."""
    c, p, r, v = dims
    config = MLAConfig(
        name="drawn",
        hidden_size=40,
        num_heads=num_heads,
        q_lora_rank=None,
        kv_lora_rank=c,
        qk_nope_head_dim=p,
        qk_rope_head_dim=r,
        v_head_dim=v,
        rope=rope,
        num_layers=num_layers,
    )
    return replace(config, **projections)


@cache
def _groups(heads: int) -> tuple[int, ...]:
    """Numbers of key/value heads other than one and all."""
    return tuple(g for g in range(2, heads) if heads % g == 0)


@cache
def _layout(memory: str, pages: str) -> CacheLayout:
    order = PAGES[pages]
    return replace(MEMORY[memory], shuffled=order.shuffled, spare_blocks=order.spare_blocks)


def _lengths(problem: str, of: Mapping[str, str], stream: Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """q_lens and kv_lens."""
    mine = names_of(problem)
    if "keys" in mine:
        return _of_requests(of, stream)
    if "tokens" not in mine:
        return (1,), (1,)
    tokens = (5, 7, 13, 29)[pick(stream, range(4))] if of["tokens"] == "other" else int(of["tokens"])
    if "states" not in mine:
        return (tokens,), (tokens,)
    states = int(of["states"])
    kv_lens = [PRIMES[pick(stream, PRIMES)] for _ in range(states)]
    if of["empty states"] != "none":
        first = pick(stream, range(states))
        for i in range(states):
            if of["empty states"] == "all" or i == first:
                kv_lens[i] = 0
    return (tokens, *[0] * (states - 1)), tuple(kv_lens)


def _of_requests(of: Mapping[str, str], stream: Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    keys, new, mates = of["keys"], of["new tokens"], of["mates"]
    kv_len = {"other": PRIMES, "long": LONG}.get(keys) or (int(keys),)
    most = kv_len[pick(stream, kv_len)]
    q_len = {"other": OTHER_NEW, "all": (most,)}.get(new) or (int(new),)
    lead = q_len[pick(stream, q_len)], most
    others = [_mate(mates, lead, stream) for _ in range(_num_mates(mates, stream))]
    if others and mates != "alike":
        others[0] = _special(mates, lead, stream)
    # The longest may stand anywhere; mates as long as it come after.
    before = [pair for pair in others if pair[1] < most]
    at = pick(stream, range(len(before) + 1))
    after = [pair for pair in others if pair[1] >= most]
    pairs = [*before[:at], lead, *before[at:], *after]
    return tuple(q for q, _ in pairs), tuple(kv for _, kv in pairs)


def _num_mates(mates: str, stream: Random) -> int:
    return 0 if mates == "none" else (1, 1, 2, 3, 7)[pick(stream, range(5))]


def _mate(mates: str, lead: tuple[int, int], stream: Random) -> tuple[int, int]:
    """A request no longer than the first, of the plain kind."""
    if mates == "alike":
        return lead
    kv_len = 1 + pick(stream, range(lead[1])) if lead[1] else 0
    return min((1, 1, 2, lead[0], 5)[pick(stream, range(5))], kv_len), kv_len


def _special(mates: str, lead: tuple[int, int], stream: Random) -> tuple[int, int]:
    """The mate for which a kind is named."""
    q_len, kv_len = _mate("ragged", lead, stream)
    if mates == "without keys":
        return (1, 2, 5)[pick(stream, range(3))], 0
    if mates == "more tokens than keys":
        return kv_len + 1 + pick(stream, range(4)), kv_len
    if mates == "idle":
        return 0, kv_len
    return max(q_len, min(1, kv_len)), kv_len


def elements(case: Case) -> int:
    """Work that a case makes: random numbers drawn, and multiplications in 64 lanes."""
    config, t, n = case.config, sum(case.q_lens), sum(case.kv_lens)
    h, width = config.num_heads, config.entry_width
    weights = 0
    if case.problem in ("attention", "layer"):
        weights = h * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
    if case.problem == "layer":
        weights += config.hidden_size * h * (config.qk_head_dim + config.v_head_dim)
    if case.problem == "merge_states":
        return len(case.kv_lens) * t * h * config.v_head_dim
    if case.problem == "rope":
        return t * h * config.qk_rope_head_dim
    if case.problem == "paged_attention":
        width = case.num_kv_heads * (config.qk_head_dim + config.v_head_dim)
    if case.problem in ("cache_write", "cache_gather"):
        return (t + n) * width
    if case.problem == "rope_cache_write":
        return (t + n) * width + t * h * config.qk_rope_head_dim
    scores = sum(q_len * kv_len for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True))
    return t * h * width + n * width + weights + scores * h * width // 64
