"""A kernel is found in the working directory; folders there that are named as ours are not taken for ours."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
THEIRS = """
from dataclasses import replace
from mla_ref.merge_states import BACKEND

BACKEND = replace(BACKEND, name="theirs")
"""


def test_folders_of_our_names_shadow_nothing(tmp_path: Path) -> None:
    for name in ("mla_ref", "mla_fast", "oracles", "evals", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('somebody else\\'s')")
    (tmp_path / "theirs.py").write_text(THEIRS)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from oracles.command import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["run", "--backend", "theirs", "--preset", "a.x-k2", "--oracle", "contract"]
    words += ["--isolate", "--jobs", "1"]
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert "36 claims held, 0 failed" in ran.stdout
