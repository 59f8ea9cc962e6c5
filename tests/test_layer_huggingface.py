"""The layer against transformers' own: weights loaded by name, prefill, chunks and decode.

transformers computes rotation, norms and softmax in float32 whatever the model's type. To compare formulas
and not roundings, its code is also evaluated with its float32 replaced by float64; there it must be within
the bound of a float64 layer, like ours. Its untouched float32 code must be within that of a float32 layer.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from test_layer import SCHEDULES, in_steps, judge, one_request, small

from mla_ref.case import Case
from mla_ref.config import YARN, MLAConfig, RopeConfig
from mla_ref.layer import BACKEND
from mla_ref.naive import naive
from mla_ref.pages import scatter
from mla_ref.presets import preset
from mla_ref.problems.layer import LayerInputs
from mla_ref.problems.rope import PROBLEM as ROPE_PROBLEM
from mla_ref.rope import BACKEND as ROPE
from mla_ref.rope import cos_sin
from oracles.bounds import ADMISSIBLE
from oracles.compare import within

transformers = pytest.importorskip("transformers", reason="compares with transformers' attention")

LAYER = 1
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
RUNS = {f"{name}-{how}": (model, steps) for name, model in MODELS.items() for how, steps in SCHEDULES.items()}
WHOLE_RUNS = {name: (model, SCHEDULES["prefill-decode"]) for name, model in WHOLE.items()}


class Wide:
    """torch, with float64 where its float32 is named."""

    float = torch.float64
    float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def modeling(model: Model) -> ModuleType:
    return getattr(getattr(transformers.models, model.family), f"modeling_{model.family}")


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (*map(modeling, MODELS.values()), transformers.modeling_rope_utils):
        monkeypatch.setattr(module, "torch", Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


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
    attention = their_attention(model, inputs.hidden_states.dtype)
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
    return torch.cat(outs), as_pages(model, cache.layers[LAYER], inputs)


def as_pages(model: Model, layer: Any, inputs: LayerInputs) -> torch.Tensor:
    """Their cached latents in our pages; interleaved pairs, which all but DeepSeek-V2 write half-split."""
    k_pe = layer.values[0, 0]
    if model.config.rope.rotate and model.config.rope.interleaved and model.family != "deepseek_v2":
        k_pe = k_pe.unflatten(-1, (2, -1)).transpose(1, 2).flatten(1)
    kv_cache = inputs.kv_cache.clone()
    scatter(kv_cache, inputs.slot_mapping, torch.cat([layer.keys[0, 0], k_pe], dim=-1))
    return kv_cache


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("model", "steps"), (RUNS | WHOLE_RUNS).values(), ids=RUNS | WHOLE_RUNS)
def test_their_formulas_are_ours(model, steps, seed):
    inputs = one_request(model.config, torch.float64, seed)
    judge(*their_layer(model, inputs, steps, their_tables(model)), inputs, BACKEND.numerics)
    judge(*in_steps(inputs, steps, naive), inputs, BACKEND.numerics)


@pytest.mark.parametrize(("model", "steps"), RUNS.values(), ids=RUNS)
def test_their_float32_is_a_float32_layer(model, steps, seed):
    inputs = one_request(model.config, torch.float32, seed)
    judge(*their_layer(model, inputs, steps, our_tables(model)), inputs, BACKEND.numerics)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("model", [model for model in MODELS.values() if model.config.rope.rotate])
def test_their_tables_are_ours_at_every_position(model, seed):
    """A one in the first channel of each pair becomes the table's cosine there and its sine in the second."""
    rope, r = model.config.rope, model.config.qk_rope_head_dim
    case = Case(problem="rope", config=model.config, q_lens=(50,), kv_lens=(50,), dtype="float64", seed=seed)
    inputs = ROPE_PROBLEM.materialize(case, torch.device("cpu"))
    x = torch.zeros(50, 1, r, dtype=torch.float64)
    x[..., slice(0, None, 2) if rope.interleaved else slice(0, r // 2)] = 1.0
    inputs = inputs._replace(x=x)
    table = their_tables(model)(x, inputs.positions[None])
    if isinstance(table, tuple):
        cos, sin = (half[0, :, : r // 2] for half in table)
    else:
        cos, sin = table[0].real, table[0].imag
    got = torch.stack([cos, sin], dim=-1).flatten(1) if rope.interleaved else torch.cat([cos, sin], dim=1)
    expected = ADMISSIBLE["rope"](inputs, ROPE.numerics)["x"]
    for mine in (got[:, None], ROPE.fn(*inputs).x):
        finding = within("x", mine, expected, "t h r", inputs)
        assert finding.ok, finding.detail


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_their_softmax_scale_is_ours(model):
    with torch.device("meta"):
        assert f"{their_attention(model, torch.float32).scaling:.14f}" == f"{model.config.softmax_scale:.14f}"


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_their_config_is_read_as_ours(model):
    """Through a checkpoint's config.json, as they write it."""
    read = MLAConfig.from_hf(their_config(model).to_dict() | {"model_type": model.family})
    assert read == replace(model.config, name=read.name, source=read.source, num_layers=read.num_layers)
