"""Weights that change.

Claim: with w_uv four times as large, out is four times as large and lse the same; with w_uk four times as
    large and q_nope a quarter, both are the same.
Why: absorbed weights are derived once and kept. Where a reload does not reach them, or reaches the path of
    decode and not that of prefill, an engine serves two models at once.
Exact or bounded: bit for bit from the magnitude on that ``oracles.scaling`` derives, within both radii below
    it and where the backend does not repeat itself; claimed where it rounds to no narrow type, whose smallest
    numbers are near, and four times as much is not near the largest ones; of values' weights alone where
    neither a quarter of the queries nor one of the weights is exact.
Kills: weights, or what was derived from them, that are kept from an earlier call.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mla_ref.case import Case
from oracles.bounds import Admissible
from oracles.compare import worst_of
from oracles.oracle import Oracle, Trial
from oracles.probes import Make, admissible, made, materialized, nothing, wide
from oracles.scaling import as_claimed, kept_by_scores, kept_by_values, why_not_scaled
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with other values' weights, then with other keys'."""
    if not wide(trial):
        return nothing("a narrow type rounds small numbers at an absolute distance")
    if reason := why_not_scaled(trial):
        return nothing(reason)
    first = trial.run(trial.inputs)
    findings = []
    for make, factor, least in ((larger_values, 4.0, kept_by_values), (larger_keys, 1.0, kept_by_scores)):
        changed = made(make, trial.case, trial.device)
        if changed is None:
            continue
        want = first._replace(out=first.out * factor)
        may_be = partial(_either, trial, make, factor)
        what = make.__name__.replace("_", " ")
        findings.append(as_claimed(trial, trial.run(changed), want, may_be, least(trial), what))
        if not findings[-1].ok:
            break
    return replace(worst_of(findings), num_checked=sum(finding.num_checked for finding in findings))


def _either(
    trial: Trial, make: Make, factor: float
) -> tuple[Mapping[str, Admissible], Mapping[str, Admissible]]:
    """What the second output may be, and the first one times ``factor``."""
    out = trial.expected()["out"]
    out = out._replace(mid=out.mid * factor, radius=out.radius * factor)
    return admissible(make, trial), {**trial.expected(), "out": out}


def larger_values(case: Case, device: str) -> Any:
    """The case's inputs with w_uv times 4."""
    inputs = materialized(case, device)
    return inputs._replace(w_uv=inputs.w_uv * 4.0)


def larger_keys(case: Case, device: str) -> Any:
    """The case's inputs with w_uk times 4 and q_nope over 4, or the reverse; None if neither is exact."""
    inputs = materialized(case, device)
    for divided, multiplied in (("q_nope", "w_uk"), ("w_uk", "q_nope")):
        quarter = getattr(inputs, divided) / 4.0
        if torch.equal(quarter * 4.0, getattr(inputs, divided)):
            return inputs._replace(**{divided: quarter, multiplied: getattr(inputs, multiplied) * 4.0})
    return None


ORACLE = Oracle(
    name="weight_reload",
    check=check,
    problems=("attention",),
    kills=("weights_remembered",),
)
