"""Compiles what ``mla_fast.triton_decode`` would launch on GPUs, without one: ``compiled_kernels.py 80 90``.

Run in a process of its own, with TRITON_INTERPRET unset: Triton decides at import what a kernel is. Prints a
line of JSON for each kernel and compute capability. Launches go through the launcher itself, so tiles,
specialisations and arguments are the shipped ones; only the last step, the launch, is left out.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import KernelInterface

from mla_fast import _split_keys
from mla_fast import triton_decode as launcher
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.problem import problem

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# Heads, latent and rope channels, block size, schedule: every tile, with and without a merge, with one block
# a tile and with several, and other widths of models.
PLAIN = (
    (16, 512, 64, 64, "one"),
    (16, 512, 64, 64, "three"),
    (16, 512, 64, 16, "one"),
    (32, 512, 64, 64, "one"),
    (32, 512, 64, 16, "three"),
    (64, 512, 64, 64, "one"),
    (64, 512, 64, 64, "three"),
    (64, 512, 64, 16, "one"),
    (64, 256, 32, 64, "three"),
    (20, 128, 0, 1, "one"),
)
QUANTISED = ((128, 512, 64, 64, "one"), (128, 512, 64, 16, "three"))
SCHEDULES = {"one": launcher.Schedule(num_splits=1), "three": launcher.Schedule(num_splits=3)}


def target(capability: int) -> type[DriverBase]:
    class Target(DriverBase):
        """A GPU that can be compiled for, and nothing else."""

        def __init__(self) -> None: ...

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability  # kernels are kept by device, and each is to be compiled for every one

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> None: ...

    return Target


def usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a thread; without local arrays, the stack is what spilled."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        )
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text.stdout)}


def compile_all(capability: int) -> None:
    triton.runtime.driver.set_active(target(capability)())
    tiles = launcher.tiles_of(*divmod(capability, 10))
    launcher._tiles = lambda _: tiles
    launcher.device_of = _split_keys.device_of = lambda _: _split_keys.Device(132, 2**13)
    compiled = []

    def warm_up(kernel: KernelInterface, grid: tuple[int, ...]):
        def run(*args: object, **options: object) -> None:
            compiled.append(
                (kernel.fn.__name__, kernel.run(*args, grid=grid, warmup=True, **options), options)
            )

        return run

    KernelInterface.__getitem__ = warm_up
    tables = {"bf16": PLAIN, "fp16": PLAIN[:1], "fp8_e4m3": QUANTISED, "fp8_ds_mla": QUANTISED}
    for fmt, rows in tables.items():
        for row in rows:
            launch(fmt, *row)
            for name, kernel, options in compiled:
                tile = [
                    options.get("ROWS"),
                    options.get("KEYS"),
                    options["num_warps"],
                    options.get("num_stages"),
                ]
                line = {
                    "capability": capability,
                    "kernel": name,
                    "format": fmt,
                    "case": row,
                    "tile": tile,
                    "shared": kernel.metadata.shared,
                }
                sys.stdout.write(json.dumps(line | usage(kernel.asm["cubin"])) + "\n")
            compiled.clear()


def launch(fmt: str, heads: int, c: int, r: int, block_size: int, schedule: str) -> None:
    config = MLAConfig(
        name="compiled", hidden_size=64, num_heads=heads, q_lora_rank=None, kv_lora_rank=c,
        qk_nope_head_dim=128, qk_rope_head_dim=r, v_head_dim=128,
    )  # fmt: skip
    case = Case(
        problem="latent_attention", config=config, q_lens=(1,), kv_lens=(5,), block_size=block_size,
        cache_format=fmt, dtype="float16" if fmt == "fp16" else "bfloat16",
    )  # fmt: skip
    launcher.scheduled(SCHEDULES[schedule])(*problem(case.problem).materialize(case, torch.device("cpu")))


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        compile_all(capability)
