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
    assert f"\n| merge is the mean | {max(shares):.0e} (T2) |\n" in result.output
    assert result.output.splitlines()[-1] == (
        f"| float32/fp32 | 1 | 1 | 1 | 1 | merge is the mean | {max(shares):.0e} (T2) |"
    )
    assert min(shares) > 1000


def test_a_bug_that_one_tier_sees_is_seen():
    """Counted once where both see it, and under the tier that does."""
    noise = measured_noise(MINI)
    allowed = limits(noise, AttentionPath())

    def row(name: str, median: float, mean_kl: float) -> dict:
        found = [
            ["T1 shadow", "median", median * allowed["median"]],
            ["T2 logits", "mean_kl", mean_kl * allowed["mean_kl"]],
        ]
        return {"name": name, "kind": "float32/fp32", "found": found}

    rows = [row("both", 20.0, 3e7), row("one", 1.5, 0.5), row("other", 0.5, 1_234.4), row("none", 1.0, 0.9)]
    assert reach.summary({"rows": rows}, noise).splitlines()[2:] == [
        "| float32/fp32 | 4 | 2 | 2 | 3 | none | 1.0 (T1) |",
    ]
    shown = reach.markdown({"rows": rows}, noise).splitlines()[2:]
    assert shown == [
        "| none | 1.0 (T1) |",
        "| one | 1.5 (T1) |",
        "| other | 1,234 (T2) |",
        "| both | 3e+07 (T2) |",
    ]


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


def test_the_records_of_the_page_agree():
    """What was found beyond limits, bug by bug, is what the run through all three tiers says of T1 and T2."""
    folder = Path(reach.__file__).parents[1] / "docs/results"
    beyond, run = (json.loads((folder / f"gate-{name}.json").read_text()) for name in ("reach-mini", "bugs"))
    noise = measured_noise(MINI)
    assert beyond["sha256"] == run["sha256"] == noise["sha256"]
    planted = {name: _kind(found[0].path) for name, found in reach.planted(1.0).items()}
    rows = [row for row in beyond["rows"] if row["kind"] == planted[row["name"]]]
    seen = {row["name"]: {line.tier[:2] for line in reach.held(row, noise) if not line.ok} for row in rows}
    marks = {each["name"]: (each["t1"], each["t2"]) for each in run["paths"] if each["wrong"]}
    assert {name: ("T1" in over, "T2" in over) for name, over in seen.items()} == marks


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
    assert reach.summary(record, noise).splitlines()[2:] == [
        "| float32/fp32 | 3 | 2 | 0 | 2 | faint | 0.5 (T1) |",
    ]
    monkeypatch.setattr(reach, "reaches", lambda *_: rows)
    result = CliRunner().invoke(app, ["reach", "mini"])
    assert result.exit_code == 1
    assert "reach: within every limit: faint (float32/fp32)" in result.output
