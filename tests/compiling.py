"""Compiles kernels for GPUs that are not here: runs the scripts ``compiled_*.py``, and reads their lines."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Bytes of shared memory that one program may have: A100, H100 and H200, B200, RTX 5090 (and RTX 4090).
SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}


def kernels_of(script: str, cache: Path, *words: object) -> list[dict[str, Any]]:
    """A record of each kernel; in a process of its own, where Triton compiles, with a cache of its own."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name(f"{script}.py"), *map(str, words)],
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def by_capability(script: str, cache: Path) -> dict[int, list[dict[str, Any]]]:
    """The kernels for each of ``SHARED_BYTES``: in one process, which imports what it needs once."""
    found: dict[int, list[dict[str, Any]]] = {capability: [] for capability in SHARED_BYTES}
    for kernel in kernels_of(script, cache, *SHARED_BYTES):
        found[kernel["capability"]].append(kernel)
    return found
