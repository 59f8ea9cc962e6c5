"""A Hugging Face config.json, read as an ``MLAConfig``. What is not understood is refused by name."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mla_ref.config import DEFAULT, YARN, MLAConfig, RopeConfig

# transformers builds most models' inner norms with this default, not with the config's rms_norm_eps.
INNER_NORM_EPS = 1e-6

ROPE_KINDS = {"default": DEFAULT, "yarn": YARN, "deepseek_yarn": YARN}
ROPE_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "partial_rotary_factor",
)
LLAMA4_KEYS = ("llama_4_scaling_beta", "max_position_embeddings")

INDEX = "a sparse index chooses the keys"
GATE = "a sigmoid gate multiplies the attention output"
SINKS = "attention sinks"


class Family(NamedTuple):
    """How one ``model_type`` departs from DeepSeek-V3.

    interleaved: the pairing; None where the key ``rope_interleave`` says it (true if absent).
    rotate: False for NoPE models.
    inner_eps: whether the norms inside the layer use the config's ``rms_norm_eps``.
    scaled_latents: LongCat's sqrt(hidden_size / rank) on both latents, two attention layers a block.
    llama4: whether queries grow with their position.
    value_dim: whether ``v_head_dim`` may be absent and is then hidden_size / heads.
    max_position: the key of the longest position.
    beyond: as in ``MLAConfig``.
    """

    interleaved: bool | None = None
    rotate: bool = True
    inner_eps: bool = False
    scaled_latents: bool = False
    llama4: bool = False
    value_dim: bool = False
    max_position: str = "max_position_embeddings"
    beyond: str = ""


FAMILIES = {
    "deepseek_v2": Family(interleaved=True),
    "deepseek_v3": Family(),
    "deepseek_v32": Family(interleaved=True, beyond=INDEX),
    "kimi_k2": Family(),
    "kimi_linear": Family(rotate=False, max_position="model_max_length"),
    "minicpm3": Family(interleaved=False, value_dim=True),
    "glm4_moe_lite": Family(),
    "glm_moe_dsa": Family(interleaved=True, beyond=INDEX),
    "glm5_next_text": Family(rotate=False, inner_eps=True, beyond=INDEX),
    "longcat_flash": Family(interleaved=True, scaled_latents=True),
    "mistral4": Family(llama4=True),
    "youtu": Family(),
    "plm": Family(),
    "axk1": Family(),
    "sarvam_mla": Family(),
    "bailing_hybrid": Family(interleaved=True, max_position="model_max_length", beyond=GATE),
    "hy_v4": Family(interleaved=False, beyond=f"{INDEX}; {SINKS}; {GATE}"),
}


class Node(NamedTuple):
    """An object of the file, and where it is, for messages."""

    data: Mapping[str, object]
    where: str


def from_hf(source: str | os.PathLike[str] | Mapping[str, object]) -> MLAConfig:
    """The attention that a checkpoint's config.json describes.

    source: the file, the folder that holds it, or its content. A multimodal model's ``text_config`` is used.

    Scales follow transformers: YaRN always applies (DeepSeek's own code applies it only to sequences past
    4096), and the tables are multiplied by ``attention_factor``, else by m(mscale) / m(mscale_all_dim) where
    both are given, else by m(1).

    Raises: ValueError naming the key and its value: an unknown ``model_type`` or rope type, a missing key, a
        wrong type, a setting that would otherwise be ignored.
    """
    node = Node(source, "config.json") if isinstance(source, Mapping) else _read(Path(source))
    if "text_config" in node.data:
        node = _child(node, "text_config")
    family = FAMILIES[_choice(node, "model_type", FAMILIES)]
    hidden, rank = _integer(node, "hidden_size"), _integer(node, "kv_lora_rank")
    q_rank = None if _required(node, "q_lora_rank") is None else _integer(node, "q_lora_rank")
    heads, r = _integer(node, "num_attention_heads"), _integer(node, "qk_rope_head_dim")
    if node.data.get("num_key_value_heads") not in (None, heads):
        raise _refusal(node, "num_key_value_heads", f"must be num_attention_heads={heads}")
    nope = _integer(node, "qk_nope_head_dim")
    longest = family.max_position if family.max_position in node.data else "max_position_embeddings"
    rope, llama4_beta = _rope(node, family, _integer(node, longest), r, nope)
    return MLAConfig(
        name=Path(node.where).parent.name or str(node.data["model_type"]),
        hidden_size=hidden,
        num_heads=heads,
        q_lora_rank=q_rank,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=r,
        v_head_dim=_value_dim(node, family, hidden, heads),
        rope=rope,
        num_layers=_layers(node, family),
        max_position=_integer(node, longest),
        rms_norm_eps=_number(node, "rms_norm_eps") if family.inner_eps else INNER_NORM_EPS,
        attention_bias=_flag(node, "attention_bias", default=False),
        q_lora_scale=math.sqrt(hidden / q_rank) if family.scaled_latents and q_rank else 1.0,
        kv_lora_scale=math.sqrt(hidden / rank) if family.scaled_latents else 1.0,
        llama4_beta=llama4_beta,
        llama4_max_position=rope.original_max_position if family.llama4 else MLAConfig.llama4_max_position,
        beyond=family.beyond,
        source=node.where,
    )


def _read(path: Path) -> Node:
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: expected an object, got {type(data).__name__}")
    return Node(data, str(path))


def _value_dim(node: Node, family: Family, hidden: int, heads: int) -> int:
    if family.value_dim and node.data.get("v_head_dim") is None:
        return hidden // heads
    return _integer(node, "v_head_dim")


def _layers(node: Node, family: Family) -> int:
    if family.scaled_latents and "num_layers" in node.data:
        return 2 * _integer(node, "num_layers")
    return _integer(node, "num_hidden_layers")


def _rope(node: Node, family: Family, max_position: int, r: int, nope: int) -> tuple[RopeConfig, float]:
    """The rotation, and llama-4's beta (0 where there is none)."""
    interleaved = family.interleaved
    if interleaved is None:
        interleaved = _flag(node, "rope_interleave", default=True)
    if not family.rotate or r == 0:
        return RopeConfig(interleaved=interleaved, rotate=False), 0.0
    rope = _rope_node(node)
    allowed = ROPE_KEYS + LLAMA4_KEYS if family.llama4 else ROPE_KEYS
    if unknown := sorted(set(rope.data) - set(allowed)):
        raise _refusal(rope, unknown[0], "is not a known setting")
    theta = _number(rope if "rope_theta" in rope.data else node, "rope_theta")
    share = _number(rope, "partial_rotary_factor", default=1.0)
    if share != 1.0 and share * (nope + r) != r:
        raise _refusal(
            rope, "partial_rotary_factor", f"must be 1 or qk_rope_head_dim/qk_head_dim={r}/{nope + r}"
        )
    beta = _number(rope, "llama_4_scaling_beta") if family.llama4 else 0.0
    if _rope_kind(rope) == DEFAULT:
        return RopeConfig(theta=theta, interleaved=interleaved), beta
    return _yarn(rope, theta, interleaved, max_position), beta


def _rope_node(node: Node) -> Node:
    """The object ``rope_parameters`` (new style) or ``rope_scaling`` (old style); else an empty one."""
    present = [key for key in ("rope_parameters", "rope_scaling") if node.data.get(key) is not None]
    if len(present) == 2 and node.data[present[0]] != node.data[present[1]]:
        raise _refusal(
            node, "rope_scaling", f"disagrees with rope_parameters={node.data['rope_parameters']!r}"
        )
    return _child(node, present[0]) if present else Node({}, node.where)


def _rope_kind(rope: Node) -> str:
    for key in ("rope_type", "type"):
        if rope.data.get(key) is not None:
            return ROPE_KINDS[_choice(rope, key, ROPE_KINDS)]
    return DEFAULT


def _yarn(rope: Node, theta: float, interleaved: bool, max_position: int) -> RopeConfig:
    original = max_position
    if rope.data.get("original_max_position_embeddings") is not None:
        original = _integer(rope, "original_max_position_embeddings")
    factor = max_position / original if _required(rope, "factor") is None else _number(rope, "factor")
    mscale, all_dim = _number(rope, "mscale", default=0.0), _number(rope, "mscale_all_dim", default=0.0)
    factors = RopeConfig(
        theta=theta,
        interleaved=interleaved,
        scaling=YARN,
        factor=factor,
        original_max_position=original,
        beta_fast=_number(rope, "beta_fast", default=0.0) or 32.0,
        beta_slow=_number(rope, "beta_slow", default=0.0) or 1.0,
        mscale=mscale or 1.0,
        mscale_all_dim=all_dim,
        truncate=_flag(rope, "truncate", default=True),
    )
    if rope.data.get("attention_factor") is not None:
        return replace(factors, attention_factor=_number(rope, "attention_factor"))
    if not (mscale and all_dim) and factors.table_scale != factors.magnitude(1.0):
        return replace(factors, attention_factor=factors.magnitude(1.0))
    return factors


def _refusal(node: Node, key: str, reason: str) -> ValueError:
    return ValueError(f"{node.where}: {key} is {node.data.get(key)!r}, {reason}")


def _required(node: Node, key: str) -> object:
    if key not in node.data:
        raise ValueError(f"{node.where}: {key} is missing")
    return node.data[key]


def _child(node: Node, key: str) -> Node:
    value = node.data[key]
    if not isinstance(value, Mapping):
        raise _refusal(node, key, "must be an object")
    return Node(value, f"{node.where}: {key}")


def _choice(node: Node, key: str, allowed: Mapping[str, object]) -> str:
    value = _required(node, key)
    if not isinstance(value, str) or value not in allowed:
        raise _refusal(node, key, f"must be one of {', '.join(allowed)}")
    return value


def _integer(node: Node, key: str) -> int:
    value = _required(node, key)
    if type(value) is not int:
        raise _refusal(node, key, "must be an integer")
    return value


def _number(node: Node, key: str, default: float | None = None) -> float:
    value = _required(node, key) if default is None else node.data.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise _refusal(node, key, "must be a finite number")
    return float(value)


def _flag(node: Node, key: str, default: bool) -> bool:
    value = node.data.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _refusal(node, key, "must be true or false")
    return value
