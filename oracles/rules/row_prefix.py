"""A row is a request that ends with it.

Claim: row s of a request with several new tokens is the only row of a request whose cache ends at that token.
Why: speculative decoding, prefill and chunks of it are decode for many rows at once; the masks, the alignment
    and the code path differ, and the answer must not.
Exact or bounded: within both radii. Of long requests the rows at the ends and in the middle are tried.
Kills: masks that are missing, too wide or aligned with the beginning.
"""

from typing import Any

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial
from oracles.probes import (
    ATTENTION,
    alone,
    batch,
    made,
    materialized,
    nothing,
    rows_of,
    runnable,
    same,
    with_parts,
)
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run the rows as a batch of requests over the same pages."""
    parts = alone(trial.inputs, tried)
    if not parts:
        return nothing("no request has two rows")
    if not runnable(trial, with_parts(trial.case, parts)):
        return nothing("the backend does not take one row a request")
    again = trial.run(made(decoding, trial.case, trial.device))
    rows = rows_of(trial.inputs, parts)
    return same(trial, again, "each row as a request", exact=False, rows=rows)


def tried(q_len: int) -> list[int]:
    """Which rows of a request."""
    if q_len < 2:
        return []
    return sorted({0, 1, q_len // 2, q_len - 2, q_len - 1})


def decoding(case: Case, device: str) -> Any:
    """The rows as requests."""
    inputs = materialized(case, device)
    return batch(inputs, alone(inputs, tried))


ORACLE = Oracle(
    name="row_prefix",
    check=check,
    problems=ATTENTION,
    kills=(
        "not_causal",
        "causal_one_more",
        "table_indexed_by_row",
    ),
)
