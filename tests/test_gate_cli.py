import importlib
import subprocess
import sys

import pytest

pytest.importorskip("scipy", reason="the statistics of the gate need scipy")

from test_evals_parity import BASE, _flipped, _write

from oracles.command import main


@pytest.mark.parametrize(("lost", "won", "code"), [(0, 0, 0), (40, 2, 1), (15, 10, 2)])
def test_gate_is_a_command_with_its_own_exit_codes(tmp_path, capsys, lost: int, won: int, code: int):
    runs = _write(tmp_path / "a", BASE), _write(tmp_path / "b", _flipped(lost, won))
    assert main(["gate", "--baseline", str(runs[0]), "--candidate", str(runs[1])]) == code
    assert "strict-match" in capsys.readouterr().out


def test_what_gate_cannot_read_is_one_line(tmp_path, capsys):
    assert main(["gate", "--baseline", str(tmp_path), "--candidate", str(tmp_path)]) == 3
    assert capsys.readouterr().err.count("\n") == 1
    for words in (["--baseline", str(tmp_path)], ["--no-such-option"]):
        assert main(["gate", *words]) == 3  # 2 is a verdict
        assert capsys.readouterr().err.startswith("mla-verify: gate: ")


def test_gate_without_evals_says_what_to_install(monkeypatch, capsys):
    found = importlib.import_module

    def gone(name):
        if name.startswith("evals"):
            raise ImportError(f"No module named {name!r}")
        return found(name)

    monkeypatch.setattr(importlib, "import_module", gone)
    assert main(["gate"]) == 3
    says = "needs scipy and more: pip install 'mla-verify[evals]' (No module named 'evals.cli')"
    assert capsys.readouterr().err == f"mla-verify: gate: {says}\n"


def test_gate_decides_without_torch(tmp_path):
    runs = _write(tmp_path / "a", BASE), _write(tmp_path / "b", BASE)
    words = ["gate", "--baseline", str(runs[0]), "--candidate", str(runs[1])]
    code = f"from oracles.command import main; code = main({words}); sys.exit(code or 'torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}"], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "PASS" in found.stdout
