"""transformers' MLA layers: with our dimensions, on our weights, their caches in our pages."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from test_layer import small

from mla_ref.config import YARN, MLAConfig, RopeConfig
from mla_ref.pages import scatter
from mla_ref.presets import preset
from mla_ref.problems.layer import LayerInputs
from mla_ref.rope import cos_sin

transformers = pytest.importorskip("transformers", reason="compares with transformers' attention")

LAYER, TOKENS = 1, 11
PLAIN = RopeConfig()
V3_ROPE = preset("deepseek-v3").rope


class Model(NamedTuple):
    """A model type of transformers, the prefix of its classes, and the same dimensions as ours."""

    family: str
    prefix: str
    config: MLAConfig
    attention: str = "Attention"


LONGCAT = small("longcat-flash", q_lora_scale=math.sqrt(42 / 20), kv_lora_scale=math.sqrt(42 / 26))
# Their one key for both lengths; positions 4 and 8 are in the second and third octave.
MISTRAL = small(
    "mistral-small-4",
    rope=replace(preset("mistral-small-4").rope, original_max_position=4),
    llama4_max_position=4,
)
V2, V3 = ("deepseek_v2", "DeepseekV2"), ("deepseek_v3", "DeepseekV3")
MODELS = {
    "v2-lite": Model(*V2, small("deepseek-v2-lite")),
    "v2-lite-no-yarn": Model(*V2, small("deepseek-v2-lite", rope=PLAIN)),
    "v2": Model(*V2, small("deepseek-v2")),
    "v3": Model(*V3, small("deepseek-v3")),
    "v3-no-yarn": Model(*V3, small("deepseek-v3", rope=PLAIN)),
    "v3-no-q-lora": Model(*V3, small("deepseek-v3", q_lora_rank=None)),
    "v3-biases": Model(*V3, small("deepseek-v3", attention_bias=True)),
    "v3-half-split": Model(*V3, small("deepseek-v3", rope=replace(V3_ROPE, interleaved=False))),
    "v3-two-magnitudes": Model(*V3, small("deepseek-v3", rope=replace(V3_ROPE, mscale=0.7))),
    "kimi-k2": Model(*V3, small("kimi-k2")),
    "moonlight": Model(*V3, small("moonlight-16b-a3b")),
    "minicpm3": Model("minicpm3", "MiniCPM3", small("minicpm3-4b")),
    "glm-4.7-flash": Model("glm4_moe_lite", "Glm4MoeLite", small("glm-4.7-flash")),
    "longcat-flash": Model("longcat_flash", "LongcatFlash", LONGCAT, "MLA"),
    "mistral-small-4": Model("mistral4", "Mistral4", MISTRAL),
    "youtu": Model("youtu", "Youtu", small("youtu-llm-2b")),
    "a.x-k1": Model("axk1", "AXK1", small("a.x-k1")),
    "kimi-linear": Model("kimi_linear", "KimiLinear", small("kimi-linear-48b")),
}
WHOLE = {
    "whole-v2-lite": Model(*V2, preset("deepseek-v2-lite")),
    "whole-v3-rank-of-64": Model(*V3, preset("deepseek-v3").shard(64)),
}


class Wide:
    """torch, with float64 where its float32 is named."""

    float = torch.float64
    float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def modeling(model: Model) -> ModuleType:
    return getattr(getattr(transformers.models, model.family), f"modeling_{model.family}")


def their_config(model: Model) -> Any:
    config, rope = model.config, model.config.rope
    parameters: dict[str, object] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.scaling == YARN:
        names = ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
        parameters |= {name: getattr(rope, name) for name in names}
        parameters["original_max_position_embeddings"] = rope.original_max_position
    if config.llama4_beta:
        parameters["original_max_position_embeddings"] = config.llama4_max_position
        parameters["llama_4_scaling_beta"] = config.llama4_beta
    theirs = transformers.CONFIG_MAPPING[model.family](
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        max_position_embeddings=config.max_position,
        attention_bias=config.attention_bias,
        rope_parameters=parameters,
        rope_interleave=rope.interleaved,
    )
    if model.family == "longcat_flash":
        theirs.head_dim = config.qk_rope_head_dim  # the others derive it
    theirs._attn_implementation = "eager"
    return theirs


def their_attention(model: Model, dtype: torch.dtype) -> torch.nn.Module:
    made: torch.nn.Module = getattr(modeling(model), model.prefix + model.attention)(
        their_config(model), LAYER
    )
    return made.to(dtype)


Tables = Callable[[torch.Tensor, torch.Tensor], object]


def their_tables(model: Model) -> Tables:
    """(hidden states, positions) -> what their attention takes for the rotation."""
    if not model.config.rope.rotate:
        return lambda hidden, positions: None
    tables: Tables = getattr(modeling(model), f"{model.prefix}RotaryEmbedding")(their_config(model))
    return tables


def our_tables(model: Model) -> Tables:
    """The same, from float64 angles, rounded once."""

    def tables(hidden: torch.Tensor, positions: torch.Tensor) -> object:
        cos, sin = cos_sin(model.config.rope, positions[0], model.config.qk_rope_head_dim)
        cos, sin = cos.to(hidden.dtype)[None], sin.to(hidden.dtype)[None]
        if model.family == "deepseek_v2":
            return torch.complex(cos, sin)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    return tables


def their_layer(
    model: Model, inputs: LayerInputs, steps: tuple[int, ...], tables: Tables
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, cache) of their attention over one request, so many tokens at a time."""
    return run(their_attention(model, inputs.hidden_states.dtype), model, inputs, steps, tables)


def run(
    attention: torch.nn.Module, model: Model, inputs: LayerInputs, steps: tuple[int, ...], tables: Tables
) -> tuple[torch.Tensor, torch.Tensor]:
    attention.load_state_dict(inputs.weights)
    cache, outs, start = transformers.DynamicCache(), [], 0
    for count in steps:
        hidden = inputs.hidden_states[None, start : start + count]
        positions = inputs.positions[None, start : start + count]
        unseen = torch.arange(start + count) > positions[0, :, None]
        mask = torch.zeros(unseen.shape, dtype=hidden.dtype).masked_fill(unseen, -torch.inf)
        with torch.no_grad():
            out, _ = attention(
                hidden_states=hidden,
                position_embeddings=tables(hidden, positions),
                attention_mask=mask[None, None],
                position_ids=positions,
                cache=cache,
            )
        outs.append(out[0])
        start += count
    layer, kv_cache = cache.layers[LAYER], inputs.kv_cache.clone()
    entries = torch.cat([layer.keys[0, 0], as_pairs(model, layer.values[0, 0])], dim=-1)
    scatter(kv_cache, inputs.slot_mapping, entries)
    return torch.cat(outs), kv_cache


def as_pairs(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Rotated channels where ours are: all but DeepSeek-V2 write interleaved pairs half-split."""
    rope = model.config.rope
    if rope.rotate and rope.interleaved and model.family != "deepseek_v2":
        return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return x
