"""Which cases the conformance matrix tries: explicit rows of lengths, dealt over models and formats.

A full product of presets, formats, lengths, block sizes, layouts, regimes and dtypes would be millions
of cases. ``STAGES`` is a table instead: a row fixes lengths, heads, block size, regime, dtype and layout. The
rows of the four stages alternate, and presets and formats are dealt over them, the table being repeated until

- every preset is tried, and every format in every stage: decode, MTP, prefill, chunked prefill;
- every row is tried, and so every length, block size, regime, dtype and layout in the table.

The lengths hold 0, 1, block - 1, block, block + 1, primes, idle requests, rows that see no key, and ragged
mixes; heads run from 1 to 128, each model sharded to as many, or to the largest divisor below. The hidden
width and the rank of the query, which only a whole layer sees, and only as lengths of projections, are cut.

A backend's own function is tried on every case, and its variants take turns: each meets all four stages. What
one run shows is judged on every case; the oracles that run an implementation again take turns too, over
those cases of each stage that the backend takes, so that one that takes few of them meets every oracle. Who
takes few of all has cases of its own besides, made of the same rows: ``narrow``.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import NamedTuple

import torch

from mla_ref.backend import Backend, supports_all
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.formats import CacheFormat
from mla_ref.layout import CacheLayout
from mla_ref.layout_algebra import KV_ORDERS
from mla_ref.problem import Problem
from mla_ref.problem import problem as find_problem
from oracles.exits import first_line
from oracles.oracle import in_order, rules
from oracles.process_state import kept
from oracles.verify import find_backend, oracles_for

# No powers of two, and unlike: a kernel that drops one, squares it or swaps the two is off by far.
KV_SCALE, V_SCALE = 0.0173, 0.0291

# The oracles that judge one run. All others run the implementation again, on inputs of their own.
OF_ONE_RUN = (
    "contract",
    "value",
    "lse",
    "likely",
    "row_norm",
    "matched_filters",
    "statistics",
    "empty_rows",
    "inputs_unchanged",
    "process_state",
    "stored",
    "allocation",
    "rope_norm",
)

# Of these, the ones that cost several times as much as all others.
COSTLY = ("likely", "row_norm", "matched_filters", "statistics")

# No multiples of a tile.
MAX_HIDDEN, MAX_QUERY_RANK = 328, 104

PACKED = CacheLayout()
IN_ORDER = CacheLayout(shuffled=False, spare_blocks=0)
PADDED = CacheLayout(entry_align=256)
GAPPED = CacheLayout(block_gap=512, offset=1024)


class Row(NamedTuple):
    """What one line of the matrix fixes; the preset and the format are dealt to it."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int
    block_size: int
    regime: str = "plain"
    dtype: str = "bfloat16"
    layout: CacheLayout = PACKED


STAGES: dict[str, tuple[Row, ...]] = {
    "decode": (
        # First, where it is dealt a model that has 128 heads.
        Row((1,), (129,), 128, 128, "outlier"),
        Row((1,), (1,), 16, 64),
        # A model that has twenty heads keeps them here: more than a tile of sixteen, and not two.
        Row((1, 1, 1, 1), (63, 64, 65, 127), 20, 64, "limits"),
        Row((1, 1, 1), (0, 1, 17), 4, 16, "zeros", layout=GAPPED),
        Row((1, 1), (257, 31), 8, 32, "sink", "float16"),
        Row((1,) * 8, (5, 13, 64, 97, 128, 129, 191, 2), 2, 64, "recency", layout=PADDED),
        Row((1,), (1031,), 1, 128, "flat"),
        Row((1, 1, 0, 1), (33, 34, 20, 35), 4, 1, "peaky", "float32", IN_ORDER),
        Row((1, 1), (83, 240), 4, 64, "negative", layout=GAPPED),
    ),
    "mtp": (
        Row((2, 2), (2, 65), 16, 64),
        Row((4, 3, 2), (64, 67, 129), 4, 64, "stairs"),
        Row((3,), (3,), 8, 16, "small", "float32", GAPPED),
        Row((4, 2), (2, 33), 2, 32, "cancelling", layout=IN_ORDER),
        Row((2,) * 6, (15, 16, 17, 31, 32, 33), 4, 16, "recency", layout=PADDED),
        Row((4,), (521,), 2, 64, "ties"),
        Row((2, 3, 4), (0, 1, 211), 4, 64, "sink", "float16"),
        Row((4, 1, 3, 2), (101, 7, 128, 64), 1, 1, "tiny"),
        Row((3, 2), (129, 127), 32, 128, "tiles", layout=GAPPED),
    ),
    "prefill": (
        Row((1,), (1,), 4, 64),
        Row((65, 63), (65, 63), 4, 64, "heavy"),
        Row((17,), (17,), 8, 16, "negative", "float16", GAPPED),
        Row((31, 7, 1), (31, 7, 1), 2, 32, "uneven"),
        Row((97,), (97,), 2, 64, "outlier", layout=PADDED),
        Row((128,), (128,), 1, 128, "flat", "float32"),
        Row((5, 0, 3), (5, 0, 3), 16, 1, "ties", layout=IN_ORDER),
        Row((64,), (64,), 2, 64, "huge"),
        Row((3, 61, 2, 13), (3, 61, 2, 13), 1, 16, "tiles", "float64"),
    ),
    "chunked": (
        Row((16,), (80,), 4, 64),
        Row((64,), (192,), 2, 64, "peak", layout=PADDED),
        Row((7, 33), (71, 130), 4, 32, "peaky"),
        Row((1, 1, 37), (200, 65, 101), 2, 64, "sink"),
        Row((15, 16, 17), (31, 32, 33), 8, 16, "tiny", "float16", GAPPED),
        Row((1, 5, 0, 2), (300, 5, 64, 3), 1, 128, "denormal"),
        Row((9, 2), (4, 67), 4, 1, "ties", "float32", IN_ORDER),
        Row((11,), (75,), 16, 64, "outlier"),
        Row((5, 29), (5, 307), 1, 128, "flat", "float64"),
    ),
}

# The stages alternate, so that any prefix of the table has some of each.
ROWS = tuple(row for rows in zip(*STAGES.values(), strict=True) for row in rows)


class Dealt(NamedTuple):
    """A row with what is dealt to it: everything for which a backend may decline the case.

    heads: at most so many, as many as divide the model's. lengths: q_lens and kv_lens. stored: dtype, format.
    scales: of keys and values, where the format has one. groups: key/value heads are its common divisor with
    the heads; 0: all of them. order: of the axes of a pool of keys and values.
    """

    model: MLAConfig
    heads: int
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    stored: tuple[str, CacheFormat]
    block_size: int
    layout: CacheLayout
    scales: tuple[float, float]
    groups: int
    order: str


def matrix(
    contract: Problem, configs: Sequence[MLAConfig], formats: Sequence[CacheFormat], seed: int = 0
) -> list[Case]:
    """The cases of one problem, in a fixed order; none if it cannot be made of these."""
    return [case_of(contract.name, i, dealt, seed) for i, dealt in deals(contract, configs, formats)]


def deals(
    contract: Problem, configs: Sequence[MLAConfig], formats: Sequence[CacheFormat]
) -> list[tuple[int, Dealt]]:
    """What is dealt to each row of which a case can be made, and its place in the table."""
    stages = len(STAGES)
    rounds = max(len(ROWS) // stages, len(formats), -(-len(configs) // stages))
    found = []
    for i in range(rounds * stages):
        turn, stage = divmod(i, stages)
        # Four models at a time, moved on by one stage from one turn to the next.
        config = configs[(turn * stages + (stage + turn) % stages) % len(configs)]
        tried = (_dealt(i, config, formats[(turn + k) % len(formats)]) for k in range(len(formats)))
        fits = (dealt for dealt in tried if contract.why_not(case_of(contract.name, i, dealt)) is None)
        if (dealt := next(fits, None)) is not None:
            found.append((i, dealt))
    return found


def _dealt(i: int, config: MLAConfig, fmt: CacheFormat) -> Dealt:
    row = ROWS[i % len(ROWS)]
    return Dealt(
        model=config,
        heads=row.heads,
        lengths=(row.q_lens, row.kv_lens),
        stored=(row.dtype, fmt),
        block_size=row.block_size,
        layout=row.layout,
        scales=(KV_SCALE, V_SCALE),
        groups=(1, 4, 2)[i % 3],
        order=tuple(KV_ORDERS.values())[i % len(KV_ORDERS)],
    )


def case_of(problem: str, i: int, dealt: Dealt, seed: int = 0) -> Case:
    """The case of row ``i``, its regime and its seed, with what is dealt to it."""
    config = _shard(dealt.model, dealt.heads)
    (q_lens, kv_lens), (dtype, fmt) = dealt.lengths, dealt.stored
    kv_scale, v_scale = dealt.scales if fmt.per_tensor_scale else (1.0, 1.0)
    return Case(
        problem=problem,
        config=config,
        q_lens=q_lens,
        kv_lens=kv_lens,
        dtype=dtype,
        cache_format=fmt.name,
        block_size=dealt.block_size,
        layout=dealt.layout,
        regime=ROWS[i % len(ROWS)].regime,
        kv_scale=kv_scale,
        seed=seed + i,
        num_kv_heads=math.gcd(config.num_heads, dealt.groups),
        v_scale=v_scale,
        kv_layout=dealt.order,
    )


# Of as many models as there may be, with as many numbers of heads as are tried.
@lru_cache(maxsize=1024)
def _shard(config: MLAConfig, most: int) -> MLAConfig:
    heads = max(n for n in range(1, most + 1) if config.num_heads % n == 0)
    return replace(
        config.shard(config.num_heads // heads),
        hidden_size=min(config.hidden_size, MAX_HIDDEN),
        q_lora_rank=None if config.q_lora_rank is None else min(config.q_lora_rank, MAX_QUERY_RANK),
    )


def stage_of(case: Case) -> str:
    """decode: one query a request at most; prefill: nothing cached before; mtp: up to four; else chunked."""
    if max(case.q_lens, default=0) <= 1:
        return "decode"
    if case.q_lens == case.kv_lens:
        return "prefill"
    return "mtp" if max(case.q_lens) <= 4 else "chunked"


class Job(NamedTuple):
    """One case, the backends that are tried on it, and the oracles that judge them, all by name.

    turn: which of the matrix's cases this is, or of a backend's own, and how many there are, where variants
        and oracles take turns; None: all of them are tried.
    only: of the oracles, those that are wanted now; turns are those of all of them. Empty: all.
    function: of a backend's functions, the one that is wanted now, its own being ""; None: all.
    by_lot: turns are independent of each other, one function and one costly oracle of each sort at a time.
    judge_on: where inputs are made and outputs are judged; None: on the device.
    mates: those cases of the same stage, as text, in their order and this one among them: a backend's turns
        are dealt over those of them that it takes. Empty: over all cases, whoever takes them.
    """

    case: Case
    specs: tuple[str, ...]
    oracles: tuple[str, ...]
    device: str
    turn: tuple[int, int] | None = None
    only: tuple[str, ...] = ()
    function: str | None = None
    by_lot: bool = False
    judge_on: str | None = None
    mates: tuple[str, ...] = ()


def trials(
    job: Job, variants: Sequence[str], supports: Callable[[Case], str | None] = supports_all
) -> list[tuple[str, tuple[str, ...]]]:
    """Which of a backend's functions are tried, its own being "", and the oracles that judge each of them.

    supports: the backend's, as ``asked.told_later``, which says what cases its turns are dealt over; what it
        does to the process meanwhile is put back.
    """
    with kept([]):
        dealt = _turns(job, variants, supports)
    turns = [(name, in_order(oracles)) for name, oracles in dealt if job.function in (None, name)]
    if not job.only:
        return turns
    wanted = ((name, tuple(o for o in oracles if o in job.only)) for name, oracles in turns)
    return [(name, oracles) for name, oracles in wanted if oracles]


def _turns(
    job: Job, variants: Sequence[str], supports: Callable[[Case], str | None]
) -> list[tuple[str, tuple[str, ...]]]:
    own = ""
    if job.turn is None:
        return [(name, job.oracles) for name in (own, *variants)]
    if job.by_lot:
        return [_by_lot(job, variants)]
    at, of = _place(job, supports)
    first = tuple(name for name in job.oracles if name in OF_ONE_RUN)
    again = whose_turn([name for name in job.oracles if name not in OF_ONE_RUN], at, of)
    tried = [own, *whose_turn(variants, at, of)]
    whose = own if job.turn[0] % 2 == 0 or not variants else tried[1]
    return [(name, first + tuple(again if name == whose else ())) for name in tried]


def _place(job: Job, supports: Callable[[Case], str | None]) -> tuple[int, int]:
    """Which of its stage's cases this one is, and how many there are, of those that the backend takes."""
    assert job.turn is not None
    taken = [case for case in map(_case_of, job.mates) if supports(case) is None]
    if job.case in taken:
        return taken.index(job.case), len(taken)
    at, of = (n // len(STAGES) for n in job.turn)
    return at, of


# Of all stages of all problems that one run judges.
@lru_cache(maxsize=1024)
def _case_of(text: str) -> Case:
    return Case.from_json(text)


def _by_lot(job: Job, variants: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Every second time a backend's own function, and over many turns every function with every oracle.

    Every second time, too, a costly one: a case without is judged in two thirds of the time.
    """
    assert job.turn is not None
    lot = Random(job.turn[0])

    def one_of(names: Sequence[str]) -> list[str]:
        return [names[int(lot.random() * len(names))]] if names else []

    own = lot.random() < 0.5 or not variants
    [function] = [""] if own else one_of(variants)
    costly = [name for name in job.oracles if name in COSTLY]
    again = [name for name in job.oracles if name not in OF_ONE_RUN]
    often = lot.random() < 0.5
    left_out = {*costly, *again}.difference(one_of(costly) if often else [], one_of(again))
    return function, tuple(name for name in job.oracles if name not in left_out)


def whose_turn(names: Sequence[str], at: int, of: int) -> list[str]:
    """Those of the names that belong to turn ``at`` of ``of``; over all turns each has its own."""
    num_turns = max(min(of, len(names)), 1)
    return [name for k, name in enumerate(names) if k % num_turns == at % num_turns]


def jobs_of(
    *,
    specs: Sequence[str],
    problems: Sequence[Problem],
    configs: Sequence[MLAConfig],
    formats: Sequence[CacheFormat],
    oracles: Sequence[str] | None,
    device: str,
    seed: int,
    full: bool = False,
    implemented: Mapping[str, str] | None = None,
    own: Mapping[str, Sequence[Case]] | None = None,
) -> list[Job]:
    """The matrix of each problem, for those of the backends that implement it, and then their own cases.

    full: every variant and every oracle on every case, none of them in turns.
    implemented: the problem of each spec, where that is known without importing it.
    own: of a spec, as ``narrow.own_cases``, the cases that it alone is tried on.

    Raises: ValueError on a backend or an oracle that cannot be found.
    """
    if implemented is None:
        implemented = {spec: load(spec).problem for spec in specs}
    jobs = []
    for contract in problems:
        able, claims = _judged(contract, implemented, oracles)
        if able and claims:
            cases = matrix(contract, configs, formats, seed)
            texts = [case.to_json() for case in cases]
            for i, case in enumerate(cases):
                job = Job(case, able, claims, device)
                mates = tuple(texts[i % len(STAGES) :: len(STAGES)])
                jobs.append(job if full else job._replace(turn=(i, len(cases)), mates=mates))
            for spec in able:
                jobs += _own_jobs(spec, (own or {}).get(spec, ()), claims, device, full)
    return jobs


def _own_jobs(
    spec: str, cases: Sequence[Case], claims: tuple[str, ...], device: str, full: bool
) -> Iterator[Job]:
    stages: dict[str, list[str]] = {}
    for case in cases:
        stages.setdefault(stage_of(case), []).append(case.to_json())
    for i, case in enumerate(cases):
        job = Job(case, (spec,), claims, device)
        yield job if full else job._replace(turn=(i, len(cases)), mates=tuple(stages[stage_of(case)]))


def jobs_on(
    cases: Sequence[Case], implemented: Mapping[str, str], oracles: Sequence[str] | None, device: str
) -> list[Job]:
    """Given cases instead of a matrix, for the backends that implement the problem of each: no turns.

    implemented: the problem of each spec.

    Raises: ValueError on an oracle that cannot be found, or a case that no inputs can be made of.
    """
    jobs = []
    for case in cases:
        contract = find_problem(case.problem)
        able, claims = _judged(contract, implemented, oracles)
        if able and claims:
            _try_to_make(contract, case)
            jobs.append(Job(case, able, claims, device))
    return jobs


def _judged(
    contract: Problem, implemented: Mapping[str, str], oracles: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The backends that implement a problem, and the oracles that judge it."""
    for name in oracles or ():
        if name not in rules():
            raise ValueError(f"oracle {name!r} is not one of {', '.join(rules())}")
    able = tuple(spec for spec, name in implemented.items() if name == contract.name)
    claims = tuple(o.name for o in oracles_for(contract) if oracles is None or o.name in oracles)
    return able, claims


def job_of(
    case: Case, spec: str, oracles: Sequence[str] | None, device: str, implemented: str | None = None
) -> Job:
    """One backend on one case. Raises: ValueError where they do not fit each other, or cannot be found.

    implemented: its problem, where that is known without importing it.
    """
    of = load(spec).problem if implemented is None else implemented
    if of != case.problem:
        raise ValueError(f"backend {spec!r} implements {of}, but the case is of {case.problem}")
    contract = find_problem(case.problem)
    claims = tuple(o.name for o in oracles_for(contract, oracles))
    _try_to_make(contract, case)
    return Job(case, (spec,), claims, device)


def _try_to_make(contract: Problem, case: Case) -> None:
    """Whatever is wrong with a stranger's case shows here. Raises: ValueError in one line."""
    try:
        contract.materialize(case, torch.device("cpu"))
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ValueError(
            f"case: its inputs cannot be made: {type(error).__name__}: {first_line(error)}"
        ) from None


def load(spec: str) -> Backend:
    """The backend called ``spec``. Raises: ValueError in one line, whatever a stranger's module raises."""
    try:
        return find_backend(spec)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"backend {spec!r}: its import raised {type(error).__name__}: {first_line(error)}"
        ) from error
