import base64
import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="runs through lm_eval")
pytest.importorskip("transformers", reason="models are loaded by transformers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from typer.testing import CliRunner

from evals import gsm8k
from evals.cli import app, main
from evals.lm import TOKENS, MLAVerifyLM, _alone, evaluate
from evals.model import load_tokenizer
from evals.parity import compare
from evals.path import AttentionPath
from evals.runs import load
from evals.task import TASK, stock_file, stock_task, template_rows
from evals.templates import HELD_OUT, NOT_LEARNT, TRAIN, split_of
from evals.trial import CHECKPOINTS

MINI = CHECKPOINTS / "mini"
SERVED = AttentionPath(decode="mla_ref.absorbed", prefill="mla_ref.chunked", chunk=128, workspace_rows=64)
REASON = gsm8k.why_not()


def test_the_task_is_the_stock_one():
    """The yaml is byte for byte what its wheel recorded, and only the source of its rows is replaced."""
    from lm_eval.tasks._yaml_loader import load_yaml

    name = "lm_eval/tasks/gsm8k/gsm8k.yaml"
    [recorded] = [file for file in importlib.metadata.files("lm_eval") if str(file) == name]
    digest = hashlib.sha256(stock_file().read_bytes()).digest()
    assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == recorded.hash.value
    ours, stock = stock_task(template_rows(4)), load_yaml(stock_file())
    assert set(stock) - set(ours) == {"dataset_path", "dataset_name"}
    assert set(ours) - set(stock) == {"custom_dataset"}
    assert all(ours[key] == stock[key] for key in set(ours) & set(stock))
    assert (stock["task"], stock["metadata"]["version"], stock["num_fewshot"]) == (TASK, 3.0, 5)


def test_questions_are_held_out_and_shots_are_not():
    data = template_rows(10)
    assert len(data["test"]) == 10
    assert {split_of(row.question) for row in data["test"]} == {HELD_OUT}
    assert {split_of(row.question) for row in data["train"]} == {TRAIN}
    assert not any("stores" in row.question for row in data["test"]), NOT_LEARNT
    assert template_rows(6)["test"] == template_rows(8)["test"][:6]


class Interrupted(Exception):
    pass


def test_runs_are_paired_resumed_and_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data, settings = template_rows(4), {"batch_size": 2, "max_gen_toks": 64}
    table = evaluate(MINI, AttentionPath(), data, tmp_path / "a", **settings)
    assert "|gsm8k|      3|flexible-extract|     5|exact_match|" in table

    keep, batches = MLAVerifyLM._keep, []

    def stop_in_the_second_batch(self, doc_id, ids):
        batches.append(doc_id)
        if len(batches) > 2:
            raise Interrupted
        keep(self, doc_id, ids)

    monkeypatch.setattr(MLAVerifyLM, "_keep", stop_in_the_second_batch)
    with pytest.raises(Interrupted):
        evaluate(MINI, SERVED, data, tmp_path / "b", **settings)
    monkeypatch.setattr(MLAVerifyLM, "_keep", keep)
    evaluate(MINI, SERVED, data, tmp_path / "b", **settings)
    tokens = [json.loads(line) for line in (tmp_path / "b" / TOKENS).read_text().splitlines()]
    assert sorted(line["doc_id"] for line in tokens) == [0, 1, 2, 3], "no question twice, none missing"

    one = compare(load(tmp_path / "a", TASK), load(tmp_path / "b", TASK), "strict-match", 0.05)
    assert (one.pair.both, one.text_equal) == (4, 1.0)
    for path, other in ((AttentionPath(), {}), (SERVED, {"batch_size": 4}), (SERVED, {"max_gen_toks": 9})):
        with pytest.raises(ValueError, match="holds a run with other settings; choose another folder"):
            evaluate(MINI, path, data, tmp_path / "b", **settings | other)

    def must_not_load(self, *args, **kwargs):
        raise Interrupted

    monkeypatch.setattr(MLAVerifyLM, "__init__", must_not_load)
    assert evaluate(MINI, AttentionPath(), data, tmp_path / "a", **settings) == table
    with pytest.raises(Interrupted):
        evaluate(MINI, AttentionPath(), data, tmp_path / "a", limit=3, **settings)


def test_a_prompt_that_is_too_long_loses_its_beginning_and_says_so(caplog: pytest.LogCaptureFixture):
    lm = MLAVerifyLM(str(MINI), max_length=10)
    assert lm._room([1, 2, 3, 4], 6) == [1, 2, 3, 4]
    assert not caplog.messages
    assert lm._room([1, 2, 3, 4, 5], 6) == [2, 3, 4, 5]
    assert caplog.messages == ["a prompt of 5 tokens is cut to its last 4"]
    with pytest.raises(ValueError, match="10 new tokens leave no room in max_length=10"):
        lm._room([1], 10)
    assert MLAVerifyLM(str(MINI)).max_length == lm.model.config.max_position == 2048


def test_continuations_are_scored_as_they_are_written():
    lm = MLAVerifyLM(str(MINI), batch_size=2)
    row = template_rows(1)["test"][0]
    prompt = lm.tok_encode(f"Question: {row.question}\nAnswer:")
    ids = lm.tok_encode(f" {row.answer}\n\n")
    wrong = [*ids[:3], ids[3] + 1]
    [(chance, greedy), (worse, not_greedy)] = lm._loglikelihood_tokens(
        [(("", ""), prompt, ids[:4]), (("", ""), prompt, wrong)]
    )
    assert greedy
    assert not not_greedy
    assert worse < chance <= 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunks": 3}, "mla-verify: chunks is unknown; a path has block_size, "),
        ({"decode": "mla_ref.rope"}, "path: mla_ref.rope solves rope"),
    ],
)
def test_a_wrong_setting_is_one_line(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        MLAVerifyLM(str(MINI), **settings)


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_gsm8ks_own_questions_run_offline(tmp_path: Path):
    out = tmp_path / "real"
    result = CliRunner().invoke(
        app,
        ["evaluate", "mini", "--out", str(out), "--limit", "1", "--data", str(gsm8k.folder())],
    )
    assert result.exit_code == 0, result.output
    [answer] = load(out, TASK).answers["strict-match"].values()
    assert answer.target == gsm8k.rows("test")[0].answer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "nobody", "--out", "x"], "checkpoint 'nobody': neither one of evals/checkpoints"),
        (["evaluate", "mini", "--out", "x", "--data", "nowhere"], r"nowhere/train.jsonl is missing"),
        (["trial", "mini", "--path", "decode=mla_ref.nothing"], "cannot import 'mla_ref.nothing'"),
        (["trial", "mini", "--path", "chunk=x"], "path: chunk is 'x', must be int"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[str], message: str):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 3
    assert message in result.output
    assert result.output.count("\n") == 1


def test_trial_decides_and_exits(tmp_path: Path):
    good = ["trial", "mini", "--questions", "0", "--path"]
    result = CliRunner().invoke(app, [*good, "decode=mla_ref.absorbed block_size=32"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "PASS: T1 and T2 are within noise; T3 was left out"
    unmeasured = CliRunner().invoke(app, [*good, "dtype=float16 cache_format=fp16"])
    assert unmeasured.exit_code == 2
    assert "INCONCLUSIVE: no noise was measured for float16 over a fp16 cache" in unmeasured.output
    unmeasured = CliRunner().invoke(app, [*good, "dtype=float16 cache_format=fp16", "--json"])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(unmeasured.output, parse_constant=refuse)
    assert all(line["limit"] is None and line["found"] >= 0.0 for line in found["lines"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trial", "mini"], "trial: Missing option '--path'"),
        (["survey", "mini", "--out", "x", "--jobs", "0"], "survey: Invalid value for '--jobs'"),
        (["gate", "--no-such-option"], "gate: No such option: --no-such-option"),
        (["nothing"], "nothing: No such command 'nothing'"),
    ],
)
def test_wrong_words_are_no_verdict(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 3  # 2 is INCONCLUSIVE
    said = capsys.readouterr()
    assert said.err.startswith(message)
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_without_words_the_command_says_what_there_is(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "calibrate" in capsys.readouterr().out


GOOD = '{"question": "1 + 1?", "answer": "#### 2"}\n'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "train.jsonl: holds no questions"),
        (GOOD + "x\n", "train.jsonl:2: is no JSON object with the texts question and answer"),
        ("3\n", "train.jsonl:1: is no JSON object"),
        ('{"question": "1 + 1?"}\n', "train.jsonl:1: is no JSON object"),
        ('{"question": 1, "answer": ["#### 2"]}\n', "train.jsonl:1: is no JSON object"),
        ("\udcff\n", "train.jsonl:1: is no JSON object"),
        (GOOD, "gsm8k: train.jsonl holds 1 questions, and 5 shots are drawn from them"),
    ],
)
def test_questions_that_cannot_be_read_are_one_line(lines: str, message: str, tmp_path: Path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(lines, errors="surrogateescape")
    command = ["evaluate", "mini", "--out", str(tmp_path / "out"), "--data", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.output.count("\n")) == (3, 1), result.output
    assert message in result.output


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_run_that_cannot_be_told_from_a_finished_one_is_refused(text: str, tmp_path: Path):
    (tmp_path / "finished.json").write_text(text)
    with pytest.raises(ValueError, match=r"finished\.json: cannot be read; without it the run goes on"):
        evaluate(MINI, AttentionPath(), template_rows(1), tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_one_line(tmp_path: Path):
    shutil.copy(MINI / "config.json", tmp_path)
    for text in (None, "{"):
        if text:
            (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match=r": its tokenizer cannot be read: [^\n]+$"):
            load_tokenizer(tmp_path)


def test_a_defect_is_no_verdict_and_nobody_who_reads_is_no_defect(monkeypatch, capfd):
    """Code 1 is FAIL."""
    for error, code, says in (
        (KeyError("x"), 3, "published: a defect of its own: KeyError: 'x'\n"),
        (BrokenPipeError(), 141, ""),
    ):

        def broken(churn: float, error: Exception = error) -> str:
            raise error

        monkeypatch.setattr("evals.statistics.published_table", broken)
        with monkeypatch.context() as patched:
            patched.setattr("evals.cli.unread", lambda: 141)
            assert main(["published"]) == code
        assert capfd.readouterr().err.endswith(says)


def test_a_margin_is_refused_before_anything_is_asked(tmp_path: Path):
    for words in (["trial", "mini", "--path", ""], ["survey", "mini", "--out", str(tmp_path / "out")]):
        result = CliRunner().invoke(app, [*words, "--margin", "2"])
        assert (result.exit_code, result.output) == (
            3,
            f"{words[0]}: margin: is 2.0, must be between 0 and 1\n",
        )


def test_an_interrupted_command_says_so(monkeypatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("evals.statistics.published_table", interrupted)
    assert main(["published"]) == 130
    assert capsys.readouterr().err == "published: interrupted\n"


def test_one_process_at_a_time_asks_in_a_folder(tmp_path: Path):
    """The other waits, and is let in when the first ends, whichever way."""
    held = f"held = open({str(tmp_path / 'lock')!r}, 'w'); fcntl.flock(held, fcntl.LOCK_EX)"
    code = f"import fcntl, sys; {held}; print(1, flush=True); sys.stdin.read()"
    first = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    first.stdout.read(1)
    entered = threading.Event()

    def enter() -> None:
        with _alone(tmp_path):
            entered.set()

    second = threading.Thread(target=enter)
    second.start()
    assert not entered.wait(0.2)
    first.kill()
    first.communicate()
    second.join(30)
    assert entered.is_set()


def test_a_lossy_cache_is_also_held_to_a_float32_one():
    path = "decode=mla_ref.absorbed cache_format=fp8_ds_mla"
    result = CliRunner().invoke(app, ["trial", "mini", "--questions", "0", "--path", path, "--json"])
    assert result.exit_code == 0, result.output
    lines = {(line["tier"], line["measure"]): line for line in json.loads(result.output)["lines"]}
    assert lines["T2 cost", "mean_kl"]["found"] > 10 * lines["T2 logits", "mean_kl"]["found"]


def test_a_scale_that_saturates_fails_the_cost_of_its_format():
    path = "decode=mla_ref.absorbed cache_format=fp8_e4m3 kv_scale=0.001"
    result = CliRunner().invoke(app, ["trial", "mini", "--questions", "0", "--path", path])
    assert result.exit_code == 1, result.output
    assert "FAIL: T2 cost: " in result.output
