"""Chunked prefill on torch's flash attention: what it computes, and in how much memory."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from mla_fast.chunked_sdpa import BACKEND, chunked_by, float32_sums, fold, supports, why_not
from mla_ref.capacity import prefill_parts
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.layout import CacheLayout
from mla_ref.problem import problem
from oracles.process_state import kept
from oracles.verdict import PASS
from oracles.verify import judge

CPU = torch.device("cpu")

CONFIG = MLAConfig(
    name="small",
    hidden_size=256,
    num_heads=4,
    q_lora_rank=None,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
)
CASE = Case(
    problem="attention",
    config=CONFIG,
    q_lens=(3, 1, 0, 5, 2, 7),
    kv_lens=(50, 33, 9, 5, 0, 4),
    block_size=8,
    layout=CacheLayout(entry_align=256, block_gap=64, offset=32),
)


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_judged(fmt: str, dtype: str):
    case = replace(CASE, cache_format=fmt, dtype=dtype, kv_scale=0.031)
    verdicts = judge(BACKEND, case, oracles=["value", "lse", "empty_rows", "poison", "inputs_unchanged"])
    assert {v.variant for v in verdicts} == {"default", *BACKEND.variants}
    assert [f"{v.variant} {v.oracle}: {v.detail}" for v in verdicts if v.status != PASS] == []


def test_the_small_workspace_makes_several_chunks():
    """Otherwise the variant would be the default once more."""
    case = replace(CASE, q_lens=(4,), kv_lens=(100,))
    inputs = problem("attention").materialize(case, CPU)
    with Live() as live:
        BACKEND.variants["small_workspace"](*inputs)
    assert live.calls["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 4


class Live(TorchDispatchMode):
    """Counts operations, and the most bytes that tensors made in them held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Any = WeakIdKeyDictionary()
        self.calls: dict[str, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[str(func)] = self.calls.get(str(func), 0) + 1
        given = {
            x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        for x in tree_leaves(result):
            known = {t.untyped_storage().data_ptr() for t in self.tensors}
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given - known:
                self.tensors[x] = True
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors}
        self.peak = max(self.peak, sum(held.values()))
        return result


ROWS, TOKENS = 4096, 32


def peak_of(rows: int, tokens: int, context: int) -> int:
    """Bytes at the peak of one prefill with a workspace of so many rows."""
    case = replace(CASE, q_lens=(tokens,), kv_lens=(context + tokens,), block_size=64, layout=CacheLayout())
    inputs = problem("attention").materialize(case, CPU)
    with Live() as live:
        chunked_by(lambda contexts, block_size: rows)(*inputs)
    return live.peak


def test_the_peak_is_the_plan_within_two_percent():
    """Workspace, kv_b output, joined keys, padded values, queries, partial results: nothing else."""
    planned = sum(prefill_parts(CONFIG, ROWS, TOKENS, 2, "padded").values())
    measured = peak_of(ROWS, TOKENS, ROWS)
    assert abs(measured - planned) * 50 <= planned, (measured, planned)


def test_a_longer_context_needs_no_more():
    """Three workspaces of context, one after another, take what one does."""
    assert peak_of(ROWS, TOKENS, 3 * ROWS) == peak_of(ROWS, TOKENS, ROWS)


@pytest.mark.parametrize("part", ["workspace", "kv_b output", "joined keys", "padded values"])
def test_a_plan_without_one_part_is_seen_to_be_wrong(part: str):
    parts = prefill_parts(CONFIG, ROWS, TOKENS, 2, "padded")
    planned = sum(parts.values()) - parts[part]
    assert abs(peak_of(ROWS, TOKENS, ROWS) - planned) * 50 > planned


def test_folding_into_nothing_is_exact():
    part, part_lse = torch.tensor([[[1.5, -2.0]]], dtype=torch.bfloat16), torch.tensor([[3.25]])
    out, lse = fold(torch.zeros_like(part), torch.full_like(part_lse, -torch.inf), part, part_lse)
    assert torch.equal(out, part)
    assert torch.equal(lse, part_lse)


@pytest.mark.parametrize("raised", [False, True])
def test_sums_are_in_float32_only_meanwhile(raised: bool):
    flags = torch.backends.cuda.matmul
    before = {
        "allow_bf16_reduced_precision_reduction": True,
        "allow_fp16_reduced_precision_reduction": False,
    }
    with kept([]):
        for name, value in before.items():
            setattr(flags, name, value)
        with pytest.raises(LookupError) if raised else nullcontext(), float32_sums():
            assert not any(getattr(flags, name) for name in before)
            if raised:
                raise LookupError
        assert {name: getattr(flags, name) for name in before} == before


def test_no_more_parts_than_the_numerics_declare():
    """Of contexts of 300 keys, a hundred at a time; the new tokens are a part, too."""
    for last, told in ((0, None), (1, "64 chunks and the new tokens, of at most 64")):
        kv_lens = (*[301] * 21, 1 + last)
        case = replace(CASE, q_lens=(1,) * len(kv_lens), kv_lens=kv_lens, block_size=1)
        assert supports(case) == told


def test_what_it_declines():
    assert why_not(torch.bfloat16, 192, 128) is None
    assert "float32" in str(why_not(torch.float32, 192, 128))
    assert why_not(torch.float16, 128, 192) == (
        "keys have 128 and values 192 channels; flash attention takes one multiple of 8 up to 256"
    )
