"""Calls of other sizes in between.

Claim: after the batch in reverse order, and then its first request alone, each call gives that batch's rows,
    and the first call once more its own.
Why: a plan, a workspace or a graph that is kept from one call to the next is sized and filled for the call
    that made it; engines change their batch at every step.
Exact or bounded: the last call repeats the first bit for bit where the backend repeats itself; the others are
    within both radii.
Kills: lengths, plans and outputs that are remembered.
"""

from oracles.oracle import Oracle, Trial, private_copy
from oracles.probes import ATTENTION, batch, rows_of, runnable, same, whole, with_parts
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run the batch, others made of its requests, and the batch."""
    trial.run(trial.inputs)
    num_requests = len(trial.case.kv_lens)
    for what, order in (
        ("with the requests in reverse order", range(num_requests - 1, -1, -1)),
        ("with the first request alone", range(min(num_requests, 1))),
    ):
        parts = whole(trial.inputs, order)
        if runnable(trial, with_parts(trial.case, parts)):
            again = trial.run(batch(trial.inputs, parts))
            rows = rows_of(trial.inputs, parts)
            finding = same(trial, again, what, exact=False, rows=rows)
            if not finding.ok:
                return finding
    return same(trial, trial.run(private_copy(trial.inputs)), "after other calls", exact=True)


ORACLE = Oracle(
    name="call_sequence",
    check=check,
    problems=ATTENTION,
    kills=(
        "first_output_remembered",
        "lengths_remembered",
        "semaphore_not_reset",
    ),
)
