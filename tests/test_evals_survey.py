import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="runs through lm_eval")
pytest.importorskip("transformers", reason="models are loaded by transformers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from typer.testing import CliRunner

from evals import survey as surveys
from evals import trial
from evals.cli import app
from evals.path import REFERENCE, parse
from evals.survey import ABSENT, PATHS, PENDING, _trial, markdown, survey
from evals.trial import CHECKPOINTS, Line, costs, limits, limits_digest, measured_noise
from oracles.verify import backends

MINI = CHECKPOINTS / "mini"
ABOUT = {
    "checkpoint": "mini",
    "sha256": measured_noise(MINI)["sha256"],
    "limits": "0" * 64,
    "model_dtype": "float32",
    "questions": 400,
    "margin": 0.05,
    "device": "CPU",
    "versions": {"torch": "2"},
    "date": "2026-01-02",
    "jobs": 3,
    "seconds": 12.34,
}
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
    row = _trial([sys.executable, "-c", code, "decode=x"], seconds, tmp_path, 0.05, [])
    assert (row["path"], row["reason"]) == ("decode=x", reason)
    assert "outcome" not in row


def test_a_share_of_no_limit():
    def share(found: float, limit: float) -> float:
        return Line(tier="", measure="", found=found, limit=limit).share

    assert (share(1.0, 4.0), share(0.0, 0.0), share(1.0, 0.0)) == (0.25, 0.0, float("inf"))


def test_every_path_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three paths through the command: the reference, one that is right, one that cannot run here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # more would wait for each other
    right = "decode=mla_ref.absorbed prefill=mla_ref.chunked chunk=96"
    paths = {REFERENCE: "", "right": right, "elsewhere": "decode=mla_fast.flash_mla"}
    monkeypatch.setattr(surveys, "PATHS", paths | {"not asked for": "decode=x"})
    file = tmp_path / "record.json"
    command = ["survey", str(MINI), "--out", str(tmp_path / "runs"), "--questions", "2", "--json", str(file)]
    result = CliRunner().invoke(app, [*command, "--only", "right", "--only", "elsewhere"])
    assert result.exit_code == 2, result.output  # two questions decide nothing
    record = json.loads(file.read_text())
    assert [row["name"] for row in record["paths"]] == [*paths]
    assert set(surveys.FIELDS) == set(record)
    assert (record["checkpoint"], record["device"], record["questions"]) == ("mini", "CPU", 2)
    assert record["limits"] == limits_digest(measured_noise(MINI))
    assert record["seconds"] >= max(row["seconds"] for row in record["paths"])
    assert result.output.splitlines()[4].startswith("mini, CPU, 2 questions, margin 5%")
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


def test_a_survey_that_is_cut_short_keeps_what_it_has(tmp_path: Path, monkeypatch):
    """By SIGTERM, while one path is through and others still run: their processes end as well."""
    running = []

    def trial(command: list[str], seconds: float, out: Path, margin: float, children: list) -> dict:
        name = command[-1]
        if name == "":
            return _row(REFERENCE, "PASS", 0.5)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        children.append(child)
        running.append(child)
        if len(running) == 2:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return {"path": name, "reason": f"ended with {child.wait()}"}

    monkeypatch.setattr(surveys, "_trial", trial)
    monkeypatch.setattr(surveys, "PATHS", {"a": "decode=a", REFERENCE: "", "b": "decode=b", "c": "decode=c"})
    file, before = tmp_path / "record.json", signal.getsignal(signal.SIGTERM)
    command = ["survey", str(MINI), "--out", str(tmp_path), "--jobs", "2", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 130, result.output
    assert signal.getsignal(signal.SIGTERM) is before
    assert [child.wait(30) for child in running] == [-9, -9]
    rows = {row["name"]: row for row in json.loads(file.read_text())["paths"]}
    assert [*rows] == ["a", REFERENCE, "b", "c"]
    assert rows[REFERENCE]["outcome"] == "PASS"
    for name in ("a", "b", "c"):
        assert rows[name]["reason"] == PENDING
        assert f"| {name} | did not run: {PENDING} |" in result.output
    assert "| the reference | PASS | 50% of the limits |" in result.output


def _decided(outcome: str) -> dict:
    """A row with all that a verdict takes."""
    row = _row("a kernel", outcome, 1.0)
    one = {"filter": "strict-match", "text_equal": 1.0, "flips": []}
    one["pair"] = {"both": 400, "lost": 0, "won": 0, "neither": 0}
    one["decision"] = {"outcome": "PASS", "reason": "small", "p": 1.0, "bound": 0.0067, "detectable": 0.0167}
    path = "decode=mla_ref.absorbed cache_format=bf16 dtype=bfloat16"
    return row | {"path": path, "place": "layer 0", "filters": {"strict-match": one}}


@pytest.mark.parametrize(
    ("tier", "share", "outcome", "reason"),
    [
        ("T1 shadow", 0.5, "PASS", "T3: small"),
        ("T1 shadow", 2.0, "FAIL", "T1 shadow: "),
        ("T2 cost", 0.5, "PASS", "T3: small"),
        ("T2 cost", 2.0, "FAIL", "T2 cost: "),
        ("T1 shadow", None, "FAIL", "T1 shadow: "),
    ],
)
def test_a_record_is_held_to_the_limits_of_today(
    tier: str, share: float | None, outcome: str, reason: str, tmp_path: Path
):
    noise, path = measured_noise(MINI), parse(_decided("PASS")["path"])
    measure = "worst" if tier == "T1 shadow" else "max_kl"
    limit = (limits(noise, path) if tier == "T1 shadow" else costs(noise, path))[measure]
    found = share and share * limit
    line = {"tier": tier, "measure": measure, "found": found, "limit": 1e-30}
    row = _decided("FAIL") | {"lines": [line]}
    record = ABOUT | {"sha256": noise["sha256"], "paths": [row]}
    file, new = tmp_path / "old.json", tmp_path / "new.json"
    file.write_text(json.dumps(record))
    result = CliRunner().invoke(app, ["rejudge", str(file), "mini", "--json", str(new)])
    assert result.exit_code == ("PASS", "FAIL").index(outcome), result.output
    written = json.loads(new.read_text())
    was = {} if outcome == "FAIL" else {"a kernel": {"outcome": "FAIL", "reason": row["reason"]}}
    assert written["limits"] == limits_digest(noise)
    assert written["rejudged"] | {"date": ""} == {"date": "", "limits": ABOUT["limits"], "verdicts": was}
    assert f"by the limits of its run, {ABOUT['limits'][:12]}:\n- " in result.output
    assert f"- a kernel: FAIL, {row['reason']}" in result.output or not was
    rows = {row["name"]: row for row in written["paths"]}
    assert rows["a kernel"]["outcome"] == outcome
    assert rows["a kernel"]["reason"].startswith(reason)
    assert rows["a kernel"]["lines"] == [line | {"limit": limit}]
    assert all(rows[name] == {"name": name, "path": path, "reason": ABSENT} for name, path in PATHS.items())
    file.write_text(json.dumps(record | {"sha256": "0" * 64}))
    refused = CliRunner().invoke(app, ["rejudge", str(file), "mini"])
    assert refused.exit_code == 3
    assert "rejudge: record: is of weights 000000000000…" in refused.output


def test_a_record_that_is_rejudged_twice_tells_what_its_run_said(tmp_path: Path):
    """By limits that fail a path, then by those of now, which pass it, then once more."""
    noise = measured_noise(MINI)
    line = {"tier": "T1 shadow", "measure": "worst", "found": 0.0, "limit": 1.0}
    row = _decided("PASS") | {"lines": [line]}
    run = ABOUT | {"sha256": noise["sha256"], "paths": [row | {"outcome": "FAIL", "reason": "noise"}]}
    first = surveys.again(run, MINI)
    second = surveys.again(first, MINI)
    assert first["rejudged"]["verdicts"] == {"a kernel": {"outcome": "FAIL", "reason": "noise"}}
    assert second["rejudged"] == first["rejudged"]
    assert second["paths"] == first["paths"]
    [kernel] = (each for each in second["paths"] if each["name"] == "a kernel")
    back = first | {"paths": [kernel | {"outcome": "FAIL"}], "rejudged": None}
    assert surveys.again(back, MINI)["rejudged"]["limits"] == first["limits"]


def test_the_record_of_the_docs_is_held_to_the_limits_of_now():
    record = json.loads((CHECKPOINTS.parent.parent / "docs" / "results" / "gate-h200.json").read_text())
    folder = CHECKPOINTS / record["checkpoint"]
    assert record["limits"] == limits_digest(measured_noise(folder))
    held = surveys.again(record, folder)
    assert held["paths"] == record["paths"]
    assert [row["name"] for row in record["paths"]] == [*PATHS]


def test_t1_and_t2_are_measured_anew_and_t3_stays(tmp_path: Path, monkeypatch):
    """One path that runs now, one that does not, one that never ran; limits that fail what was found then."""
    asked = []

    def prints(command: list[str], seconds: float, children: list) -> tuple[dict, dict | None]:
        asked.append(command)
        if command[-1] == "decode=gone":
            return {"path": command[-1], "reason": "needs CUDA"}, None
        return {"path": command[-1]}, {"lines": [_line(0.0)], "place": "layer 1", "outcome": "PASS"}

    monkeypatch.setattr(surveys, "_printed", prints)
    old = _decided("PASS") | {"lines": [_line(1.0)]}
    gone, never = old | {"name": "gone", "path": "decode=gone"}, {"name": "never", "reason": "hung"}
    file, new = tmp_path / "old.json", tmp_path / "new.json"
    file.write_text(json.dumps(ABOUT | {"paths": [old, gone, never]}))
    assert CliRunner().invoke(app, ["rejudge", str(file), "mini"]).exit_code == 1
    result = CliRunner().invoke(app, ["rejudge", str(file), "mini", "--measure", "--json", str(new)])
    assert result.exit_code == 0, result.output
    assert [words[-1] for words in asked] == [old["path"], "decode=gone"]
    assert all(words[words.index("--questions") + 1] == "0" for words in asked)
    written = json.loads(new.read_text())
    rows = {row["name"]: row for row in written["paths"]}
    kernel = rows["a kernel"]
    assert (kernel["outcome"], kernel["place"], kernel["lines"][0]["found"]) == ("PASS", "layer 1", 0.0)
    assert kernel["filters"] == old["filters"]
    assert rows["gone"] == {"name": "gone", "path": "decode=gone", "reason": "needs CUDA"}
    assert rows["never"] == never
    assert written["measured"]["device"] == "CPU"
    assert f"T1 and T2 measured {written['measured']['date']}, CPU, torch " in result.output
    assert (written["date"], written["seconds"]) == (ABOUT["date"], ABOUT["seconds"])


def test_limits_have_a_digest_of_what_they_allow(monkeypatch):
    noise = measured_noise(MINI)
    here = limits_digest(noise)
    assert limits_digest(noise | {"kv_scale": 0.0}) == here
    monkeypatch.setattr(trial, "COST", 4.0)
    assert limits_digest(noise) != here


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "record: is no object; survey --json writes one"),
        ('{"cases": []}', "record: has no checkpoint, sha256, "),
        ("{", "other.json: not JSON: "),
        ("\udcff", "other.json: not JSON: "),
        (json.dumps(ABOUT | {"paths": [1]}), "record: a path is not as survey writes it: "),
        (json.dumps(ABOUT | {"paths": [{"name": "x", "outcome": "PASS"}]}), "writes it: KeyError('path')"),
    ],
)
def test_what_is_no_record_gets_no_verdict(text: str, says: str, tmp_path: Path):
    file = tmp_path / "other.json"
    file.write_text(text, errors="surrogateescape")
    result = CliRunner().invoke(app, ["rejudge", str(file), "mini"])
    assert result.exit_code == 3, result.output
    assert says in result.output
    assert len(result.output.splitlines()) == 1


def test_a_path_that_fails_names_no_measure_that_is_gone(tmp_path: Path):
    row = _decided("PASS") | {"lines": [_line(1.0) | {"measure": "forgotten"}]}
    with pytest.raises(ValueError, match="a path is not as survey writes it: KeyError"):
        surveys.again(ABOUT | {"paths": [row]}, MINI)


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
