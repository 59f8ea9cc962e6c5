"""Compiles what ``mla_fast``'s Gluon launchers of decode would launch on a Hopper GPU, without one.

``compiled_gluon_kernels.py gluon_decode 128 64 bf16``: launcher, heads, block size, format. As
``compiled_kernels``: one line of JSON a kernel, through the launcher itself. For attention kernels also what
its loops are made of, read from the machine code.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from compiled_kernels import CUOBJDUMP, target, usage
from triton.runtime.jit import KernelInterface

from mla_fast import gluon_decode
from mla_fast._split_schedule import PAIR_KEYS
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.problem import problem

PTXAS = CUOBJDUMP.with_name("ptxas")
NUM_SMS = 132


class Loop(NamedTuple):
    """What lies between a backward branch and its target."""

    length: int
    products: int
    copies: int
    local_loads: int
    local_stores: int
    expansions: int
    barriers: int


def loops(cubin: bytes) -> list[Loop]:
    """Every loop of a kernel, shortest first."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        dump = subprocess.run(
            [CUOBJDUMP, "--dump-sass", path], capture_output=True, text=True, check=True
        ).stdout
    code = [(int(a, 16), text) for a, text in re.findall(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);", dump, re.M)]
    found = []
    for address, text in code:
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < address:
            body = [t for a, t in code if int(branch[1], 16) <= a <= address]
            of = ("HGMMA", "UTMALDG", r"\bLDL", r"\bSTL", r"F2FP\.F16\.E4M3", r"BAR\.SYNC")
            count = [sum(bool(re.search(p, t)) for t in body) for p in of]
            found.append(Loop(len(body), *count))
    return sorted(found)


def complaints(ptx: str) -> list[str]:
    """What ptxas warns of, as where it cannot keep products in flight."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx, encoding="utf-8")
        command = [PTXAS, "--gpu-name=sm_90a", path, "-o", path.with_suffix(".cubin")]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]


def scattered(ttgir: str) -> list[str]:
    """Reductions over lanes that do not follow each other: Triton shuffles as if they did, without a word."""
    lanes = {
        name: json.loads(bases)
        for name, bases in re.findall(r"^(#linear\d*) = .*?lane = (\[.*?\]), warp", ttgir, re.M)
    }
    found = []
    reduction = re.compile(r'"tt\.reduce".*?<\{axis = (\d+) : i32\}>.*?\}\) : \((tensor<.*?>)\) -> ', re.S)
    for axis, operand in reduction.findall(ttgir):
        parent = re.search(r"#linear\d*", operand)
        if parent is None:
            continue
        dims = list(range(len(lanes[parent[0]][0])))
        for dim in re.findall(r"dim = (\d+)", operand)[::-1]:  # the innermost slice is the parent's
            del dims[int(dim)]
        along = "".join("x" if lane[dims[int(axis)]] else "." for lane in lanes[parent[0]])
        if "." in along.strip("."):
            found.append(f"axis {axis} of {operand}: lanes {along}")
    return found


def compile_all(name: str, heads: int, block_size: int, fmt: str) -> None:
    triton.runtime.driver.set_active(target(90)())
    launcher = importlib.import_module(f"mla_fast.{name}")
    gluon_decode.plan = lambda *args, **options: gluon_decode.plan_for(NUM_SMS, *args, **options)
    compiled = {}

    def warm_up(kernel: KernelInterface, grid: tuple[int, ...]):
        def run(*args: object, **options: object) -> None:
            compiled[kernel.fn.__name__] = kernel.run(*args, grid=grid, warmup=True, **options)

        return run

    KernelInterface.__getitem__ = warm_up
    config = MLAConfig(
        name="compiled", hidden_size=64, num_heads=heads, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    case = Case(
        problem="latent_attention", config=config, q_lens=(1,), kv_lens=(5,), block_size=block_size,
        cache_format=fmt, dtype="float16" if fmt == "fp16" else "bfloat16",
    )  # fmt: skip
    inputs = problem(case.problem).materialize(case, torch.device("cpu"))
    # A table for lengths that a fixed cut splits: whatever they are, its merge is launched.
    columns = gluon_decode.CHUNK_PAIRS * PAIR_KEYS // block_size + 1
    inputs = inputs._replace(block_table=inputs.block_table.repeat(1, columns))
    for function in (launcher.BACKEND.fn, launcher.batch_invariant):
        function(*inputs)
    for kernel_name, kernel in compiled.items():
        line = {"kernel": kernel_name, "case": [heads, block_size, fmt], "shared": kernel.metadata.shared}
        line |= usage(kernel.asm["cubin"])
        if kernel_name.startswith("mla_decode"):
            line |= {"loops": loops(kernel.asm["cubin"]), "complaints": complaints(kernel.asm["ptx"])}
            line["scattered"] = scattered(kernel.asm["ttgir"])
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    compile_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
