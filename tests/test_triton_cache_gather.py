"""Gathering from the cache in plain Triton: judged, and bit for bit what the format decodes to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_fast.triton_cache_gather import BACKEND, gather_into
from mla_ref.cache_gather import cache_gather
from mla_ref.case import DTYPES, Case
from mla_ref.config import MLAConfig
from mla_ref.formats import formats
from mla_ref.layout import CacheLayout
from mla_ref.problems.cache_gather import PROBLEM
from oracles.coverage import draw
from oracles.verdict import PASS, UNSUPPORTED
from oracles.verify import judge

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VARIANTS = {"default": BACKEND.fn, **BACKEND.variants}
FAR = 2**40 // 3 // 4 * 4  # bytes between two blocks


def case_of(**changes: Any) -> Case:
    """Ranges of six requests, some of them empty, first and last included."""
    config = MLAConfig(
        name="reads", hidden_size=64, num_heads=2, q_lora_rank=None, kv_lora_rank=256,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    return Case(
        **{
            "problem": "cache_gather", "config": config, "q_lens": (0, 33, 0, 0, 1, 17, 5),
            "kv_lens": (7, 40, 3, 0, 9, 17, 0), "block_size": 16, "kv_scale": 0.0173, **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize("fmt", sorted(formats()))
def test_every_claim_about_every_format(fmt: str, seed: int) -> None:
    layout = CacheLayout(entry_align=64, block_gap=128, offset=32)
    verdicts = judge(BACKEND, case_of(cache_format=fmt, layout=layout, seed=seed), device=DEVICE.type)
    assert {v.variant for v in verdicts} == set(VARIANTS)
    assert [f"{v.variant} {v.oracle}: {v.detail}" for v in verdicts if v.status != PASS] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", sorted(formats()))
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_what_the_format_decodes_to(fmt: str, dtype: str, variant: str, seed: int) -> None:
    case = case_of(cache_format=fmt, dtype=dtype, regime="tiles", seed=seed, block_size=3)
    inputs = PROBLEM.materialize(case, DEVICE)
    for got, want in zip(VARIANTS[variant](*inputs), cache_gather(*inputs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_code(variant: str) -> None:
    """All 256 of them in one entry; the two that are NaN stay NaN."""
    case = case_of(cache_format="fp8_e4m3", q_lens=(1,), kv_lens=(1,), block_size=1, dtype="float32")
    inputs = PROBLEM.materialize(case, DEVICE)
    inputs.kv_cache.view(torch.uint8)[..., :256] = torch.arange(256, dtype=torch.uint8)
    (got, _), (want, _) = VARIANTS[variant](*inputs), cache_gather(*inputs)
    assert want.isnan().sum() == 2
    assert torch.equal(got.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))


def test_judged_on_random_cases(seed: int) -> None:
    alone = replace(BACKEND, variants={})
    for i in range(25):
        case = draw("cache_gather", seed, i, BACKEND.supports)
        for verdict in judge(alone, case, device=DEVICE.type, oracles=("value",)):
            assert verdict.status == PASS, f"{verdict.detail} {case.to_json()}"


@pytest.mark.parametrize("fmt", ["bf16", "fp8_ds_mla"])
def test_blocks_beyond_32_bits(fmt: str, tmp_path: Path) -> None:
    """Blocks a third of a terabyte apart, in a file with holes."""
    if DEVICE.type != "cpu":
        pytest.skip("the file is memory of the host")
    inputs = PROBLEM.materialize(case_of(cache_format=fmt, q_lens=(9,), kv_lens=(11,), block_size=4), DEVICE)
    n, k, e = inputs.kv_cache.shape
    size = inputs.kv_cache.element_size()
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=n * FAR, dtype=torch.uint8)
    far = pool.view(inputs.kv_cache.dtype).as_strided((n, k, e), (FAR // size, e, 1))
    far.copy_(inputs.kv_cache)
    for got, want in zip(BACKEND.fn(*inputs._replace(kv_cache=far)), cache_gather(*inputs), strict=True):
        assert torch.equal(got, want)


def test_rows_of_a_workspace(seed: int) -> None:
    """Both parts into one buffer of entries, whose other bytes stay."""
    inputs = PROBLEM.materialize(case_of(cache_format="fp8_ds_mla", seed=seed), DEVICE)
    want = cache_gather(*inputs)
    t, (c, r) = inputs.num_tokens, (inputs.kv_lora_rank, inputs.qk_rope_head_dim)
    workspace = torch.full((t + 2, c + r + 16), -7.0, dtype=inputs.dtype, device=DEVICE)
    kv_c, k_pe = workspace[1 : t + 1, :c], workspace[1 : t + 1, c : c + r]
    gather_into(
        kv_c, k_pe, inputs.kv_cache, inputs.block_table, inputs.cu_seqlens, inputs.seq_starts,
        inputs.cache_format, inputs.kv_scale,
    )  # fmt: skip
    assert torch.equal(kv_c, want.kv_c)
    assert torch.equal(k_pe, want.k_pe)
    kv_c.fill_(-7.0)
    k_pe.fill_(-7.0)
    assert (workspace == -7.0).all()


def test_unaligned_scales_are_declined() -> None:
    case = case_of(cache_format="fp8_ds_mla_pow2", layout=CacheLayout(block_gap=6))
    assert {v.status for v in judge(BACKEND, case, device=DEVICE.type)} == {UNSUPPORTED}
    with pytest.raises(ValueError, match=r"block stride is \d+ bytes, must be a multiple of 4"):
        BACKEND.fn(*PROBLEM.materialize(case, DEVICE))


def test_nothing_to_read() -> None:
    kv_c, k_pe = BACKEND.fn(*PROBLEM.materialize(case_of(q_lens=(0,), kv_lens=(3,)), DEVICE))
    assert (kv_c.shape, k_pe.shape) == ((0, 256), (0, 16))
