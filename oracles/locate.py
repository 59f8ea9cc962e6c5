"""Where the bad elements of a tensor are, in the problem's words, and what would explain all of them.

A guess is made only where one explanation, and no other, gives every bad element, each within its own bound.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from oracles.verdict import Pattern

WORDS = {
    "b": "request",
    "h": "head",
    "g": "key/value head",
    "n": "block",
    "k": "slot",
    "m": "column",
    "j": "key",
    "e": "element",
    "t": "row",
    "s": "state",
}

LOG2_E = math.log2(math.e)

# Cells of the map of bad elements, and elements that a row is first compared in.
MAX_CELLS = 16
SAMPLE = 8

# Rows, heads or channels beyond which nobody looks for where a wrong one came from.
MAX_MOVED = 600

# Elements beyond which copies would be too large, and nothing is explained.
MAX_EXPLAINED = 2**26

# Channels that kernels take at once.
TILES = (128, 64, 32, 16)


class Rows(NamedTuple):
    """Of each packed row: its request, its number in it, and how many tokens, keys and seen keys it has."""

    num_requests: int
    request: torch.Tensor
    query: torch.Tensor
    q_len: torch.Tensor
    kv_len: torch.Tensor | None
    sees: torch.Tensor | None


class _Bad(NamedTuple):
    """A tensor, what it should be and how far it may be from that, float64, and where it is not."""

    got: torch.Tensor
    want: torch.Tensor
    bound: torch.Tensor
    mask: torch.Tensor

    def at(self) -> "_Bad":
        """The bad elements alone."""
        return _Bad(*(x[self.mask] for x in self))

    def box(self) -> "_Bad":
        """All elements of the rows, heads and channels with bad ones: what explains these holds for all."""
        box = self
        for axis in range(self.mask.dim()):
            others = [i for i in range(self.mask.dim()) if i != axis]
            kept = self.mask.any(others) if others else self.mask
            box = _Bad(*(x.movedim(axis, 0)[kept].movedim(0, axis) for x in box))
        return _Bad(*(x.flatten() for x in box))

    def first(self, axis: int) -> "_Bad":
        """[n m], one axis first and all others as one."""
        return _Bad(*(x.movedim(axis, 0).flatten(1) if x.dim() > 1 else x[:, None] for x in self))


def locate(
    name: str,
    letters: str,
    got: torch.Tensor,
    want: torch.Tensor,
    bound: torch.Tensor,
    inside: torch.Tensor,
    inputs: Any,
) -> Pattern:
    """The pattern of the elements that are not ``inside``; there is at least one.

    letters: the tensor's axes; inputs: the problem's, or None.
    """
    axes = letters.split() if len(letters.split()) == got.dim() else [""] * got.dim()
    bad = _Bad(got.double(), want.double(), bound.double(), ~inside)
    rows = rows_of(inputs, got.shape[0]) if axes[:1] == ["t"] else None
    where = ", ".join(filter(None, (*_axes(axes, bad.mask, rows, inputs), _kind(got, bad))))
    guesses: list[str] = []
    if got.numel() <= MAX_EXPLAINED:
        guesses = list(dict.fromkeys(_guesses(name, axes, bad, rows, inputs)))
    return Pattern(where=where, guess=guesses[0] if len(guesses) == 1 else "", **_map(axes, bad.mask, rows))


def rows_of(inputs: Any, num_rows: int) -> Rows | None:
    """Whose each packed row is; None where rows are not packed tokens of requests."""
    offsets = getattr(inputs, "cu_seqlens_q", getattr(inputs, "cu_seqlens", None))
    if offsets is None or not offsets.numel() or int(offsets[-1]) != num_rows:
        return None
    device, sizes = offsets.device, [b - a for a, b in pairwise(offsets.tolist())]
    request = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)
    q_len = torch.tensor(sizes, device=device)[request]
    query = torch.arange(num_rows, device=device) - offsets[:-1].to(torch.int64)[request]
    kv_len = getattr(inputs, "cache_seqlens", None)
    if kv_len is None or not hasattr(inputs, "cu_seqlens_q"):
        return Rows(len(sizes), request, query, q_len, None, None)
    kv_len = kv_len.to(torch.int64)[request]
    return Rows(len(sizes), request, query, q_len, kv_len, (kv_len - q_len + query + 1).clamp(min=0))


def _axes(axes: Sequence[str], mask: torch.Tensor, rows: Rows | None, inputs: Any) -> Iterator[str]:
    """Which indices of each axis have a bad element, and how many elements of those are bad."""
    extent = 1
    for axis, letter in enumerate(axes):
        flags = mask.movedim(axis, 0).flatten(1).any(1) if mask.dim() > 1 else mask
        extent *= int(flags.sum())
        if letter == "t" and rows is not None:
            yield from _row_words(flags, rows, inputs)
        elif len(flags) > 1:
            yield _span(_word(letter), flags, tiles=letter not in WORDS)
    count = int(mask.sum())
    yield "" if count == extent else f"{_percent(count, extent)} % of their elements"


def _word(letter: str) -> str:
    return WORDS.get(letter, "channel" if letter else "element")


def _span(word: str, flags: torch.Tensor, tiles: bool = False) -> str:
    """The indices that are set: "every head", "heads 64..127 of 128", "heads 1, 3 of 4"."""
    at, size = flags.nonzero().flatten().tolist(), len(flags)
    if len(at) == size:
        return f"every {word}"
    if len(at) == 1:
        return f"{word} {at[0]} of {size}"
    first, last = at[0], at[-1]
    if last - first + 1 == len(at):
        tile = next((t for t in TILES if len(at) == t and first % t == 0), None) if tiles else None
        whole = f" (tile {first // tile} of {tile})" if tile else ""
        return f"{word}s {first}..{last} of {size}{whole}"
    step = at[1] - first
    if len(at) > 2 and all(b - a == step for a, b in pairwise(at)):
        return f"every {step}. {word} from {first} on, of {size}"
    if len(at) <= 6:
        return f"{word}s {', '.join(map(str, at))} of {size}"
    if size - len(at) <= 3:
        return f"every {word} but {', '.join(map(str, (~flags).nonzero().flatten().tolist()))}"
    return f"{len(at)} of {size} {word}s"


def _row_words(flags: torch.Tensor, rows: Rows, inputs: Any) -> Iterator[str]:
    """Requests, the queries in them, and what the bad rows have that no other row has."""
    requests = torch.zeros(rows.num_requests, dtype=torch.bool, device=flags.device)
    requests[rows.request[flags]] = True
    has_rows = torch.zeros_like(requests)
    has_rows[rows.request] = True
    mates = flags | ~requests[rows.request]
    if rows.num_requests > 1:
        every = bool((requests == has_rows).all())
        yield "every request" if every else _span("request", requests)
    if not bool(mates.all()):
        numbers = rows.query[flags]
        alone = int(numbers.min()) == int(numbers.max())
        newest = bool((rows.query[flags] == rows.q_len[flags] - 1).all())
        if newest:
            yield "the newest query"
        elif alone:
            yield f"query {int(numbers[0])}"
        else:
            yield f"{int(flags.sum())} of their {int(requests[rows.request].sum())} queries"
    same = (what for what, having in _conditions(rows, inputs) if torch.equal(having, flags))
    if not bool(flags.all()) and (what := next(same, "")):
        yield f"exactly the rows {what}"


def _conditions(rows: Rows, inputs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What may be special about a row."""
    if rows.kv_len is None or rows.sees is None:
        yield "of requests with more than one token", rows.q_len > 1
        return
    yield "that see no key", rows.sees == 0
    yield "of requests without older tokens", rows.kv_len == rows.q_len
    yield "of requests with older tokens", rows.kv_len > rows.q_len
    yield "of requests with more than one query", rows.q_len > 1
    yield "of requests with one query", rows.q_len == 1
    yield "before their request's newest", rows.query < rows.q_len - 1
    for length in sorted(set(rows.sees.tolist())):
        yield f"that see more than {length} key{'s'[: length != 1]}", rows.sees > length
    for length in sorted(set(rows.sees.tolist()), reverse=True):
        yield f"that see fewer than {length} key{'s'[: length != 1]}", rows.sees < length
    cache = getattr(inputs, "kv_cache", getattr(inputs, "key_cache", None))
    if cache is not None:
        yield "of requests whose last block is not full", rows.kv_len % cache.shape[1] != 0
        yield "of requests whose last block is full", rows.kv_len % cache.shape[1] == 0


def _kind(got: torch.Tensor, bad: _Bad) -> str:
    """What all bad elements are: "all 0"."""
    values = bad.at()
    if got.dtype == torch.uint8:
        return "all 0xFF" if bool((values.got == 255).all()) else ""
    for what, is_so in (
        ("NaN", values.got.isnan()),
        ("+inf", values.got == torch.inf),
        ("-inf", values.got == -torch.inf),
        ("0", values.got == 0.0),
    ):
        if bool(is_so.all()):
            return f"all {what}"
    if bool((~values.got.isfinite() & values.want.isfinite()).any()):
        return "some of them not finite"
    return ""


def _guesses(name: str, axes: Sequence[str], bad: _Bad, rows: Rows | None, inputs: Any) -> Iterator[str]:
    """Every explanation that gives all bad elements."""
    values = bad.at()
    if name == "lse" and bool((values.want == -torch.inf).all()):
        what = {0.0: "0", torch.inf: "+inf"}.get(float(values.got[0]))
        if what and bool((values.got == values.got[0]).all()):
            yield f"lse of a row without keys is {what} where -inf is due"
        return
    if bool(values.got.isfinite().all() and values.want.isfinite().all() and values.got.any()):
        box = bad.box()
        odd = ~(box.got.isfinite() & box.want.isfinite())
        if bool((box.got == box.want)[odd].all()):
            box = _Bad(*(x[~odd] for x in box))
            yield from _factors(name, box, inputs)
            if name == "lse":
                yield from _offsets(box)
    yield from _moved(axes, bad, rows)
    if (
        bad.got.dim() == 2
        and bad.got.shape[0] == bad.got.shape[1] > 1
        and _explains(bad, bad.want.T, bad.bound.T)
    ):
        yield f"{name} has its two axes exchanged"


def _explains(bad: _Bad, want: torch.Tensor, bound: torch.Tensor) -> bool:
    """Whether all of a tensor is something else, where that is not all the same."""
    finite = want[want.isfinite()]
    if not len(finite) or bool((finite == finite[0]).all()):
        return False
    return bool(_near(bad.got, want, bound).all())


def _near(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return (got == want) | ((got - want).abs() <= bound)


def _factors(name: str, box: _Bad, inputs: Any) -> Iterator[str]:
    """Every element is the right one times the same number."""
    if not bool((box.want != 0.0).any()):
        return
    found: dict[float, str] = {}
    for what, factor in _numbers(inputs):
        if bool(_near(box.got, factor * box.want, max(1.0, abs(factor)) * box.bound).all()):
            found.setdefault(factor, what)
    if name == "lse" and LOG2_E in found:
        found[LOG2_E] = "log2(e), as in base 2,"
    yield from (f"{name} is {what} times the right one" for what in found.values())
    clear = box.want.abs() > 8.0 * box.bound
    if not found and int(clear.sum()) >= SAMPLE:
        low, high = _interval(*(x[clear] for x in box[:3]))
        middle = 0.5 * (low + high)
        if (
            low <= high
            and middle
            and bool(_near(box.got, middle * box.want, max(1.0, abs(middle)) * box.bound).all())
        ):
            yield f"{name} is {middle:.4g} times the right one"


def _interval(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> tuple[float, float]:
    """Numbers x for which got is x · want, each within its bound."""
    a, b = (got - bound) / want, (got + bound) / want
    return float(torch.minimum(a, b).max()), float(torch.maximum(a, b).min())


def _numbers(inputs: Any) -> Iterator[tuple[str, float]]:
    """Factors that have been forgotten, or applied twice, before."""
    yield "log2(e)", LOG2_E
    yield "ln(2)", 1.0 / LOG2_E
    yield "-1", -1.0
    yield "2", 2.0
    yield "1 / 2", 0.5
    scales = {}
    for field in ("kv_scale", "k_scale", "v_scale", "softmax_scale"):
        value = getattr(inputs, field, None)
        scale = math.nan if value is None else float(value)
        if math.isfinite(scale) and scale not in (0.0, 1.0):
            scales[field] = scale
    if {"k_scale", "v_scale"} <= set(scales):
        scales["k_scale / v_scale"] = scales["k_scale"] / scales["v_scale"]
    for field, scale in scales.items():
        yield f"{field} = {scale:.4g}", scale
        yield (
            f"1 / ({field}) = {1 / scale:.4g}" if "/" in field else f"1 / {field} = {1 / scale:.4g}",
            1.0 / scale,
        )
    for field, scale in scales.items():
        yield f"({field})² = {scale * scale:.4g}", scale * scale
        yield f"1 / ({field})² = {1 / scale / scale:.4g}", 1.0 / scale / scale


def _offsets(box: _Bad) -> Iterator[str]:
    """Every lse is the right one and the same number."""
    low = float((box.got - box.want - box.bound).max())
    high = float((box.got - box.want + box.bound).min())
    if len(box.got) < SAMPLE or not low <= high:
        return
    if low <= math.log(2.0) <= high:
        yield "lse is larger by ln(2), as if every key counted twice"
    elif low <= -math.log(2.0) <= high:
        yield "lse is smaller by ln(2), as if half of the weight were lost"
    else:
        yield f"lse is off by {0.5 * (low + high):.4g} everywhere"


def _moved(axes: Sequence[str], bad: _Bad, rows: Rows | None) -> Iterator[str]:
    """Bad rows, heads or channels are those of another place."""
    for axis, letter in enumerate(axes):
        if letter in ("", "n", "k") or not 1 < bad.got.shape[axis] <= MAX_MOVED:
            continue
        sources = _sources(bad.first(axis))
        if sources:
            yield _moved_words(_word(letter), bad.got.shape[axis], sources, rows if letter == "t" else None)


def _sources(bad: _Bad) -> dict[int, int]:
    """Of each bad row of [n m] the only other row that it is; empty unless there is one for each of them."""
    wrong = bad.mask.any(1).nonzero().flatten()
    if bad.got.shape[1] < 4:
        return {}
    plain = torch.tensor([bool((row == row[0]).all()) for row in bad.got[wrong]])
    if bool(plain.any()):
        return {}  # rows of one number could be anyone's
    sample = torch.linspace(0, bad.got.shape[1] - 1, SAMPLE).long()
    got = bad.got[wrong][:, None, sample]
    alike = _near(got, bad.want[None, :, sample], bad.bound[None, :, sample]).all(2)
    sources = {}
    for i, row in enumerate(wrong.tolist()):
        found = [
            j
            for j in alike[i].nonzero().flatten().tolist()
            if j != row
            and bool(_near(bad.got[row], bad.want[j], bad.bound[j]).all())
            and int((~_near(bad.want[row], bad.want[j], bad.bound[j])).sum()) >= 4  # else anything is near
        ]
        if len(found) != 1:
            return {}
        sources[row] = found[0]
    return sources


def _moved_words(word: str, size: int, sources: dict[int, int], rows: Rows | None) -> str:
    if rows is not None:
        requests = {(int(rows.request[row]), int(rows.request[source])) for row, source in sources.items()}
        here, there = next(iter(requests))
        if len(requests) == 1 and here != there:
            if int((rows.request == here).sum()) == len(sources):
                return f"rows of request {here} are those of request {there}"
            if len(sources) == 1:
                (row, source), query = next(iter(sources.items())), rows.query
                return f"query {query[row]} of request {here} is query {query[source]} of request {there}"
    half = size // 2
    steps = {(source - row + half) % size - half for row, source in sources.items()}
    if len(steps) == 1 and len(sources) > 1:
        step = steps.pop()
        return f"every bad {word} is the one {abs(step)} {'before' if step < 0 else 'after'} it"
    if len(set(sources.values())) == 1 and len(sources) > 1:
        return f"every bad {word} is {word} {next(iter(sources.values()))}"
    if len(sources) == 2 and all(sources.get(source) == row for row, source in sources.items()):
        return f"{word}s {' and '.join(map(str, sources))} are exchanged"
    pairs = ", ".join(f"{row} is {source}" for row, source in list(sources.items())[:4])
    more = ", …" if len(sources) > 4 else ""
    return f"{word}s are in each other's place: {pairs}{more}"


def _map(axes: Sequence[str], mask: torch.Tensor, rows: Rows | None) -> dict[str, Any]:
    """Shares of bad elements by request (or the first axis) and head (or the second)."""
    second = axes.index("h") if "h" in axes[1:] else 1
    if mask.dim() > 1:
        flat = mask.movedim(second, 1).reshape(len(mask), mask.shape[second], -1).double().mean(2)
    else:
        flat = mask.double().reshape(-1, 1)
    row = _word(axes[0]) if axes else "index"
    if rows is not None:
        row = "request"
        total = flat.new_zeros(rows.num_requests, flat.shape[1]).index_add_(0, rows.request, flat)
        flat = total / torch.bincount(rows.request, minlength=rows.num_requests).clamp(min=1)[:, None]
    steps = [-(-size // MAX_CELLS) for size in flat.shape]
    cells = [
        tuple(_percent(float(part.mean()), 1.0) for part in torch.split(band, steps[1], dim=1))
        for band in torch.split(flat, steps[0])
    ]
    return {
        "row": row,
        "column": _word(axes[second]) if mask.dim() > 1 else "",
        "row_step": steps[0],
        "column_step": steps[1],
        "shares": tuple(cells),
    }


def _percent(part: float, whole: float) -> int:
    """0 and 100 only where it is none and all."""
    if part <= 0.0:
        return 0
    return 100 if part >= whole else min(max(round(100.0 * part / whole), 1), 99)
