import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="runs through lm_eval")
pytest.importorskip("transformers", reason="models are loaded by transformers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from typer.testing import CliRunner

from evals import sight
from evals.cli import app
from evals.sight import Sight, markdown, unseen
from evals.statistics import FAIL, INCONCLUSIVE, PASS

RIGHT = Sight("absorbed", False, False, False, PASS, 200, 1.0, 1.0, 0, 0, 1.0, 1.0)
WRONG = Sight("first page dropped", True, True, True, FAIL, 200, 1.0, 0.5, 100, 0, 1e-9, 0.4)


@pytest.mark.parametrize(
    ("row", "bad"),
    [
        (RIGHT, False),
        (WRONG, False),
        (RIGHT._replace(t1=True), True),
        (RIGHT._replace(t2=True), True),
        (RIGHT._replace(t3=FAIL), True),
        (WRONG._replace(t1=False, t2=False), True),
        (WRONG._replace(t1=False, t3=PASS), False),
    ],
)
def test_a_bug_unseen_and_a_right_path_failed_are_named(row: Sight, bad: bool):
    assert unseen([RIGHT, WRONG, row]) == ([row.name] if bad else [])


def test_the_table_says_what_each_tier_says():
    lines = markdown([RIGHT, WRONG._replace(t1=False)]).splitlines()
    assert lines[2] == "| right: absorbed |  |  |  | 100.0% of 200 | 0, 0 | 1 | 100.0% |"
    assert lines[3] == "| first page dropped |  | seen | seen | 50.0% of 200 | 100, 0 | 1e-09 | 40.0% |"


def test_a_right_path_and_a_bug_through_all_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Four questions cannot decide, and the table says so."""
    right, bugs = sight.right, sight.bugs
    monkeypatch.setattr(sight, "right", lambda scale: right(scale)[:1])
    monkeypatch.setattr(sight, "bugs", lambda scale: bugs(scale)[2:3])
    file = tmp_path / "rows.json"
    command = ["bugs", "--out", str(tmp_path / "runs"), "--questions", "4", "--json", str(file)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    ours, wrong = (Sight(**row) for row in json.loads(file.read_text())["paths"])
    assert (ours.t1, ours.t2, ours.t3, ours.questions) == (False, False, INCONCLUSIVE, 4)
    assert wrong.t1 or wrong.t2
    monkeypatch.setattr(sight, "measured_noise", lambda folder: {"kv_scale": 1.0, "noise": {}})
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 3
    assert "bugs: absorbed: no noise was measured" in refused.output
