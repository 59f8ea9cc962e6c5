"""A crowd.

Claim: in a batch of hundreds of requests over the same pages, each gets the answer that it gets in a small
    one.
Why: numbers of splits are chosen by the size of the batch, schedulers keep requests in a warp or a block of
    threads, and tests stop at eight. Pages that many requests share are the prefix that they have in common.
Exact or bounded: within both radii, since work may be split differently. The newest rows of the requests with
    the fewest keys are asked for, again and again; where that is too much work, those of four short requests,
    with few heads, in the smallest of a few models that the backend takes.
Kills: whatever happens beyond the size of batch that was tried.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mla_ref.case import Case
from mla_ref.problem import problem
from oracles.dimensions import MODELS, elements
from oracles.oracle import Oracle, Trial, naming
from oracles.probes import (
    ATTENTION,
    Part,
    admissible,
    alike,
    alone,
    batch,
    last_rows,
    made,
    materialized,
    nothing,
    only,
    picked,
    rows_of,
    runnable,
    same,
    with_parts,
)
from oracles.verdict import Finding

# More than a block of 1024, 256, 128, 64 or 32 threads has; which one is begun with, by the seed.
CROWDS = (1031, 259, 131, 67, 35)
BEGINNING = (4, 3, 2, 0, 4, 3, 2, 1)

# Of all requests, how many of the shortest are asked again and again; and those of a smaller case.
SHORTEST = 4
SHORT = (1, 2, 5, 17)

# Of ``dimensions.elements``, which counts a shared page for each request: some hundred milliseconds.
MOST, MOST_SHORT = 1_000_000, 4_000_000


def check(trial: Trial) -> Finding:
    """Run the crowd, and compare each row with that of its request."""
    if not crowd(trial.inputs, 1):
        return nothing("no request has a row")
    for size in CROWDS[BEGINNING[trial.case.seed % len(BEGINNING)] :]:
        if _fits(trial, trial.case, parts := crowd(trial.inputs, size), MOST):
            return _as_in_small(trial, trial.case, parts)
        for case in short(trial.case):
            if runnable(trial, case) and _fits(trial, case, parts := crowd_of(case, size), MOST_SHORT):
                return _as_in_small(trial, case, parts)
    return nothing(f"the backend does not take {CROWDS[-1]} requests of one row, or they are too much work")


def _fits(trial: Trial, case: Case, parts: list[Part], most: int) -> bool:
    whole = with_parts(case, parts)
    return elements(whole) <= most and runnable(trial, whole)


def _as_in_small(trial: Trial, case: Case, parts: list[Part]) -> Finding:
    inputs = trial.inputs if case == trial.case else made(materialized, case, trial.device)
    what, rows = f"in a batch of {len(parts)}", rows_of(inputs, parts)
    with naming(what):
        output = trial.run(batch(inputs, parts))
    if case == trial.case:
        return same(trial, output, what, exact=False, rows=rows)
    first = only(trial.run(inputs), rows)
    expected = {name: picked(x, rows) for name, x in admissible(materialized, trial, case).items()}
    return alike(trial, output, first, expected, what, exact=False)


def crowd(inputs: Any, size: int) -> list[Part]:
    """The newest rows of the requests with the fewest keys, in turn; none if no request has a row."""
    newest = sorted(alone(inputs, last_rows), key=lambda part: part.kv_len)[:SHORTEST]
    return [newest[i % len(newest)] for i in range(size)] if newest else []


def crowd_of(case: Case, size: int) -> list[Part]:
    """The same of a case that ``short`` made, before its inputs are."""
    return [Part(i % len(SHORT), 0, 1, case.kv_lens[i % len(SHORT)]) for i in range(size)]


def short(case: Case) -> Iterator[Case]:
    """Short requests of one token each, with one head or the case's own, in small models first."""
    own = case.config
    dims = own.kv_lora_rank, own.qk_nope_head_dim, own.qk_rope_head_dim, own.v_head_dim
    for heads in dict.fromkeys((1, own.num_heads)):
        for c, p, r, v in (*sorted(MODELS, key=sum), dims):
            config = replace(
                own, num_heads=heads, kv_lora_rank=c, qk_nope_head_dim=p, qk_rope_head_dim=r, v_head_dim=v
            )
            small = replace(case, config=config, q_lens=(1,) * len(SHORT), kv_lens=SHORT, num_kv_heads=1)
            if problem(case.problem).why_not(small) is None:
                yield small


ORACLE = Oracle(
    name="many_requests",
    check=check,
    problems=ATTENTION,
    kills=("requests_beyond_a_warp", "requests_beyond_a_block"),
)
