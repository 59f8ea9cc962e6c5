"""Block transfer between random layouts: the right bytes arrive, no other byte moves, in how many runs."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from random_layouts import Pool, layouts, orders, pools

from mla_ref.layout import poisoned_pool
from mla_ref.layout_algebra import KV_ORDERS, Placement, block_bytes, place
from mla_ref.transfer import Descriptor, copy, descriptors
from mla_ref.values import integers

many = settings(max_examples=4 * settings.default.max_examples)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Pool, Pool, list[tuple[int, int]], list[int]]:
    """Two pools of the same contents, distinct blocks of each, and some of the layers."""
    source = draw(pools())
    sizes = {**source.sizes, "n": draw(st.integers(2, 5))}
    target = replace(source, order=draw(orders()), sizes=sizes, layout=draw(layouts(source.itemsize)))
    count = draw(st.integers(1, min(source.sizes["n"], sizes["n"])))
    here = draw(st.permutations(range(source.sizes["n"])))[:count]
    there = draw(st.permutations(range(sizes["n"])))[:count]
    layers = draw(st.lists(st.sampled_from(range(source.sizes["l"])), unique=True, min_size=1))
    return source, target, list(zip(here, there, strict=True)), layers


def filled(placement: Placement, seed: int) -> torch.Tensor:
    """A pool of random bytes, gaps included."""
    return integers(seed, "pool", 256, placement.pool_bytes).to(torch.uint8)


def elements(placement: Placement, pool: torch.Tensor, field: int, layer: int, block: int) -> torch.Tensor:
    """Bytes [k g x itemsize] of a block, read by address, one element at a time."""
    view = placement.views[field].select(l=layer, n=block).permute("kgx")
    return pool[view.addresses()[..., None] + torch.arange(view.itemsize)]


@many
@given(drawn=transfers(), seed=st.integers(0, 2**31))
def test_the_right_bytes_arrive_and_no_other_byte_changes(drawn, seed: int):
    source, target, blocks, layers = drawn
    here, there = source.placement(), target.placement()
    source_pool, target_pool = filled(here, seed), filled(there, seed + 1)
    before_source, before = source_pool.clone(), target_pool.clone()
    copy(descriptors(here.views, there.views, blocks, layers), source_pool, target_pool)
    assert torch.equal(source_pool, before_source)
    moved = torch.zeros(there.pool_bytes, dtype=torch.bool)
    for block, to in blocks:
        for layer in layers:
            for start, stop in block_bytes(there.views, l=layer, n=to):
                moved[start:stop] = True
            for field in (0, 1):
                got = elements(there, target_pool, field, layer, to)
                assert torch.equal(got, elements(here, source_pool, field, layer, block))
    assert torch.equal(target_pool[~moved], before[~moved])


@many
@given(drawn=transfers(), seed=st.integers(0, 2**31))
def test_there_and_back_is_the_identity(drawn, seed: int):
    source, target, blocks, layers = drawn
    here, there = source.placement(), target.placement()
    pool, away, home = filled(here, seed), poisoned_pool(there.pool_bytes), poisoned_pool(here.pool_bytes)
    copy(descriptors(here.views, there.views, blocks, layers), pool, away)
    back = [(to, block) for block, to in blocks]
    copy(descriptors(there.views, here.views, back, layers), away, home)
    expected = poisoned_pool(here.pool_bytes)
    for block, _ in blocks:
        for layer in layers:
            for start, stop in block_bytes(here.views, l=layer, n=block):
                expected[start:stop] = pool[start:stop]
    assert torch.equal(home, expected)


@many
@given(drawn=transfers())
def test_runs_are_maximal_and_partition_the_block(drawn):
    source, target, blocks, layers = drawn
    for pair in blocks:
        runs = descriptors(source.placement().views, target.placement().views, [pair], layers)
        assert all(
            a.source + a.num_bytes != b.source or a.target + a.num_bytes != b.target
            for a in runs
            for b in runs
        )
        for side, placement, block in ((0, source.placement(), pair[0]), (1, target.placement(), pair[1])):
            wanted = [run for layer in layers for run in block_bytes(placement.views, l=layer, n=block)]
            covered = sorted(byte for run in runs for byte in range(run[side], run[side] + run.num_bytes))
            assert covered == sorted(byte for start, stop in wanted for byte in range(start, stop))


SIZES = {"l": 3, "n": 4, "k": 16, "g": 4}


def runs_between(source: str, target: str, layers: list[int] | None) -> int:
    pools_of = [place(KV_ORDERS[name], SIZES, [64, 64], 2).views for name in (source, target)]
    return len(descriptors(*pools_of, [(1, 2)], layers))


@pytest.mark.parametrize(
    ("source", "target", "one_layer", "all_layers"),
    [
        ("kv_first_nhd", "kv_first_nhd", 2, 6),
        ("blocks_first_nhd", "blocks_first_nhd", 1, 3),
        ("blocks_first_hnd", "blocks_first_hnd", 1, 3),
        ("unified_nhd", "unified_nhd", 1, 1),
        ("packed_blhnc", "packed_blhnc", 1, 1),
        ("packed_lhbnc", "packed_lhbnc", 4, 12),
        ("kv_first_nhd", "blocks_first_nhd", 2, 6),
        ("unified_nhd", "blocks_first_nhd", 1, 3),
        # the last row of the keys and the first of the values are neighbours in both
        ("blocks_first_nhd", "blocks_first_hnd", 2 * 16 * 4 - 1, 3 * (2 * 16 * 4 - 1)),
        ("packed_lbnhc", "blocks_first_nhd", 2 * 16 * 4, 3 * 2 * 16 * 4),
    ],
)
def test_number_of_descriptors(source: str, target: str, one_layer: int, all_layers: int):
    """Two a block and layer where keys and values are apart, one where they are together."""
    assert runs_between(source, target, [1]) == one_layer
    assert runs_between(source, target, None) == all_layers


def test_lengths_of_the_published_descriptors():
    """Blocks first sends 2·k·h·d elements in one piece where key-value first sends k·h·d twice."""
    half = 16 * 4 * 64 * 2
    kv_first = place(KV_ORDERS["kv_first_nhd"], SIZES, [64, 64], 2).views
    blocks_first = place(KV_ORDERS["blocks_first_nhd"], SIZES, [64, 64], 2).views
    assert [run.num_bytes for run in descriptors(kv_first, kv_first, [(0, 0)], [0])] == [half, half]
    assert descriptors(blocks_first, blocks_first, [(1, 3)], [0]) == [
        Descriptor(2 * half, 6 * half, 2 * half)
    ]


def without_values(runs: list[Descriptor], views) -> list[Descriptor]:
    return [run for run in runs if run.source < views[1].offset]


MISTAKES = {
    "the second half of the fields stays behind": lambda runs, views: without_values(runs, views),
    "a run too few": lambda runs, views: runs[:-1],
    "runs of half their length": lambda runs, views: [r._replace(num_bytes=r.num_bytes // 2) for r in runs],
    "the block of the source is used for the target": lambda runs, views: [
        r._replace(target=r.source) for r in runs
    ],
    "one element too far": lambda runs, views: [r._replace(num_bytes=r.num_bytes + 2) for r in runs],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_transfer_is_seen(mistake: str, seed: int):
    here = place(KV_ORDERS["kv_first_nhd"], SIZES, [8, 8], 2, block_gap=64)
    pool, away = filled(here, seed), poisoned_pool(here.pool_bytes)
    runs = descriptors(here.views, here.views, [(1, 3)], [1])
    expected = away.clone()
    copy(runs, pool, expected)
    copy(MISTAKES[mistake](runs, here.views), pool, away)
    assert not torch.equal(away, expected)


@pytest.mark.parametrize(
    ("change", "blocks", "message"),
    [
        ({"k": 8}, [(0, 0)], "field 0 is {'l': 3, 'n': 0, 'k': 16"),
        ({}, [(0, 1), (2, 1)], "target blocks [1, 1] are not distinct"),
        ({}, [(4, 0)], "index n=4, but n has 4 elements"),
    ],
)
def test_errors_name_the_thing_and_both_values(change: dict[str, int], blocks, message: str):
    here = place("l2nkgx", SIZES, [8, 8], 2).views
    there = place("ln2kgx", {**SIZES, **change}, [8, 8], 2).views
    with pytest.raises(ValueError, match=re.escape(message)):
        descriptors(here, there, blocks)


def test_elements_of_another_size_are_an_error():
    narrow, wide = (place("l2nkgx", SIZES, [8, 8], size).views for size in (2, 4))
    with pytest.raises(ValueError, match=r"field 0 is .* × 2 B, but target .* × 4 B"):
        descriptors(narrow, wide, [(0, 0)])


def test_a_missing_field_is_an_error():
    views = place("l2nkgx", SIZES, [8, 8], 2).views
    with pytest.raises(ValueError, match="source has 2 fields, target 1"):
        descriptors(views, views[:1], [(0, 0)])
