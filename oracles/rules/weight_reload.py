"""Weights that change.

Claim: with w_uv four times as large, out is four times as large and lse the same; with w_uk four times as
    large and q_nope a quarter, both are the same.
Why: absorbed weights are derived once and kept. Where a reload does not reach them, or reaches the path of
    decode and not that of prefill, an engine serves two models at once.
Exact or bounded: bit for bit; claimed where the backend repeats itself and rounds to no narrow type, whose
    smallest numbers are near.
Kills: weights, or what was derived from them, that are kept from an earlier call.
"""

from typing import Any

from mla_ref.case import Case
from oracles.compare import identical
from oracles.oracle import Oracle, Trial
from oracles.probes import made, materialized, nothing, repeats, wide
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with other values' weights, then with other keys'."""
    if not wide(trial):
        return nothing("a narrow type rounds small numbers at an absolute distance")
    first, shapes, checked = trial.run(trial.inputs), trial.problem.output_shapes, 0
    for make, factor in ((larger_values, 4.0), (larger_keys, 1.0)):
        again = trial.run(made(make, trial.case, trial.device))
        for name, want in (("out", first.out * factor), ("lse", first.lse)):
            finding = identical(name, getattr(again, name), want, shapes[name], trial.inputs)
            if not finding.ok:
                return finding if repeats(trial) else nothing("the backend does not repeat itself")
            checked += finding.num_checked
    return Finding(ok=True, num_checked=checked)


def larger_values(case: Case, device: str) -> Any:
    """The case's inputs with w_uv times 4."""
    inputs = materialized(case, device)
    return inputs._replace(w_uv=inputs.w_uv * 4.0)


def larger_keys(case: Case, device: str) -> Any:
    """The case's inputs with w_uk times 4 and q_nope over 4."""
    inputs = materialized(case, device)
    return inputs._replace(w_uk=inputs.w_uk * 4.0, q_nope=inputs.q_nope / 4.0)


ORACLE = Oracle(
    name="weight_reload",
    check=check,
    problems=("attention",),
    kills=("weights_remembered",),
)
