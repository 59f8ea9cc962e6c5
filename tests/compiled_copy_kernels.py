"""Compiles what the copying launchers would launch on GPUs, without one: ``compiled_copy_kernels.py 90``.

As ``compiled_kernels``: one line of JSON a kernel, through the launchers themselves. ``loads`` and ``stores``
count the accesses to global memory by their bytes a thread.
"""

import collections
import json
import re
import sys

import torch
import triton
from compiled_kernels import target, usage
from triton.runtime.jit import KernelInterface

from mla_fast import triton_cache_gather, triton_cache_write, triton_merge_states, triton_rope_cache_write
from mla_fast._stored_entries import SCALINGS
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.problem import problem

# Problem, format, type, latent and rope channels: every rule of scales, with and without a conversion.
CASES = (
    ("cache_gather", "bf16", "bfloat16", 512, 64),
    ("cache_gather", "fp16", "bfloat16", 512, 64),
    ("cache_gather", "fp8_e4m3", "bfloat16", 512, 64),
    ("cache_gather", "fp8_ds_mla", "bfloat16", 512, 64),
    ("cache_gather", "fp8_ds_mla", "float32", 256, 0),
    ("cache_write", "bf16", "bfloat16", 512, 64),
    ("cache_write", "fp16", "float32", 48, 24),
    ("cache_write", "fp8_e4m3", "bfloat16", 512, 64),
    ("cache_write", "fp8_ds_mla", "bfloat16", 512, 64),
    ("cache_write", "fp8_ds_mla_pow2", "float16", 512, 64),
    ("rope_cache_write", "bf16", "bfloat16", 512, 64),
    ("rope_cache_write", "fp8_ds_mla", "bfloat16", 512, 64),
    ("rope_cache_write", "bf16", "float64", 512, 64),
    ("merge_states", "bf16", "bfloat16", 512, 64),
    ("merge_states", "bf16", "float64", 512, 64),
)
LAUNCHERS = {
    "cache_gather": triton_cache_gather,
    "cache_write": triton_cache_write,
    "rope_cache_write": triton_rope_cache_write,
    "merge_states": triton_merge_states,
}
WIDTH = re.compile(r"\b(ld|st)\.global(?:\.\w+::\w+)*(?:\.v(\d))?\.[a-z](\d+)")


def accesses(ptx: str) -> dict[str, dict[int, int]]:
    """How many loads and stores of how many bytes there are."""
    found: dict[str, collections.Counter[int]] = {"ld": collections.Counter(), "st": collections.Counter()}
    for kind, count, bits in WIDTH.findall(ptx):
        found[kind][int(count or 1) * int(bits) // 8] += 1
    return {"loads": dict(found["ld"]), "stores": dict(found["st"])}


def rounded_either_way(llir: str) -> int:
    """How many sums are of two products, of which the compiler may keep either one unrounded, or neither."""
    products = set(re.findall(r"(%\S+) = fmul ", llir))
    sums = re.findall(r"= (?:fadd|fsub) .*?(%\S+), (%\w+)", llir)
    return sum({left, right} <= products for left, right in sums)


def case_of(name: str, fmt: str, dtype: str, c: int, r: int) -> Case:
    config = MLAConfig(
        name="compiled", hidden_size=64, num_heads=16, q_lora_rank=None, kv_lora_rank=c,
        qk_nope_head_dim=128, qk_rope_head_dim=r, v_head_dim=128,
    )  # fmt: skip
    # Two tokens: a stride between them is one that a launch sees, and not the 1 of a lone row.
    return Case(
        problem=name, config=config, q_lens=(2, 2), kv_lens=(70, 5), cache_format=fmt, dtype=dtype
    )  # fmt: skip


def compile_all(capability: int) -> None:
    triton.runtime.driver.set_active(target(capability)())
    triton_merge_states.INTERPRETED_BYTES = triton_merge_states.BYTES
    triton_cache_gather.INTERPRETED_ELEMENTS = triton_cache_gather.ELEMENTS
    writers = triton_cache_write, triton_rope_cache_write
    for launcher in (triton_cache_gather, *writers):
        launcher.converts_e4m3 = lambda _: capability >= 89
    compiled = []

    def warm_up(kernel: KernelInterface, grid: tuple[int, ...]):
        def run(*args: object, **options: object) -> None:
            compiled.append((kernel.fn.__name__, kernel.run(*args, grid=grid, warmup=True, **options)))

        return run

    KernelInterface.__getitem__ = warm_up
    for row in CASES:
        inputs = problem(row[0]).materialize(case_of(*row), torch.device("cpu"))
        backend = LAUNCHERS[row[0]].BACKEND
        for launcher in writers:
            launcher.INTERPRETED = launcher.TILES[SCALINGS[row[1]].kind]
        # What rotates as well converts by the code of ``cache_write``.
        both = "fp8" in row[1] and row[0] != "rope_cache_write"
        variants = {"default": backend.fn, **(backend.variants if both else {})}
        for variant, fn in variants.items():
            fn(*inputs)
            for name, kernel in compiled:
                line = {"capability": capability, "kernel": name, "case": row, "variant": variant}
                line |= {"shared": kernel.metadata.shared}
                line |= {"rounded_either_way": rounded_either_way(kernel.asm["llir"])}
                line |= usage(kernel.asm["cubin"]) | accesses(kernel.asm["ptx"])
                sys.stdout.write(json.dumps(line) + "\n")
            compiled.clear()


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        compile_all(capability)
