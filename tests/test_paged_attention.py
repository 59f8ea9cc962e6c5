"""Pages of keys and values: every layout gives the same bits, and each way to misread a layout is seen."""

from collections.abc import Callable
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
from mla_ref.paged_attention import paged_attention
from mla_ref.problem import problem
from mla_ref.problems.paged_attention import PROBLEM, PagedAttentionInputs

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


def in_float64(inputs: PagedAttentionInputs, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One query, one head at a time, written out: no masks, no reshapes."""
    out = torch.zeros(*inputs.query.shape[:2], inputs.value_cache.shape[-1], dtype=torch.float64)
    lse = torch.full(inputs.query.shape[:2], -torch.inf, dtype=torch.float64)
    block_size = inputs.key_cache.shape[1]
    offsets = inputs.cu_seqlens_q.tolist()
    for i, kv_len in enumerate(inputs.cache_seqlens.tolist()):
        q_len = offsets[i + 1] - offsets[i]
        for s in range(q_len):
            for h in range(inputs.query.shape[1]):
                keys, values = [], []
                for j in range(max(kv_len - q_len + s + 1, 0)):
                    block, slot = int(inputs.block_table[i, j // block_size]), j % block_size
                    keys.append(inputs.key_cache[block, slot, h // group].double())
                    values.append(inputs.value_cache[block, slot, h // group].double())
                if keys:
                    query = inputs.query[offsets[i] + s, h].double()
                    scores = inputs.softmax_scale * torch.stack(keys) @ query
                    lse[offsets[i] + s, h] = torch.logsumexp(scores, 0)
                    out[offsets[i] + s, h] = torch.softmax(scores, 0) @ torch.stack(values)
    return out, lse


def test_the_reference_is_attention_written_out():
    """In float64 both are exact up to the order of a dozen additions: they agree to eight digits, rounded."""
    case = small_case(dtype="float64")
    inputs = inputs_of(case)
    inputs = inputs._replace(query=inputs.query.double())
    got, (out, lse) = paged_attention(*inputs), in_float64(inputs, 2)
    assert torch.equal(got.out.mul(2**30).round(), out.mul(2**30).round())
    assert torch.equal(got.lse, lse.to(torch.float32))


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


def restrided(tensor: torch.Tensor, strides: tuple[int, ...], offset: int) -> torch.Tensor:
    """The same memory read with other strides; reads past its end come round to its beginning."""
    flat = torch.tensor([], dtype=tensor.dtype).set_(tensor.untyped_storage())
    index = torch.full(tensor.shape, offset, dtype=torch.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
        shape = [1] * tensor.dim()
        shape[axis] = size
        index = index + (torch.arange(size) * stride).reshape(shape)
    return flat[index % flat.numel()]


Misreading = Callable[[PagedAttentionInputs], PagedAttentionInputs]


def values_of_the_other_order(inputs: PagedAttentionInputs) -> PagedAttentionInputs:
    """The values are looked for where a pool in the other of the two published orders would have them."""
    key, value = inputs.key_cache, inputs.value_cache
    n, k, g, x = key.shape
    apart, together = n * k * g * x, k * g * x
    gap = value.storage_offset() - key.storage_offset()
    wrong = together if gap == apart else apart
    return inputs._replace(value_cache=restrided(value, value.stride(), key.storage_offset() + wrong))


def packed_entries(inputs: PagedAttentionInputs) -> PagedAttentionInputs:
    """Entry padding is not there: each head's row begins where the one before it ends."""

    def read(cache: torch.Tensor) -> torch.Tensor:
        n, k, g, x = cache.shape
        return restrided(cache, (k * g * x, g * x, x, 1), cache.storage_offset())

    return inputs._replace(key_cache=read(inputs.key_cache), value_cache=read(inputs.value_cache))


def assumed_block_stride(inputs: PagedAttentionInputs) -> PagedAttentionInputs:
    """A block is as long as its own entries, whatever lies between blocks."""

    def read(cache: torch.Tensor) -> torch.Tensor:
        block = cache.shape[1] * cache.stride(1)
        return restrided(cache, (block, *cache.stride()[1:]), cache.storage_offset())

    return inputs._replace(key_cache=read(inputs.key_cache), value_cache=read(inputs.value_cache))


def wrong_unbind_axis(inputs: PagedAttentionInputs) -> PagedAttentionInputs:
    """(n, 2, …) unbound along its first axis as if it were (2, n, …), or the other way round."""
    key, value = inputs.key_cache, inputs.value_cache
    n, k, g, x = key.shape
    page, start = k * g * x, key.storage_offset()
    if value.storage_offset() - start == page:
        block, second = page, n * page
    else:
        block, second = 2 * page, page
    strides = (block, *key.stride()[1:])
    return inputs._replace(
        key_cache=restrided(key, strides, start), value_cache=restrided(value, strides, start + second)
    )


def hnd_read_as_nhd(inputs: PagedAttentionInputs) -> PagedAttentionInputs:
    """Slots and heads change places."""

    def read(cache: torch.Tensor) -> torch.Tensor:
        n, k, g, x = cache.shape
        nhd = cache.stride(2) < cache.stride(1)
        slot, head = (x, k * x) if nhd else (g * x, x)
        return restrided(cache, (cache.stride(0), slot, head, 1), cache.storage_offset())

    return inputs._replace(key_cache=read(inputs.key_cache), value_cache=read(inputs.value_cache))


def first_layer(inputs: PagedAttentionInputs) -> PagedAttentionInputs:
    """The storage offset is dropped, so the first layer is read for every one."""

    def read(cache: torch.Tensor) -> torch.Tensor:
        return restrided(cache, cache.stride(), cache.storage_offset() - inputs.key_cache.storage_offset())

    return inputs._replace(key_cache=read(inputs.key_cache), value_cache=read(inputs.value_cache))


# Each misreading, and layouts on which an engine that did it was wrong.
MISREADINGS: dict[str, tuple[Misreading, list[tuple[str, CacheLayout]]]] = {
    "values of the other order": (
        values_of_the_other_order,
        [(PACKED, CacheLayout()), (KV_ORDERS["blocks_first_nhd"], CacheLayout())],
    ),
    "packed where padded": (packed_entries, [(PACKED, CacheLayout(entry_align=64))]),
    "block stride assumed": (
        assumed_block_stride,
        [(PACKED, CacheLayout(block_gap=64)), (KV_ORDERS["unified_nhd"], CacheLayout())],
    ),
    "wrong unbind axis": (
        wrong_unbind_axis,
        [(PACKED, CacheLayout()), (KV_ORDERS["blocks_first_nhd"], CacheLayout())],
    ),
    "HND read as NHD": (
        hnd_read_as_nhd,
        [(KV_ORDERS["kv_first_hnd"], CacheLayout()), (PACKED, CacheLayout())],
    ),
    "storage offset dropped": (first_layer, [(PACKED, CacheLayout()), (PACKED, CacheLayout(offset=64))]),
}


@pytest.mark.parametrize("name", MISREADINGS)
def test_a_misread_layout_changes_the_result(name: str, seed: int):
    """Keys and values are of one width here, as in the engines, so that no misreading fails on shapes."""
    misread, where = MISREADINGS[name]
    for order, layout in where:
        case = small_case(config=model(4, 4, 4, 8), kv_layout=order, layout=layout, seed=seed)
        inputs = inputs_of(case)
        assert not same(paged_attention(*misread(inputs)), paged_attention(*inputs))


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
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        paged_attention(*inputs._replace(**change))
    assert message == str(caught.value)


def test_transposed_channels_are_refused():
    inputs = inputs_of(small_case())
    key = inputs.key_cache.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="key_cache: last stride is 2, must be 1"):
        paged_attention(*inputs._replace(key_cache=key))


def test_the_case_survives_json():
    case = small_case(kv_layout="gkn2lx", v_scale=0.5)
    assert Case.from_json(case.to_json()) == case
    assert problem(case.problem) is PROBLEM
