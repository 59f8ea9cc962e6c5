"""A crowd.

Claim: in a batch of hundreds of requests over the same pages, each gets the answer that it gets in a small
    one.
Why: numbers of splits are chosen by the size of the batch, schedulers keep requests in a warp or a block of
    threads, and tests stop at eight. Pages that many requests share are the prefix that they have in common.
Exact or bounded: within both radii, since work may be split differently. The newest rows of the requests with
    the fewest keys are asked for, again and again.
Kills: whatever happens beyond the size of batch that was tried.
"""

from typing import Any

from mla_ref.case import Case
from oracles.dimensions import elements
from oracles.oracle import Oracle, Trial
from oracles.probes import (
    ATTENTION,
    Part,
    alone,
    batch,
    last_rows,
    made,
    materialized,
    nothing,
    rows_of,
    runnable,
    same,
    with_parts,
)
from oracles.verdict import Finding

# More than a block of 256, 128, 64 or 32 threads has; by the seed the first or a later one is begun with.
CROWDS = (259, 131, 67, 35)

# Of all requests, how many of the shortest are asked again and again.
SHORTEST = 4

# Of ``dimensions.elements``: a few hundred milliseconds on one core.
MOST = 1_000_000


def check(trial: Trial) -> Finding:
    """Run the crowd, and compare each row with that of its request."""
    parts = crowd(trial.case, trial.inputs)
    if not parts:
        return nothing("no request has a row, or so many of them are too much work")
    if not runnable(trial, with_parts(trial.case, parts)):
        return nothing(f"the backend does not take {len(parts)} requests of one row")
    output = trial.run(made(crowded, trial.case, trial.device))
    what, rows = f"in a batch of {len(parts)}", rows_of(trial.inputs, parts)
    return same(trial, output, what, exact=False, rows=rows)


def crowd(case: Case, inputs: Any) -> list[Part]:
    """The newest rows of the requests with the fewest keys, in turn; none if that is too much work."""
    newest = sorted(alone(inputs, last_rows), key=lambda part: part.kv_len)[:SHORTEST]
    for size in CROWDS[-1 - case.seed % len(CROWDS) :] if newest else ():
        parts = [newest[i % len(newest)] for i in range(size)]
        if elements(with_parts(case, parts)) <= MOST:
            return parts
    return []


def crowded(case: Case, device: str) -> Any:
    """The crowd as a batch."""
    inputs = materialized(case, device)
    return batch(inputs, crowd(case, inputs))


ORACLE = Oracle(
    name="many_requests",
    check=check,
    problems=ATTENTION,
    kills=("requests_beyond_a_warp",),
)
