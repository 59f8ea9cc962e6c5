"""Every reference implementation of attention against the float64 truth, on every model."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from mla_ref.absorbed import expand_output, fold_query
from mla_ref.backend import Backend, backends_in
from mla_ref.case import Case
from mla_ref.chunked import MAX_PARTS, PLANS, supports
from mla_ref.formats import cache_format, formats
from mla_ref.layout import CacheLayout
from mla_ref.numerics import Numerics
from mla_ref.presets import PRESETS
from mla_ref.problems.attention import AttentionInputs, materialize
from oracles import bounds
from oracles.compare import within

CPU = torch.device("cpu")
BACKENDS = [b for b in backends_in("mla_ref").values() if b.problem == "attention"]
VARIANTS = [
    pytest.param(backend, fn, id=f"{backend.name}-{variant}")
    for backend in BACKENDS
    for variant, fn in {"default": backend.fn, **backend.variants}.items()
]
FORMAT_NAMES = tuple(formats())

# A request without new tokens, one of decode, one without keys, one with more queries than keys, a chunk with
# context, a whole prompt, MTP. The longest context, 66 tokens in blocks of 16, takes a small workspace three
# chunks; the others run out before it.
Q_LENS = (0, 1, 5, 3, 20, 9, 2)
KV_LENS = (7, 67, 0, 2, 53, 9, 33)


def case_of(preset: str, fmt: str, dtype: str = "float64", seed: int = 0) -> Case:
    return Case(
        problem="attention",
        config=replace(PRESETS[preset], num_heads=2),
        q_lens=Q_LENS,
        kv_lens=KV_LENS,
        dtype=dtype,
        cache_format=fmt,
        block_size=16,
        layout=CacheLayout(entry_align=64, block_gap=24, offset=16),
        kv_scale=0.0371,
        seed=seed,
    )


@cache
def inputs_of(case: Case) -> AttentionInputs:
    return materialize(case, CPU)


@cache
def truth(case: Case, numerics: Numerics) -> dict[str, bounds.Admissible]:
    return bounds.attention(inputs_of(case), numerics)


def assert_admissible(case: Case, backend: Backend, fn: Callable[..., Any]) -> None:
    assert backend.supports(case) is None
    output = fn(*inputs_of(case))
    for name, letters in (("out", "t h v"), ("lse", "t h")):
        finding = within(
            name, getattr(output, name), truth(case, backend.numerics)[name], letters, inputs_of(case)
        )
        assert finding.ok, finding.detail
        assert finding.num_checked


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("backend", "fn"), VARIANTS)
def test_float64_on_every_model(preset: str, backend: Backend, fn: Callable[..., Any]) -> None:
    fmt = FORMAT_NAMES[list(PRESETS).index(preset) % len(FORMAT_NAMES)]
    assert_admissible(case_of(preset, fmt), backend, fn)


@pytest.mark.parametrize(
    ("dtype", "fmt"),
    [*product(("float64", "bfloat16"), FORMAT_NAMES), ("float32", "fp32"), ("float16", "fp8_e4m3")],
)
@pytest.mark.parametrize(("backend", "fn"), VARIANTS)
def test_every_format_and_dtype(dtype: str, fmt: str, backend: Backend, fn: Callable[..., Any]) -> None:
    assert_admissible(case_of("deepseek-v3", fmt, dtype), backend, fn)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_float64_bound_leaves_no_room_for_a_lower_precision(preset: str, backend: Backend) -> None:
    # Worst cases of float64 sums; an implementation that rounded anything to float32 would leave them.
    fmt = FORMAT_NAMES[list(PRESETS).index(preset) % len(FORMAT_NAMES)]
    out = truth(case_of(preset, fmt), backend.numerics)["out"]
    assert (out.radius <= torch.finfo(torch.float32).eps * out.mid.abs().max()).all()
    assert not out.ill


@pytest.mark.parametrize(("backend", "fn"), VARIANTS)
def test_uniform_attention_is_a_mean(backend: Backend, fn: Callable[..., Any]) -> None:
    # Scale 0: every visible key has the same weight. One request of 6 tokens in blocks 2, 0, 1 of two slots,
    # its latents 1, 2, … 6, doubled by w_uv. Its two queries see 5 and 6 keys: 2 · 3 and 2 · 3.5; ln 5, ln 6.
    # A second request has two queries and one key, 8: nothing, and 2 · 8, ln 1.
    pages = torch.tensor([[3.0, 4.0], [5.0, 6.0], [1.0, 2.0], [8.0, torch.nan]])
    output = fn(
        q_nope=torch.full((4, 1, 1), 3.0, dtype=torch.float64),
        q_pe=torch.full((4, 1, 2), 5.0, dtype=torch.float64),
        kv_cache=torch.stack([pages, pages, pages], dim=-1),
        block_table=torch.tensor([[2, 0, 1], [3, -1, -1]], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 2, 4], dtype=torch.int32),
        cache_seqlens=torch.tensor([6, 1], dtype=torch.int32),
        w_uk=torch.ones(1, 1, 1, dtype=torch.float64),
        w_uv=torch.full((1, 1, 1), 2.0, dtype=torch.float64),
        max_seqlen_q=2,
        softmax_scale=0.0,
        cache_format=cache_format("fp32"),
        kv_scale=torch.tensor(torch.nan),
    )
    # Rounded to float32, which the float64 sums of five and six terms do not reach.
    assert output.out.flatten().float().tolist() == [6.0, 7.0, 0.0, 16.0]
    assert torch.equal(output.lse.flatten(), torch.tensor([5.0, 6.0, 0.0, 1.0]).double().log().float())


def test_folded_query_and_expanded_output_by_hand() -> None:
    # Head 0 swaps its two channels and triples the second; head 1 sums them into a third latent channel.
    w = torch.tensor([[[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]])
    query = torch.tensor([[[1.0, 2.0], [5.0, 7.0]]])
    assert fold_query(query, w).tolist() == [[[6.0, 1.0, 0.0], [0.0, 0.0, 12.0]]]
    latent = torch.tensor([[[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]]])
    assert expand_output(latent, w).tolist() == [[[2.0, 3.0], [4.0, 4.0]]]


def test_small_workspaces_take_several_chunks() -> None:
    contexts = [max(kv - q, 0) if q else 0 for q, kv in zip(Q_LENS, KV_LENS, strict=True)]
    counts = {name: len(plan(contexts, rows(contexts, 16), 16)) for name, (plan, rows) in PLANS.items()}
    assert {name: count >= 3 for name, count in counts.items()} == {name: "small" in name for name in PLANS}


def test_more_parts_than_declared_are_unsupported() -> None:
    # 1100 requests share 64 · 1100 rows a chunk, 64 each: 4096 tokens of context are 64 parts, the new one is
    # another.
    config = replace(PRESETS["deepseek-v3"], num_heads=1)
    lengths = {"q_lens": (1,) * 1100, "kv_lens": (4097,) * 1100}
    case = Case(problem="attention", config=config, **lengths)
    assert supports(case) == f"equal_share would merge 65 parts of one request, and {MAX_PARTS} are declared"
    assert supports(replace(case, kv_lens=(4096 - 64 + 1,) * 1100)) is None
