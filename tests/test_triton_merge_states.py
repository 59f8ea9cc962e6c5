"""Merging partial results in plain Triton: judged, empty states unread, and in place."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_fast.triton_merge_states import BACKEND, merge_into
from mla_ref.case import DTYPES, Case
from mla_ref.config import MLAConfig
from mla_ref.problems.merge_states import PROBLEM
from oracles.coverage import draw
from oracles.oracle import private_copy
from oracles.verdict import FAIL, PASS
from oracles.verify import judge

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def case_of(**changes: Any) -> Case:
    """Three states, the last empty, of eleven tokens with three heads."""
    config = MLAConfig(
        name="merged", hidden_size=64, num_heads=3, q_lora_rank=None, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=40,
    )  # fmt: skip
    return Case(
        **{
            "problem": "merge_states", "config": config, "q_lens": (4, 7, 0), "kv_lens": (70, 5, 0),
            **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_claim_about_every_type(dtype: str, seed: int) -> None:
    verdicts = judge(BACKEND, case_of(dtype=dtype, seed=seed), device=DEVICE.type)
    assert [f"{v.variant} {v.oracle}: {v.detail}" for v in verdicts if v.status != PASS] == []


@pytest.mark.parametrize("num_states", [1, 2, 4, 5, 9, 33])
def test_any_number_of_states(num_states: int, seed: int) -> None:
    case = case_of(q_lens=(5,) + (0,) * (num_states - 1), kv_lens=(9,) * num_states, seed=seed)
    for verdict in judge(BACKEND, case, device=DEVICE.type):
        assert verdict.status == PASS, f"{verdict.oracle}: {verdict.detail}"


def test_judged_on_random_cases(seed: int) -> None:
    alone = replace(BACKEND, variants={})
    for i in range(25):
        case = draw("merge_states", seed, i, BACKEND.supports)
        for verdict in judge(alone, case, device=DEVICE.type, oracles=("value", "lse", "empty_rows")):
            assert verdict.status == PASS, f"{verdict.detail} {case.to_json()}"


def test_one_rounding_of_the_output_is_all_that_is_claimed(seed: int) -> None:
    """Weights in bfloat16 would not pass for it."""

    def coarse(outs: torch.Tensor, lses: torch.Tensor) -> Any:
        weights = torch.softmax(lses, 0).nan_to_num().bfloat16()
        out = (weights[..., None] * outs.nan_to_num()).float().sum(0)
        return out.to(outs.dtype), torch.logsumexp(lses, 0)

    (verdict,) = judge(
        replace(BACKEND, fn=coarse), case_of(seed=seed), device=DEVICE.type, oracles=("value",)
    )
    assert verdict.status == FAIL


@pytest.mark.parametrize("state", [0, 2])
@pytest.mark.parametrize("v", [40, 512])
def test_in_the_place_of_a_state(state: int, v: int, seed: int) -> None:
    case = case_of(seed=seed)
    inputs = PROBLEM.materialize(replace(case, config=replace(case.config, v_head_dim=v)), DEVICE)
    want = BACKEND.fn(*inputs)
    outs, lses = private_copy(inputs)
    merge_into(outs[state], lses[state], outs, lses)
    assert torch.equal(outs[state], want.out)
    assert torch.equal(lses[state], want.lse)
    for other in {0, 1, 2} - {state}:
        assert torch.equal(lses[other], inputs.lses[other])


def test_strides_of_states_that_lie_apart(seed: int) -> None:
    inputs = PROBLEM.materialize(case_of(seed=seed), DEVICE)
    want = BACKEND.fn(*inputs)
    outs = inputs.outs.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    got = BACKEND.fn(outs, inputs.lses.permute(1, 2, 0).contiguous().permute(2, 0, 1))
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_no_rows() -> None:
    out, lse = BACKEND.fn(*PROBLEM.materialize(case_of(q_lens=(0,), kv_lens=(3,)), DEVICE))
    assert (out.shape, lse.shape) == ((0, 3, 40), (0, 3))
