"""The Triton kernel over pages of keys and values: judged under the interpreter, compiled for every GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import SHARED_BYTES, by_capability

from mla_fast.triton_paged_attention import BACKEND, parts_of, why_not
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.layout import CacheLayout
from mla_ref.layout_algebra import KV_ORDERS, View
from mla_ref.problems.paged_attention import PROBLEM
from oracles.verdict import PASS
from oracles.verify import judge

CPU = torch.device("cpu")
VARIANTS = {"default": BACKEND.fn, **BACKEND.variants}


def model(nope: int, rope: int, value: int, heads: int = 4) -> MLAConfig:
    return MLAConfig(
        name=f"x{nope + rope}-v{value}",
        hidden_size=heads * value,
        num_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=1,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
    )


def case_of(**changes: Any) -> Case:
    """Context, a lone token, an idle request, one without a key; 2 query heads for each of 2."""
    return replace(
        Case(
            problem="paged_attention",
            config=model(16, 16, 32),
            q_lens=(3, 1, 0, 2),
            kv_lens=(41, 17, 9, 0),
            block_size=16,
            num_kv_heads=2,
        ),
        **changes,
    )


CLAIMS = ("value", "lse", "empty_rows", "poison", "layout", "inputs_unchanged")
WIDE = case_of(config=model(64, 64, 128, heads=2), q_lens=(2, 0, 1), kv_lens=(19, 3, 0), num_kv_heads=1)


@pytest.mark.parametrize(
    "case",
    [
        case_of(q_lens=(7, 1), kv_lens=(33, 1), block_size=5, layout=CacheLayout(entry_align=512)),
        case_of(kv_lens=(20, 5, 9, 0), cache_format="fp8_e4m3", dtype="float16", kv_scale=0.5, v_scale=1.3),
        case_of(config=model(20, 4, 36), kv_layout=KV_ORDERS["packed_bhlnc"], cache_format="fp32"),
        replace(WIDE, config=model(64, 0, 64, heads=2)),
        replace(WIDE, cache_format="fp8_e4m3", kv_scale=0.037, v_scale=1.3),
        replace(WIDE, config=model(128, 64, 128, heads=2), kv_layout=KV_ORDERS["unified_hnd"]),
        replace(WIDE, config=model(128, 128, 256, heads=2), dtype="float16", cache_format="fp16"),
    ],
    ids=["ragged", "32-fp16-fp8", "24-36-fp32", "64", "128-fp8", "192-128", "256-fp16"],
)
def test_judged(case: Case):
    """The claims that widths, types and layouts can break; `mla-verify run` tries every other one as well."""
    verdicts = judge(BACKEND, case, oracles=CLAIMS)
    assert {v.variant for v in verdicts} == set(VARIANTS)
    assert [f"{v.variant} {v.oracle}: {v.detail}" for v in verdicts if v.status != PASS] == []


@pytest.mark.parametrize("variant", ["default", "splits_3"])
@pytest.mark.parametrize("layout", [CacheLayout(), CacheLayout(entry_align=96, block_gap=64, offset=32)])
def test_every_order_gives_the_same_bits(variant: str, layout: CacheLayout):
    results = [
        VARIANTS[variant](*PROBLEM.materialize(case_of(kv_layout=order, layout=layout), CPU))
        for order in KV_ORDERS.values()
    ]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0].out)
        assert torch.equal(lse, results[0].lse)


FAR = 3 * 2**29  # itself a signed 32-bit number, its double is not


@pytest.mark.parametrize("axis", ["n", "g", "k"])
@pytest.mark.parametrize("variant", ["default", "splits_3"])
def test_addresses_beyond_32_bits(axis: str, variant: str, tmp_path: Path):
    """One axis with a stride of 3 · 2²⁹ elements and indices above 1, over a file with holes."""
    case = case_of(
        q_lens=(2,), kv_lens=(9,), block_size=3, cache_format="fp8_e4m3", kv_scale=0.1, num_kv_heads=4
    )
    inputs = PROBLEM.materialize(case, CPU)
    sizes = inputs.key_cache.shape
    strides = {"n": 4096, "k": 1024, "g": 64, "x": 1, axis: FAR}
    view = View("nkgx", tuple(sizes), tuple(strides.values()), 0, 1)
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=view.hull[1] + 64, dtype=torch.uint8)
    far = {}
    for name, offset in (("key_cache", 0), ("value_cache", 32)):
        placed = replace(view, offset=offset)
        far[name] = placed.tensor(pool, torch.float8_e4m3fn)
        far[name].view(torch.uint8).copy_(getattr(inputs, name).view(torch.uint8))
    fn = VARIANTS[variant]
    for got, want in zip(fn(*inputs._replace(**far)), fn(*inputs), strict=True):
        assert torch.equal(got, want)


def test_no_tokens_at_all():
    inputs = PROBLEM.materialize(case_of(q_lens=(0, 0), kv_lens=(3, 0)), CPU)
    out, lse = BACKEND.fn(*inputs)
    assert (out.shape, lse.shape) == ((0, 4, 32), (0, 4))


def test_what_it_declines():
    assert BACKEND.supports(case_of()) is None
    reason = "queries are float32; tensor cores take bfloat16 or float16"
    assert BACKEND.supports(case_of(dtype="float32")) == reason
    reason = "keys have 320 and values 128 channels, of which 256 fit"
    assert BACKEND.supports(case_of(config=model(256, 64, 128))) == reason
    assert why_not(torch.float16, 256, 256) is None


def test_key_channels_in_two_powers_of_two():
    shapes = {
        64: (64, 0),
        128: (128, 0),
        192: (128, 64),
        256: (256, 0),
        24: (16, 16),
        96: (64, 32),
        5: (16, 0),
    }
    for width, parts in shapes.items():
        assert parts_of(width) == parts
        assert sum(parts) >= width


# Four registers of addresses, reloaded once a tile, where ptxas trades them for occupancy.
SPILLED_BYTES = 16


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return by_capability("compiled_paged_kernels", tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_shipped_tiles_compile_without_spilling(
    capability: int, compiled: dict[int, list[dict[str, Any]]]
) -> None:
    """Every tile that a launch can choose, for 16-bit and e4m3 pages, with and without a merge."""
    kernels = compiled[capability]
    assert len(kernels) == 18
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_BYTES[capability], kernel
        assert kernel["STACK"] <= SPILLED_BYTES, kernel
