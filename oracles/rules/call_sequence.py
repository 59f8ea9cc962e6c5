"""Calls of other sizes in between.

Claim: after the batch in reverse order, its first request alone, a step in which nobody has a key and one in
    which nobody has a token, each call gives that batch's rows, and the first call once more its own.
Why: a plan, a workspace or a graph that is kept from one call to the next is sized and filled for the call
    that made it; engines change their batch at every step, and a grid of no blocks is an error to launch.
Exact or bounded: the last call repeats the first bit for bit where the backend repeats itself; the others are
    within both radii, and rows without a key exact.
Kills: lengths, plans and outputs that are remembered, steps without work that raise.
"""

from collections.abc import Iterator
from typing import Any

from oracles.oracle import Oracle, Trial, naming, private_copy
from oracles.probes import ATTENTION, Part, batch, lengths, rows_of, runnable, same, whole, with_parts
from oracles.rejudge import admitted_instead
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
            with naming(what):
                again = trial.run(batch(trial.inputs, parts))
            rows = rows_of(trial.inputs, parts)
            finding = same(trial, again, what, exact=False, rows=rows)
            if not finding.ok:
                return finding
    for what, parts in idle(trial.inputs):
        if parts and runnable(trial, with_parts(trial.case, parts)):
            finding = admitted_instead(trial, batch(trial.inputs, parts), what)
            if not finding.ok:
                return finding
    with naming("after other calls"):
        again = trial.run(private_copy(trial.inputs))
    return same(trial, again, "after other calls", exact=True)


def idle(inputs: Any) -> Iterator[tuple[str, list[Part]]]:
    """Batches of the same requests with nothing to do, and what they are."""
    sizes = list(enumerate(lengths(inputs)))
    yield "where nobody has a key", [Part(i, 0, 1, 0) for i, (q_len, _) in sizes if q_len]
    yield "where nobody has a token", [Part(i, 0, 0, kv_len) for i, (_, kv_len) in sizes]


ORACLE = Oracle(
    name="call_sequence",
    check=check,
    problems=ATTENTION,
    kills=(
        "first_output_remembered",
        "lengths_remembered",
        "semaphore_not_reset",
        "raises_without_keys",
        "raises_without_tokens",
    ),
)
