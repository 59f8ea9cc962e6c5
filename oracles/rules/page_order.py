"""Pages are somewhere else.

Claim: with every page at another place of the pool, and the block table that says so, the output is the same.
Why: a block table is an indirection, and nothing else. Engines hand out pages in any order, and reuse them.
Exact or bounded: bit for bit where the backend repeats itself, else within both radii.
Kills: logical numbers used as physical ones, tables that are taken for rising.
"""

from dataclasses import replace
from typing import Any

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial
from oracles.probes import ATTENTION, cached_anew, made, materialized, same, stored
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run over the same entries in shuffled pages."""
    again = trial.run(made(elsewhere, trial.case, trial.device))
    return same(trial, again, "with the pages elsewhere", exact=True)


def elsewhere(case: Case, device: str) -> Any:
    """The case's inputs over other pages of a larger pool."""
    layout = replace(case.layout, shuffled=True, spare_blocks=case.layout.spare_blocks + 3)
    moved = replace(case, layout=layout, seed=case.seed + 1)
    inputs = materialized(case, device)
    return cached_anew(inputs, moved, stored(inputs))


ORACLE = Oracle(
    name="page_order",
    check=check,
    problems=ATTENTION,
    kills=("page_table_taken_for_rising",),
)
