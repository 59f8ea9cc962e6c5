"""Chunk plans written down by hand, and what holds for every plan."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_ref.chunk_plan import (
    CAP,
    EARLIER_CAP,
    Chunk,
    Span,
    equal_share,
    packed,
    places,
    whole_blocks,
    workspace_rows,
)

PLANNERS = pytest.mark.parametrize("plan", [equal_share, packed], ids=["equal_share", "packed"])
LENGTHS = st.lists(st.integers(0, 70), max_size=6)


def spans(*chunks: tuple[tuple[int, int, int], ...]) -> list[Chunk]:
    return [tuple(Span(*span) for span in chunk) for chunk in chunks]


def test_equal_share_by_hand() -> None:
    # 26 rows for two requests with context: 13 each, 12 in whole blocks of 4. The longest needs three chunks.
    assert equal_share([30, 0, 5], 26, 4) == spans(
        ((0, 0, 12), (1, 0, 0), (2, 0, 5)),
        ((0, 12, 24), (1, 0, 0), (2, 5, 5)),
        ((0, 24, 30), (1, 0, 0), (2, 5, 5)),
    )


def test_packed_by_hand() -> None:
    # 26 rows, blocks of 4: 24 of request 0, and the 2 rows left hold no block. Its last 6, then all 5 of
    # request 2, leave 15: three blocks of request 3, whose last 5 tokens open a third chunk.
    assert packed([30, 0, 5, 17], 26, 4) == spans(
        ((0, 0, 24),), ((0, 24, 30), (2, 0, 5), (3, 0, 12)), ((3, 12, 17),)
    )


def test_packed_takes_a_remainder_that_is_no_whole_block() -> None:
    # 10 rows, blocks of 4: request 0 leaves 3, which hold all of request 1 but no block of request 2.
    assert packed([7, 3, 4], 10, 4) == spans(((0, 0, 7), (1, 0, 3)), ((2, 0, 4),))


def test_a_workspace_of_one_block() -> None:
    assert packed([5, 4], 4, 4) == spans(((0, 0, 4),), ((0, 4, 5),), ((1, 0, 4),))
    assert equal_share([5, 4], 8, 4) == spans(((0, 0, 4), (1, 0, 4)), ((0, 4, 5), (1, 4, 4)))


@PLANNERS
def test_no_context_needs_no_chunk_and_no_workspace(plan: Callable[..., list[Chunk]]) -> None:
    assert plan([], 0, 64) == []
    assert plan([0, 0, 0], 0, 64) == []


def test_too_small_a_workspace_is_refused() -> None:
    message = r"workspace_rows: is 127, but 2 requests need a block of 64 rows each"
    with pytest.raises(ValueError, match=message):
        equal_share([100, 0, 1], 127, 64)
    with pytest.raises(ValueError, match=r"workspace_rows: is 63, but 1 requests need a block of 64"):
        packed([0, 1], 63, 64)


def test_spans_fill_the_workspace_one_after_another() -> None:
    (chunk,) = spans(((0, 24, 30), (1, 7, 7), (2, 0, 5)))
    assert places(chunk) == [slice(0, 6), slice(6, 6), slice(6, 11)]
    assert places(()) == []


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "block_size", "cap", "rows"),
    [
        (16384, 256, 16, EARLIER_CAP, 131072),  # 8 · 16384 is the earlier cap exactly
        (16384, 256, 16, CAP, 65536),
        (163840, 256, 64, EARLIER_CAP, 131072),
        (1024, 16, 16, CAP, 8192),  # 8 · 1024
        (1024, 1024, 16, CAP, 65536),  # 4 · 1024 · 16 is the cap exactly
        (128, 64, 64, CAP, 16384),  # 4 · 64 · 64
    ],
)
def test_workspace_rule(max_model_len: int, max_num_seqs: int, block_size: int, cap: int, rows: int) -> None:
    assert workspace_rows(max_model_len, max_num_seqs, block_size, cap) == rows


def test_workspace_rule_leaves_a_block_for_every_request() -> None:
    assert workspace_rows(4096, 1024, 64) == 65536
    with pytest.raises(ValueError, match=r"workspace_rows: is 65536, but 1025 requests need a block of 64"):
        workspace_rows(4096, 1025, 64)


def test_whole_blocks() -> None:
    assert [whole_blocks(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]


@PLANNERS
@given(lengths=LENGTHS, block_size=st.integers(1, 9), spare=st.integers(0, 40))
def test_every_token_once_in_order_within_the_workspace(
    plan: Callable[..., list[Chunk]], lengths: list[int], block_size: int, spare: int
) -> None:
    with_context = sum(length > 0 for length in lengths)
    rows = block_size * (with_context if plan is equal_share else min(with_context, 1)) + spare
    chunks = plan(lengths, rows, block_size)
    tokens = [(i, token) for chunk in chunks for i, start, stop in chunk for token in range(start, stop)]
    want = [(i, token) for i, length in enumerate(lengths) for token in range(length)]
    assert sorted(tokens) == want
    for chunk in chunks:
        assert [span.request for span in chunk] == sorted({span.request for span in chunk})
        assert sum(span.num_tokens for span in chunk) <= rows
        for i, start, stop in chunk:
            assert start % block_size == 0 or start == stop
            assert stop % block_size == 0 or stop == lengths[i]


@given(lengths=LENGTHS, block_size=st.integers(1, 9), spare=st.integers(0, 40))
def test_packed_wastes_nothing(lengths: list[int], block_size: int, spare: int) -> None:
    rows = block_size + spare
    chunks = packed(lengths, rows, block_size)
    tokens = [(i, token) for chunk in chunks for i, start, stop in chunk for token in range(start, stop)]
    assert tokens == sorted(tokens)
    for chunk in chunks:
        assert all(span.num_tokens for span in chunk)
        assert not any(start for _, start, _ in chunk[1:])
    for chunk, after in pairwise(chunks):  # what a chunk leaves holds neither a block nor all that comes next
        left = rows - sum(span.num_tokens for span in chunk)
        assert left < block_size
        assert left < after[0].num_tokens


@given(lengths=LENGTHS, block_size=st.integers(1, 9), spare=st.integers(0, 40))
def test_equal_share_is_equal(lengths: list[int], block_size: int, spare: int) -> None:
    with_context = sum(length > 0 for length in lengths)
    rows = block_size * with_context + spare
    chunks = equal_share(lengths, rows, block_size)
    if with_context:
        share = rows // with_context // block_size * block_size
        assert len(chunks) == -(-max(lengths) // share)
        for i, chunk in enumerate(chunks):
            assert len(chunk) == len(lengths)
            for span, length in zip(chunk, lengths, strict=True):
                assert span.num_tokens == min(max(length - i * share, 0), share)
