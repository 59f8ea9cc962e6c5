"""The Hopper kernels compile without a GPU: they fit, loops touch no local memory, products overlap."""

import pytest
from compiled_gluon_kernels import scattered
from compiling import SHARED_BYTES, kernels_of

ATTENTION = {"mla_decode_kernel", "mla_decode_fp8_kernel", "mla_decode_few_kernel"}
AROUND = {"schedule_kernel", "fixed_schedule_kernel", "merge_kernel", "merge_rows_kernel"}
PRODUCTS = 44  # tensor-core instructions of one consumer and one pair: 36 of scores, 8 of values
BOXES = {64: 1, 32: 2, 16: 4}  # copies to a block of 64 keys
EXPANSIONS = 256  # instructions that take two codes each, of one thread and one pair
# Of the kernel for few rows, those of one turn, values in float16 or not: 32 of keys, then 96 or 32. And how
# long its loop may be: what two warps of a scheduler run, which is the same, must come from the instruction
# cache. A turn passes by the rest, 437 of 1100.
FEW_EXPANSIONS = 160
FEW_LENGTH = 1200
FEW_BARRIERS = 2

# By format and block size, loads and stores of local memory in one turn of a consumer's loop, where there
# are any. Pages of 16: twelve copies a pair, whose addresses and the products' descriptors it cannot hold.
CONSUMER_SPILLS = {("fp8_ds_mla", 16): (120, 30)}

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
    ("gluon_decode_few", 8, 16, "fp8_e4m3"),
)


@pytest.fixture(
    scope="module", params=[DEFAULT, *(pytest.param(row, marks=pytest.mark.slow) for row in OTHERS)], ids=str
)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return kernels_of("compiled_gluon_kernels", tmp_path_factory.mktemp("triton"), *request.param)


def test_all_fit(kernels: list[dict]) -> None:
    names = {kernel["kernel"] for kernel in kernels}
    assert names - ATTENTION == AROUND
    assert len(names & ATTENTION) == 1
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_BYTES[90], kernel
        if kernel["kernel"] not in ATTENTION:
            assert kernel["STACK"] <= SCHEDULE_STACK, kernel


def test_loops_touch_no_local_memory(kernels: list[dict]) -> None:
    """A spilled register comes back from L2: the shared memory in use leaves too little L1 to hold it."""
    for kernel in kernels:
        if kernel["kernel"] not in ATTENTION:
            continue
        _, block_size, fmt = kernel["case"]
        if kernel["kernel"] == "mla_decode_few_kernel":
            assert kernel["STACK"] == 0, kernel
            continue
        consumers = [loop for loop in kernel["loops"] if loop[1] == PRODUCTS][:2]
        assert len(consumers) == 2, kernel
        loads, stores = CONSUMER_SPILLS.get((fmt, block_size), (0, 0))
        for loop in consumers:
            assert loop[3] <= loads, kernel
            assert loop[4] <= stores, kernel
        if fmt.startswith("fp8"):
            other = next(loop for loop in kernel["loops"] if loop[5] >= EXPANSIONS)
        else:
            other = next(loop for loop in kernel["loops"] if loop[2] >= 6 * BOXES[block_size])
        assert other[1] == 0, kernel
        assert other[3:5] == [0, 0], kernel


def test_products_overlap(kernels: list[dict]) -> None:
    for kernel in kernels:
        assert kernel.get("complaints", []) == [], kernel["case"]


def test_few_rows_turn_in_a_short_loop(kernels: list[dict]) -> None:
    for kernel in kernels:
        if kernel["kernel"] == "mla_decode_few_kernel":
            turn = next(loop for loop in kernel["loops"] if loop[5] >= FEW_EXPANSIONS)
            assert turn[5] == FEW_EXPANSIONS, kernel
            assert turn[0] <= FEW_LENGTH, kernel
            assert turn[6] == FEW_BARRIERS, kernel


def test_reductions_take_lanes_that_follow_each_other(kernels: list[dict]) -> None:
    for kernel in kernels:
        assert kernel.get("scattered", []) == [], kernel["case"]


def test_lanes_apart_are_seen() -> None:
    """A row has lanes 0, 1, 4 and 5 of eight, a column 0 and 2; the third axis is gone."""
    text = """#linear = #ttg.linear<{register = [], lane = [[0, 1, 0], [1, 0, 0], [0, 2, 0]], warp = []}>
    %1 = "tt.reduce"(%0) <{axis = 1 : i32}> ({
    }) : (tensor<2x4xf32, #ttg.slice<{dim = 2, parent = #linear}>>) -> tensor<2xf32>"""
    assert len(scattered(text)) == 1
    assert scattered(text.replace("axis = 1", "axis = 0")) == []
