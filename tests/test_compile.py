"""The kernels that are shipped compile for every architecture, fit in its shared memory, and do not spill."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

# Bytes of shared memory that one program may have: A100, H100 and H200, B200, RTX 5090 (and RTX 4090).
SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}

# Eight registers of a thread, read back once a tile: 64 by 64 scores beside 64 by 512 sums take all 255. On a
# B200 the sums pass through registers on their way out of tensor memory, after the loop.
SPILLED_BYTES = {capability: 80 if capability == 100 else 32 for capability in SHARED_BYTES}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, subprocess.CompletedProcess[str]]:
    """Everything, two architectures at a time."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))

    def run(capability: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, Path(__file__).with_name("compiled_kernels.py"), str(capability)]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SHARED_BYTES, pool.map(run, SHARED_BYTES), strict=True))


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_shipped_tiles(capability: int, compiled: dict[int, subprocess.CompletedProcess[str]]) -> None:
    run = compiled[capability]
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == {"_mla_decode_kernel", "_merge_splits_kernel"}
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_BYTES[capability], kernel
        assert kernel["STACK"] <= SPILLED_BYTES[capability], kernel
