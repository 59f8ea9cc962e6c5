"""Pages of keys and values: the reference is right, every layout gives the same bits, the rest is poison."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from random_layouts import layouts, orders

from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.formats import formats
from mla_ref.layout import CacheLayout
from mla_ref.layout_algebra import KV_ORDERS
from mla_ref.paged_attention import BACKEND, paged_attention
from mla_ref.problem import problem
from mla_ref.problems.paged_attention import PROBLEM, PagedAttentionInputs
from oracles.verdict import PASS
from oracles.verify import judge

CPU = torch.device("cpu")
PACKED = "l2nkgx"

many = settings(max_examples=4 * settings.default.max_examples)


def model(num_heads: int, nope: int, rope: int, value: int) -> MLAConfig:
    """Ordinary attention: only heads and widths matter."""
    return MLAConfig(
        name=f"h{num_heads}-x{nope + rope}-v{value}",
        hidden_size=num_heads * value,
        num_heads=num_heads,
        q_lora_rank=None,
        kv_lora_rank=1,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
    )


def small_case(**changes: object) -> Case:
    """Two requests with context, one idle, one without a key; four heads over two."""
    return replace(
        Case(
            problem="paged_attention",
            config=model(4, 6, 4, 8),
            q_lens=(3, 1, 0, 2),
            kv_lens=(11, 5, 7, 0),
            dtype="float32",
            cache_format="fp32",
            block_size=3,
            num_kv_heads=2,
        ),
        **changes,
    )


def inputs_of(case: Case) -> PagedAttentionInputs:
    inputs: PagedAttentionInputs = PROBLEM.materialize(case, CPU)
    return inputs


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("nope", "rope", "value"), [(64, 0, 64), (64, 64, 128), (128, 64, 128), (192, 64, 256)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_reference_is_right(num_kv_heads: int, nope: int, rope: int, value: int, dtype: str):
    """Multi-head, grouped-query and multi-query attention at the usual widths, by every claim there is."""
    case = small_case(config=model(4, nope, rope, value), num_kv_heads=num_kv_heads, dtype=dtype)
    assert [(v.oracle, v.detail) for v in judge(BACKEND, case) if v.status != PASS] == []


@many
@given(order=orders(), layout=layouts(4), seed=st.integers(0, 2**16))
def test_every_layout_gives_the_same_bits(order: str, layout: CacheLayout, seed: int):
    case = small_case(seed=seed)
    expected = paged_attention(*inputs_of(case))
    assert same(paged_attention(*inputs_of(replace(case, kv_layout=order, layout=layout))), expected)


@pytest.mark.parametrize(
    "name", [f for f in formats() if PROBLEM.why_not(small_case(cache_format=f)) is None]
)
@pytest.mark.parametrize("order", [PACKED, KV_ORDERS["packed_bhlnc"]])
def test_every_format_that_stores_channels(name: str, order: str):
    """Scales of keys and values differ; where a format has none they are NaN and never read."""
    case = small_case(cache_format=name, kv_layout=order, kv_scale=0.37, v_scale=1.7)
    inputs = inputs_of(case)
    got = paged_attention(*inputs)
    live = torch.tensor([i for i in range(6) if i < 4])
    assert got.out[live].isfinite().all()
    scaled = inputs.key_cache.dtype == torch.float8_e4m3fn
    assert inputs.k_scale.isnan() == inputs.v_scale.isnan() == (not scaled)
    if scaled:
        doubled = paged_attention(*inputs._replace(v_scale=inputs.v_scale * 2))
        assert same(doubled, (got.out * 2, got.lse))
        assert not torch.equal(paged_attention(*inputs._replace(k_scale=inputs.v_scale)).lse, got.lse)


def test_formats_that_store_latents_are_refused():
    with pytest.raises(ValueError, match="cache format fp8_ds_mla stores latents, not keys and values"):
        inputs_of(small_case(cache_format="fp8_ds_mla"))


@many
@given(order=orders(), layout=layouts(4))
def test_everything_but_the_cached_tokens_is_poison(order: str, layout: CacheLayout):
    """Other layers, spare blocks, gaps, padding and slots past each length are NaN, byte for byte."""
    case = small_case(kv_layout=order, layout=layout)
    inputs = inputs_of(case)
    pool = torch.tensor([], dtype=torch.uint8).set_(inputs.key_cache.untyped_storage())
    live = torch.zeros(pool.shape, dtype=torch.bool)
    for cache in (inputs.key_cache, inputs.value_cache):
        mask = torch.tensor([], dtype=torch.int32).set_(
            torch.zeros(pool.shape, dtype=torch.uint8).untyped_storage(),
            cache.storage_offset(),
            cache.shape,
            cache.stride(),
        )
        for i, length in enumerate(case.kv_lens):
            for j in range(length):
                mask[inputs.block_table[i, j // case.block_size], j % case.block_size] = -1
        live |= torch.tensor([], dtype=torch.uint8).set_(mask.untyped_storage()).bool()
    assert (pool[~live] == 0xFF).all()
    assert int(live.sum()) == sum(case.kv_lens) * case.num_kv_heads * (10 + 8) * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_cache": torch.empty(2, 3, 3, 10)}, "value_cache: g=2, but g=3 elsewhere (contract [n k g v])"),
        ({"query": torch.empty(6, 5, 10)}, "query: h=5 is no multiple of g=2 key/value heads"),
        ({"k_scale": torch.ones((), dtype=torch.float64)}, "k_scale: dtype is float64, must be float32"),
        ({"max_seqlen_q": 2}, "max_seqlen_q: 2, but the longest query has 3 tokens"),
    ],
)
def test_errors_name_the_thing_and_both_values(change: dict[str, object], message: str):
    inputs = inputs_of(small_case())
    if "key_cache" in change:
        change = {"key_cache": torch.empty(inputs.key_cache.shape[0], 3, 3, 10)}
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_attention(*inputs._replace(**change))


def test_transposed_channels_are_refused():
    inputs = inputs_of(small_case())
    key = inputs.key_cache.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="key_cache: last stride is 2, must be 1"):
        paged_attention(*inputs._replace(key_cache=key))


def test_the_case_survives_json():
    case = small_case(kv_layout="gkn2lx", v_scale=0.5)
    assert Case.from_json(case.to_json()) == case
    assert problem(case.problem) is PROBLEM
