"""Rotating and writing in plain Triton: judged, latents byte for byte, and angles at any position."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_fast.triton_rope_cache_write import BACKEND, quarter_turns
from mla_ref.case import DTYPES, Case
from mla_ref.config import YARN, MLAConfig, RopeConfig
from mla_ref.formats import formats
from mla_ref.layout import CacheLayout
from mla_ref.numerics import Numerics
from mla_ref.problems.rope_cache_write import PROBLEM, RopeCacheWriteInputs
from mla_ref.rope_cache_write import rope_cache_write
from oracles.bounds import ADMISSIBLE
from oracles.compare import within
from oracles.coverage import draw
from oracles.oracle import private_copy, storage_bytes
from oracles.verdict import PASS, UNSUPPORTED
from oracles.verify import judge

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VARIANTS = {"default": BACKEND.fn, **BACKEND.variants}
HALVES = RopeConfig(interleaved=False, scaling=YARN, factor=40.0, mscale=1.0, mscale_all_dim=0.7)
FAR = (0, 1, 40, 2_000, 65_536, 131_071, 1_000_000, 2**31 + 1, 2**45)


def case_of(rope: RopeConfig = HALVES, **changes: Any) -> Case:
    """New tokens of four requests, one idle, one with more tokens than it has cached; 12 pairs."""
    config = MLAConfig(
        name="rotates", hidden_size=64, num_heads=3, q_lora_rank=None, kv_lora_rank=256,
        qk_nope_head_dim=16, qk_rope_head_dim=24, v_head_dim=16, rope=rope,
    )  # fmt: skip
    return Case(
        **{
            "problem": "rope_cache_write", "config": config, "q_lens": (5, 1, 0, 9), "kv_lens": (21, 1, 7, 6),
            "block_size": 16, "kv_scale": 0.0173, **changes,
        }
    )  # fmt: skip


def test_every_claim(seed: int) -> None:
    """Half-split pairs, codes made by bits; the other path is judged below, and on random cases."""
    backend = replace(BACKEND, fn=VARIANTS["by_bits"], variants={})
    layout = CacheLayout(entry_align=64, block_gap=128, offset=32)
    verdicts = judge(backend, case_of(cache_format="fp8_e4m3", layout=layout, seed=seed), device=DEVICE.type)
    assert [f"{v.oracle}: {v.detail}" for v in verdicts if v.status != PASS] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", sorted(formats()))
def test_latents_are_the_encoders_and_the_rest_is_admitted(fmt: str, dtype: str, seed: int) -> None:
    for interleaved, (name, fn) in zip((True, False), VARIANTS.items(), strict=True):
        rope = replace(HALVES, interleaved=interleaved)
        case = case_of(rope, cache_format=fmt, dtype=dtype, regime="tiles", seed=seed, block_size=3)
        inputs = PROBLEM.materialize(case, DEVICE)
        got, want = private_copy(inputs), private_copy(inputs)
        fn(*got)
        rope_cache_write(*want)
        # Of formats whose entries are elements c is where the rope part begins; of byte formats, the scales.
        stored = [x.kv_cache[..., :256].view(torch.uint8) for x in (got, want)]
        assert torch.equal(*stored), name
        for verdict in judge(
            replace(BACKEND, fn=fn, variants={}), case, device=DEVICE.type, oracles=("stored", "value")
        ):
            assert verdict.status == PASS, (name, verdict.detail)


def test_judged_on_random_cases(seed: int) -> None:
    alone = replace(BACKEND, variants={})
    for i in range(4):
        case = draw("rope_cache_write", seed, i, BACKEND.supports)
        for verdict in judge(alone, case, device=DEVICE.type, oracles=("stored", "value")):
            assert verdict.status == PASS, f"{verdict.detail} {case.to_json()}"


def pairs_at(positions: torch.Tensor, dtype: torch.dtype, rope: RopeConfig, r: int) -> RopeCacheWriteInputs:
    """Queries whose pairs are (1, 0), so that what is returned is the table."""
    given = PROBLEM.materialize(case_of(q_lens=(1,), kv_lens=(1,)), DEVICE)
    t = len(positions)
    one = torch.zeros(t, 1, r, dtype=dtype, device=DEVICE)
    (one[..., 0::2] if rope.interleaved else one[..., : r // 2]).fill_(1.0)
    return given._replace(
        q_pe=one,
        kv_c=torch.zeros(t, 256, dtype=dtype, device=DEVICE),
        k_pe=torch.zeros(t, r, dtype=dtype, device=DEVICE),
        positions=positions.to(DEVICE),
        rope=rope,
        kv_cache=torch.zeros(1, 1, 256 + r, dtype=torch.bfloat16, device=DEVICE),
        slot_mapping=torch.full((t,), -1, device=DEVICE),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rope", [RopeConfig(), HALVES, RopeConfig(theta=1.000001)])
def test_angles_are_as_exact_at_a_million_as_at_one(dtype: torch.dtype, rope: RopeConfig) -> None:
    """θ next to 1 turns every pair by a radian a position: 355 and 710 come within 10⁻⁴ of half turns."""
    positions = torch.tensor([*FAR, *range(2, 360), 710, 103_993, 104_348])
    inputs = pairs_at(positions, dtype, rope, 64)
    got = BACKEND.fn(*inputs).q_pe
    finding = within("q_pe", got, ADMISSIBLE[PROBLEM.name](inputs, BACKEND.numerics)["q_pe"], "t h r")
    assert finding.ok, finding.detail


def test_an_angle_in_float32_would_not_be_admitted() -> None:
    inputs = pairs_at(torch.tensor([1_000_000]), torch.float32, RopeConfig(), 64)
    want = ADMISSIBLE[PROBLEM.name](inputs, Numerics())["q_pe"]
    angle = inputs.positions.float() * (quarter_turns(inputs.rope, 64, DEVICE) * (torch.pi / 2.0)).float()
    got = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(-2)[None, None]
    assert not within("q_pe", got, want, "t h r").ok


@pytest.mark.parametrize("variant", VARIANTS)
def test_where_nothing_is_rotated_queries_are_returned_themselves(variant: str) -> None:
    inputs = PROBLEM.materialize(case_of(RopeConfig(rotate=False), cache_format="fp8_e4m3"), DEVICE)
    got, want = private_copy(inputs), private_copy(inputs)
    assert VARIANTS[variant](*got).q_pe is got.q_pe
    rope_cache_write(*want)
    assert torch.equal(storage_bytes(got.kv_cache), storage_bytes(want.kv_cache))


@pytest.mark.parametrize("interleaved", [True, False])
def test_channels_of_any_stride(interleaved: bool, seed: int) -> None:
    rope = RopeConfig(interleaved=interleaved)
    inputs = PROBLEM.materialize(case_of(rope, cache_format="fp8_ds_mla", seed=seed), DEVICE)
    packed, strided = private_copy(inputs), private_copy(inputs)
    strided = strided._replace(
        **{name: getattr(strided, name).mT.contiguous().mT for name in ("q_pe", "kv_c", "k_pe")}
    )
    assert torch.equal(BACKEND.fn(*packed).q_pe, BACKEND.fn(*strided).q_pe)
    assert torch.equal(storage_bytes(packed.kv_cache), storage_bytes(strided.kv_cache))


@pytest.mark.parametrize("num_heads", [1, 5, 20])
def test_any_number_of_heads(num_heads: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs as it takes, the last one with fewer heads."""
    from mla_fast import triton_rope_cache_write

    monkeypatch.setattr(triton_rope_cache_write, "INTERPRETED", triton_rope_cache_write.TILES["none"])
    case = case_of(RopeConfig(), seed=seed)
    case = replace(case, config=replace(case.config, num_heads=num_heads, qk_rope_head_dim=64))
    for verdict in judge(
        replace(BACKEND, variants={}), case, device=DEVICE.type, oracles=("stored", "value")
    ):
        assert verdict.status == PASS, verdict.detail


def test_unaligned_scales_are_declined() -> None:
    case = case_of(cache_format="fp8_ds_mla", layout=CacheLayout(offset=2))
    assert {v.status for v in judge(BACKEND, case, device=DEVICE.type)} == {UNSUPPORTED}
    with pytest.raises(ValueError, match=r"address is \d+ bytes, must be a multiple of 4"):
        BACKEND.fn(*PROBLEM.materialize(case, DEVICE))


def test_no_tokens_at_all() -> None:
    inputs = PROBLEM.materialize(case_of(q_lens=(0,), kv_lens=(3,)), DEVICE)
    before = storage_bytes(inputs.kv_cache).clone()
    turned, kv_cache = BACKEND.fn(*inputs)
    assert turned.shape == inputs.q_pe.shape
    assert kv_cache is inputs.kv_cache
    assert torch.equal(storage_bytes(kv_cache), before)
