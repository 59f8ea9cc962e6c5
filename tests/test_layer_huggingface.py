"""The layer against transformers' own: weights loaded by name, prefill, chunks and decode.

transformers computes rotation, norms and softmax in float32 whatever the model's type. To compare formulas
and not roundings, its code is also evaluated with its float32 replaced by float64; there it must be within
the bound of a float64 layer, like ours. Its untouched float32 code must be within that of a float32 layer.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_layer import SCHEDULES, in_steps, judge, one_request
from their_layer import (
    MODELS,
    TOKENS,
    WHOLE,
    Model,
    Wide,
    as_pairs,
    modeling,
    our_tables,
    run,
    their_attention,
    their_config,
    their_layer,
    their_tables,
    transformers,
)

import mla_ref.layer
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.layer import BACKEND, up_projections
from mla_ref.naive import naive
from mla_ref.pages import gather
from mla_ref.problem import AttentionOutput
from mla_ref.problems.attention import AttentionInputs
from mla_ref.problems.layer import LayerInputs
from mla_ref.problems.rope import PROBLEM as ROPE_PROBLEM
from mla_ref.rope import BACKEND as ROPE
from oracles.bounds import ADMISSIBLE, Admissible, Ball, accumulator, linear, rms_norm, rotation
from oracles.compare import within

RUNS = {f"{name}-{how}": (model, steps) for name, model in MODELS.items() for how, steps in SCHEDULES.items()}


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (*map(modeling, MODELS.values()), transformers.modeling_rope_utils):
        monkeypatch.setattr(module, "torch", Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


Steps = dict[str, list[torch.Tensor]]


def their_steps(
    model: Model, inputs: LayerInputs, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """Their cache; ``steps`` gathers what each step gave."""
    module, plain = modeling(model), modeling(model).eager_attention_forward

    def attend(attention: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = plain(attention, query, *args, **kwargs)
        p, query = model.config.qk_nope_head_dim, query[0].transpose(0, 1)
        steps["q_nope"].append(query[..., :p])
        steps["q_pe"].append(as_pairs(model, query[..., p:]))
        steps["attention"].append(out[0])
        return out, weights

    monkeypatch.setattr(module, "eager_attention_forward", attend)
    attention = their_attention(model, torch.float64)
    for name, child in attention.named_children():
        child.register_forward_hook(lambda child, args, out, name=name: steps[name].append(out[0]))
    return run(attention, model, inputs, SCHEDULES["prefill-decode"], their_tables(model))[1]


def our_steps(
    model: Model, inputs: LayerInputs, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """Our cache, likewise."""
    project, rms_norm = mla_ref.layer.project, mla_ref.layer.rms_norm

    def projected(x: torch.Tensor, weights: Any, name: str) -> torch.Tensor:
        steps[name].append(project(x, weights, name))
        return steps[name][-1]

    def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, gain: float) -> torch.Tensor:
        name = "kv_a_layernorm" if len(weight) == model.config.kv_lora_rank else "q_a_layernorm"
        steps[name].append(rms_norm(x, weight, eps, gain))
        return steps[name][-1]

    def attend(*args: Any) -> AttentionOutput:
        out = naive(*args)
        for name, x in (("q_nope", args[0]), ("q_pe", args[1]), ("attention", out.out)):
            steps[name].append(x)
        return out

    monkeypatch.setattr(mla_ref.layer, "project", projected)
    monkeypatch.setattr(mla_ref.layer, "rms_norm", normed)
    return in_steps(inputs, SCHEDULES["prefill-decode"], attend)[1]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("model", "steps"), RUNS.values(), ids=RUNS)
def test_their_formulas_are_ours(model, steps, seed):
    inputs = one_request(model.config, torch.float64, seed)
    judge(*their_layer(model, inputs, steps, their_tables(model)), inputs, BACKEND.numerics)
    judge(*in_steps(inputs, steps, naive), inputs, BACKEND.numerics)


@pytest.mark.parametrize(("model", "steps"), RUNS.values(), ids=RUNS)
def test_their_float32_is_a_float32_layer(model, steps, seed):
    inputs = one_request(model.config, torch.float32, seed)
    judge(*their_layer(model, inputs, steps, our_tables(model)), inputs, BACKEND.numerics)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("record", [their_steps, our_steps])
@pytest.mark.parametrize("model", WHOLE.values(), ids=WHOLE)
def test_every_step_at_full_dimensions(model, record, seed, monkeypatch):
    """Each step is judged on what the one before it gave, so that no bound outgrows a rounding to float32.

    Over the whole layer the bounds multiply: to 1e-5 for DeepSeek-V3, though all agree to 1e-14.
    """
    inputs, steps = one_request(model.config, torch.float64, seed), defaultdict(list)
    kv_cache = record(model, inputs, steps, monkeypatch)
    step = {name: torch.cat(parts) for name, parts in steps.items() if name != "kv_b_proj"}
    config, weights, acc = model.config, inputs.weights, accumulator(BACKEND.numerics, torch.float64)

    def exactly(x: torch.Tensor) -> Ball:
        return Ball(x, torch.zeros_like(x))

    def projected(x: torch.Tensor, name: str) -> Ball:
        return linear(exactly(x), weights[f"{name}.weight"], BACKEND.numerics, acc)

    def normed(x: torch.Tensor, name: str) -> Ball:
        return rms_norm(exactly(x), weights[f"{name}.weight"], config.rms_norm_eps, 1.0, acc)

    def rotated(x: torch.Tensor) -> Ball:
        return rotation(exactly(x), inputs.positions, config.rope, BACKEND.numerics, torch.float64)

    c, p = config.kv_lora_rank, config.qk_nope_head_dim
    step["k_pe"] = gather(kv_cache, inputs.block_table[0], 0, TOKENS)[:, None, c:]
    q = step["q_proj" if config.q_lora_rank is None else "q_b_proj"].view(
        TOKENS, config.num_heads, config.qk_head_dim
    )
    want = {
        "kv_a_proj_with_mqa": projected(inputs.hidden_states, "kv_a_proj_with_mqa"),
        "kv_a_layernorm": normed(step["kv_a_proj_with_mqa"][:, :c], "kv_a_layernorm"),
        "k_pe": rotated(step["kv_a_proj_with_mqa"][:, None, c:]),
        "q_nope": exactly(q[..., :p]),
        "q_pe": rotated(q[..., p:]),
        "o_proj": projected(step["attention"].flatten(1), "o_proj"),
    }
    if config.q_lora_rank is None:
        want["q_proj"] = projected(inputs.hidden_states, "q_proj")
    else:
        want["q_a_proj"] = projected(inputs.hidden_states, "q_a_proj")
        want["q_a_layernorm"] = normed(step["q_a_proj"], "q_a_layernorm")
        want["q_b_proj"] = projected(step["q_a_layernorm"], "q_b_proj")
    w_uk, w_uv = up_projections(weights["kv_b_proj.weight"], config)
    attention = AttentionInputs(
        q_nope=step["q_nope"],
        q_pe=step["q_pe"],
        kv_cache=kv_cache,
        block_table=inputs.block_table,
        cu_seqlens_q=inputs.cu_seqlens_q,
        cache_seqlens=inputs.cache_seqlens,
        w_uk=w_uk,
        w_uv=w_uv,
        max_seqlen_q=TOKENS,
        softmax_scale=config.softmax_scale,
        cache_format=inputs.cache_format,
        kv_scale=inputs.kv_scale,
    )
    admissible = {name: Admissible(*ball, torch.float64) for name, ball in want.items()}
    admissible["attention"] = ADMISSIBLE["attention"](attention, BACKEND.numerics)["out"]
    assert set(step) == set(admissible)
    for name, expected in admissible.items():
        finding = within(name, step[name], expected)
        assert finding.ok, finding.detail
        rounding = torch.finfo(torch.float32).eps / 2 * float(expected.mid.abs().max())
        assert float(expected.radius.max()) < rounding, name


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
