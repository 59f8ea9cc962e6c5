"""Pages have another size.

Claim: with the same entries in pages of another size the output is the same.
Why: a page is a unit of allocation. Only sizes that the backend takes are tried: twice the size or half of
    it, and one and a half times, which is no power of two where the size is one.
Exact or bounded: within both radii, since a kernel may tile by pages.
Kills: page sizes that are built in or taken for a power of two, table columns counted in other units.
"""

from dataclasses import replace
from typing import Any

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial, naming
from oracles.probes import ATTENTION, cached_anew, made, materialized, nothing, runnable, same, stored
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run over the same entries in pages of two other sizes."""
    finding = None
    for sizes in ((doubled, halved), (longer,)):
        for resized in sizes:
            case = _case(trial.case, resized)
            if case.block_size == trial.case.block_size or not runnable(trial, case):
                continue
            what = f"with pages of {case.block_size} tokens"
            with naming(what):
                again = trial.run(made(resized, trial.case, trial.device))
            finding = same(trial, again, what, exact=False)
            if not finding.ok:
                return finding
            break
    return finding or nothing("the backend takes no other page size")


def doubled(case: Case, device: str) -> Any:
    """The case's inputs in pages twice as large."""
    return _repaged(case, device, doubled)


def halved(case: Case, device: str) -> Any:
    """The case's inputs in pages half as large."""
    return _repaged(case, device, halved)


def longer(case: Case, device: str) -> Any:
    """The case's inputs in pages one and a half times as large."""
    return _repaged(case, device, longer)


def _case(case: Case, resized: Any) -> Case:
    size = case.block_size
    sizes = {doubled: size * 2, halved: max(size // 2, 1), longer: size * 3 // 2}
    return replace(case, block_size=sizes[resized])


def _repaged(case: Case, device: str, resized: Any) -> Any:
    inputs = materialized(case, device)
    return cached_anew(inputs, _case(case, resized), stored(inputs))


ORACLE = Oracle(
    name="page_size",
    check=check,
    problems=ATTENTION,
    kills=("page_size_built_in", "page_size_taken_for_a_power_of_two"),
)
