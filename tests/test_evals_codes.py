"""A path over a cache that rounds, on its own codes and on those of the definition."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="models are loaded by transformers")
pytest.importorskip("tokenizers", reason="the checkpoints' tokenizer needs tokenizers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from typer.testing import CliRunner

from evals import codes
from evals.cli import app
from evals.tiers import Text
from evals.trial import CHECKPOINTS, texts_of

MINI = CHECKPOINTS / "mini"
PATH = "decode=mla_fast.sdpa prefill=mla_fast.sdpa chunk=96 cache_format=bf16"


def test_codes_are_all_that_parts_a_right_path(tmp_path: Path, monkeypatch):
    """Where it reads the definition's codes it is far nearer; before any attention both wrote the same."""
    [text] = texts_of(MINI)[:1]
    monkeypatch.setattr(codes, "texts_of", lambda folder: [Text(text.prompt[:110], text.answer[:3])])
    file = tmp_path / "codes.json"
    result = CliRunner().invoke(app, ["codes", "mini", "--path", PATH, "--json", str(file)])
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    rows = {row["beside"]: row for row in record["rows"]}
    assert [*rows] == [codes.OWN, codes.ON_CODES, codes.WHOLE, codes.STEPS]
    first, *others = rows[codes.OWN]["bytes"]
    assert first == 0 < min(others)
    assert rows[codes.ON_CODES]["max_kl"] * 100 < rows[codes.OWN]["max_kl"]
    assert len(result.output.splitlines()) == 2 + len(rows)
    assert f"| {', '.join(map(str, [first, *others]))} |" in result.output


def test_what_is_no_number_leaves_its_cell_empty():
    row = {"beside": codes.OWN, "mean_kl": None, "max_kl": 1.0, "bytes": [0, 3]}
    assert codes.markdown({"rows": [row]}).splitlines()[-1] == "| the definition |  | 1.0e+00 | 0, 3 |"


def test_a_path_that_is_none_is_one_line():
    result = CliRunner().invoke(app, ["codes", "mini", "--path", "decode=nothing.here"])
    assert result.exit_code == 3
    assert result.output.count("\n") == 1
