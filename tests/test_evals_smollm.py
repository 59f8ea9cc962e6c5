"""A real language model through every path: logits as transformers' Llama computes them, to rounding."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="compares with transformers' Llama")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

import torch
import transformers

from evals import smollm
from evals.model import teacher_forced
from evals.path import AttentionPath, attention_of
from evals.smollm import as_mla, layer_around
from evals.tiers import Divergence, Text, divergence, shadow
from evals.trial import FACTORS
from mla_ref.problem import AttentionOutput
from mla_ref.problems.attention import AttentionInputs
from mla_ref.values import integers

REASON = smollm.why_not()
PLAIN = AttentionPath()
PATHS = (
    AttentionPath(decode="mla_ref.absorbed", prefill="mla_ref.absorbed"),
    AttentionPath(decode="mla_ref.absorbed", prefill="mla_ref.chunked", chunk=48, workspace_rows=32),
)
TEXT = (
    "Question: Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did Natalia sell altogether in April and May?\nAnswer: Natalia sold 48/2 = 24 "
    "clips in May."
)


def _theirs(llama: Any, tokens: list[int], count: int) -> list[torch.Tensor]:
    with torch.no_grad():
        return [llama(torch.tensor([tokens])).logits[0, -count - 1 : -1]]


def _ours(model: Any, path: AttentionPath, tokens: list[int], count: int) -> list[torch.Tensor]:
    layer = layer_around(attention_of(path, model.config))
    return teacher_forced(model, layer, path, [tokens[:-count]], [tokens[-count:]])


def _check(llama: Any, tokens: list[int], count: int, seed: int) -> Divergence:
    """Theirs is as far from ours as our paths, which are right, are from each other, ten times over."""
    want = _theirs(llama, tokens, count)
    model = as_mla(llama, seed)
    plain = _ours(model, PLAIN, tokens, count)
    others = [divergence(plain, _ours(model, path, tokens, count)) for path in PATHS]
    apart = divergence(want, plain)
    for measure in ("mean_kl", "max_kl", "max_logit"):
        noise = max(getattr(other, measure) for other in others)
        assert getattr(apart, measure) <= FACTORS["float32"] * noise, (measure, apart, others)
    assert apart.top1 == 1.0
    return apart


def test_a_small_llama_is_converted_exactly(seed: int):
    config = transformers.LlamaConfig(
        vocab_size=67,
        hidden_size=288,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=256,
    )
    torch.manual_seed(seed)
    llama = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in llama.model.layers:  # scores and outputs that depend on the keys
            layer.self_attn.q_proj.weight *= 4.0
            layer.self_attn.k_proj.weight *= 4.0
            layer.self_attn.v_proj.weight *= 4.0
    _check(llama, integers(seed, "tokens", 67, 90).tolist(), 9, seed)


def test_a_wrong_slot_is_not_exact(seed: int):
    """One key head in another's place is far beyond rounding."""
    config = transformers.LlamaConfig(
        vocab_size=67,
        hidden_size=288,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    torch.manual_seed(seed)
    llama = transformers.LlamaForCausalLM(config).eval()
    tokens = integers(seed, "tokens", 67, 40).tolist()
    want = _theirs(llama, tokens, 9)
    model = as_mla(llama, seed)
    weights = model.hf.model.layers[0].self_attn.weights
    weights["k_proj.weight"] = weights["k_proj.weight"].roll(32, 0)
    plain = _ours(model, PLAIN, tokens, 9)
    noise = divergence(plain, _ours(model, PATHS[0], tokens, 9))
    assert divergence(want, plain).max_logit > 100 * FACTORS["float32"] * noise.max_logit


def test_other_numbers_of_key_heads_are_refused():
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=8
    )
    with pytest.raises(ValueError, match="smollm: 2 key heads, the conversion is for 3"):
        as_mla(transformers.LlamaForCausalLM(config))


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_smollm2_is_converted_exactly(seed: int):
    llama = smollm.load_llama()
    tokens = smollm.load_tokenizer()(TEXT)["input_ids"]
    apart = _check(llama, tokens, 10, seed)
    assert apart.tokens == 10
    model = as_mla(smollm.load_llama(), seed)
    texts = [Text(tokens[:-10], tokens[-10:])]
    path = replace(PATHS[1], cache_format="fp8_ds_mla")
    right = attention_of(path, model.config)
    noise = shadow(model, path, right, texts, layer_around)
    assert noise.samples == model.hf.config.num_hidden_layers * (len(tokens) - 1) * 9

    def off(*args: Any) -> AttentionOutput:
        inputs = AttentionInputs(*args)
        return right(*inputs._replace(softmax_scale=inputs.softmax_scale * 1.001))

    seen = shadow(model, path, off, texts, layer_around)
    assert seen.median > FACTORS["float32"] * noise.median, "one part in a thousand of the scale shows"
