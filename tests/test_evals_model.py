from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="models are loaded by transformers")
pytest.importorskip("tokenizers", reason="the checkpoints' tokenizer needs tokenizers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

import transformers

from evals.model import Model, greedy, load, teacher_forced, with_our_attention
from evals.path import AttentionPath, attention_of, layer_of, parse
from evals.tiers import divergence
from evals.trial import CHECKPOINTS, FACTORS, texts_of
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.layer import layer_around
from mla_ref.naive import naive
from mla_ref.problems.attention import PROBLEM, AttentionInputs
from mla_ref.values import integers

MINI = CHECKPOINTS / "mini"
SERVED = AttentionPath(decode="mla_ref.absorbed", prefill="mla_ref.chunked", chunk=32, workspace_rows=32)

TINY = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    },
}
KINDS = {
    "v2-lite": ("deepseek_v2", {"q_lora_rank": None}),
    "v2": ("deepseek_v2", {"q_lora_rank": 24}),
    "v3": ("deepseek_v3", {"q_lora_rank": 24}),
}


def _logits_of_theirs(hf: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [
            hf(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]


def _ours(model: Model, path: AttentionPath, prompts: Any, answers: Any) -> list[torch.Tensor]:
    return teacher_forced(model, layer_of(path, model.config), path, prompts, answers)


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_experts_are_served_as_transformers_computes_them(kind: str, seed: int, tmp_path: Path):
    """Ours may be as far from theirs as ours are from each other, in the same arithmetic, ten times over."""
    family, extra = KINDS[kind]
    config = transformers.CONFIG_MAPPING[family](**TINY | extra)
    torch.manual_seed(seed)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    prompts = [integers(seed, f"prompt {n}", 61, n).tolist() for n in (5, 71, 40, 33)]
    answers = [integers(seed, f"answer {n}", 61, n).tolist() for n in (9, 3, 1, 12)]
    plain = _ours(model, AttentionPath(), prompts, answers)
    noise = divergence(plain, _ours(model, SERVED, prompts, answers))
    apart = divergence(_logits_of_theirs(theirs, prompts, answers), plain)
    assert [len(rows) for rows in plain] == [9, 3, 1, 12]
    assert apart.max_logit <= FACTORS["float32"] * noise.max_logit, (apart, noise)
    assert apart.max_kl <= FACTORS["float32"] * noise.max_kl, (apart, noise)


@pytest.fixture(scope="module")
def mini() -> Model:
    return load(MINI)


def test_batches_mix_prefill_and_decode(mini: Model, seed: int):
    """Every token of every request passes once, in order, and short requests decode beside long prompts."""
    steps: list[tuple[list[int], list[int]]] = []

    def watched(*args: Any):
        inputs = AttentionInputs(*args)
        steps.append((inputs.cu_seqlens_q.diff().tolist(), inputs.cache_seqlens.tolist()))
        return naive(*inputs)

    prompts = [[1] * 3, [2] * 70, [3] * 33]
    answers = [[7] * 6, [8] * 2, [9] * 5]
    path = replace(SERVED, decode_threshold=2)
    rows = teacher_forced(mini, layer_around(watched), path, prompts, answers)
    assert [len(r) for r in rows] == [6, 2, 5]
    layers = len(mini.hf.model.layers)
    assert steps[::layers][:4] == [
        ([3, 32, 32], [3, 32, 32]),
        ([2, 32, 1], [5, 64, 33]),
        ([2, 6, 2], [7, 70, 35]),
        ([1, 1, 2], [8, 71, 37]),
    ]


def test_mixed_steps_go_to_both_implementations(seed: int):
    config = MLAConfig.from_hf(MINI)
    case = Case(
        problem="attention",
        config=config,
        q_lens=(1, 9, 2, 1),
        kv_lens=(40, 30, 2, 17),
        dtype="float32",
        cache_format="fp32",
        block_size=16,
        seed=seed,
    )
    inputs = PROBLEM.materialize(case, torch.device("cpu"))
    want = naive(*inputs)
    got = attention_of(AttentionPath(decode_threshold=2), config)(*inputs)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    swapped = attention_of(AttentionPath(decode="mla_ref.absorbed"), config)(*inputs)
    rows = torch.tensor([0, 12])
    assert torch.equal(swapped.out[1:12], want.out[1:12])
    assert not torch.equal(swapped.out[rows], want.out[rows])


def test_greedy_writes_the_answer_and_stops(mini: Model):
    text = texts_of(MINI)[0]
    stop = text.answer[-1]
    first = text.answer.index(stop)
    [written] = greedy(
        mini, layer_of(SERVED, mini.config), SERVED, [text.prompt], 60, lambda ids: ids[-1] == stop
    )
    assert written == text.answer[: first + 1]
    [cut] = greedy(mini, layer_of(SERVED, mini.config), SERVED, [text.prompt], 4, lambda ids: False)
    assert cut == text.answer[:4]


@pytest.mark.parametrize(
    "path",
    [
        AttentionPath(),
        SERVED,
        AttentionPath(
            prefill="mla_ref.chunked[equal_share, small workspace]", decode="mla_ref.split[num_splits=7]"
        ),
        AttentionPath(cache_format="fp8_e4m3", kv_scale=0.25, decode_threshold=3, dtype="bfloat16"),
    ],
    ids=str,
)
def test_a_path_is_read_as_it_is_printed(path: AttentionPath):
    assert parse(str(path)) == path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse("decode=x chunk=many"), "path: chunk is 'many', must be int"),
        (lambda: parse("chunks=3"), "path: 'chunks=3' is no field"),
        (lambda: AttentionPath(block_size=0), "path: block_size is 0, must be at least 1"),
        (lambda: AttentionPath(workspace_rows=8), "path: workspace_rows=8, but prefill is mla_ref.naive"),
        (lambda: _attention(decode="mla_ref.rope"), "path: mla_ref.rope solves rope, not attention"),
        (lambda: _attention(decode="mla_ref.split[num_splits=9]"), "has no variant 'num_splits=9'; it has"),
        (lambda: _attention(decode="nothing.here"), "backend 'nothing.here': cannot import"),
        (lambda: _attention(decode="mla_fast.triton_decode"), "path: mla_fast.triton_decode "),
        (lambda: load(Path("nowhere")), "nowhere.*: No such file"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(make: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def _attention(**path: Any):
    return attention_of(AttentionPath(**path), MLAConfig.from_hf(MINI))


def test_only_whole_layers_are_replaced():
    config = replace(MLAConfig.from_hf(MINI), beyond="a sparse index chooses the keys")
    with pytest.raises(ValueError, match="a sparse index chooses the keys"):
        with_our_attention(None, config)
