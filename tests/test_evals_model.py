import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("transformers", reason="models are loaded by transformers")
pytest.importorskip("tokenizers", reason="the checkpoints' tokenizer needs tokenizers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

import transformers
from safetensors.torch import load_file, save_file

from evals.model import Model, greedy, load, teacher_forced, with_our_attention
from evals.path import AttentionPath, _by_length, attention_of, layer_of, parse
from evals.tiers import divergence
from evals.trial import CHECKPOINTS, FACTORS, texts_of
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.layer import layer_around
from mla_ref.naive import naive
from mla_ref.problem import AttentionOutput
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


class Kind(NamedTuple):
    """A model as transformers saves it. says: the model_type of its config.json where that is another."""

    family: str
    q_lora_rank: int | None
    says: str = ""
    shards: str = "1GB"
    tied: bool = False


KINDS = {
    "v2-lite": Kind("deepseek_v2", None),
    "v2, tied": Kind("deepseek_v2", 24, tied=True),
    "v3, in shards": Kind("deepseek_v3", 24, shards="40KB"),
    "kimi-k2": Kind("deepseek_v3", 24, says="kimi_k2"),
}


def _save(kind: Kind, seed: int, folder: Path) -> Any:
    """transformers' own model with random weights, saved to ``folder``."""
    settings = TINY | {"q_lora_rank": kind.q_lora_rank, "tie_word_embeddings": kind.tied}
    torch.manual_seed(seed)
    hf = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING[kind.family](**settings), dtype=torch.float32
    )
    hf.eval().save_pretrained(folder, max_shard_size=kind.shards)
    if kind.says:
        _change(folder, model_type=kind.says, auto_map={"AutoConfig": "configuration.Of"})
    return hf


def _change(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


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
    theirs = _save(KINDS[kind], seed, tmp_path)
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == ("shards" in kind)
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
    given = []

    def watched(*args: Any) -> AttentionOutput:
        part = AttentionInputs(*args)
        given.append((part.max_seqlen_q, part.cu_seqlens_q.tolist()))
        return naive(*part)

    _by_length(watched, watched, 1)(*inputs)
    assert given == [(1, [0, 1, 2]), (9, [0, 9, 11])]


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
        (lambda: parse("kv_scale=nan"), "path: kv_scale is nan, must be above 0 and finite"),
        (lambda: parse("kv_scale=0"), "path: kv_scale is 0.0, must be above 0 and finite"),
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


Weights = dict[str, torch.Tensor]
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
VALUES = "model.layers.0.self_attn.kv_b_proj.weight"


def _edited(edit: Callable[[Weights], Weights]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        save_file(weights | edit(weights), folder / "model.safetensors", metadata={"format": "pt"})

    return change


def _without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("lm_head.weight"), "tensors missing: 1, first lm_head.weight"),
        (_without(VALUES), f"tensors missing: 1, first {VALUES}"),
        (_without(EXPERT), "those of experts are missing or differ in shape"),
        (_edited(lambda w: {"extra": w[VALUES] + 0}), "that the model does not have: 1, first extra"),
        (
            _edited(lambda w: {VALUES: w[VALUES][1:] + 0}),
            r"kv_b_proj.weight is \[127, 32\], must be \[128, 32\]",
        ),
        (_edited(lambda w: {EXPERT: w[EXPERT][1:] + 0}), "those of experts are missing or differ in shape"),
        (_cut, "Error while deserializing header"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"holds no \*\.safetensors"),
        (lambda folder: _change(folder, kv_lora_rank=64), "tensors of another shape: "),
        (lambda folder: _change(folder, model_type="plm"), "transformers has no model_type 'plm'"),
        (lambda folder: _change(folder, quantization_config={"quant_method": "fp8"}), r"quantised \(fp8\)"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_one_line(change, message: str, seed: int, tmp_path: Path, capfd):
    """transformers warns, and goes on with random weights."""
    _save(KINDS["v2-lite"], seed, tmp_path)
    change(tmp_path)
    capfd.readouterr()
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path)
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_shard_that_is_missing_is_named(seed: int, tmp_path: Path):
    _save(KINDS["v3, in shards"], seed, tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(OSError, match=shard.name):
        load(tmp_path)
