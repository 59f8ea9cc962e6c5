"""A cache format that another package brings as an entry point, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORMAT = """
from dataclasses import replace
from mla_ref.formats import bf16

FORMAT = replace(bf16.FORMAT, name="theirs")
TAKEN = bf16.FORMAT
NUMBER = 7
"""


def installed(folder: Path, target: str) -> None:
    """A package of one module, as an installer leaves it."""
    (folder / "their_format.py").write_text(FORMAT)
    info = folder / "their_format-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mla_verify.formats]\ntheirs = their_format:{target}\n")


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(folder)!r}]\n"
    return subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, check=False)


def test_a_format_of_another_package_is_listed_dealt_and_judged(tmp_path: Path) -> None:
    installed(tmp_path, "FORMAT")
    code = """
from mla_ref.case import Case
from mla_ref.formats import formats
from mla_ref.presets import preset
from oracles.verify import find_backend, judge

assert list(formats())[-1] == "theirs"
case = Case(problem="latent_attention", config=preset("a.x-k2").shard(16), q_lens=(1,), kv_lens=(33,),
            cache_format="theirs")
assert Case.from_json(case.to_json()) == case
print(*(v.status for v in judge(find_backend("mla_ref.latent"), case, oracles=["value", "lse"])))
"""
    ran = python(tmp_path, code)
    assert ran.stdout == "pass pass\n", ran.stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("TAKEN", "their_format:TAKEN is called 'bf16'"),
        ("NUMBER", "their_format:NUMBER is int, not CacheFormat"),
    ],
)
def test_an_entry_point_that_is_no_new_format_is_refused(tmp_path: Path, target: str, message: str) -> None:
    installed(tmp_path, target)
    ran = python(tmp_path, "from mla_ref.formats import formats; formats()")
    assert ran.returncode == 1
    assert f"ValueError: mla_verify.formats: {message}" in ran.stderr
