"""Pages have another size.

Claim: with the same entries in pages of another size the output is the same.
Why: a page is a unit of allocation. Only sizes that the backend takes are tried.
Exact or bounded: within both radii, since a kernel may tile by pages.
Kills: page sizes that are built in, table columns counted in other units.
"""

from dataclasses import replace
from typing import Any

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial
from oracles.probes import ATTENTION, cached_anew, made, materialized, nothing, runnable, same, stored
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run over the same entries in pages of twice the size, or of half of it."""
    for resized in (doubled, halved):
        case = _case(trial.case, resized)
        if case.block_size != trial.case.block_size and runnable(trial, case):
            what = f"with pages of {case.block_size} tokens"
            return same(trial, trial.run(made(resized, trial.case, trial.device)), what, exact=False)
    return nothing("the backend takes no other page size")


def doubled(case: Case, device: str) -> Any:
    """The case's inputs in pages twice as large."""
    return _repaged(case, device, doubled)


def halved(case: Case, device: str) -> Any:
    """The case's inputs in pages half as large."""
    return _repaged(case, device, halved)


def _case(case: Case, resized: Any) -> Case:
    size = case.block_size * 2 if resized is doubled else max(case.block_size // 2, 1)
    return replace(case, block_size=size)


def _repaged(case: Case, device: str, resized: Any) -> Any:
    inputs = materialized(case, device)
    return cached_anew(inputs, _case(case, resized), stored(inputs))


ORACLE = Oracle(
    name="page_size",
    check=check,
    problems=ATTENTION,
    kills=("page_size_built_in",),
)
