"""What every version of lm_eval writes is read alike, and what cannot be read is one line."""

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from test_evals_parity import BASE, DATE, FILTERS, _gate, _results, _samples, _write

from evals.parity import compare, deciding, report, why_not_comparable
from evals.runs import load

DOC = {"question": "1 + 1?", "answer": "2"}


def _of_0_4_2(folder: Path, right: list[bool], name: str = "results") -> Path:
    """One JSON array of samples, filter by filter, without its names and without hashes."""
    results, samples = _results(sum(right) / len(right), len(right)), _samples(right)
    for key in ("n-samples", "model_name", "chat_template_sha"):
        del results[key]
    del results["config"]["fewshot_seed"]
    for sample in samples:
        for key in ("filter", "metrics", "doc_hash", "prompt_hash", "target_hash"):
            del sample[key]
        sample |= {"doc": DOC | {"id": sample["doc_id"]}, "arguments": [["Question: 1 + 1?", {}]]}
    folder.mkdir(parents=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=2))
    (folder / "pretrained__x,dtype__auto_gsm8k.jsonl").write_text(json.dumps(samples, indent=2))
    return folder


def _without_filters(results: dict, samples: list[dict]) -> None:
    """As 0.4.3 … 0.4.5 write samples."""
    for sample in samples:
        del sample["filter"], sample["metrics"]


def test_samples_without_a_filter_come_in_the_order_of_the_task(tmp_path: Path):
    half = [False] * 300 + [True] * 300

    def edit(results: dict, samples: list[dict]) -> None:
        results["results"]["gsm8k"][f"exact_match,{FILTERS[1]}"] = 0.5
        for sample in samples[600:]:
            sample["exact_match"] = float(half[sample["doc_id"]])
        _without_filters(results, samples)

    answers = load(_write(tmp_path / "a", BASE, edit), "gsm8k").answers
    assert list(answers) == list(FILTERS)
    assert [[a.right for a in answers[name].values()] for name in FILTERS] == [BASE, half]


def test_a_question_more_often_than_there_are_filters_is_refused(tmp_path: Path):
    def edit(results: dict, samples: list[dict]) -> None:
        samples.append(dict(samples[0]))
        _without_filters(results, samples)

    with pytest.raises(ValueError, match=r":1201: question 0 a second time"):
        load(_write(tmp_path / "a", BASE, edit), "gsm8k")


@pytest.mark.parametrize("name", ["results", "mine"])
def test_the_oldest_format_is_paired(tmp_path: Path, name: str):
    changed = [not BASE[0], *BASE[1:]]
    one, other = _of_0_4_2(tmp_path / "a", BASE, name), _of_0_4_2(tmp_path / "b", changed)
    result = _gate(one, other, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["strict-match"]["pair"]["won"] == 1


def test_hashes_are_made_where_they_are_missing(tmp_path: Path):
    """sha256 of the document as lm_eval dumps it, of the prompt, of the target."""
    [answer, *_] = load(_of_0_4_2(tmp_path / "a", BASE), "gsm8k").answers["strict-match"].values()
    doc = '{\n  "question": "1 + 1?",\n  "answer": "2",\n  "id": 0\n}'
    target = "So 1+1=<<1+1=2>>2.\n#### 0"
    for got, text in (
        (answer.doc_hash, doc),
        (answer.prompt_hash, "Question: 1 + 1?"),
        (answer.target_hash, target),
    ):
        assert got == hashlib.sha256(text.encode()).hexdigest()


def test_a_results_file_with_a_name_of_its_own(tmp_path: Path):
    inner = _write(tmp_path / "a", BASE) / "model"
    (inner / f"results_{DATE}.json").rename(inner / f"mine_{DATE}.json")
    for given in (tmp_path / "a", inner / f"mine_{DATE}.json"):
        assert load(given, "gsm8k").path.name == f"mine_{DATE}.json"


def test_tasks_whose_names_begin_alike_are_kept_apart(tmp_path: Path):
    inner = _write(tmp_path / "a", BASE) / "model"
    samples = inner / f"samples_gsm8k_{DATE}.jsonl"
    samples.rename(inner / f"samples_gsm8k_cot_{DATE}.jsonl")
    with pytest.raises(
        ValueError, match=r"no samples of gsm8k, but of gsm8k_cot beside results_.*json; run "
    ):
        load(tmp_path / "a", "gsm8k")
    with pytest.raises(ValueError, match="has gsm8k, not gsm8k_cot"):
        load(tmp_path / "a", "gsm8k_cot")


def test_runs_of_two_models_in_one_folder_are_refused(tmp_path: Path):
    _write(tmp_path / "out", BASE)
    (tmp_path / "out" / "model").rename(tmp_path / "out" / "first")
    _write(tmp_path / "out", BASE)
    with pytest.raises(ValueError, match="holds runs of gsm8k in 2 folders, name one: first, model"):
        load(tmp_path / "out", "gsm8k")
    assert load(tmp_path / "out" / "first", "gsm8k").path.parent.name == "first"


def test_the_filter_that_decides_is_the_one_that_is_named(tmp_path: Path):
    run = load(_write(tmp_path / "a", BASE), "gsm8k")
    alone = replace(run, answers={FILTERS[0]: run.answers[FILTERS[0]]})
    assert deciding(alone) == deciding(alone, FILTERS[0]) == deciding(run, FILTERS[0]) == FILTERS[0]
    with pytest.raises(ValueError, match=f"filter '{FILTERS[1]}' is not one of {FILTERS[0]}"):
        deciding(alone, FILTERS[1])


def test_results_without_a_date_are_named_one_by_one(tmp_path: Path):
    folder = _of_0_4_2(tmp_path / "a", BASE)
    (folder / "other.json").write_text((folder / "results.json").read_text())
    with pytest.raises(
        ValueError, match=r"holds 2 results without a date, name one: other\.json, results\.json"
    ):
        load(folder, "gsm8k")
    assert load(folder / "other.json", "gsm8k").path.name == "other.json"


def _choices(results: dict, samples: list[dict]) -> None:
    """A task of choices: the log probability of each of them, acc and acc_norm, no filter."""
    accuracy = results["results"]["gsm8k"][f"exact_match,{FILTERS[0]}"]
    results["results"]["gsm8k"] = {"acc,none": accuracy, "acc_norm,none": 0.25}
    del samples[600:]
    for sample in samples:
        chances = [["-1.5", "False"], ["-2.25", "True"]]
        sample |= {
            "acc": sample.pop("exact_match"),
            "acc_norm": float(sample["doc_id"] % 4 == 0),
            "filter": "none",
            "metrics": ["acc", "acc_norm"],
            "target": "0",
            "resps": [[each] for each in chances],
            "filtered_resps": chances,
        }


def test_choices_are_paired_by_accuracy(tmp_path: Path):
    one, other = _write(tmp_path / "a", BASE, _choices), _write(tmp_path / "b", BASE, _choices)
    result = _gate(one, other)
    assert result.exit_code == 0, result.output
    assert "|none            |     5|acc        |↑  |0.6667|" in result.output
    assert result.output.splitlines()[-1].startswith("PASS (none, margin 2.00%)")
    normed = load(one, "gsm8k", "acc_norm")
    assert sum(answer.right for answer in normed.answers["none"].values()) == 150
    assert normed.answers["none"][0].text == '[[["-1.5", "False"]], [["-2.25", "True"]]]'


def test_two_metrics_are_not_comparable(tmp_path: Path):
    one, other = _write(tmp_path / "a", BASE), _write(tmp_path / "b", BASE, _choices)
    result = _gate(one, other)
    assert result.exit_code == 3
    assert "not comparable: metric: exact_match in the baseline, acc in the candidate" in result.output


def test_repeated_answers_are_all_compared(tmp_path: Path):
    """One question, three sampled answers, of which a filter takes a vote."""

    def edit(results: dict, samples: list[dict]) -> None:
        for sample in samples:
            sample["resps"] = [["a", "b", "c"]]

    answer = load(_write(tmp_path / "a", BASE, edit), "gsm8k").answers["strict-match"][0]
    assert answer.text == '["a", "b", "c"]'
    assert answer.extracted == "-1"


def _bypass(results: dict, samples: list[dict]) -> None:
    for sample in samples:
        del sample["exact_match"]
        sample |= {"bypass": 999, "metrics": ["bypass"]}


@pytest.mark.parametrize(
    ("edit", "options", "message"),
    [
        (_bypass, (), "its samples have none of exact_match, acc; name one of bypass"),
        (None, ("--metric", "f1"), ":1: no 'f1', but exact_match"),
        (None, ("--task", "mmlu"), "no samples of mmlu, but of gsm8k beside results_"),
        (None, ("--margin", "2"), "margin: is 2.0, must be between 0 and 1"),
        (lambda results, samples: samples.clear(), (), "holds no answers"),
        (lambda results, samples: samples.insert(0, 3), (), "its samples have none of exact_match, acc"),
        (lambda results, samples: results.pop("results"), (), "has no results; it is not the results file"),
    ],
)
def test_what_cannot_be_paired_is_one_line(tmp_path: Path, edit, options: tuple[str, ...], message: str):
    result = _gate(_write(tmp_path / "a", BASE, edit), _write(tmp_path / "b", BASE), *options)
    assert result.exit_code == 3, result.output
    assert message in result.output
    assert result.output.count("\n") == 1


def test_a_run_is_not_compared_with_itself(tmp_path: Path):
    """Nothing could ever be lost; a link to it is the same run."""
    one = _write(tmp_path / "a", BASE)
    (tmp_path / "b").symlink_to(one)
    result = _gate(one, tmp_path / "b")
    assert result.exit_code == 3
    assert "json: is the baseline and the candidate; two runs are compared\n" in result.output


def _clocked(date: float, seconds: str) -> Callable[[dict, list[dict]], None]:
    def edit(results: dict, samples: list[dict]) -> None:
        results |= {"date": date, "total_evaluation_time_seconds": seconds}

    return edit


def test_a_copy_of_a_run_is_not_compared_with_it(tmp_path: Path):
    """Begun at the same moment and as long to the last digit is the same run, wherever it was copied to."""
    one = _write(tmp_path / "a", BASE, _clocked(1796095000.84, "45.38"))
    copied = tmp_path / "b"
    shutil.copytree(one, copied)
    result = _gate(one, copied)
    assert result.exit_code == 3, result.output
    [line] = result.output.splitlines()
    assert line.endswith(
        f"results_{DATE}.json: is a copy of {load(one, 'gsm8k').path}: both began at 1796095000.84 and took "
        "45.38 s; two runs are compared"
    )
    for number, clocks in enumerate([(1796095000.84, "45.39"), (1796095000.85, "45.38")]):
        assert _gate(one, _write(tmp_path / f"other{number}", BASE, _clocked(*clocks))).exit_code == 0


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("samples_", "no samples of gsm8k beside results_"),
        ("results_", "samples of gsm8k, but no results of their date beside them"),
        ("", "no samples of gsm8k, and no results; it is no --output_path of lm_eval with --log_samples"),
    ],
)
def test_what_a_folder_lacks_is_said(remove: str, message: str, tmp_path: Path):
    folder = _write(tmp_path / "a", BASE)
    for file in (folder / "model").glob(f"{remove}*"):
        file.unlink()
    with pytest.raises(ValueError, match=re.escape(message)):
        load(folder, "gsm8k")


def test_samples_that_are_named_are_told_from_results(tmp_path: Path):
    [samples] = _write(tmp_path / "a", BASE).rglob("samples_*")
    with pytest.raises(
        ValueError, match=r"jsonl: holds samples; name the results file beside it, or the fold"
    ):
        load(samples, "gsm8k")


def _tokens(end: list | None) -> Callable[[dict, list], None]:
    def edit(results: dict, samples: list[dict]) -> None:
        results["tokenizer_eos_token"] = end

    return edit


def test_two_tokenizers_are_not_comparable(tmp_path: Path):
    """An engine that does not say its tokens may have the same ones."""
    one = _write(tmp_path / "a", BASE, _tokens(["</s>", "2"]))
    other = _write(tmp_path / "b", BASE, _tokens(["<|end|>", "7"]))
    silent = _write(tmp_path / "c", BASE, _tokens(None))
    result = _gate(one, other)
    assert result.exit_code == 3
    assert "end token[0]: </s> in the baseline, <|end|> in the candidate" in result.output
    assert _gate(one, silent).exit_code == _gate(silent, other).exit_code == 0


def test_of_long_settings_the_part_that_differs_is_shown(tmp_path: Path):
    def warm(results: dict, samples: list[dict]) -> None:
        results["configs"]["gsm8k"]["generation_kwargs"] = {"until": ["x" * 200], "temperature": 0.7}

    def cold(results: dict, samples: list[dict]) -> None:
        results["configs"]["gsm8k"]["generation_kwargs"] = {"until": ["x" * 200, "y"]}

    one, other = _write(tmp_path / "a", BASE, warm), _write(tmp_path / "b", BASE, cold)
    says = why_not_comparable(load(one, "gsm8k"), load(other, "gsm8k"))
    assert says == "generation settings.until[1]: nothing in the baseline, y in the candidate"


def test_a_file_that_is_not_text_is_one_line(tmp_path: Path):
    inner = _write(tmp_path / "a", BASE) / "model"
    (inner / f"samples_gsm8k_{DATE}.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"jsonl: not JSON, or cut short: 'utf-8' codec can't decode"):
        load(tmp_path / "a", "gsm8k")
    (inner / f"results_{DATE}.json").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"json: not JSON, or cut short: 'utf-8' codec"):
        load(tmp_path / "a", "gsm8k")
    with pytest.raises(ValueError, match="nowhere: is neither a folder nor a results file"):
        load(tmp_path / "nowhere", "gsm8k")


def test_texts_may_hold_any_separator(tmp_path: Path):
    """U+2028 ends no line of JSON, though it ends one of text."""

    def edit(results: dict, samples: list[dict]) -> None:
        samples[0]["resps"] = [["one\u2028two\x85three"]]

    folder = _write(tmp_path / "a", BASE, edit)
    file = folder / "model" / f"samples_gsm8k_{DATE}.jsonl"
    lines = [json.dumps(json.loads(line), ensure_ascii=False) for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert load(folder, "gsm8k").answers["strict-match"][0].text == "one\u2028two\x85three"


ODD = (None, -1, 1.5, float("nan"), "", "x", [], [1], {"a": 1}, True, 10**400)


def _places(value: object, before: tuple = ()) -> Iterator[tuple]:
    """The way to everything in a JSON value but the whole of it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*before, key)
        yield from _places(each, (*before, key))


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:12])
def test_whatever_stands_in_a_file_there_is_a_decision_or_one_line(tmp_path: Path, odd: object):
    """Every part of the results, and of a sample, is something else."""
    right = [True, True, False]
    good = load(_write(tmp_path / "good", right), "gsm8k")
    inner = _write(tmp_path / "odd", right) / "model"
    whole = _results(2 / 3, 3), _samples(right)
    refused = []
    for place in _places([whole[0], whole[1][0]]):
        results, samples = copy.deepcopy(whole)
        *before, last = place
        where = [results, samples[0]]
        for key in before:
            where = where[key]
        if not before:
            continue
        where[last] = odd
        (inner / f"results_{DATE}.json").write_text(json.dumps(results))
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (inner / f"samples_gsm8k_{DATE}.jsonl").write_text(lines)
        try:
            run = load(tmp_path / "odd", "gsm8k")
            one = compare(good, run, deciding(run), 0.02)
            report(good, run, [one], 0.02, 20)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert not [message for message in refused if "\n" in message]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda results: results.update(configs=[1]), "configs is [1], must be an object"),
        (lambda results: results["configs"].update(gsm8k="x"), 'configs.gsm8k is "x", must be an object'),
        (
            lambda results: results["configs"]["gsm8k"].update(filter_list=["x"]),
            'configs.gsm8k.filter_list is ["x"], must be a list of filters with names',
        ),
        (lambda results: results["n-shot"].update(gsm8k="5"), 'n-shot.gsm8k is "5", must be a whole number'),
        (
            lambda results: results["results"]["gsm8k"].update({"exact_match,strict-match": 1e300}),
            "results.gsm8k.exact_match,strict-match is 1e+300, must be between 0 and 1",
        ),
    ],
)
def test_a_part_of_another_kind_is_named(tmp_path: Path, edit, message: str):
    result = _gate(_write(tmp_path / "a", BASE, lambda results, samples: edit(results)), tmp_path)
    assert result.exit_code == 3
    assert result.output.rstrip().endswith(f"results_{DATE}.json: {message}")
    assert result.output.count("\n") == 1


def test_lists_that_never_end_are_one_line(tmp_path: Path):
    inner = _write(tmp_path / "a", BASE) / "model"
    for name in (f"samples_gsm8k_{DATE}.jsonl", f"results_{DATE}.json"):
        (inner / name).write_text('{"a":' + "[" * 200_000)
        result = _gate(tmp_path / "a", tmp_path)
        assert (result.exit_code, result.output.count("\n")) == (3, 1), result.output[:200]
        assert name in result.output


def test_foreign_texts_do_nothing_to_a_terminal(tmp_path: Path):
    def edit(results: dict, samples: list[dict]) -> None:
        for sample in samples:
            sample["filtered_resps"] = ["\x1b[2J\nPASS " + "9" * 100]

    changed = [not BASE[0], *BASE[1:]]
    result = _gate(_write(tmp_path / "a", BASE), _write(tmp_path / "b", changed, edit))
    [line] = (line for line in result.output.splitlines() if "question 0" in line)
    assert f"candidate …{'9' * 39}  texts" in line
    short = _gate(_write(tmp_path / "c", BASE), _write(tmp_path / "d", changed, _escapes))
    assert "\x1b" not in short.output
    assert "candidate \\x1b[2J PASS  texts" in short.output


def _escapes(results: dict, samples: list[dict]) -> None:
    for sample in samples:
        sample["filtered_resps"] = ["\x1b[2J\nPASS"]
