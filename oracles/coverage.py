"""Which case comes next: every pair of values of two dimensions early, the same cases on every machine.

``draw(problem, seed, index)`` is a function of its arguments alone, and of the version of this project. Cases
come in blocks; within one, each case takes the values that make the most pairs that no earlier one of the
block has had. One case in ``LARGE_EVERY`` may be ``LARGE`` times as much work as the others.

Where every case has a kernel compiled for it, cases may come in runs: the first is the one that is due, and
the others are like it in all that a kernel is compiled for, and else random.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import combinations
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mla_ref.case import Case
from mla_ref.problem import problem as find_problem
from oracles.dimensions import DIMENSIONS, dimensions, elements, make, names_of, pick
from oracles.process_state import kept

BLOCK = 256

# Of ``dimensions.elements``: a few milliseconds' work, and for one case in so many this many times as much.
ELEMENTS = 250_000
LARGE_EVERY, LARGE = 32, 16

ANY_SIZE = 2**62

# What kernels are compiled for: widths, strides, types. Lengths, pages and values are looked at as they run.
COMPILED = (
    "model c/p/r/v",
    "heads",
    "key/value heads",
    "axes of the pool",
    "block",
    "memory",
    "dtype",
    "format",
    "projections",
    "layers",
)

# Tries to find a case that is like another, before it is that other with new values.
LIKE = 10

# Tries to find a first case that a backend supports.
SEARCH = 5000

Supports = Callable[[Case], str | None]
Pairs = npt.NDArray[np.bool_]

# A case, and its ``elements``.
_Weighed = tuple[int, Case]


class NothingFound(ValueError):
    """A backend takes none of the cases that were tried."""


def draw(problem: str, seed: int, index: int, supports: Supports | None = None, alike: int = 1) -> Case:
    """Case ``index`` of the endless sequence that belongs to ``seed``.

    supports: a backend's, as ``asked.told_later``; only cases that it takes are drawn, and what it does to
        the process meanwhile is put back. alike: so many in a row share what is
    ``COMPILED``; the sequence of their first ones is that of cases that do not.

    Raises: NothingFound if there is no case that it takes.
    """
    run, turn = divmod(index, alike)
    large = run % LARGE_EVERY == LARGE_EVERY - 1
    number = run // LARGE_EVERY if large else run - run // LARGE_EVERY
    with kept([]):
        space = _space(problem, supports, ELEMENTS * (LARGE if large else 1))
        block, row = divmod(number, BLOCK)
        begun, more = _begun(space, f"{seed}/{large}/{block}")
        while len(begun) <= row:
            begun.append(next(more))
        return begun[row] if turn == 0 else _like(begun[row], seed, index, supports)


def _like(first: Case, seed: int, index: int, supports: Supports | None) -> Case:
    """A case that differs from the first of its run in what is not ``COMPILED``."""
    large = index % LARGE_EVERY == LARGE_EVERY - 1
    space = _space(first.problem, supports, ELEMENTS * (LARGE if large else 1))
    stream, same = Random(f"{seed}/{index}/alike"), dimensions(first)
    for _ in range(LIKE):
        values = [
            DIMENSIONS[name].values.index(same[name])
            if name in COMPILED
            else pick(stream, DIMENSIONS[name].values)
            for name in space.names
        ]
        case = _attempt(space, values, stream)
        if case is None:
            continue
        case = replace(case, num_kv_heads=first.num_kv_heads)
        if elements(case) <= space.limit and _taken(space, case):
            return case
    return replace(first, seed=pick(stream, range(2**31)))


class _Space(NamedTuple):
    """What may be drawn.

    plain: the plainest values that are accepted, and first of all ``plainest``, a case that has them.
    """

    problem: str
    names: tuple[str, ...]
    supports: Supports | None
    limit: int
    plain: tuple[int, ...] = ()
    plainest: Case | None = None


@cache
def _space(problem: str, supports: Supports | None, limit: int) -> _Space:
    names = names_of(problem)
    space = _Space(problem, names, supports, limit)
    stream = Random(f"plain/{problem}")
    for attempt in range(SEARCH):
        values = [pick(stream, DIMENSIONS[name].values) if attempt else 0 for name in names]
        case = _attempt(space, values, stream)
        if case is not None:
            return space._replace(plain=tuple(values), plainest=case)
    raise NothingFound(f"{problem}: none of {SEARCH} random cases is supported")


def _attempt(space: _Space, values: Sequence[int], stream: Random) -> Case | None:
    """A case with exactly these values, or None."""
    wanted = {name: DIMENSIONS[name].values[i] for name, i in zip(space.names, values, strict=True)}
    case = make(space.problem, wanted, stream)
    if elements(case) > space.limit or not _is_one(space.problem, case, wanted):
        return None
    return case if _taken(space, case) else None


def _is_one(problem: str, case: Case, wanted: Mapping[str, str]) -> bool:
    """Whether a case has the values that it was made for, and is one of its problem."""
    return dimensions(case) == wanted and find_problem(problem).why_not(case) is None


def _taken(space: _Space, case: Case) -> bool:
    return space.supports is None or space.supports(case) is None


@cache
def _possible(space: _Space) -> Pairs:
    """[x x], True for two values of two dimensions that a case has which is plain in all others but one."""
    first = _firsts(space)
    pairs = np.zeros((first[-1], first[-1]), dtype=bool)
    for a, b in combinations(range(len(space.names)), 2):
        for i in range(first[a + 1] - first[a]):
            for j in range(first[b + 1] - first[b]):
                cases = _nearly_plain(space.problem, space.plain, a, i, b, j)
                if any(work <= space.limit and _taken(space, case) for work, case in cases):
                    pairs[first[a] + i, first[b] + j] = pairs[first[b] + j, first[a] + i] = True
    return pairs


def _nearly_plain(problem: str, plain: Sequence[int], a: int, i: int, b: int, j: int) -> Iterator[_Weighed]:
    """Cases with values ``i`` of dimension ``a`` and ``j`` of ``b``, and else plain ones but for the model.

    They are made once for all backends and limits, and only as far as somebody looks.
    """
    made, more = _made(problem, tuple(plain), a, i, b, j)
    yield from made
    for weighed in more:
        made.append(weighed)
        yield weighed


@cache
def _made(
    problem: str, plain: tuple[int, ...], a: int, i: int, b: int, j: int
) -> tuple[list[_Weighed], Iterator[_Weighed]]:
    """Those made before, and the rest."""
    return [], _making(problem, plain, a, i, b, j)


def _making(problem: str, plain: tuple[int, ...], a: int, i: int, b: int, j: int) -> Iterator[_Weighed]:
    stream, values, names = Random(f"{a}/{i}/{b}/{j}"), list(plain), names_of(problem)
    for model in (plain[0], *range(len(DIMENSIONS[names[0]].values))):
        # Of all dimensions a model's is the one that others depend on: formats, and work.
        values[0], values[a], values[b] = model, i, j
        wanted = {name: DIMENSIONS[name].values[value] for name, value in zip(names, values, strict=True)}
        case = make(problem, wanted, stream)
        if _is_one(problem, case, wanted):
            yield elements(case), case


def _firsts(space: _Space) -> list[int]:
    """Where the values of each dimension begin, were they all in one list; its length last."""
    firsts = [0]
    for name in space.names:
        firsts.append(firsts[-1] + len(DIMENSIONS[name].values))
    return firsts


@lru_cache(maxsize=64)
def _begun(space: _Space, name: str) -> tuple[list[Case], Iterator[Case]]:
    """The cases of one block as far as they were asked for, and the rest of them."""
    return [], _covering(space, name)


def _covering(space: _Space, name: str) -> Iterator[Case]:
    """Cases that make as many new pairs as a greedy choice can, dimension by dimension in random order."""
    first, left, row = _firsts(space), _possible(space).copy(), 0
    while True:
        stream = Random(f"{name}/{row}")
        order = _shuffled(len(space.names), stream)
        chosen = _chosen(left, first, order, stream)
        yield _accepted(space, chosen, order, stream, left, first)
        row += 1


def _shuffled(n: int, stream: Random) -> list[int]:
    return sorted(range(n), key=[stream.random() for _ in range(n)].__getitem__)


def _chosen(left: Pairs, first: list[int], order: list[int], stream: Random) -> list[int]:
    values, gain = [0] * len(order), left.sum(0)
    for step, axis in enumerate(order):
        span = gain[first[axis] : first[axis + 1]]
        best = np.flatnonzero(span == span.max()).tolist()
        values[axis] = best[pick(stream, best)]
        row = left[first[axis] + values[axis]].astype(np.int64)
        gain = gain + row if step else row
    return values


def _accepted(
    space: _Space, values: list[int], order: list[int], stream: Random, left: Pairs, first: list[int]
) -> Case:
    """The case with these values, or with as few of them as possible made plain."""
    for trial in _plainer(space, values, order):
        case = _attempt(space, trial, stream)
        if case is not None:
            break
    else:
        assert space.plainest is not None
        trial, case = space.plain, replace(space.plainest, seed=pick(stream, range(2**31)))
    ids = [start + value for start, value in zip(first, trial, strict=False)]
    left[np.ix_(ids, ids)] = False
    return case


def _plainer(space: _Space, values: Sequence[int], order: Sequence[int]) -> Iterator[Sequence[int]]:
    """The values; then one of them plain, the last chosen first; then ever more of them."""
    yield values
    for num_plain in range(1, len(order) + 1):
        for start in range(len(order) - num_plain, -1, -1) if num_plain < 3 else (len(order) - num_plain,):
            plain = set(order[start : start + num_plain])
            yield [space.plain[i] if i in plain else value for i, value in enumerate(values)]


class Covered(NamedTuple):
    """What some cases of one problem have had.

    values: dimension -> (values had, values that can be had). pairs: likewise of values of two dimensions.
    """

    problem: str
    cases: int
    values: dict[str, tuple[int, int]]
    pairs: tuple[int, int]

    def line(self) -> str:
        """One line for a person: what is complete, what is not."""
        had, possible = self.pairs
        short = [f"{name} {a} of {b}" for name, (a, b) in self.values.items() if a < b]
        missing = f"; values: {', '.join(short)}" if short else "; every value"
        share = 100 * had // possible
        return f"{self.problem}: {self.cases} cases, {had} of {possible} pairs ({share} %){missing}"


def covered(problem: str, cases: Iterable[Case], supports: Supports | None = None) -> Covered:
    """How much of a problem's dimensions the cases have had, of what cases of any size can have.

    supports: a backend's; what it does not take is not counted as missing.

    Raises: NothingFound if there is no case that it takes.
    """
    space = _space(problem, supports, ANY_SIZE)
    possible, first = _possible(space), _firsts(space)
    had, count = np.zeros_like(possible), 0
    for case in cases:
        count += 1
        values = dimensions(case)
        ids = [
            first[axis] + DIMENSIONS[name].values.index(values[name])
            for axis, name in enumerate(space.names)
            if values[name] in DIMENSIONS[name].values
        ]
        had[np.ix_(ids, ids)] = True
    # On the diagonal of ``had`` are single values; ``possible`` has no pairs within a dimension.
    single, apart = had.diagonal(), ~np.eye(len(had), dtype=bool)
    spans = {name: slice(first[axis], first[axis + 1]) for axis, name in enumerate(space.names)}
    return Covered(
        problem,
        count,
        {
            name: (int(single[span].sum()), int((single[span] | possible[span].any(1)).sum()))
            for name, span in spans.items()
        },
        (int((had & apart).sum()) // 2, int(((had | possible) & apart).sum()) // 2),
    )
