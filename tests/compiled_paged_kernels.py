"""Compiles what ``mla_fast.triton_paged_attention`` would launch: ``python compiled_paged_kernels.py 90``.

As ``compiled_kernels``, for keys and values: one line of JSON a kernel, through the launcher itself.
"""

import json
import sys

import torch
import triton
from compiled_kernels import target, usage
from triton.runtime.jit import KernelInterface

from mla_fast import _split_keys
from mla_fast import triton_paged_attention as launcher
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.problem import problem

# Key and value channels of the models; heads are 4 to each key-value head.
WIDTHS = ((128, 128), (192, 128), (256, 256))


def case_of(x: int, v: int, cache_format: str) -> Case:
    config = MLAConfig(
        name="compiled", hidden_size=64, num_heads=8, q_lora_rank=None, kv_lora_rank=1,
        qk_nope_head_dim=x, qk_rope_head_dim=0, v_head_dim=v,
    )  # fmt: skip
    return Case(
        problem="paged_attention", config=config, q_lens=(1,), kv_lens=(5,), block_size=16,
        cache_format=cache_format, num_kv_heads=2, kv_layout="nl2gkx",
    )  # fmt: skip


def compile_all(capability: int) -> None:
    triton.runtime.driver.set_active(target(capability)())
    launcher.device_of = _split_keys.device_of = lambda _: _split_keys.Device(132, 2**13)
    compiled = []

    def warm_up(kernel: KernelInterface, grid: tuple[int, ...]):
        def run(*args: object, **options: object) -> None:
            compiled.append((kernel.fn.__name__, kernel.run(*args, grid=grid, warmup=True, **options)))

        return run

    KernelInterface.__getitem__ = warm_up
    for x, v in WIDTHS:
        for fmt in ("bf16", "fp8_e4m3"):
            for num_rows, num_splits in ((4, 3), (512, 1)):
                tile = launcher.choose_tile(capability // 10, num_rows, x, v, fmt != "bf16")
                inputs = problem("paged_attention").materialize(case_of(x, v, fmt), torch.device("cpu"))
                launcher.scheduled(_split_keys.Schedule(num_splits=num_splits, tile=tile))(*inputs)
                for name, kernel in compiled:
                    line = {"capability": capability, "kernel": name, "x": x, "v": v, "format": fmt}
                    line |= {"tile": tile, "shared": kernel.metadata.shared, "splits": num_splits}
                    sys.stdout.write(json.dumps(line | usage(kernel.asm["cubin"])) + "\n")
                compiled.clear()


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        compile_all(capability)
