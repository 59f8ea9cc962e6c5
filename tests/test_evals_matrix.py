import pytest

pytest.importorskip("tokenizers", reason="the checkpoints' tokenizer needs tokenizers")
pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from typer.testing import CliRunner

from evals.cli import app
from evals.matrix import HEADER, Cell, markdown, page, paths
from evals.path import AttentionPath


def test_paths_are_the_product_of_the_axes():
    made = paths([("a", "b"), ("c", "c")], ["fp32", "bf16"], [0, 96], [1, 3], [16], ["float32"])
    assert len(set(made)) == 16
    assert {(path.decode, path.prefill) for path in made} == {("a", "b"), ("c", "c")}
    assert {(path.chunk, path.decode_threshold) for path in made} == {(0, 1), (0, 3), (96, 1), (96, 3)}


def test_tables_show_figures_and_reasons():
    rows = [
        Cell(AttentionPath(chunk=96), right=0.5, equal=1.0, kl=1.5e-9, cost=2e-5, top1=0.99, seconds=3.21),
        Cell(AttentionPath(decode="x"), reason="needs <a> device"),
    ]
    lines = markdown(rows).splitlines()
    assert [line.count("|") for line in lines] == [len(HEADER) + 1] * 4
    assert "| 96 | 1 | 16 | float32 | 50.0% | 100.0% | 1.5e-09 | 2.0e-05 | 99.0% | 3.2 |" in lines[2]
    assert "| needs <a> device |" in lines[3]
    html = page(rows, "a & b")
    assert "<title>a &amp; b</title>" in html
    assert "<td>needs &lt;a&gt; device</td>" in html
    assert html.count("<tr>") == 3


def test_what_cannot_run_is_a_row(tmp_path):
    out = tmp_path / "table.html"
    backend = ["--backend", "mla_ref.rope", "--formats", "fp32", "--chunks", "0"]
    result = CliRunner().invoke(app, ["matrix", "mini", *backend, "--questions", "1", "--html", str(out)])
    assert result.exit_code == 0, result.output
    assert "mla_ref.rope solves rope, not attention" in result.output.splitlines()[-1]
    assert "mla_ref.rope solves rope" in out.read_text()
    wrong = CliRunner().invoke(app, ["matrix", "mini", "--chunks", "many"])
    assert wrong.exit_code == 3
    assert "chunks: 'many' are no integers" in wrong.output
