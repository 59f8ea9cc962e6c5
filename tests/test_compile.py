"""The kernels that are shipped compile for every architecture, fit in its shared memory, and do not spill."""

from typing import Any

import pytest
from compiling import SHARED_BYTES, by_capability

# Eight registers of a thread, read back once a tile: 64 by 64 scores beside 64 by 512 sums take all 255. On a
# B200 the sums pass through registers on their way out of tensor memory, after the loop.
SPILLED_BYTES = {capability: 80 if capability == 100 else 32 for capability in SHARED_BYTES}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return by_capability("compiled_kernels", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_shipped_tiles(capability: int, compiled: dict[int, list[dict[str, Any]]]) -> None:
    kernels = compiled[capability]
    assert {kernel["kernel"] for kernel in kernels} == {"_mla_decode_kernel", "_merge_splits_kernel"}
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_BYTES[capability], kernel
        assert kernel["STACK"] <= SPILLED_BYTES[capability], kernel
