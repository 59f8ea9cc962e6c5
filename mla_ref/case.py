"""A recipe for inputs: integers and strings only, the same bits on every machine."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, get_args

from mla_ref.config import MLAConfig, RopeConfig
from mla_ref.formats import cache_format
from mla_ref.layout import CacheLayout

DTYPES = ("bfloat16", "float16", "float32", "float64")


# The regime whose values were not made but seen.
RECORDED = "recorded"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A file that holds what a model gave its attention, and the hash of its bytes: ``mla_ref.recording``."""

    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """One experiment, without tensors.

    problem: which contract; a name from ``mla_ref.problems``.
    q_lens, kv_lens: new tokens and cached tokens (new ones included) of each request.
    dtype: of queries, weights and outputs. cache_format: of the cache.
    kv_scale: the per-tensor scale of formats that have one.
    regime: how the values are spread; a name from ``mla_ref.values.REGIMES``.
    seed: everything random follows from it.
    num_kv_heads, v_scale, kv_layout: of keys and values that are cached apart (``paged_attention``): heads,
        the scale of the values beside ``kv_scale`` of the keys, and the order of the pool's axes as in
        ``mla_ref.layout_algebra``.
    recording: where the values of the regime "recorded" are.
    """

    problem: str
    config: MLAConfig
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    dtype: str = "bfloat16"
    cache_format: str = "bf16"
    block_size: int = 64
    layout: CacheLayout = CacheLayout()
    regime: str = "plain"
    kv_scale: float = 1.0
    seed: int = 0
    num_kv_heads: int = 1
    v_scale: float = 1.0
    kv_layout: str = "l2nkgx"
    recording: Recording | None = None

    def __post_init__(self) -> None:
        if len(self.q_lens) != len(self.kv_lens):
            raise ValueError(f"case: {len(self.q_lens)} q_lens but {len(self.kv_lens)} kv_lens")
        for name in ("q_lens", "kv_lens"):
            for i, length in enumerate(getattr(self, name)):
                if length < 0:
                    raise ValueError(f"case: {name}[{i}] is {length}, must not be negative")
        for name in ("block_size", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"case: {name} is {getattr(self, name)}, must be at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"case: dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        cache_format(self.cache_format)

    def to_json(self) -> str:
        """One line; ``from_json`` gives back an equal case."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def brief(self) -> str:
        """The same without what ``from_json`` fills in by itself: short enough to be pasted."""
        return json.dumps(_told(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "Case":
        """Raises: ValueError naming the field that is unknown, missing or of the wrong type."""
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"case: not JSON: {error}") from None
        case: Case = _build(Case, data, "case")
        return case


def _told(part: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not what they are by default; two zeros differ in their sign."""
    values = {f.name: (getattr(part, f.name), f.default) for f in fields(part)}
    return {
        name: _told(value) if is_dataclass(value) else value
        for name, (value, default) in values.items()
        if repr(value) != repr(default)
    }


# What a JSON value may be for each annotation that Case and its parts use.
_NESTED = {"config": MLAConfig, "layout": CacheLayout, "rope": RopeConfig, "recording": Recording}


def _build(kind: type[Any], data: object, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
    known = {f.name: f for f in fields(kind)}
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(known)}")
    values = {}
    for name, value in data.items():
        values[name] = _convert(known[name].type, name, value, f"{where}.{name}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).split('__init__() ')[-1]}") from None


def _convert(annotation: Any, name: str, value: object, where: str) -> Any:
    if value is None and type(None) in get_args(annotation):
        return None
    if name in _NESTED:
        return _build(_NESTED[name], value, where)
    if annotation == tuple[int, ...]:
        if isinstance(value, list) and all(type(v) is int for v in value):
            return tuple(value)
        raise ValueError(f"{where}: expected a list of integers, got {value!r}")
    if annotation is float and type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]
    if annotation == int | None and type(value) is int:
        return value
    if annotation == float | None and type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]
    if type(value) is annotation:
        return value
    expected = getattr(annotation, "__name__", str(annotation))
    raise ValueError(f"{where}: expected {expected}, got {value!r}")
