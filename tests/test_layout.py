"""Layouts as arithmetic, against enumeration and against torch's own strides."""

import math
import re
from itertools import pairwise, permutations, product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from random_layouts import Pool, pools

from mla_ref.layout import CacheLayout, allocate
from mla_ref.layout_algebra import (
    KV_ORDERS,
    View,
    block_bytes,
    merged,
    num_bytes,
    place,
    round_up,
    shared_bytes,
    stacked,
    why_not_shareable,
)
from mla_ref.pages import DEAD_BLOCK, block_table

many = settings(max_examples=4 * settings.default.max_examples)

SIZES = {"l": 2, "n": 3, "k": 4, "g": 2}


def bytes_of(view: View) -> list[int]:
    """Every byte of every element, by plain enumeration of the index."""
    return [
        view.offset + sum(i * stride for i, stride in zip(index, view.strides, strict=True)) + byte
        for index in product(*(range(size) for size in view.sizes))
        for byte in range(view.itemsize)
    ]


@many
@given(pool=pools())
def test_intervals_are_the_bytes_of_the_elements(pool: Pool):
    for view in pool.placement().views:
        for part in (view, view.select(n=1), view.select(l=1, n=0), view.select(k=1), view.permute("xgknl")):
            expected = sorted(set(bytes_of(part)))
            runs = part.intervals()
            assert [byte for start, stop in runs for byte in range(start, stop)] == expected
            assert all(stop < start for (_, stop), (start, _) in pairwise(runs))
            assert part.hull == (expected[0], expected[-1] + 1)


@many
@given(pool=pools())
def test_every_element_has_bytes_of_its_own_inside_the_pool(pool: Pool):
    placement = pool.placement()
    claimed = [byte for view in placement.views for byte in bytes_of(view)]
    assert len(claimed) == len(set(claimed))
    assert min(claimed) >= pool.layout.offset
    assert max(claimed) < placement.pool_bytes
    for view in placement.views:
        assert view.why_not_bijective() is None
    assert shared_bytes(*(view.intervals() for view in placement.views)) == 0


@many
@given(pool=pools())
def test_entries_and_blocks_start_where_the_alignment_says(pool: Pool):
    align = pool.layout.entry_align
    outside = next(axis for axis in reversed(pool.order[:-1]) if axis != "2")
    for view, width in zip(pool.placement().views, pool.widths, strict=True):
        row = sum(pool.widths) if pool.order.endswith("2x") else width
        if outside != "n":
            assert view.stride(outside) == round_up(row * pool.itemsize, align)
        assert all(view.stride(axis) >= round_up(width * pool.itemsize, align) for axis in "lnkg")
        assert view.stride("n") >= pool.layout.block_gap
        assert (view.stride("n") - pool.layout.block_gap) % pool.layout.block_align == 0


@pytest.mark.parametrize("order", ["".join(p) + "x" for p in permutations("l2nkg")])
def test_packed_strides_are_those_of_torch(order: str):
    sizes = {**SIZES, "2": 2, "x": 5}
    physical = torch.empty([sizes[axis] for axis in order])
    placement = place(order, SIZES, [5, 5], physical.itemsize)
    assert placement.pool_bytes == physical.untyped_storage().nbytes()
    for view, expected in zip(placement.views, physical.unbind(order.index("2")), strict=True):
        tensor = view.tensor(physical.view(-1).view(torch.uint8), torch.float32)
        assert tensor.shape == expected.shape
        assert tensor.stride() == expected.stride()
        assert tensor.data_ptr() == expected.data_ptr()
        assert view.permute("lnkgx") == stacked(placement.views).unbind("2")[view.offset > 0].permute("lnkgx")


def test_unbind_of_the_two_published_shapes():
    """The strides and offsets that the change from (2, n, …) to (n, 2, …) is about."""
    n, k, h, d = 7, 16, 8, 64
    page = k * h * d
    kv_first = place(KV_ORDERS["kv_first_nhd"], {"l": 1, "n": n, "k": k, "g": h}, [d, d], 2)
    blocks_first = place(KV_ORDERS["blocks_first_nhd"], {"l": 1, "n": n, "k": k, "g": h}, [d, d], 2)
    shapes = ((kv_first, (2, n, k, h, d), 0), (blocks_first, (n, 2, k, h, d), 1))
    for placement, shape, axis in shapes:
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        for view, part in zip(placement.views, tensor.unbind(axis), strict=True):
            assert [s // 2 for s in view.select(l=0).strides] == list(part.stride())
            assert view.offset // 2 == part.storage_offset()
    assert kv_first.views[0].stride("n") == page * 2
    assert kv_first.views[1].offset == n * page * 2
    assert blocks_first.views[0].stride("n") == 2 * page * 2
    assert blocks_first.views[1].offset == page * 2
    assert kv_first.pool_bytes == blocks_first.pool_bytes


RUNS_OF_A_BLOCK = {
    "kv_first_nhd": (2, 4),
    "kv_first_hnd": (2, 4),
    "blocks_first_nhd": (1, 2),
    "blocks_first_hnd": (1, 2),
    "unified_nhd": (1, 1),
    "unified_hnd": (1, 1),
    "packed_lbhnc": (1, 2),
    "packed_lbnhc": (1, 2),
    "packed_lhbnc": (2, 4),
    "packed_blhnc": (1, 1),
    "packed_blnhc": (1, 1),
    "packed_bhlnc": (2, 1),
}


@pytest.mark.parametrize("name", KV_ORDERS)
def test_runs_of_a_block_in_one_layer_and_in_all(name: str):
    """SIZES has two layers and two heads: keys and values apart double the runs, heads outside blocks too."""
    views = place(KV_ORDERS[name], SIZES, [8, 8], 2).views
    one, every = block_bytes(views, l=1, n=2), block_bytes(views, n=2)
    assert (len(one), len(every)) == RUNS_OF_A_BLOCK[name]
    assert num_bytes(one) == 2 * 4 * 2 * 8 * 2
    assert num_bytes(every) == 2 * num_bytes(one)


def test_a_segregated_page_is_entries_then_scales_then_padding():
    """DeepSeek-V4: 64 tokens of 448 + 128 bytes, then 64 of 7 scales and one spare, rounded up to 576."""
    placement = place("n2kx", {"n": 3, "k": 64}, [576, 8], 1, block_align=576)
    entries, scales = placement.views
    assert entries.stride("n") == 37_440 == round_up(64 * 584, 576)
    assert scales.offset == 64 * 576
    assert block_bytes(placement.views, n=1) == [(37_440, 37_440 + 37_376)]
    assert placement.pool_bytes - sum(view.payload_bytes for view in placement.views) == 3 * 64


@pytest.mark.parametrize(
    ("entry_bytes", "align", "stride"),
    [
        (1152, 1, 1152),
        (1152, 128, 1152),
        (1152, 256, 1280),
        (1152, 576, 1152),
        (576, 128, 640),
        (576, 256, 768),
        (576, 576, 576),
        (656, 256, 768),
        (584, 256, 768),
        (528, 256, 768),
        (352, 256, 512),
        (288, 256, 512),
        (2304, 256, 2304),
    ],
)
def test_entry_alignment(entry_bytes: int, align: int, stride: int):
    assert CacheLayout(entry_align=align).entry_stride(entry_bytes) == stride


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32])
def test_the_latent_cache_is_where_its_layout_says(dtype: torch.dtype):
    layout = CacheLayout(entry_align=64, block_align=96, block_gap=8, offset=40)
    cache = allocate(layout, num_blocks=3, block_size=5, entry_width=36, dtype=dtype)
    view = layout.latent(3, 5, 36, dtype.itemsize).views[0]
    assert [s * dtype.itemsize for s in cache.stride()] == list(view.strides)
    assert cache.storage_offset() * dtype.itemsize == 40
    assert cache.untyped_storage().nbytes() == layout.pool_bytes(36 * dtype.itemsize, 5, 3)
    assert (cache.view(torch.uint8) == 0xFF).all()


def attention_page(order: str, num_blocks: int = 6):
    return place(order, {"l": 1, "n": num_blocks, "k": 4, "g": 2}, [8, 8], 2).views


def state_page(page_bytes: int, num_blocks: int = 6):
    """A state-space group: a convolution state and a recurrent state, padded to a page of its own."""
    return place("n2x", {"n": num_blocks}, [96, 80], 1, block_align=page_bytes).views


def test_hybrid_pages_alias_only_in_blocks_first_order():
    page = 2 * 4 * 2 * 8 * 2
    assert why_not_shareable(attention_page("ln2kgx"), state_page(page)) is None
    assert why_not_shareable(attention_page("lngk2x"), state_page(page)) is None
    reason = why_not_shareable(attention_page("l2nkgx"), state_page(page))
    assert reason == "block 1 of one group shares 48 bytes with block 0 of the other"
    assert why_not_shareable(attention_page("l2nkgx"), attention_page("l2nkgx")) is None
    assert "block 1" in str(why_not_shareable(attention_page("ln2kgx"), state_page(page // 2 * 3)))


def test_a_single_byte_is_shared():
    here, there = View("nx", (2, 4), (4, 1), 0, 1), View("nx", (2, 2), (4, 1), 3, 1)
    assert why_not_shareable([here], [there]) == (
        "block 1 of one group shares 1 bytes with block 0 of the other"
    )


def test_every_row_of_a_block_table_ends_in_a_dead_block():
    table, num_blocks = block_table((65, 0, 64), 64, CacheLayout(spare_blocks=2), 0)
    assert (table == DEAD_BLOCK).tolist() == [[False, False, True], [True] * 3, [False, True, True]]
    assert num_blocks == 5


@many
@given(a=pools(), b=pools())
def test_shareable_is_what_enumeration_says(a: Pool, b: Pool):
    owners: list[dict[int, int]] = []
    groups = [pool.placement().views for pool in (a, b)]
    for views in groups:
        owner = {}
        for n in range(views[0].size("n")):
            owner.update({byte: n for view in views for byte in bytes_of(view.select(n=n))})
        owners.append(owner)
    common = owners[0].keys() & owners[1].keys()
    clash = any(owners[0][byte] != owners[1][byte] for byte in common)
    shared = {owners[0][byte] for byte in common}
    blocks = min(views[0].size("n") for views in groups)
    expected = not clash and shared >= set(range(blocks))
    assert (why_not_shareable(*groups) is None) == expected


def test_expanded_and_overlapping_views_are_no_bijections():
    expanded = View("nx", (3, 4), (0, 2), 0, 2)
    assert expanded.why_not_bijective() == "16 bytes belong to more than one element"
    assert View("nx", (3, 4), (6, 2), 0, 2).why_not_bijective() == "4 bytes belong to more than one element"
    assert View("nx", (2, 2), (3, 2), 0, 2).why_not_bijective() == "1 bytes belong to more than one element"
    assert View("nx", (0, 4), (0, 2), 0, 2).intervals() == []


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=12))
def test_merged_and_shared(runs: list[tuple[int, int]]):
    spans = sorted((start, start + length) for start, length in runs)
    union = {byte for start, stop in spans for byte in range(start, stop)}
    assert num_bytes(merged(spans)) == len(union)
    half = len(spans) // 2
    sets = [
        {byte for start, stop in part for byte in range(start, stop)} for part in (spans[:half], spans[half:])
    ]
    assert shared_bytes(merged(spans[:half]), merged(spans[half:])) == len(sets[0] & sets[1])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: place("lnkgx", SIZES, [4, 4], 2), "order 'lnkgx' must name each of '2gklnx' once, x last"),
        (lambda: place("l2nkxg", SIZES, [4, 4], 2), "x last"),
        (lambda: View("nn", (1, 1), (1, 1), 0, 1), "axes 'nn'"),
        (lambda: View("nk", (2, 2), (4, 2), 0, 2).select(n=2), "index n=2, but n has 2 elements"),
        (lambda: View("nk", (2, 2), (4, 2), 0, 2).select(g=0), "axis 'g' is not one of 'nk'"),
        (lambda: View("nk", (2, 2), (4, 2), 0, 2).address(n=0), "index over 'n', but the axes are 'nk'"),
        (lambda: View("nk", (2, 2), (4, 2), 0, 2).permute("ng"), "'ng' is no order of 'nk'"),
        (
            lambda: View("nk", (2, 2), (5, 2), 0, 2).tensor(
                torch.empty(64, dtype=torch.uint8), torch.float16
            ),
            "stride of n of 5 bytes is no multiple of torch.float16's 2",
        ),
        (
            lambda: View("nk", (2, 2), (4, 2), 0, 2).tensor(torch.empty(7, dtype=torch.uint8), torch.float16),
            "bytes 0 … 7 in a pool of 7",
        ),
        (
            lambda: View("n", (2,), (4,), 0, 4).tensor(torch.empty(8, dtype=torch.uint8), torch.float16),
            "torch.float16 has 2 bytes, but elements have 4",
        ),
        (lambda: stacked(place("l2nkgx", SIZES, [4, 5], 2).views), "field 1 is"),
        (lambda: stacked([View("x", (2,), (2,), at, 2) for at in (0, 8, 20)]), "field 2 is"),
        (lambda: CacheLayout(block_align=0), "block_align is 0, must be at least 1"),
        (lambda: CacheLayout(block_gap=-1), "block_gap is -1, must not be negative"),
    ],
)
def test_errors_name_the_thing_and_both_values(act, message: str):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_addresses_agree_with_select():
    view = place("g2nlkx", SIZES, [3, 4], 2, entry_align=16, offset=6).views[1].permute("lnkgx")
    table = view.addresses()
    assert table.numel() == math.prod(view.sizes)
    for index in product(*(range(size) for size in view.sizes)):
        assert int(table[index]) == view.address(**dict(zip(view.axes, index, strict=True)))
