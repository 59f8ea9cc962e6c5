"""How far beyond the limits planted bugs are: where each is planted, and what is said of it."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="models are loaded by transformers")
pytest.importorskip("tokenizers", reason="the checkpoints' tokenizer needs tokenizers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from typer.testing import CliRunner

from evals import reach, trial
from evals.cli import app
from evals.path import AttentionPath
from evals.planted import bugs
from evals.tiers import Text
from evals.trial import CHECKPOINTS, digest, limits, measured_noise, texts_of

MINI = CHECKPOINTS / "mini"
EVERYWHERE = ["float32/fp32", "float32/bf16", "float32/fp8_e4m3", "float32/fp8_ds_mla", "bfloat16/bf16"]


def _kind(path: AttentionPath) -> str:
    return f"{path.dtype}/{path.cache_format}"


def test_every_bug_is_planted_wherever_it_can_be():
    places = {name: [_kind(each.path) for each in found] for name, found in reach.planted(0.5).items()}
    of_a_format = {name for name in places if name.startswith("fp8 scale")}
    assert len(places) == 17
    assert len(of_a_format) == 2
    for name, kinds in places.items():
        assert kinds == (["float32/fp8_e4m3", "bfloat16/fp8_e4m3"] if name in of_a_format else EVERYWHERE)
    every = [each.path for found in reach.planted(0.5).values() for each in found]
    assert all(path.kv_scale == 0.5 for path in every if path.cache_format == "fp8_e4m3")


def test_one_is_measured_and_shown(tmp_path: Path, monkeypatch):
    """On one short text, over one cache: far beyond the limits, which are those of the print, read once."""
    [bug] = (each for each in bugs(1.0) if each.name == "merge is the mean")
    [text] = texts_of(MINI)[:1]
    monkeypatch.setattr(reach, "planted", lambda scale: {bug.name: (bug,)})
    monkeypatch.setattr(reach, "texts_of", lambda folder: [Text(text.prompt, text.answer[:3])])
    file, read = tmp_path / "reach.json", []
    monkeypatch.setattr(trial, "digest", lambda folder: (read.append(folder), digest(folder))[1])
    result = CliRunner().invoke(app, ["reach", "mini", "--json", str(file)])
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert (record["checkpoint"], record["device"]) == ("mini", "CPU")
    assert read == [MINI]
    [row] = record["rows"]
    assert (row["name"], row["kind"]) == (bug.name, "float32/fp32")
    noise = measured_noise(MINI)
    shares = [line.share for line in reach.held(row, noise)]
    assert result.output.splitlines()[-1] == f"| merge is the mean | {max(shares):,.0f} (T2) |"
    assert min(shares) > 1000


@pytest.mark.parametrize("jobs", [1, 2, 3, 99])
def test_rows_come_in_the_order_of_the_bugs_whoever_measures_them(jobs: int, monkeypatch):
    """Of 99 processes none is started for nothing."""
    shares = []

    def spawned(most, find, names):
        shares.extend(names)
        return map(find, names)

    monkeypatch.setattr(reach, "spawned", spawned)
    monkeypatch.setattr(reach, "_find", lambda *given: [{"name": name} for name in given[-1]])
    names = [*reach.planted(1.0)]
    assert [row["name"] for row in reach.reaches(MINI, {"kv_scale": 1.0}, "cpu", jobs)] == names
    assert len(shares) == min(jobs, 17)
    assert all(shares)


def test_a_bug_within_every_limit_is_named(monkeypatch):
    """The faintest first; what is no number is beyond every limit."""
    noise = measured_noise(MINI)
    allowed = limits(noise, AttentionPath())

    def row(name: str, kind: str, share: float | None) -> dict:
        found = share and share * allowed["median"]
        return {"name": name, "kind": kind, "found": [["T1 shadow", "median", found]]}

    rows = [
        row("clear", "float32/fp32", 40.0),
        row("faint", "float32/fp32", 0.5),
        row("nan", "float32/fp32", None),
    ]
    record = {"rows": rows}
    assert reach.unseen(record, noise) == ["faint (float32/fp32)"]
    assert reach.markdown(record, noise).splitlines() == [
        "| bug | float32/fp32 |",
        "|---|--:|",
        "| faint | 0.5 (T1) |",
        "| clear | 40 (T1) |",
        "| nan | inf (T1) |",
    ]
    monkeypatch.setattr(reach, "reaches", lambda *_: rows)
    result = CliRunner().invoke(app, ["reach", "mini"])
    assert result.exit_code == 1
    assert "reach: within every limit: faint (float32/fp32)" in result.output
