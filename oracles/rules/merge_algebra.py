"""Merging is a commutative monoid.

Claim: states in reverse order merge to the same; so do two halves merged first; empty states, whose output
    may be NaN, in front and behind change nothing, be there hundreds; and a lone state is returned as it is.
Why: splits end in any order, chunks are folded in one after another, and a request without a context brings
    an empty state. Kernels keep the states' weights in a warp, or in a table of so many splits.
Exact or bounded: a lone state within the roundings of one term, which is bit for bit in sixteen bits; the
    others within the radii of both sides, those of the halves passed on through their merge.
Kills: states that are dropped, averaged or weighed alike, empty states that count.
"""

from dataclasses import replace
from typing import Any

import torch

from mla_ref.case import Case
from mla_ref.problems.merge_states import MergeStatesInputs
from oracles.bounds import Admissible, merge_of
from oracles.compare import worst_of
from oracles.oracle import Oracle, Trial, naming
from oracles.probes import Make, Probe, admissible, agree, made, materialized, runnable, same, shows
from oracles.verdict import Finding

# How many empty states are put in front, by the seed, where the backend takes as many; of them no more
# elements than that.
IN_FRONT = (1, 5, 33, 258)
MOST = 4_000_000


def check(trial: Trial) -> Finding:
    """Reverse, add nothing, merge in two steps, and merge one."""
    for make, what in ((backwards, "states in reverse order"), (_with_empty(trial), "empty states added")):
        if make is None:
            continue
        with naming(what):
            again = trial.run(made(make, trial.case, trial.device))
        finding = same(trial, again, what, exact=False)
        if not finding.ok:
            return finding
    if len(trial.inputs.outs) > 1:
        finding = _in_two_steps(trial)
        if not finding.ok:
            return replace(finding, detail=f"halves merged first: {finding.detail}")
    return shows(trial, alone, trial.case, "the first state alone")


def _with_empty(trial: Trial) -> Make | None:
    """The one that adds the most empty states of those that the backend takes."""
    for make, count in ((surrounded, _in_front(trial.case)), (flanked, 1)):
        if runnable(trial, _with_states(trial.case, count + 1)):
            return make
    return None


def _with_states(case: Case, more: int) -> Case:
    """A case of so many more states, and of as many rows."""
    return replace(case, q_lens=case.q_lens + (0,) * more, kv_lens=case.kv_lens + (0,) * more)


def _in_two_steps(trial: Trial) -> Finding:
    halves = [trial.run(made(make, trial.case, trial.device)) for make in (older, newer)]
    known = [admissible(make, trial) for make in (older, newer)]
    inputs = MergeStatesInputs(*(torch.stack([getattr(x, name) for x in halves]) for name in ("out", "lse")))
    out, lse = (
        known[0][name]._replace(
            mid=torch.stack([x[name].mid for x in known]), radius=torch.stack([x[name].radius for x in known])
        )
        for name in ("out", "lse")
    )
    through = merge_of(*inputs, out, lse)
    whole, got, findings = trial.run(trial.inputs), trial.run(inputs), []
    last = trial.expected()
    for name, letters in trial.problem.output_shapes.items():
        step: Admissible = getattr(through, name)
        here = last[name]._replace(radius=last[name].radius + step.radius)
        pair = getattr(got, name), getattr(whole, name)
        findings.append(agree(name, *pair, here, last[name], letters, trial.inputs))
    return worst_of(findings)


def backwards(case: Case, device: str) -> Any:
    """The case's states in reverse order."""
    inputs = materialized(case, device)
    return MergeStatesInputs(*(x.flip(0) for x in inputs))


def surrounded(case: Case, device: str) -> Any:
    """The case's states between others that are empty."""
    return _between_empty(case, device, _in_front(case))


def flanked(case: Case, device: str) -> Any:
    """The case's states between two that are empty."""
    return _between_empty(case, device, 1)


def _in_front(case: Case) -> int:
    state = sum(case.q_lens) * case.config.num_heads * case.config.v_head_dim
    return min(IN_FRONT[case.seed % len(IN_FRONT)], max(MOST // max(state, 1), 1))


def _between_empty(case: Case, device: str, count: int) -> Any:
    outs, lses = materialized(case, device)
    nothing = torch.full_like(outs[:1], torch.nan), torch.full_like(lses[:1], -torch.inf)
    return MergeStatesInputs(
        *(torch.cat([*[n] * count, x, n]) for n, x in zip(nothing, (outs, lses), strict=True))
    )


def older(case: Case, device: str) -> Any:
    """The first half of the states."""
    inputs = materialized(case, device)
    return MergeStatesInputs(*(x[: len(x) // 2] for x in inputs))


def newer(case: Case, device: str) -> Any:
    """The second half of the states."""
    inputs = materialized(case, device)
    return MergeStatesInputs(*(x[len(x) // 2 :] for x in inputs))


def alone(case: Case, device: str) -> Probe:
    """The first state, and itself."""
    inputs = MergeStatesInputs(*(x[:1] for x in materialized(case, device)))
    empty = inputs.lses[0].isneginf()[..., None]
    return Probe(
        inputs, {"out": inputs.outs[0].double().masked_fill(empty, 0.0), "lse": inputs.lses[0].double()}
    )


ORACLE = Oracle(
    name="merge_algebra",
    check=check,
    problems=("merge_states",),
    kills=(
        "states_averaged",
        "states_first_ignored",
        "states_keep_the_largest_lse",
        "states_empty_times_zero",
        "states_empty_counted",
        "states_beyond_three_dropped",
        "states_single_rounded",
        "states_third_weighed_as_second",
        "states_beyond_a_warp",
    ),
)
