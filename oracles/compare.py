"""The one comparator: type, shape and device first, then masks, then every element against its own bound."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from oracles.bounds import PIECE, Admissible, spacing
from oracles.locate import WORDS, locate
from oracles.verdict import Finding, Worst

# The letters of a tensor's axes, or a function that words an index.
Where = str | Callable[[tuple[int, ...]], str]


def within(name: str, got: torch.Tensor, want: Admissible, where: Where = "", inputs: Any = None) -> Finding:
    """``got`` holds admissible values only.

    NaN is where the truth is NaN and nowhere else; an infinity is where the truth is infinite, or rounds to
    one. ``worst`` is the element with the largest error over its bound, half a spacing of the type included,
    whether it is outside or not.
    """
    if reason := why_not_comparable(name, got, want.mid, want.dtype):
        return Finding(ok=False, detail=reason)
    if not got.numel():
        return Finding(ok=True)
    got, want = got.detach(), want._replace(mid=want.mid.detach(), radius=want.radius.detach())
    return _finding(name, got, _compared(got, want), want.mid, where, inputs)


class _Compared(NamedTuple):
    """Of each element: whether it is what it may be, its error over its bound, and this bound."""

    inside: torch.Tensor
    ratio: torch.Tensor
    bound: torch.Tensor


def _compared(got: torch.Tensor, want: Admissible) -> _Compared:
    """Piece by piece on the CPU: of a large whole, some forty temporaries would go through no cache."""
    if got.device.type != "cpu" or got.numel() <= PIECE:
        return _compared_at_once(got, want)
    flat = [x.reshape(-1) for x in (got, want.mid, want.radius)]
    pieces = [
        _compared_at_once(piece, want._replace(mid=mid, radius=radius))
        for piece, mid, radius in zip(*(torch.split(x, PIECE) for x in flat), strict=True)
    ]
    return _Compared(*(torch.cat(parts).reshape(got.shape) for parts in zip(*pieces, strict=True)))


def _compared_at_once(got: torch.Tensor, want: Admissible) -> _Compared:
    value, (low, high) = got.double(), want.interval()
    inside = (low <= value) & (value <= high)
    error = (value - want.mid).abs_()
    half = spacing(want.mid.abs() + want.radius, want.dtype).mul_(0.5)
    neither = None
    if not math.isfinite(float(error.sum() + half.sum() + value.abs().sum() + want.radius.sum())):
        neither = value.isnan() & want.mid.isnan()
        inside = inside & (value.isfinite() | (want.radius < torch.finfo(want.dtype).max)) | neither
        error = error.masked_fill_((value == want.mid) | neither, 0.0)
        half = half.masked_fill_(~half.isfinite(), 0.0)
    bound = half.add_(want.radius)
    ratio = (error / bound).nan_to_num_(nan=math.inf)
    if neither is not None:
        ratio = ratio.masked_fill_(error == 0.0, 0.0)
    outside = ratio.clamp(min=math.nextafter(1.0, 2.0))
    return _Compared(inside, torch.where(inside, ratio.clamp_(max=1.0), outside), bound)


def identical(
    name: str, got: torch.Tensor, want: torch.Tensor, where: Where = "", inputs: Any = None
) -> Finding:
    """``got`` and ``want`` are the same bytes, element for element; any NaN equals any NaN."""
    if reason := why_not_comparable(name, got, want, want.dtype):
        return Finding(ok=False, detail=reason)
    if not got.numel():
        return Finding(ok=True)
    got, want = got.detach(), want.detach()
    if torch.equal(_bits(got), _bits(want)):
        return Finding(ok=True, num_checked=got.numel())
    same = _bits(got) == _bits(want)
    if got.is_floating_point():
        same |= got.isnan() & want.isnan()
    if bool(same.all()):
        return Finding(ok=True, num_checked=got.numel())
    ratio = torch.where(same, 0.0, torch.inf).double()
    found = _Compared(same, ratio, torch.zeros_like(ratio))
    return _finding(name, got, found, want.double(), where, inputs)


def worst_of(findings: list[Finding]) -> Finding:
    """The finding that speaks for all: a broken claim before a kept one, then the largest ratio."""
    return max(findings, key=lambda finding: (not finding.ok, finding.worst.ratio if finding.worst else 0.0))


def told(what: str, finding: Finding) -> Finding:
    """The finding; where the claim broke it says what was different about the inputs."""
    return finding if finding.ok else replace(finding, detail=f"{what}: {finding.detail}")


def why_not_comparable(name: str, got: object, want: torch.Tensor, dtype: torch.dtype) -> str | None:
    """What differs before any value is looked at, or None."""
    if not isinstance(got, torch.Tensor):
        return f"{name}: is {type(got).__name__}, must be a tensor"
    if got.dtype != dtype:
        return f"{name}: dtype is {_plain(got.dtype)}, must be {_plain(dtype)}"
    if got.shape != want.shape:
        return f"{name}: shape is {list(got.shape)}, must be {list(want.shape)}"
    if reason := why_not_strided(name, got):
        return reason
    if got.device != want.device:
        return f"{name}: is on {got.device}, must be on {want.device}"
    return None


def why_not_strided(name: str, tensor: torch.Tensor) -> str | None:
    """What a tensor is that has no strides, or None."""
    if tensor.layout == torch.strided:
        return None
    return f"{name}: layout is {_plain(tensor.layout)}, must be strided"


def _plain(what: torch.dtype | torch.layout) -> str:
    return str(what).removeprefix("torch.")


def _bits(x: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(integer[x.dtype.itemsize])


def _finding(
    name: str,
    got: torch.Tensor,
    found: _Compared,
    want: torch.Tensor,
    where: Where,
    inputs: Any,
) -> Finding:
    inside, ratio, bound = found
    num_bad = got.numel() - int(inside.sum())
    flat = int(ratio.argmax())
    index = _unraveled(flat, got.shape)
    worst = Worst(
        tensor=name,
        index=index,
        got=float(got[index].double()),
        want=float(want[index]),
        bound=float(bound[index]),
        ratio=float(ratio[index]),
        place=where(index) if callable(where) else place(where, index, inputs),
    )
    if not num_bad:
        return Finding(ok=True, worst=worst, num_checked=got.numel())
    detail = (
        f"{name}: {num_bad} of {got.numel()} elements are not what they may be; worst at {worst.place}: "
        f"got {worst.got:.9g}, {wanted(worst)}"
    )
    letters = where if isinstance(where, str) else ""
    return Finding(
        ok=False,
        detail=detail,
        worst=worst,
        num_bad=num_bad,
        num_checked=got.numel(),
        pattern=partial(locate, name, letters, got, want, bound, inside, inputs),
    )


def wanted(worst: Worst) -> str:
    """What an element may be; how far it is from that where there is such a number."""
    if not worst.bound or not math.isfinite(worst.want):
        return f"must be {worst.want:.9g}"
    want = f"want {worst.want:.9g} ± {worst.bound:.3g}"
    return f"{want} ({worst.ratio:.3g} × the bound)" if math.isfinite(worst.got) else want


def _unraveled(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element from its number. torch's own imports sympy."""
    index: list[int] = []
    for size in reversed(shape):
        flat, i = divmod(flat, size)
        index.insert(0, i)
    return tuple(index)


def place(letters: str, index: tuple[int, ...], inputs: Any) -> str:
    """An index in the problem's words: "request 1, query 0, head 3, channel 17"."""
    if not letters:
        return f"index {list(index)}" if index else "its only element"
    at = dict(zip(letters.split(), index, strict=True))
    words = [_word(letter, i, inputs) for letter, i in at.items()]
    if "n" in at and "k" in at and hasattr(inputs, "slot_mapping"):
        slot = at["n"] * inputs.kv_cache.shape[1] + at["k"]
        owner = (inputs.slot_mapping == slot).nonzero().flatten().tolist()
        words.append(f"token {owner[0]}" if owner else "no new token's")
    return ", ".join(words)


def _word(letter: str, i: int, inputs: Any) -> str:
    if letter == "e" and inputs.kv_cache.dtype == torch.uint8:
        return f"byte {i}"
    if letter != "t":
        return f"{WORDS.get(letter, 'channel')} {i}"
    for field, word in (("cu_seqlens_q", "query"), ("cu_seqlens", "token")):
        if hasattr(inputs, field):
            for request, (start, stop) in enumerate(pairwise(getattr(inputs, field).tolist())):
                if start <= i < stop:
                    return f"request {request}, {word} {i - start}"
    return f"token {i}"
