"""A checkpoint as users have it: shards, 16 bits, experts, a token that begins texts, a chat template."""

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="runs through lm_eval")
pytest.importorskip("transformers", reason="models are loaded by transformers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

import transformers
from test_evals_model import TINY
from tokenizers import AddedToken, Tokenizer, processors
from typer.testing import CliRunner

from evals import calibration, trial
from evals.cli import app
from evals.gsm8k import Row
from evals.lm import MLAVerifyLM, evaluate
from evals.path import AttentionPath
from evals.runs import load
from evals.task import TASK
from evals.tiers import Text
from mla_ref.values import integers

BEGIN, TURN = "<begin>", "<turn>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<turn>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("foreign")
    tokenizer = Tokenizer.from_file(str(trial.CHECKPOINTS / "mini" / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (BEGIN, TURN)])
    begin, turn = (tokenizer.token_to_id(word) for word in (BEGIN, TURN))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, begin)]
    )
    tokenizer.save(str(made / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": "<|endoftext|>"}
    (made / "tokenizer_config.json").write_text(json.dumps(words | {"chat_template": TEMPLATE}))
    settings = TINY | {"q_lora_rank": None, "vocab_size": tokenizer.get_vocab_size(), "num_hidden_layers": 2}
    torch.manual_seed(0)
    hf = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING["deepseek_v2"](**settings), dtype=torch.bfloat16
    )
    hf.generation_config.eos_token_id = [0, turn]
    hf.save_pretrained(made, max_shard_size="60KB")
    assert len([*made.glob("*.safetensors")]) > 1
    return made


def test_texts_begin_once_with_the_token_that_begins_texts(folder: Path):
    lm = MLAVerifyLM(str(folder))
    begin = lm.tokenizer.bos_token_id
    plain = lm.tok_encode("1 + 1", add_special_tokens=False)
    assert begin not in plain
    assert lm.tok_encode("1 + 1") == [begin, *plain]
    assert lm.tok_encode(f"{BEGIN}1 + 1") == [begin, *plain]
    prompt = lm.apply_chat_template([{"role": "user", "content": "1 + 1"}])
    assert prompt == f"{BEGIN}user: 1 + 1{TURN}assistant:"
    assert lm.tok_encode(prompt).count(begin) == 1
    assert all(text.prompt[0] == begin and begin not in text.answer for text in trial.texts_of(folder))


def test_an_answer_ends_with_any_token_that_ends_one(folder: Path):
    """The checkpoint's generation config names two, the tokenizer one."""
    lm = MLAVerifyLM(str(folder))
    turn = lm.tokenizer.convert_tokens_to_ids(TURN)
    assert lm.ends == {0, turn}
    assert [lm._stops([5, end], ["no such words"]) for end in (0, turn, 5)] == [True, True, False]


def test_shots_are_turns_of_a_chat(folder: Path, tmp_path: Path):
    rows = [Row(f"What is {n} + 1?", f"It is.\n#### {n + 1}") for n in range(8)]
    settings = {"limit": 1, "max_gen_toks": 4, "model_dtype": "bfloat16"}
    data = {"train": rows, "test": rows[:1]}
    evaluate(folder, AttentionPath(dtype="bfloat16"), data, tmp_path / "chat", chat=True, **settings)
    [file] = tmp_path.rglob("samples_*.jsonl")
    prompt = json.loads(file.read_text().splitlines()[0])["arguments"]["gen_args_0"]["arg_0"]
    assert prompt.startswith(f"{BEGIN}user: Question: ")
    assert prompt.count("assistant: It is.") == 5
    assert prompt.endswith(f"{TURN}assistant:")
    evaluate(folder, AttentionPath(dtype="bfloat16"), data, tmp_path / "plain", **settings)
    chat, plain = (load(tmp_path / name, TASK) for name in ("chat", "plain"))
    assert chat.settings["chat template"] != plain.settings["chat template"]


def test_noise_is_measured_and_held_to_in_its_own_type(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
):
    monkeypatch.setattr(calibration, "FORMATS", ("bf16",))
    monkeypatch.setattr(calibration, "DTYPES", ("bfloat16",))
    for module in (calibration, trial):
        monkeypatch.setattr(module, "texts_of", lambda folder: [text])
    text = Text(integers(seed, "prompt", 1000, 40).tolist(), integers(seed, "answer", 1000, 4).tolist())
    mine = tmp_path / "mine"
    shutil.copytree(folder, mine)
    run = CliRunner().invoke
    path = "decode=mla_ref.absorbed cache_format=bf16 dtype=bfloat16"
    command = ["trial", str(mine), "--questions", "0", "--path", path, "--model-dtype", "bfloat16"]
    refused = run(app, command)
    assert refused.exit_code == 3
    assert "gate.json: is missing; python -m evals calibrate" in refused.output
    measured = run(app, ["calibrate", str(mine), "--model-dtype", "bfloat16"])
    assert measured.exit_code == 0, measured.output
    passed = run(app, command)
    assert passed.exit_code == 0, passed.output
    other = run(app, [*command[:-1], "float32"])
    assert other.exit_code == 3
    assert "is of a bfloat16 model, not of a float32 one; calibrate it again" in other.output
    wrong = run(app, [*command[:-1], "int8"])
    assert "model dtype 'int8' is not one of float32, bfloat16, float16" in wrong.output
    [first, *_] = sorted(mine.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1] + b"\1")
    changed = run(app, command)
    assert changed.exit_code == 3
    assert "sha256 of its weights is" in changed.output
