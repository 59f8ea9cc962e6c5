"""What an implementation must not touch.

Claim: every input that is not written in place is byte for byte what it was, with the gaps and padding
    around it.
Why: caches and weights are shared by every later call.
Exact or bounded: exact.
Kills: a kernel that rescales its queries in place, or stores past the end of its rows.
"""

from oracles.compare import identical, told
from oracles.oracle import Oracle, Trial, named_tensors, storage_bytes
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Compare values with their places, then whole storages."""
    before, left = named_tensors(trial.inputs), named_tensors(trial.left())
    checked = 0
    for name, tensor in before.items():
        if name in trial.problem.writes:
            continue
        finding = identical(name, left[name], tensor, trial.problem.shapes.get(name, ""), trial.inputs)
        if not finding.ok:
            return told("a call changed an input", finding)
        storage = identical(f"{name}'s storage", storage_bytes(left[name]), storage_bytes(tensor))
        if not storage.ok:
            return told("a call changed memory around an input", storage)
        checked += finding.num_checked
    return Finding(ok=True, num_checked=checked)


ORACLE = Oracle(
    name="inputs_unchanged",
    check=check,
    kills=(
        "query_scaled_in_place",
        "store_past_the_end",
        "fused_queries_in_place",
    ),
)
