"""Compiles what ``mla_fast.gluon_prefill`` would launch on a Hopper GPU, without one.

``compiled_prefill_kernels.py 128 64 128 bf16``: nope, rope and value widths, type. One line of JSON, through
the launcher itself: what the kernel takes, and for its hot loops what stands between products and waits.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from compiled_gluon_kernels import complaints, scattered
from compiled_kernels import CUOBJDUMP, target
from triton.runtime.jit import KernelInterface

from mla_fast import gluon_prefill as launcher


def hot_loops(cubin: bytes) -> list[dict[str, int]]:
    """What the innermost loops with products hold.

    meetings: barriers of a consumer's warps. overlapped: exponentials between the wait for the scores and the
    wait for the product with the values.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        dump = subprocess.run(
            [CUOBJDUMP, "--dump-sass", path], capture_output=True, text=True, check=True
        ).stdout
    code = [(int(a, 16), text) for a, text in re.findall(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);", dump, re.M)]
    bodies = []
    for address, text in code:
        # A loop ends in a branch under a condition; others go back from a wait that stands out of line.
        branch = re.match(r"@!?U?P\d+\s+BRA\b.*?0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < address:
            body = [t for a, t in code if int(branch[1], 16) <= a <= address]
            if any("HGMMA" in t for t in body) and not any("UTMALDG" in t for t in body):
                bodies.append(body)
    shortest = sorted(bodies, key=len)[:2]
    return [
        {
            "products": sum("HGMMA" in t for t in body),
            "local": sum(bool(re.search(r"\b(LDL|STL)", t)) for t in body),
            "meetings": sum("BAR.SYNC" in t for t in body),
            "exponentials": sum("MUFU.EX2" in t for t in body),
            "overlapped": sum("MUFU.EX2" in t for t in body[slice(*_waits(body))]),
        }
        for body in shortest
    ]


def _waits(body: list[str]) -> tuple[int, int]:
    """Where the first and the last wait for products are."""
    places = [i for i, t in enumerate(body) if "WARPGROUP.DEPBAR" in t]
    return places[0], places[-1]


def compile_one(p: int, r: int, v: int, fmt: str) -> None:
    triton.runtime.driver.set_active(target(90)())
    launcher._num_sms = lambda device: 132
    compiled = []

    def warm_up(kernel: KernelInterface, grid: tuple[int, ...]):
        def run(*args: object, **options: object) -> None:
            compiled.append(kernel.run(*args, grid=grid, warmup=True, **options))

        return run

    KernelInterface.__getitem__ = warm_up
    dtype = torch.float16 if fmt == "fp16" else torch.bfloat16
    t, j, h, c = 200, 300, 3, 512
    launcher.run(
        torch.zeros(2, launcher.TILE_FIELDS, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(t, h, p, dtype=dtype),
        torch.zeros(t, h, r, dtype=dtype),
        torch.zeros(j, h, p + v, dtype=dtype),
        torch.zeros(j, c + r, dtype=dtype)[:, c:],
        torch.zeros(t, h, v, dtype=dtype),
        torch.zeros(t, h),
        0.1,
    )
    (kernel,) = compiled
    line = {
        "shared": kernel.metadata.shared,
        "loops": hot_loops(kernel.asm["cubin"]),
        "complaints": complaints(kernel.asm["ptx"]),
        "scattered": scattered(kernel.asm["ttgir"]),
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    compile_one(*map(int, sys.argv[1:4]), sys.argv[4])
