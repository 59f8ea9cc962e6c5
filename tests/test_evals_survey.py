import json
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="runs through lm_eval")
pytest.importorskip("transformers", reason="models are loaded by transformers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from typer.testing import CliRunner

from evals import survey as surveys
from evals.cli import app
from evals.path import REFERENCE, parse
from evals.survey import PATHS, _trial, markdown, survey
from evals.trial import CHECKPOINTS, Line
from oracles.verify import backends

MINI = CHECKPOINTS / "mini"
TABLE = "|Tasks|Version|\n|-----|------:|\n|gsm8k|    3.0|\n|     |       |"


def _line(found: float | None, limit: float | None = 1.0) -> dict:
    return {"tier": "T1 shadow", "measure": "worst", "found": found, "limit": limit}


def _row(name: str, outcome: str, found: float, lost: int = 0) -> dict:
    return {
        "name": name,
        "path": "",
        "seconds": 12.34,
        "outcome": outcome,
        "reason": "T1 shadow: worst is 2, at most 1 is noise",
        "lines": [_line(found), _line(0.0)],
        "table": TABLE,
        "filters": {
            "strict-match": {
                "pair": {"both": 390 - lost, "lost": lost, "won": 0, "neither": 10},
                "decision": {"bound": 0.0067, "p": 1.0},
                "text_equal": 0.995,
            }
        },
    }


def test_paths_are_readable_and_name_backends():
    assert PATHS[REFERENCE] == ""
    for path in map(parse, PATHS.values()):
        assert {path.decode, path.prefill} <= set(backends())
    assert len({str(parse(path)) for path in PATHS.values()}) == len(PATHS)


def test_the_tables_show_every_path_and_why():
    rows = [
        _row(REFERENCE, "PASS", 0.0),
        _row("wrong", "FAIL", 2.0, 4),
        _row("unmeasured", "INCONCLUSIVE", 0.5) | {"lines": [_line(0.5, None)] * 2},
        _row("broken", "FAIL", 0.0) | {"lines": [_line(0.5), _line(None)]},
        {"name": "gone", "reason": "needs CUDA"},
    ]
    assert markdown({"paths": rows}).splitlines() == [
        "|path|Tasks|Version|",
        "|----|-----|------:|",
        "|the reference|gsm8k|    3.0|",
        "||     |       |",
        "|wrong|gsm8k|    3.0|",
        "||     |       |",
        "|unmeasured|gsm8k|    3.0|",
        "||     |       |",
        "|broken|gsm8k|    3.0|",
        "||     |       |",
        "",
        "| path | verdict | T1, T2 | strict-match | lost, won | 95 % bound | McNemar p | texts equal | s |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
        "| the reference | PASS | 0% of the limits | 97.50% of 400 | 0, 0 | 0.67% | 1 | 99.5% | 12 |",
        "| wrong | FAIL | 200% of the limits | 96.50% of 400 | 4, 0 | 0.67% | 1 | 99.5% | 12 |",
        "| unmeasured | INCONCLUSIVE | no limits | 97.50% of 400 | 0, 0 | 0.67% | 1 | 99.5% | 12 |",
        "| broken | FAIL | no number | 97.50% of 400 | 0, 0 | 0.67% | 1 | 99.5% | 12 |",
        "| gone | did not run: needs CUDA |  |  |  |  |  |  |  |",
        "",
        "- wrong: T1 shadow: worst is 2, at most 1 is noise",
        "- unmeasured: T1 shadow: worst is 2, at most 1 is noise",
        "- broken: T1 shadow: worst is 2, at most 1 is noise",
    ]


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("import time; time.sleep(60)", 0.5, "not ended after 0 s"),
        ("raise ValueError('broken')", 60, "ValueError: broken"),
        ("import os; os._exit(9)", 60, "ended with 9 and no word"),
        ("import sys; sys.exit('trial: path: x needs a CUDA device')", 60, "x needs a CUDA device"),
    ],
)
def test_what_does_not_end_well_is_a_row(code: str, seconds: float, reason: str, tmp_path: Path):
    row = _trial([sys.executable, "-c", code, "decode=x"], seconds, tmp_path, 0.05)
    assert (row["path"], row["reason"]) == ("decode=x", reason)
    assert "outcome" not in row


def test_a_share_of_no_limit():
    def share(found: float, limit: float) -> float:
        return Line(tier="", measure="", found=found, limit=limit).share

    assert (share(1.0, 4.0), share(0.0, 0.0), share(1.0, 0.0)) == (0.25, 0.0, float("inf"))


def test_every_path_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three paths through the command: the reference, one that is right, one that cannot run here."""
    right = "decode=mla_ref.absorbed prefill=mla_ref.chunked chunk=96"
    paths = {REFERENCE: "", "right": right, "elsewhere": "decode=mla_fast.flash_mla"}
    monkeypatch.setattr(surveys, "PATHS", paths | {"not asked for": "decode=x"})
    file = tmp_path / "record.json"
    command = ["survey", str(MINI), "--out", str(tmp_path / "runs"), "--questions", "2", "--json", str(file)]
    result = CliRunner().invoke(app, [*command, "--only", "right", "--only", "elsewhere"])
    assert result.exit_code == 2, result.output  # two questions decide nothing
    record = json.loads(file.read_text())
    assert [row["name"] for row in record["paths"]] == [*paths]
    assert (record["checkpoint"], record["device"], record["questions"]) == ("mini", "CPU", 2)
    reference, ours, elsewhere = record["paths"]
    assert all(line["found"] == 0.0 for line in reference["lines"])
    assert ours["filters"]["strict-match"]["pair"] == {"both": 2, "lost": 0, "won": 0, "neither": 0}
    assert "|gsm8k|    3.0|strict-match    |     5|exact_match|↑  |1.0000|" in ours["table"]
    assert elsewhere["reason"].startswith("mla_fast.flash_mla ")
    assert f"| elsewhere | did not run: {elsewhere['reason']} |" in result.output


def test_where_none_ends_there_is_no_verdict(tmp_path: Path, monkeypatch):
    tried = []

    def never_ends(command: list[str], *_: object) -> dict:
        tried.append(command)
        return {"path": command[-1], "reason": "not ended after 1 s"}

    monkeypatch.setattr(surveys, "_trial", never_ends)
    command = ["survey", str(MINI), "--out", str(tmp_path), "--questions", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 3, result.output
    assert [words[-1] for words in tried] == [*PATHS.values()]
    assert all(words[words.index("--model-dtype") + 1] == "float32" for words in tried)
    assert "| the reference | did not run: not ended after 1 s |" in result.output
    other = CliRunner().invoke(app, [*command, "--model-dtype", "bfloat16"])
    assert other.exit_code == 3
    assert "is of a float32 model, not of a bfloat16 one; calibrate it again" in other.output


def test_the_reference_is_begun_first_and_the_others_beside_it(tmp_path: Path, monkeypatch):
    begun, together = [], threading.Barrier(3, timeout=30)

    def meets(command: list[str], *_: object) -> dict:
        begun.append(command[-1])
        together.wait()
        return {"path": command[-1], "reason": "met the others"}

    monkeypatch.setattr(surveys, "_trial", meets)
    paths = {"a": "decode=a", REFERENCE: "", "b": "decode=b"}
    *_, record = survey(MINI, paths, 1, tmp_path, jobs=3)
    assert begun[0] == ""
    assert [row["name"] for row in record["paths"]] == [*paths]
    assert all(row["reason"] == "met the others" for row in record["paths"])


def test_a_device_that_is_none_is_one_line(tmp_path: Path):
    for words in (["survey", "mini", "--out", str(tmp_path)], ["trial", "mini", "--path", ""]):
        result = CliRunner().invoke(app, [*words, "--device", "cuda:99"])
        assert result.exit_code == 3, result.output
        assert f"{words[0]}: device 'cuda:99': " in result.output
        assert result.output.count("\n") == 1


def test_what_cannot_be_surveyed_is_one_line(tmp_path: Path):
    result = CliRunner().invoke(app, ["survey", "mini", "--out", str(tmp_path), "--only", "x"])
    assert result.exit_code == 3
    assert "survey: path 'x' is not one of the reference, " in result.output
    assert result.output.count("\n") == 1
    with pytest.raises(ValueError, match="the reference is not among a"):
        next(survey(MINI, {"a": ""}, 1, tmp_path))
