"""The suite says the same wherever it runs: what its caller has set is not there."""

import os
import subprocess
import sys
from pathlib import Path

import conftest

HOSTILE = {
    "CI": "true", "FORCE_COLOR": "1", "PY_COLORS": "1", "COLUMNS": "40", "LINES": "5", "TERM": "dumb",
    "TRITON_INTERPRET": "0", "HF_HOME": "/nowhere", "TRANSFORMERS_CACHE": "/nowhere",
    "HUGGINGFACE_HUB_CACHE": "/nowhere", "TYPER_USE_RICH": "0", "_TYPER_STANDARD_TRACEBACK": "1",
    "MLA_VERIFY_GSM8K": "/nowhere", "GITHUB_ACTIONS": "true", "LC_ALL": "C",
}  # fmt: skip
# Of these the suite sets the one itself, where it matters, and leaves the other.
KEPT = ("TRITON_INTERPRET", "LC_ALL")


def test_nothing_of_the_caller_is_seen():
    assert not {"CI", "BUILD_NUMBER", *conftest.THEIRS} & set(os.environ)
    # Packages set variables of these families themselves when they are imported, but to other values.
    assert not [name for name in HOSTILE.keys() - KEPT if os.environ.get(name) == HOSTILE[name]]


def test_whatever_the_caller_has_set():
    words = ["-m", "pytest", "-q", f"{__file__}::test_nothing_of_the_caller_is_seen"]
    bare = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    for environment in (bare, os.environ | HOSTILE):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=Path(__file__).parent.parent,
            env=dict(environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
