"""The Hopper prefill kernel compiles without a GPU: it fits, loops use no local memory, products overlap."""

from pathlib import Path

import pytest
from compiling import SHARED_BYTES, kernels_of

# Widths of nope, rope and value, type; and the tensor-core instructions of a block in one consumer: one for
# every 16 channels of the scores, and every 16 of the 128 keys.
DEFAULT = (128, 64, 128, "bf16")
OTHERS = ((128, 64, 128, "fp16"), (64, 64, 128, "bf16"), (64, 32, 64, "bf16"))


@pytest.mark.parametrize(
    "row", [DEFAULT, *(pytest.param(row, marks=pytest.mark.slow) for row in OTHERS)], ids=str
)
def test_compiles(row: tuple[int, int, int, str], tmp_path: Path) -> None:
    (kernel,) = kernels_of("compiled_prefill_kernels", tmp_path, *row)
    assert kernel["shared"] <= SHARED_BYTES[90]
    assert kernel["complaints"] == []
    assert kernel["scattered"] == []
    assert len(kernel["loops"]) == 2
    p, r = row[:2]
    for loop in kernel["loops"]:
        assert loop["products"] == (p + r) // 16 + 128 // 16
        assert loop["local"] == 0
        # About half of a thread's 64 weights are made while the product with the last weights runs.
        assert loop["exponentials"] >= 64
        assert 24 <= loop["overlapped"] <= 40
        assert loop["meetings"] == 1
