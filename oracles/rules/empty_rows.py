"""Rows without a key.

Claim: where a row sees no key, out is exactly 0 and lse exactly -inf; everywhere else lse is finite.
Why: log 0 is -inf, and (0, -inf) is the neutral element under which partial results merge.
Exact or bounded: exact.
Kills: +inf or NaN for an empty row, stale memory, a request that was skipped.
"""

import torch

from oracles.compare import identical
from oracles.oracle import Oracle, Trial
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Rows whose true lse is -inf, against the neutral element."""
    output, shapes = trial.run(trial.inputs), trial.problem.output_shapes
    empty = trial.expected()["lse"].mid.isneginf()
    lse = torch.where(empty | output.lse.isneginf(), output.lse, 0.0)
    want = torch.where(empty, -torch.inf, 0.0).to(output.lse.dtype)
    finding = identical("lse", lse, want, shapes["lse"], trial.inputs)
    if not finding.ok:
        return finding
    out = torch.where(empty[..., None], output.out, 0.0)
    return identical("out", out.abs(), torch.zeros_like(out), shapes["out"], trial.inputs)


ORACLE = Oracle(
    name="empty_rows",
    check=check,
    problems=("latent_attention", "attention", "paged_attention", "merge_states"),
    kills=(
        "empty_row_plus_inf",
        "empty_row_nan",
        "empty_row_lse_zero",
        "empty_row_stale",
        "states_empty_times_zero",
        "states_empty_counted",
        "states_all_empty_nan",
    ),
)
