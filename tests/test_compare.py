"""The comparator: what is looked at first, what fails closed, and how a place reads."""

import math
from types import SimpleNamespace

import pytest
import torch

from oracles import bounds, compare
from oracles.bounds import Admissible, nearest
from oracles.compare import identical, place, why_not_comparable, within, worst_of
from oracles.verdict import Finding

NAN, INF = math.nan, math.inf


def admissible(mid, radius, dtype=torch.float32) -> Admissible:
    return Admissible(torch.tensor(mid).double(), torch.tensor(radius).double(), dtype)


@pytest.mark.parametrize(
    ("got", "mid", "radius", "ok"),
    [
        (1.0, 1.0, 0.0, True),
        (1.0 + 2.0**-23, 1.0, 0.0, False),
        (1.0 + 2.0**-23, 1.0, 2.0**-24 * 1.5, True),
        (0.5, 1.0, 0.5, True),
        (0.49, 1.0, 0.5, False),
        (NAN, 1.0, 0.5, False),
        (NAN, 1.0, INF, False),
        (1.0, NAN, 0.5, False),
        (1.0, NAN, NAN, False),
        (1.0, 1.0, NAN, False),
        (NAN, NAN, NAN, True),
        (INF, 1.0, INF, False),
        (1e30, 1.0, INF, True),
        (-INF, -INF, 0.0, True),
        (INF, -INF, 0.0, False),
        (-3e38, -INF, 0.0, False),
        (-INF, -3e38, 1e37, False),
        (-0.0, 0.0, 0.0, True),
        (1e-45, 0.0, 0.0, False),
    ],
)
def test_one_element(got, mid, radius, ok):
    finding = within("out", torch.tensor([got]), admissible([mid], [radius]))
    assert finding.ok is ok
    assert (finding.num_bad, finding.num_checked) == (0 if ok else 1, 1)
    assert finding.worst is not None
    assert (finding.worst.ratio > 1.0) is not ok


def test_an_infinity_is_right_where_the_truth_rounds_to_one():
    overflowing = admissible([65519.0, 65519.0], [2.0, 2.0], torch.float16)
    assert within("out", torch.tensor([INF, 65504.0]).half(), overflowing).ok
    assert not within("out", torch.tensor([INF, 60000.0]).half(), overflowing).ok


def test_the_outputs_rounding_costs_nothing():
    """Of bfloat16 values around 1 + 2^-8, exactly the two neighbours are roundings of the ball."""
    want = admissible([1.0 + 2.0**-8] * 4, [2.0**-12] * 4, torch.bfloat16)
    got = torch.tensor([1.0 - 2.0**-8, 1.0, 1.0 + 2.0**-7, 1.0 + 2.0**-6]).bfloat16()
    assert [
        within("out", x[None], Admissible(*(y[:1] for y in want[:2]), torch.bfloat16)).ok for x in got
    ] == [
        False,
        True,
        True,
        False,
    ]


def test_what_differs_before_any_value_is_said_in_one_line():
    want = torch.zeros(2, 3)
    assert why_not_comparable("out", None, want, torch.float32) == "out: is NoneType, must be a tensor"
    assert (
        why_not_comparable("out", want.half(), want, torch.float32)
        == "out: dtype is float16, must be float32"
    )
    assert why_not_comparable("out", want.T, want, torch.float32) == "out: shape is [3, 2], must be [2, 3]"
    elsewhere = torch.zeros(2, 3, device="meta")
    sparse = want.to_sparse()
    told = "out: layout is sparse_coo, must be strided"
    assert why_not_comparable("out", sparse, want, torch.float32) == told
    assert why_not_comparable("out", elsewhere, want, torch.float32) == "out: is on meta, must be on cpu"
    for finding in (identical("out", want.T, want), within("out", want.T, admissible([[0.0] * 3] * 2, 0.0))):
        assert finding == Finding(ok=False, detail="out: shape is [3, 2], must be [2, 3]")


def test_no_elements_are_all_right():
    assert within(
        "out",
        torch.zeros(0, 3),
        Admissible(torch.zeros(0, 3).double(), torch.zeros(0, 3).double(), torch.float32),
    ).ok
    assert identical("out", torch.zeros(0, 3), torch.zeros(0, 3)).ok


def test_identical_compares_bits():
    assert not identical("out", torch.tensor([0.0]), torch.tensor([-0.0])).ok
    assert identical("out", torch.tensor([NAN, 1.0]), torch.tensor([-NAN, 1.0])).ok
    assert not identical(
        "cache", torch.tensor([255], dtype=torch.uint8), torch.tensor([127], dtype=torch.uint8)
    ).ok
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert identical("cache", codes, codes.clone()).ok
    assert identical("cache", codes, codes[torch.arange(255, -1, -1)]).num_bad == 256


def test_a_failure_names_the_worst_element():
    got = torch.zeros(4, 2, 3)
    got[2, 1, 0], got[3, 0, 2] = 1.0, 5.0
    want = Admissible(torch.zeros(4, 2, 3).double(), torch.full((4, 2, 3), 0.5).double(), torch.float32)
    inputs = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 1, 1, 4]))
    finding = within("out", got, want, "t h v", inputs)
    assert (finding.num_bad, finding.num_checked) == (2, 24)
    assert finding.worst is not None
    assert (finding.worst.index, finding.worst.got, finding.worst.want) == ((3, 0, 2), 5.0, 0.0)
    assert finding.worst.place == "request 2, query 2, head 0, channel 2"
    assert finding.detail == (
        "out: 2 of 24 elements are not what they may be; worst at request 2, query 2, head 0, channel 2: "
        "got 5, want 0 ± 0.5 (10 × the bound)"
    )


def test_nobody_is_some_bounds_away_from_infinity():
    want = Admissible(torch.tensor([-torch.inf]).double(), torch.tensor([1e300]).double(), torch.float32)
    finding = within("lse", torch.tensor([0.5]), want, "h")
    assert finding.detail.endswith("worst at head 0: got 0.5, must be -inf")


@pytest.mark.parametrize(
    ("letters", "index", "fields", "words"),
    [
        ("t h", (1, 3), {}, "token 1, head 3"),
        ("t c", (2, 7), {"cu_seqlens": torch.tensor([0, 2, 5])}, "request 1, token 0, channel 7"),
        ("b m", (1, 2), {}, "request 1, column 2"),
        (
            "n k e",
            (1, 2, 5),
            {"kv_cache": torch.zeros(2, 4, 8), "slot_mapping": torch.tensor([3, 6])},
            "block 1, slot 2, element 5, token 1",
        ),
        (
            "n k e",
            (1, 3, 5),
            {"kv_cache": torch.zeros(2, 4, 8, dtype=torch.uint8), "slot_mapping": torch.tensor([3, 6])},
            "block 1, slot 3, byte 5, no new token's",
        ),
        ("", (4, 5), {}, "index [4, 5]"),
    ],
)
def test_places_in_the_problems_words(letters, index, fields, words):
    assert place(letters, index, SimpleNamespace(**fields)) == words


def test_a_broken_claim_speaks_before_a_kept_one():
    close = within("a", torch.tensor([1.0]), admissible([1.5], [0.5]))
    broken = identical("b", torch.tensor([1.0]), torch.tensor([2.0]))
    malformed = Finding(ok=False, detail="c: shape")
    assert worst_of([close, broken]) == broken
    assert not worst_of([close, malformed]).ok
    assert worst_of([Finding(ok=True), close]) == close


def test_a_tensor_in_a_graph_is_compared_by_its_values():
    got, want = (torch.tensor([1.0, x], requires_grad=True) for x in (3.0, 2.0))
    findings = [
        within("out", got, Admissible(want.double(), torch.zeros(2, dtype=torch.float64), torch.float32)),
        identical("out", got, want),
    ]
    assert [(finding.ok, finding.worst.index, finding.worst.got) for finding in findings] == [
        (False, (1,), 3.0)
    ] * 2


def ordinary(seed):
    draws = torch.Generator().manual_seed(seed)
    mid, radius = (torch.randn(6, 35, dtype=torch.float64, generator=draws) for _ in range(2))
    radius = radius.abs() * 0.01
    return mid, radius, (mid + 0.5 * radius).bfloat16()


@pytest.mark.parametrize("bad", [None, (0, 0), (5, 34)], ids=str)
@pytest.mark.parametrize("odd", [None, NAN, INF], ids=str)
def test_pieces_are_judged_as_the_whole_is(monkeypatch, bad, odd):
    mid, radius, got = ordinary(3)
    if odd is not None:
        mid[2, 7] = odd
        got[2, 7] = odd
    if bad:
        got[bad] = 7.0
    want = Admissible(mid, radius, torch.bfloat16)
    monkeypatch.setattr(compare, "PIECE", 1000)
    whole = within("out", got, want, "t v")
    monkeypatch.setattr(compare, "PIECE", 16)
    pieces = within("out", got, want, "t v")
    assert (pieces.ok, pieces.detail, pieces.worst, pieces.num_bad, pieces.num_checked) == (
        *(whole.ok, whole.detail, whole.worst, whole.num_bad),
        210,
    )
    assert whole.ok == (bad is None)
    if bad:
        assert whole.worst.index == bad
        assert pieces.pattern() == whole.pattern()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pieces_are_rounded_as_the_whole_is(monkeypatch, dtype):
    x = ordinary(4)[0].T * 2.0**-10
    whole = nearest(x, dtype)
    monkeypatch.setattr(bounds, "PIECE", 16)
    assert torch.equal(nearest(x, dtype), whole)
