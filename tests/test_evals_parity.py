import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from typer.testing import CliRunner

from evals.cli import app
from evals.parity import compare, table
from evals.runs import load

FILTERS = ("strict-match", "flexible-extract")
DATE = "2026-01-02T03-04-05.000001"


def _results(accuracy: float, n: int) -> dict:
    return {
        "results": {"gsm8k": {"alias": "gsm8k", **{f"exact_match,{name}": accuracy for name in FILTERS}}},
        "configs": {
            "gsm8k": {
                "generation_kwargs": {"until": ["Question:"], "do_sample": False},
                "filter_list": [{"name": name} for name in FILTERS],
                "metric_list": [{"metric": "exact_match"}],
            }
        },
        "versions": {"gsm8k": 3.0},
        "n-shot": {"gsm8k": 5},
        "n-samples": {"gsm8k": {"original": 1319, "effective": n}},
        "config": {"model": "vllm", "model_args": "pretrained=x", "limit": None, "fewshot_seed": 1234},
        "model_name": "x",
        "chat_template_sha": None,
    }


def _samples(right: list[bool]) -> list[dict]:
    return [
        {
            "doc_id": i,
            "target": f"So 1+1=<<1+1=2>>2.\n#### {i}",
            "resps": [[f"#### {i if ok else -1}"]],
            "filtered_resps": [str(i if ok else -1)],
            "filter": name,
            "metrics": ["exact_match"],
            "doc_hash": f"d{i}",
            "prompt_hash": f"p{i}",
            "target_hash": f"t{i}",
            "exact_match": float(ok),
        }
        for name in FILTERS
        for i, ok in enumerate(right)
    ]


def _write(folder: Path, right: list[bool], edit: Callable[[dict, list[dict]], None] | None = None) -> Path:
    results, samples = copy.deepcopy(_results(sum(right) / len(right), len(right))), _samples(right)
    if edit:
        edit(results, samples)
    inner = folder / "model"
    inner.mkdir(parents=True)
    (inner / f"results_{DATE}.json").write_text(json.dumps(results))
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    (inner / f"samples_gsm8k_{DATE}.jsonl").write_text(lines)
    return folder


def _gate(a: Path, b: Path, *options: str):
    return CliRunner().invoke(app, ["gate", "--baseline", str(a), "--candidate", str(b), *options])


BASE = [i % 3 != 0 for i in range(600)]


def _flipped(lost: int, won: int) -> list[bool]:
    right = list(BASE)
    for i in [i for i in range(600) if BASE[i]][:lost] + [i for i in range(600) if not BASE[i]][:won]:
        right[i] = not right[i]
    return right


@pytest.mark.parametrize(
    ("lost", "won", "code", "word"),
    [(0, 0, 0, "PASS"), (5, 5, 0, "PASS"), (40, 2, 1, "FAIL"), (15, 10, 2, "INCONCLUSIVE")],
)
def test_gate_decides_and_exits(tmp_path: Path, lost: int, won: int, code: int, word: str):
    result = _gate(_write(tmp_path / "a", BASE), _write(tmp_path / "b", _flipped(lost, won)))
    assert result.exit_code == code, result.output
    assert result.output.splitlines()[-1].startswith(f"{word} (flexible-extract, margin 2.00%): ")
    assert result.output.count("question ") == min(20, lost + won)


def test_texts_that_are_all_the_same_are_pointed_out(tmp_path: Path):
    """They are so where a setting of the candidate was never taken, and that passes."""
    one, same = _write(tmp_path / "a", BASE), _write(tmp_path / "b", BASE)
    assert "\nnote: all 600 texts are the same to the letter; " in _gate(one, same).output
    assert "note: " not in _gate(one, _write(tmp_path / "c", _flipped(1, 0))).output


def test_what_could_have_shown_is_said(tmp_path: Path):
    pair = _write(tmp_path / "a", BASE), _write(tmp_path / "b", BASE)
    said = "detectable: the least true loss of which 80% of such runs show p < 0.05; FAIL asks for p < 0.01"
    assert said in _gate(*pair).output.splitlines()


def test_pairing_counts_and_lists_the_flips(tmp_path: Path):
    baseline = load(_write(tmp_path / "a", BASE), "gsm8k")
    candidate = load(_write(tmp_path / "b", _flipped(2, 1)), "gsm8k")
    one = compare(baseline, candidate, "strict-match", 0.05)
    assert (one.pair.both, one.pair.lost, one.pair.won, one.pair.neither) == (398, 2, 1, 199)
    assert [(f.doc_id, f.lost, f.target, f.baseline, f.candidate) for f in one.flips] == [
        (0, False, "0", "-1", "0"),
        (1, True, "1", "1", "-1"),
        (2, True, "2", "2", "-1"),
    ]
    assert one.flips[1].differs_at == len("#### ")
    assert one.text_equal == 597 / 600
    assert "|gsm8k|    3.0|strict-match    |     5|exact_match|↑  |0.6667|±  |0.0193|" in table(baseline)


def test_a_small_run_never_passes(tmp_path: Path):
    right = [True] * 100
    result = _gate(_write(tmp_path / "a", right), _write(tmp_path / "b", right))
    assert result.exit_code == 2
    assert "100 questions bound a loss to no less than 2.63%" in result.output


def _set(*path: str, value: object) -> Callable[[dict, list[dict]], None]:
    def edit(results: dict, samples: list[dict]) -> None:
        where = results
        for key in path[:-1]:
            where = where[key]
        where[path[-1]] = value

    return edit


def _sample(index: int, **fields: object) -> Callable[[dict, list[dict]], None]:
    def edit(results: dict, samples: list[dict]) -> None:
        samples[index] |= fields

    return edit


def _drop(results: dict, samples: list[dict]) -> None:
    del samples[7]


def _swap_question(results: dict, samples: list[dict]) -> None:
    for sample in samples:
        if sample["doc_id"] == 9:
            sample["doc_id"] = 1000


def _one_filter(results: dict, samples: list[dict]) -> None:
    samples[:] = [sample for sample in samples if sample["filter"] == "strict-match"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set("versions", "gsm8k", value=2.0), "task version: 3.0 in the baseline, 2.0 in the candidate"),
        (_set("n-shot", "gsm8k", value=8), "n-shot: 5 in the baseline, 8 in the candidate"),
        (_set("config", "limit", value=600.0), "limit: null in the baseline, 600.0 in the candidate"),
        (_set("config", "fewshot_seed", value=7), "few-shot seed: 1234 in the baseline, 7 in the candidate"),
        (_set("configs", "gsm8k", "generation_kwargs", value={"until": []}), "generation settings"),
        (_set("configs", "gsm8k", "filter_list", value=[]), "filters[0]: "),
        (
            _set("configs", "gsm8k", "generation_kwargs", "nothing", value="nothing"),
            "generation settings.nothing: ",
        ),
        (_set("chat_template_sha", value="abc"), "chat template: null in the baseline, abc in the candidate"),
        (_sample(3, prompt_hash="other"), "prompts: 1 of 600 differ, first that of question 3"),
        (_sample(4, doc_hash="other"), "questions: 1 of 600 differ, first that of question 4"),
        (
            _one_filter,
            "filters: strict-match, flexible-extract in the baseline, strict-match in the candidate",
        ),
        (_swap_question, "questions: 2 are in one run only, for example 9 in the baseline"),
    ],
)
def test_runs_that_differ_are_refused_with_the_reason(tmp_path: Path, edit, message: str):
    result = _gate(_write(tmp_path / "a", BASE), _write(tmp_path / "b", BASE, edit))
    assert result.exit_code == 3
    assert f"gate: not comparable: {message}" in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_drop, "599 answers of strict-match, but the run had 600 questions"),
        (_sample(1, exact_match=0.0), "strict-match counts to 0.6650, but the results say 0.6667"),
        (_sample(0, exact_match=0.5), ":1: exact_match is 0.5, must be 0 or 1"),
        (_sample(1, doc_id=0), ":2: question 0 a second time"),
        (_set("results", value={"mmlu": {}}), "has mmlu, not gsm8k"),
    ],
)
def test_damaged_runs_are_refused(tmp_path: Path, edit, message: str):
    with pytest.raises(ValueError, match=message):
        load(_write(tmp_path / "a", BASE, edit), "gsm8k")


def test_missing_files_are_named(tmp_path: Path):
    result = _gate(tmp_path, tmp_path)
    assert result.exit_code == 3
    assert "no samples of gsm8k, and no results; it is no --output_path of lm_eval" in result.output
    a = _write(tmp_path / "a", BASE)
    line = (a / "model" / f"samples_gsm8k_{DATE}.jsonl").read_text().splitlines()[0]
    (a / "model" / f"samples_gsm8k_{DATE}.jsonl").write_text(line + "\n" + line[:40])
    with pytest.raises(ValueError, match=r"\.jsonl:2: not JSON, or cut short: Unterminated string"):
        load(a, "gsm8k")
    result = _gate(_write(tmp_path / "b", BASE), _write(tmp_path / "c", BASE), "--filter", "none")
    assert result.exit_code == 3
    assert "filter 'none' is not one of strict-match, flexible-extract" in result.output


def test_the_newest_run_of_a_folder_is_read(tmp_path: Path):
    a = _write(tmp_path / "a", BASE)
    newer = _write(tmp_path / "b", _flipped(3, 0)) / "model"
    for file in newer.iterdir():
        file.rename(a / "model" / file.name.replace("2026-01", "2026-02"))
    assert "2026-02" in load(a, "gsm8k").path.name


def test_json_holds_every_filter(tmp_path: Path):
    result = _gate(_write(tmp_path / "a", BASE), _write(tmp_path / "b", _flipped(1, 0)), "--json")
    data = json.loads(result.output)
    assert set(data) == set(FILTERS)
    assert data["flexible-extract"]["decision"]["outcome"] == "PASS"
    assert data["strict-match"]["pair"] == {"both": 399, "lost": 1, "won": 0, "neither": 200}
