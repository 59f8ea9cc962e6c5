"""Requests do not know each other.

Claim: a request's rows are the same whatever the other requests of the batch have cached, and the same
    without them.
Why: a page that is another's, a length that is the batch's, a scheduler that ends one request where another
    begins: each makes an answer depend on who else is being served.
Exact or bounded: with other contents in the same batch bit for bit where the backend repeats itself; without
    the others within both radii, since work may be split differently.
Kills: foreign pages, rows and lengths of neighbours.
"""

from functools import cache, partial
from typing import Any

import torch

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial, naming
from oracles.probes import (
    ATTENTION,
    Make,
    alike,
    batch,
    first_keys,
    made,
    materialized,
    nothing,
    only,
    picked,
    restored,
    rows_of,
    runnable,
    same,
    stored,
    whole,
    with_parts,
)
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with the entries of all other requests exchanged, then without them, for two of the requests."""
    lengths = trial.case.kv_lens
    if len(lengths) < 2:
        return nothing("one request has no mates")
    for kept in dict.fromkeys((lengths.index(max(lengths)), 0)):
        parts = whole(trial.inputs, [kept])
        rows = rows_of(trial.inputs, parts)
        what = "with other keys in other requests"
        with naming(what):
            again = trial.run(made(strangers_of(kept), trial.case, trial.device))
        first = only(trial.run(trial.inputs), rows)
        expected = {name: picked(x, rows) for name, x in trial.expected().items()}
        finding = alike(trial, only(again, rows), first, expected, what, exact=True)
        if finding.ok and runnable(trial, with_parts(trial.case, parts)):
            what = "without the other requests"
            with naming(what):
                alone = trial.run(batch(trial.inputs, parts))
            finding = same(trial, alone, what, exact=False, rows=rows)
        if not finding.ok:
            return finding
    return Finding(ok=True, num_checked=trial.run(trial.inputs).out.numel())


@cache
def strangers_of(kept: int) -> Make:
    """``strangers``, the same function for the same request."""
    return partial(strangers, kept=kept)


def strangers(case: Case, device: str, kept: int) -> Any:
    """All requests but one have the entries of the whole batch, moved on by half of it."""
    inputs = materialized(case, device)
    starts, entries = first_keys(inputs), stored(inputs)
    order = (torch.arange(starts[-1], device=device) + 1 + starts[-1] // 2) % max(starts[-1], 1)
    mine = slice(starts[kept], starts[kept + 1])
    order[mine] = torch.arange(starts[kept], starts[kept + 1], device=device)
    return restored(inputs, {name: x[order] for name, x in entries.items()})


ORACLE = Oracle(
    name="batch_mates",
    check=check,
    problems=ATTENTION,
    kills=(
        "page_of_another_request",
        "table_indexed_by_row",
        "rows_one_late",
    ),
)
