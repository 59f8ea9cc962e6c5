"""Torch's own attention, the first implementation that nobody here wrote, under the judge."""

from dataclasses import replace

import pytest
import torch

from mla_fast.sdpa import BACKEND, expanded
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from oracles.coverage import draw
from oracles.verdict import FAIL, PASS
from oracles.verify import judge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Widths of keys and values: unlike, which the CPU computes as "math", and alike, which it computes as flash.
WIDTHS = {"math": (32, 16, 32), "flash": (32, 16, 48)}


def config(widths: tuple[int, int, int]) -> MLAConfig:
    nope, rope, value = widths
    return MLAConfig(
        name="narrow", hidden_size=64, num_heads=4, q_lora_rank=None, kv_lora_rank=64,
        qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value,
    )  # fmt: skip


def mtp(widths: tuple[int, int, int], dtype: str, seed: int) -> Case:
    return Case(
        problem="attention", config=config(widths), q_lens=(3, 0, 1, 5, 70), kv_lens=(190, 7, 0, 3, 600),
        dtype=dtype, block_size=16, regime="peaky", seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("kernel", WIDTHS)
def test_judged(kernel: str, dtype: str, seed: int) -> None:
    verdicts = judge(BACKEND, mtp(WIDTHS[kernel], dtype, seed), device=DEVICE)
    assert len(verdicts) >= 2 * (1 + len(BACKEND.variants))
    for verdict in verdicts:
        assert verdict.status == PASS, f"{verdict.variant} {verdict.oracle}: {verdict.detail} {verdict.worst}"


def test_scores_are_held_some_rows_at_a_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_fast.sdpa.SCORES", 4 * 600 * 32)
    case = mtp(WIDTHS["math"], "bfloat16", seed)
    for verdict in judge(BACKEND, case, device=DEVICE, oracles=("value", "lse", "empty_rows")):
        assert verdict.status == PASS, f"{verdict.detail} {verdict.worst}"


def test_judged_on_random_cases(seed: int) -> None:
    for i in range(30):
        case = draw("attention", seed, i)
        widths = case.config
        if i % 2:
            case = replace(case, config=replace(widths, v_head_dim=widths.qk_head_dim))
        for verdict in judge(BACKEND, case, device=DEVICE, oracles=("value", "lse", "empty_rows")):
            assert verdict.status == PASS, f"{verdict.detail} {verdict.worst} {case.to_json()}"


def test_torchs_own_causal_mask_is_another(seed: int) -> None:
    def top_left(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: object, scale: float
    ) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    wrong = replace(BACKEND, fn=expanded(top_left), variants={})
    (verdict,) = judge(wrong, mtp(WIDTHS["math"], "bfloat16", seed), device=DEVICE, oracles=["value"])
    assert verdict.status == FAIL


def test_another_scale_is_caught(seed: int) -> None:
    def rescaled(*args: torch.Tensor, attn_mask: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*args, attn_mask=attn_mask, scale=0.9 * scale)

    wrong = replace(BACKEND, fn=expanded(rescaled), variants={})
    (verdict,) = judge(wrong, mtp(WIDTHS["flash"], "float16", seed), device=DEVICE, oracles=["value"])
    assert verdict.status == FAIL
