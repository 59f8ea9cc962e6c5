"""The whole layer: its parts on exact answers, its cache byte for byte, its weights under reload."""

import math
from dataclasses import replace

import pytest
import torch

from mla_ref.backend import backends_in
from mla_ref.case import Case
from mla_ref.config import MLAConfig, RopeConfig
from mla_ref.formats import cache_format
from mla_ref.formats._plain import plain_format
from mla_ref.layer import (
    BACKEND,
    MLA,
    Attention,
    latents,
    layer_around,
    project,
    queries,
    rms_norm,
    up_projections,
)
from mla_ref.naive import naive
from mla_ref.numerics import Numerics
from mla_ref.pages import gather
from mla_ref.presets import PRESETS, preset
from mla_ref.problem import AttentionOutput
from mla_ref.problems.layer import PROBLEM, LayerInputs, materialize, weight_shapes
from mla_ref.rope import rotate
from oracles.bounds import ADMISSIBLE, new_entries, stored_parts
from oracles.compare import within

# Every dimension differs, so that no broadcast hides a swap.
DIMS = {"hidden_size": 42, "kv_lora_rank": 26, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_heads": 3}


def small(name: str, **changes: object) -> MLAConfig:
    """A preset's rules at small dimensions."""
    config = preset(name)
    dims = DIMS | {
        "qk_rope_head_dim": min(config.qk_rope_head_dim, 8),
        "q_lora_rank": None if config.q_lora_rank is None else 20,
    }
    return replace(config, **(dims | changes))


V3 = small("deepseek-v3")
V2_LITE = small("deepseek-v2-lite")
BIASED = replace(V3, name="biased", attention_bias=True)
WHOLE = [small(name) for name in PRESETS if not preset(name).beyond]


def inputs_of(config: MLAConfig, seed: int, **changes: object) -> LayerInputs:
    """Chunk, prefill, decode and a request of padding, on fresh tensors."""
    recipe = {"q_lens": (3, 5, 1, 2), "kv_lens": (13, 5, 9, 1), "dtype": "float32", "cache_format": "fp32"}
    case = Case(problem="layer", config=config, block_size=4, seed=seed, **(recipe | changes))
    return materialize(case, torch.device("cpu"))


ATTENTIONS = {name: b for name, b in backends_in("mla_ref").items() if b.problem == "attention"}

# How many of a request's tokens each call brings.
SCHEDULES = {"prefill": (11,), "chunks": (4, 1, 6), "prefill-decode": (7, 1, 1, 1, 1), "decode": (1,) * 11}


def one_request(config: MLAConfig, dtype: torch.dtype, seed: int) -> LayerInputs:
    """A prefill of eleven tokens, on a cache that stores exactly what it is given."""
    name = str(dtype).removeprefix("torch.")
    inputs = inputs_of(config, seed, q_lens=(11,), kv_lens=(11,), dtype=name)
    exact = plain_format(name, dtype, torch.finfo(dtype).eps / 2)
    return inputs._replace(cache_format=exact, kv_cache=inputs.kv_cache.to(dtype))


def in_steps(
    inputs: LayerInputs, steps: tuple[int, ...], attention: Attention
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, cache) of the module over one request, so many tokens at a time, on one cache."""
    module = MLA(inputs.config, attention, dtype=inputs.hidden_states.dtype)
    module.load_state_dict(inputs.weights)
    kv_cache, outs, start = inputs.kv_cache.clone(), [], 0
    for count in steps:
        part = slice(start, start + count)
        start += count
        outs.append(
            module(
                hidden_states=inputs.hidden_states[part],
                positions=inputs.positions[part],
                kv_cache=kv_cache,
                block_table=inputs.block_table,
                cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
                cache_seqlens=torch.tensor([start], dtype=torch.int32),
                slot_mapping=inputs.slot_mapping[part],
                max_seqlen_q=count,
                cache_format=inputs.cache_format,
                kv_scale=inputs.kv_scale,
            )
        )
    return torch.cat(outs), kv_cache


def judge(out: torch.Tensor, kv_cache: torch.Tensor, inputs: LayerInputs, numerics: Numerics) -> None:
    """The cached entries are admissible, and so is the output for the entries that were cached.

    No schedule appears in either bound: what passes agrees with every other schedule that does.
    """
    done = inputs._replace(kv_cache=kv_cache)
    finding = within("out", out, ADMISSIBLE["layer"](done, numerics)["out"], "t d", inputs)
    assert finding.ok, finding.detail
    stored = gather(kv_cache, inputs.block_table[0], 0, len(out))
    entries = new_entries(inputs, numerics)
    for part in stored_parts(inputs.cache_format, stored, *entries, inputs.kv_scale):
        finding = within(part.name, part.got, part.want)
        assert finding.ok, finding.detail


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("steps", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("config", [*WHOLE, BIASED], ids=lambda config: config.name)
def test_prefill_chunks_and_decode_are_one_computation(config, dtype, steps, seed):
    inputs = one_request(config, dtype, seed)
    judge(*in_steps(inputs, steps, naive), inputs, BACKEND.numerics)


@pytest.mark.parametrize("steps", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
@pytest.mark.parametrize("config", [V3, V2_LITE], ids=lambda config: config.name)
def test_every_attention_serves_the_layer(config, attention, steps, seed):
    """A layer rounds as its attention does, and to its own type between the steps."""
    inputs = one_request(config, torch.float64, seed)
    numerics = replace(attention.numerics, stage=BACKEND.numerics.stage)
    for fn in (attention.fn, *attention.variants.values()):
        judge(*in_steps(inputs, steps, fn), inputs, numerics)


@pytest.mark.parametrize("config", [*WHOLE, BIASED], ids=lambda config: config.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_every_form_gives_finite_outputs_of_its_own_type(config, dtype, seed):
    inputs = inputs_of(config, seed, dtype=dtype)
    out, kv_cache = BACKEND.fn(*inputs)
    assert out.dtype == inputs.hidden_states.dtype
    assert out.shape == inputs.hidden_states.shape
    assert bool(out.isfinite().all())
    assert kv_cache is inputs.kv_cache


@pytest.mark.parametrize("config", [V3, V2_LITE, BIASED], ids=lambda config: config.name)
def test_the_module_is_the_function(config, seed):
    inputs = inputs_of(config, seed)
    module = MLA(config)
    module.load_state_dict(inputs.weights)
    want = BACKEND.fn(*inputs._replace(kv_cache=(cache := inputs.kv_cache.clone())))
    got = module(*(value for name, value in inputs._asdict().items() if name not in ("weights", "config")))
    assert torch.equal(got, want.out)
    assert torch.equal(bytes_of(inputs.kv_cache), bytes_of(cache))
    assert not got.requires_grad


@pytest.mark.parametrize("config", [V3, V2_LITE, BIASED], ids=lambda config: config.name)
def test_the_state_dict_has_a_checkpoints_names(config):
    with torch.device("meta"):
        state = MLA(config).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == weight_shapes(config)


def test_a_checkpoints_names():
    low_rank = {"q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"}
    rest = {"kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight", "o_proj.weight"}
    assert set(weight_shapes(V3)) == low_rank | rest
    assert set(weight_shapes(V2_LITE)) == {"q_proj.weight"} | rest
    biases = {"q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"}
    assert set(weight_shapes(BIASED)) == low_rank | rest | biases


@pytest.mark.parametrize("name", ["bf16", "fp32", "fp8_e4m3"])
def test_only_the_named_slots_change_and_they_hold_the_latents(name, seed):
    inputs = inputs_of(V3, seed, cache_format=name, kv_scale=0.25)
    before = inputs.kv_cache.clone()
    kv_c, k_pe = latents(inputs.hidden_states, inputs.positions, inputs.weights, V3)
    want = cache_format(name).encode(kv_c, k_pe, inputs.kv_scale)
    BACKEND.fn(*inputs)
    flat, old = inputs.kv_cache.flatten(0, 1), before.flatten(0, 1)
    written = inputs.slot_mapping[inputs.slot_mapping >= 0]
    assert torch.equal(bytes_of(flat[written]), bytes_of(want[inputs.slot_mapping >= 0]))
    others = torch.ones(flat.shape[0], dtype=torch.bool)
    others[written] = False
    assert torch.equal(bytes_of(flat[others]), bytes_of(old[others]))
    assert int((inputs.slot_mapping < 0).sum()) == 1


def test_the_cached_key_is_rotated_once(seed):
    inputs = inputs_of(V3, seed, q_lens=(6,), kv_lens=(13,))
    BACKEND.fn(*inputs)
    entry = project(inputs.hidden_states, inputs.weights, "kv_a_proj_with_mqa")
    want = rotate(entry[:, None, V3.kv_lora_rank :], torch.arange(7, 13), V3.rope).x[:, 0]
    assert torch.equal(gather(inputs.kv_cache, inputs.block_table[0], 7, 13)[:, V3.kv_lora_rank :], want)


def test_the_latent_is_normed_and_the_rope_part_is_not(seed):
    """Doubling the down-projection leaves the one (up to eps) and doubles the other."""
    inputs = inputs_of(replace(V3, rms_norm_eps=0.0), seed)
    name = "kv_a_proj_with_mqa.weight"
    doubled = {**inputs.weights, name: inputs.weights[name] * 2.0}
    once = latents(inputs.hidden_states, inputs.positions, inputs.weights, inputs.config)
    twice = latents(inputs.hidden_states, inputs.positions, doubled, inputs.config)
    assert torch.equal(twice[0], once[0])
    assert torch.equal(twice[1], 2.0 * once[1])


def test_rms_norm_by_hand():
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0]])
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(rms_norm(x, weight, eps=2.75, gain=1.0), torch.tensor([[1.0, 8.0 / 3.0, 0.0, 0.0]]))
    assert torch.equal(rms_norm(x, weight, eps=2.75, gain=2.0), torch.tensor([[2.0, 16.0 / 3.0, 0.0, 0.0]]))


def test_up_projections_split_each_head():
    h, p, v, c = 3, 16, 12, 26
    weight = torch.arange(h * (p + v) * c).view(h * (p + v), c)
    w_uk, w_uv = up_projections(weight, V3)
    assert w_uk.shape == (h, p, c)
    assert w_uv.shape == (h, v, c)
    assert w_uk[2, 5, 7] == (2 * (p + v) + 5) * c + 7
    assert w_uv[1, 11, 23] == (1 * (p + v) + p + 11) * c + 23
    assert w_uk.data_ptr() == weight.data_ptr()


def test_queries_are_split_nope_first(seed):
    inputs = inputs_of(V2_LITE, seed)
    q_nope, q_pe = queries(inputs.hidden_states, torch.zeros(11, dtype=torch.int64), inputs.weights, V2_LITE)
    q = project(inputs.hidden_states, inputs.weights, "q_proj").view(11, 3, 24)
    assert torch.equal(q_nope, q[..., :16])
    assert torch.equal(q_pe, q[..., 16:])


@pytest.mark.parametrize(("field", "norm"), [("q_lora_scale", "q_a"), ("kv_lora_scale", "kv_a")])
def test_a_latent_scale_is_its_norms_weight(field, norm, seed):
    """As engines fold it. A power of two commutes with every rounding."""
    config = replace(small("longcat-flash", kv_lora_scale=1.0, q_lora_scale=1.0), **{field: 4.0})
    inputs = inputs_of(config, seed)
    name = f"{norm}_layernorm.weight"
    folded = inputs._replace(
        config=replace(config, **{field: 1.0}),
        weights={**inputs.weights, name: 4.0 * inputs.weights[name]},
        kv_cache=inputs.kv_cache.clone(),
    )
    assert torch.equal(BACKEND.fn(*inputs).out, BACKEND.fn(*folded).out)
    assert torch.equal(bytes_of(inputs.kv_cache), bytes_of(folded.kv_cache))
    unscaled = inputs._replace(config=folded.config)
    assert not torch.equal(BACKEND.fn(*inputs).out, BACKEND.fn(*unscaled).out)


def test_llama4_queries_grow_by_octaves_of_the_context(seed):
    """1 + beta ln(1 + floor(position / 8192)), exactly 1 below 8192; beta = 1/ln 2 makes it 2 and 3."""
    config = small("mistral-small-4", llama4_beta=1.0 / math.log(2.0), rope=RopeConfig(rotate=False))
    plain = replace(config, llama4_beta=0.0)
    inputs = inputs_of(config, seed, dtype="float64")
    positions = torch.tensor([0, 1, 8191, 8192, 16383, 16384, 24575, 24576, 32767, 40000, 8190])
    got = queries(inputs.hidden_states, positions, inputs.weights, config)
    want = queries(inputs.hidden_states, positions, inputs.weights, plain)
    growth = torch.tensor([1, 1, 1, 2, 2, math.log2(3) + 1, math.log2(3) + 1, 3, 3, math.log2(5) + 1, 1])
    for grown, q in zip(got, want, strict=True):
        assert torch.equal((grown / q).mean((1, 2)).float(), growth.float())


def test_a_nope_model_does_not_see_positions(seed):
    inputs = inputs_of(small("kimi-linear-48b"), seed)
    moved = inputs._replace(positions=inputs.positions + 1000, kv_cache=inputs.kv_cache.clone())
    assert torch.equal(BACKEND.fn(*inputs).out, BACKEND.fn(*moved).out)
    rotated = inputs_of(V2_LITE, seed)
    moved = rotated._replace(positions=rotated.positions + 1000, kv_cache=rotated.kv_cache.clone())
    assert not torch.equal(BACKEND.fn(*rotated).out, BACKEND.fn(*moved).out)


@pytest.mark.parametrize("config", [V3, BIASED], ids=lambda config: config.name)
def test_a_token_that_sees_no_key_gives_the_bias(config, seed):
    inputs = inputs_of(config, seed, q_lens=(4,), kv_lens=(1,))
    assert inputs.slot_mapping[:3].tolist() == [-3, -2, -1]
    out = BACKEND.fn(*inputs).out[:3]
    want = inputs.weights["o_proj.bias"] if config.attention_bias else torch.zeros(42)
    assert torch.equal(out, want.expand(3, 42))


def test_the_attention_given_is_the_one_that_runs(seed):
    calls = []

    def recorded(*args):
        calls.append(args)
        q_nope, q_pe = args[:2]
        return AttentionOutput(q_nope.new_zeros(*q_nope.shape[:2], 12), q_pe.new_zeros(q_pe.shape[:2]))

    inputs = inputs_of(BIASED, seed)
    module = MLA(BIASED, attention=recorded)
    module.load_state_dict(inputs.weights)
    for layer in (layer_around(recorded), lambda *args: module.layer(*args)):
        out = layer(*inputs).out
        assert torch.equal(out, inputs.weights["o_proj.bias"].expand(11, 42))
    assert len(calls) == 2
    assert calls[0][9] == BIASED.softmax_scale
    assert calls[0][2] is inputs.kv_cache


def test_reloading_weights_leaves_nothing_of_the_old_ones(seed):
    first, second = (inputs_of(V3, seed + i) for i in (0, 1))
    reloaded, fresh = MLA(V3), MLA(V3)
    rest = [value for name, value in first._asdict().items() if name not in ("weights", "config")]
    reloaded.load_state_dict(first.weights)
    before = reloaded(*rest)
    reloaded.load_state_dict(second.weights)
    fresh.load_state_dict(second.weights)
    assert torch.equal(reloaded(*rest), fresh(*rest))
    assert not torch.equal(reloaded(*rest), before)


@pytest.mark.parametrize(
    "lens", [((5,), (5,)), ((1,), (9,)), ((3,), (13,))], ids=["prefill", "decode", "chunk"]
)
@pytest.mark.parametrize("row", [0, 16], ids=["w_uk", "w_uv"])
def test_every_path_reads_the_current_up_projection(lens, row, seed):
    inputs = inputs_of(V3, seed, q_lens=lens[0], kv_lens=lens[1])
    before = BACKEND.fn(*inputs).out
    inputs.weights["kv_b_proj.weight"][row] += 1.0
    assert not torch.equal(BACKEND.fn(*inputs).out, before)


@pytest.mark.parametrize("name", [name for name in PRESETS if preset(name).beyond])
def test_a_layer_that_is_more_than_mla_is_refused(name):
    config = small(name)
    with pytest.raises(ValueError, match=rf"^{name}: the layer computes more than MLA: "):
        MLA(config)
    case = Case(problem="layer", config=config, q_lens=(1,), kv_lens=(1,))
    assert BACKEND.supports(case).startswith(f"{name}: the layer computes more than MLA")
    assert BACKEND.supports(replace(case, config=V3)) is None


def test_inputs_are_left_as_they_were(seed):
    inputs, same = inputs_of(V3, seed), inputs_of(V3, seed)
    BACKEND.fn(*inputs)
    for name, tensor in inputs.weights.items():
        assert torch.equal(tensor, same.weights[name]), name
    for name in (
        "hidden_states",
        "positions",
        "block_table",
        "cu_seqlens_q",
        "cache_seqlens",
        "slot_mapping",
    ):
        assert torch.equal(getattr(inputs, name), getattr(same, name)), name


def changed(**weights: torch.Tensor | None):
    def change(inputs: LayerInputs) -> LayerInputs:
        merged = {**inputs.weights, **{f"{name}.weight": weight for name, weight in weights.items()}}
        return inputs._replace(
            weights={name: weight for name, weight in merged.items() if weight is not None}
        )

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda i: i._replace(hidden_states=torch.zeros(11, 43)),
            "hidden_states: d=43, but deepseek-v3 has 42",
        ),
        (lambda i: i._replace(positions=i.positions.int()), "positions: dtype is int32, must be int64"),
        (lambda i: i._replace(positions=i.positions - 5), r"positions\[3\]: is -5, must not be negative"),
        (lambda i: i._replace(slot_mapping=i.slot_mapping[:3]), "slot_mapping: t=3, but t=11 elsewhere"),
        (lambda i: i._replace(slot_mapping=i.slot_mapping * 0), r"slot_mapping\[1\]: is 0, as is"),
        (
            lambda i: i._replace(slot_mapping=i.slot_mapping + 999),
            r"slot_mapping\[0\]: is .*, but kv_cache has",
        ),
        (lambda i: i._replace(max_seqlen_q=4), "max_seqlen_q: 4, but the longest query has 5 tokens"),
        (
            lambda i: i._replace(cache_format=cache_format("bf16")),
            "kv_cache: dtype is float32, must be bfloat16",
        ),
        (changed(o_proj=None), "weights: o_proj.weight is missing; deepseek-v3 has q_a_proj.weight, "),
        (changed(q_proj=torch.zeros(72, 42)), "weights: q_proj.weight is unknown; deepseek-v3 has"),
        (changed(o_proj=torch.zeros(36, 42)), r"o_proj.weight: shape is \[36, 42\], must be \[42, 36\]"),
        (changed(o_proj=torch.zeros(42, 36).half()), "o_proj.weight: dtype is float16, must be float32"),
        (
            changed(o_proj=torch.zeros(42, 36, device="meta")),
            "o_proj.weight: on meta, but hidden_states is on cpu",
        ),
    ],
)
def test_bad_inputs_are_named(change, message, seed):
    with pytest.raises(ValueError, match=message):
        BACKEND.fn(*change(inputs_of(V3, seed)))


def test_materialize_leaves_the_new_slots_dead(seed):
    inputs = inputs_of(V3, seed)
    flat = inputs.kv_cache.flatten(0, 1)
    assert bool(flat[inputs.slot_mapping[inputs.slot_mapping >= 0]].isnan().all())
    context = gather(inputs.kv_cache, inputs.block_table[0], 0, 10)
    assert bool(context.isfinite().all())
    assert inputs.positions.tolist() == [10, 11, 12, 0, 1, 2, 3, 4, 8, 0, 0]
    PROBLEM.check(inputs)
    PROBLEM.check_values(inputs)


def test_unit_variance_survives_the_projections(seed):
    """What makes a case's scores those of a model: bell-shaped weights keep every stage near 1."""
    config = small("deepseek-v3", hidden_size=256, q_lora_rank=128, kv_lora_rank=128)
    inputs = inputs_of(config, seed, q_lens=(64,), kv_lens=(64,))
    for stage in (
        *queries(inputs.hidden_states, inputs.positions, inputs.weights, config),
        *latents(inputs.hidden_states, inputs.positions, inputs.weights, config),
    ):
        assert 0.5 < float(stage.square().mean()) < 2.0


def test_naive_is_the_default_attention(seed):
    inputs = inputs_of(V3, seed)
    assert torch.equal(layer_around(naive)(*inputs).out, BACKEND.fn(*inputs).out)
