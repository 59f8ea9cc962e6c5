"""The matrix for a backend that takes few of its cases: every row of the table, as near as it takes it.

A kernel of one width, one type and one block size may take three of the 36 cases that are dealt to everybody.
Whoever takes less than two thirds of them has cases of its own besides: each row that it declined is dealt to
it again, with as few changes as it asks for, of heads, lengths, model, dtype and format, block size, layout,
scales, or the axes of a pool. Where several values will do, that one is taken which makes the most pairs of
``dimensions`` that no case before has had, so that what a narrow contract leaves free is combined.

What is dealt follows from the answers of ``supports`` alone, on whatever machine and in whatever time: equal
contracts have equal cases. It is asked ``QUESTIONS`` times at most; what it was not asked about counts as
declined.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, count
from random import Random
from typing import Any, NamedTuple

from mla_ref.case import DTYPES, Case
from mla_ref.config import MLAConfig
from mla_ref.formats import CacheFormat, cache_format
from mla_ref.layout_algebra import KV_ORDERS
from mla_ref.presets import preset as find_preset
from mla_ref.problem import Problem
from mla_ref.problem import problem as find_problem
from oracles.asked import Declined
from oracles.coverage import ELEMENTS, LARGE
from oracles.dimensions import DIMENSIONS, MEMORY, dimensions, elements, names_of, pick
from oracles.matrix import KV_SCALE, ROWS, V_SCALE, Dealt, case_of, deals, stage_of
from oracles.process_state import kept

# Tries to find a first case, where the table has none that is taken.
SEARCH = 5000

# How often a backend is asked: twice as often as where it takes nothing.
QUESTIONS = 10_000

# Tokens of a request at most, and keys of whole tiles, for kernels that are made for no others.
FEW, TILE = (5, 2), 128

# What kernels are made for, and addresses follow from: other values are tried where the row's would do, too.
FREE = ("heads", "stored", "block_size", "layout")

_Pair = tuple[tuple[str, str], tuple[str, str]]


class Dealing(NamedTuple):
    """Which matrix is dealt, by the names of problems, models and formats; of other problems, nothing is."""

    seed: int
    problems: tuple[str, ...]
    presets: tuple[str, ...]
    formats: tuple[str, ...]


def own_cases_of(problem: str, supports: Declined, dealing: Dealing) -> list[Case]:
    """``own_cases`` of a backend that implements ``problem``."""
    if problem not in dealing.problems:
        return []
    return own_cases(
        find_problem(problem),
        [find_preset(name) for name in dealing.presets],
        [cache_format(name) for name in dealing.formats],
        supports,
        dealing.seed,
    )


def own_cases(
    contract: Problem,
    configs: Sequence[MLAConfig],
    formats: Sequence[CacheFormat],
    supports: Declined,
    seed: int = 0,
) -> list[Case]:
    """What a backend is tried on besides the matrix: none if it takes most of that, or nothing was found.

    supports: the backend's, as ``asked.told_later``; what it does to the process meanwhile is put back. No
        case is more work than the largest of the matrix, or of those that ``coverage`` draws.
    """
    with kept([]):
        return _own_cases(contract, configs, formats, _counted(supports), seed)


def _counted(supports: Declined) -> Declined:
    numbers = count()
    return lambda case: supports(case) if next(numbers) < QUESTIONS else f"no more than {QUESTIONS} questions"


def _own_cases(
    contract: Problem,
    configs: Sequence[MLAConfig],
    formats: Sequence[CacheFormat],
    supports: Declined,
    seed: int,
) -> list[Case]:
    table = deals(contract, configs, formats)
    cases = {i: case_of(contract.name, i, dealt, seed) for i, dealt in table}
    taken = {i for i, case in cases.items() if supports(case) is None}
    if 3 * len(taken) >= 2 * len(table):
        return []
    limit = max(ELEMENTS * LARGE, *map(elements, cases.values()))
    space = _Space(contract, supports, limit, seed, _values(contract, configs, formats))
    known = [(stage_of(cases[i]), dealt) for i, dealt in table if i in taken] or _first(space, table)
    had = _Had({pair for i in taken for pair in _pairs(cases[i])}, Counter())
    own = []
    for i, dealt in table if known else ():
        if i in taken:
            continue
        stage = stage_of(cases[i])
        like = next((other for of, other in known if of == stage), known[0][1])
        if (again := _again(space, i, dealt, like, had)) is not None:
            case = space.case(i, again)
            own.append(case)
            known.append((stage_of(case), again))
            had.pairs.update(_pairs(case))
    return own


class _Space(NamedTuple):
    """What may be dealt again. values: of each part of ``Dealt`` but its lengths, those that are tried."""

    contract: Problem
    supports: Declined
    limit: int
    seed: int
    values: Mapping[str, Sequence[Any]]

    def case(self, i: int, dealt: Dealt) -> Case:
        """Of row ``i``."""
        return case_of(self.contract.name, i, dealt, self.seed)

    def takes(self, i: int, dealt: Dealt) -> bool:
        """Whether this is a case of the problem, not too much work, and one that the backend takes."""
        case = self.case(i, dealt)
        possible = elements(case) <= self.limit and self.contract.why_not(case) is None
        return possible and self.supports(case) is None


class _Had(NamedTuple):
    """Pairs of values that cases had, and how often which value of a part was chosen."""

    pairs: set[_Pair]
    chosen: Counter[tuple[str, int]]


def _values(
    contract: Problem, configs: Sequence[MLAConfig], formats: Sequence[CacheFormat]
) -> dict[str, Sequence[Any]]:
    """In the order in which they are chosen: how many heads there are decides how much else there may be."""
    heads = [*(row.heads for row in ROWS), *map(int, DIMENSIONS["heads"].values)]
    values: dict[str, Sequence[Any]] = {
        "heads": list(dict.fromkeys(heads)),
        "lengths": (),
        "model": configs,
        "stored": [(dtype, fmt) for dtype in DTYPES for fmt in formats],
        "block_size": list(map(int, DIMENSIONS["block"].values)),
        "layout": list(dict.fromkeys([*(row.layout for row in ROWS), *MEMORY.values()])),
        "scales": [(KV_SCALE, V_SCALE), (1.0, 1.0)],
    }
    if "axes of the pool" in names_of(contract.name):
        values |= {"groups": (1, 4, 2, 0), "order": tuple(KV_ORDERS.values())}
    return values


def _first(space: _Space, table: Sequence[tuple[int, Dealt]]) -> list[tuple[str, Dealt]]:
    """Any case that is taken, with its stage, for a backend that takes none of the table's."""
    stream = Random(f"narrow/{space.contract.name}")
    for _ in range(SEARCH):
        i, dealt = table[pick(stream, table)]
        options = {**space.values, "lengths": _lengths(dealt)}
        trial = dealt._replace(**{name: some[pick(stream, some)] for name, some in options.items()})
        if space.takes(i, trial):
            return [(stage_of(space.case(i, trial)), trial)]
    return []


def _again(space: _Space, i: int, dealt: Dealt, like: Dealt, had: _Had) -> Dealt | None:
    """A row that is taken, as few parts of it as possible being other than they were dealt.

    like: one that is taken, which says what parts those are.
    """
    other = [name for name in space.values if getattr(dealt, name) != getattr(like, name)]
    fewest = (names for size in range(len(other) + 1) for names in combinations(other, size))
    for names in fewest:
        trial = dealt._replace(**{name: getattr(like, name) for name in names})
        if space.takes(i, trial):
            break
    else:
        return None
    for name in names:
        trial = _chosen(space, i, dealt, trial, name, had)
    modest = space._replace(limit=max(ELEMENTS, elements(space.case(i, trial))))
    for name in FREE:
        if name not in names:
            trial = _chosen(modest, i, dealt, trial, name, had)
    return trial


def _chosen(space: _Space, i: int, dealt: Dealt, trial: Dealt, name: str, had: _Had) -> Dealt:
    """The same with another value of one part: of lengths the nearest, of all else the newest, or its own."""
    if name == "lengths":
        tried = [trial._replace(lengths=lengths) for lengths in _lengths(dealt)]
        taken = [each for each in tried if space.takes(i, each)]
        stage = stage_of(space.case(i, dealt))
        return min(taken, key=lambda each: stage_of(space.case(i, each)) != stage, default=trial)
    tried = [trial._replace(**{name: value}) for value in space.values[name]]
    dealt_again = trial._replace(**{name: getattr(dealt, name)})
    ranks = [
        (-len(_pairs(space.case(i, each)) - had.pairs), each != dealt_again, had.chosen[name, at], at)
        for at, each in enumerate(tried)
        if space.takes(i, each)
    ]
    if not ranks:
        return trial
    *_, at = min(ranks)
    had.chosen[name, at] += 1
    return tried[at]


def _pairs(case: Case) -> set[_Pair]:
    return set(combinations(dimensions(case).items(), 2))


def _lengths(dealt: Dealt) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A row's lengths, and what narrow kernels take instead of them, the nearest first."""
    likes = ((tuple(q for q, _ in requests), tuple(kv for _, kv in requests)) for requests in _likes(dealt))
    return list(dict.fromkeys(likes))


def _likes(dealt: Dealt) -> Iterator[list[tuple[int, int]]]:
    requests = list(zip(*dealt.lengths, strict=True))
    busy = [(q, kv) for q, kv in requests if 0 < q <= kv]
    most = max(q for q, _ in busy)
    shapes = [
        requests,
        busy,
        [(most, kv) for _, kv in busy if kv >= most],
        [max(busy, key=lambda request: request[1])],
        [(1, kv) for _, kv in busy],
        [(q, q) for q, _ in busy],
    ]
    yield from shapes
    for few in FEW:
        yield from ([(min(q, few), min(q, few) if q == kv else kv) for q, kv in shape] for shape in shapes)
    for shape in shapes:
        whole = [(q, -(-kv // TILE) * TILE) for q, kv in shape]
        yield [(kv if q == old else q, kv) for (q, kv), (_, old) in zip(whole, shape, strict=True)]
