"""The Hopper kernels compile without a GPU: they fit, loops touch no local memory, products overlap."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = 232_448  # that one program may have

# Tensor-core instructions of each consumer in its loop: 36 of scores and 8 of values for a pair of blocks, by
# either half; with few rows 36 of scores for a block, by two groups, and 32 of values by a third.
PRODUCTS = {
    "mla_decode_kernel": (44, 44), "mla_decode_fp8_kernel": (44, 44), "mla_decode_few_kernel": (32, 36, 36),
}  # fmt: skip

# Copies of 64 keys in the producer's loop, and into how many boxes a block size divides each.
COPIES = {"mla_decode_kernel": 6, "mla_decode_fp8_kernel": 6, "mla_decode_few_kernel": 5}
BOXES = {64: 1, 32: 2, 16: 4}

# Registers that are spilled all the same, of some 1400 instructions a block and 2400 a pair: 128 registers at
# launch are few for the groups that make scores, and 24 copies have more addresses than a producer can hold
# that expands codes too.
CONSUMER_SPILLS = {"mla_decode_few_kernel": 2}
PRODUCER_SPILLS = {("mla_decode_fp8_kernel", 16): 3}

# One register, once: the compiler allows itself 32 for a schedule of few requests.
SCHEDULE_STACK = 8

# Launcher, heads, block size, format: several lanes and one; one, two and four boxes to a block of keys.
DEFAULT = ("gluon_decode", 128, 64, "bf16")
OTHERS = (
    ("gluon_decode", 64, 32, "fp16"),
    ("gluon_decode", 16, 16, "bf16"),
    ("gluon_decode_fp8", 128, 64, "fp8_ds_mla"),
    ("gluon_decode_fp8", 16, 16, "fp8_ds_mla"),
    ("gluon_decode_fp8", 64, 32, "fp8_e4m3"),
    ("gluon_decode_few", 16, 64, "fp8_ds_mla"),
)


@pytest.fixture(
    scope="module", params=[DEFAULT, *(pytest.param(row, marks=pytest.mark.slow) for row in OTHERS)], ids=str
)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [
        sys.executable,
        Path(__file__).with_name("compiled_gluon_kernels.py"),
        *map(str, request.param),
    ]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_all_fit(kernels: list[dict]) -> None:
    names = {kernel["kernel"] for kernel in kernels}
    assert names - set(PRODUCTS) == {"schedule_kernel", "fixed_schedule_kernel", "merge_kernel"}
    assert len(names & set(PRODUCTS)) == 1
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_BYTES, kernel
        if kernel["kernel"] not in PRODUCTS:
            assert kernel["STACK"] <= SCHEDULE_STACK, kernel


def test_loops_touch_no_local_memory(kernels: list[dict]) -> None:
    """A spilled register comes back from L2: the shared memory in use leaves too little L1 to hold it."""
    for kernel in kernels:
        name = kernel["kernel"]
        if name not in PRODUCTS:
            continue
        _, block_size, _ = kernel["case"]
        consumers = []
        for products in sorted(set(PRODUCTS[name])):
            found = [loop for loop in kernel["loops"] if loop[1] == products]
            consumers += found[: PRODUCTS[name].count(products)]
        assert len(consumers) == len(PRODUCTS[name]), kernel
        for _, _, _, loads, stores in consumers:
            assert max(loads, stores) <= CONSUMER_SPILLS.get(name, 0), kernel
        copies = COPIES[name] * BOXES[block_size]
        producer = next(loop for loop in kernel["loops"] if loop[2] >= copies)
        assert max(producer[3:]) <= PRODUCER_SPILLS.get((name, block_size), 0), kernel


def test_products_overlap(kernels: list[dict]) -> None:
    for kernel in kernels:
        assert kernel.get("complaints", []) == [], kernel["case"]
