"""Once more.

Claim: further runs on the same bytes give what the first one gave: fifty in all on a GPU, and four elsewhere.
Why: counters that are not reset, workspaces that are added to, and races show at the second call, or at one
    of many.
Exact or bounded: bit for bit; a backend that sums in no fixed order stays within both radii, and its detail
    says that it does not repeat itself.
Kills: semaphores and workspaces that keep what an earlier call left.
"""

from dataclasses import replace

import torch

from oracles.compare import identical, worst_of
from oracles.oracle import Oracle, Trial, private_copy, storage_bytes
from oracles.probes import agree
from oracles.verdict import Finding

# After the first. Threads race on a GPU, and a run is cheap there.
RUNS, RUNS_ON_A_GPU = 3, 49


def check(trial: Trial) -> Finding:
    """Run again and again on one copy, what is written put back each time, and compare with the first run."""
    first, findings, exact = trial.run(trial.inputs), [], True
    judged = {name: trial.problem.output_shapes[name] for name in trial.expected()}
    on_a_gpu = torch.device(trial.runs_on or trial.device).type == "cuda"
    memory = private_copy(trial.inputs)
    for number in range(RUNS_ON_A_GPU if on_a_gpu else RUNS):
        for name in trial.problem.writes:  # what the run before has stored is no store of this one
            storage_bytes(getattr(memory, name)).copy_(storage_bytes(getattr(trial.inputs, name)))
        again = trial.call(memory)
        for name in trial.problem.writes:
            stored = getattr(memory, name)
            findings.append(identical(name, stored, getattr(trial.left(), name), "n k e", trial.inputs))
            if not findings[-1].ok:
                return replace(findings[-1], detail=f"run {number + 2}: {findings[-1].detail}")
        for name, letters in judged.items():
            pair, expected = (getattr(again, name), getattr(first, name)), trial.expected()[name]
            finding = identical(name, *pair, letters, trial.inputs)
            if not finding.ok:
                exact = False
                finding = agree(name, *pair, expected, expected, letters, trial.inputs)
            if not finding.ok:  # whatever later runs do
                return replace(finding, detail=f"run {number + 2}: {finding.detail}")
            findings.append(finding)
    worst = worst_of(findings)
    return worst if exact else replace(worst, detail="runs differ, within the bounds")


ORACLE = Oracle(
    name="repeat",
    check=check,
    problems=(
        "latent_attention",
        "attention",
        "paged_attention",
        "merge_states",
        "cache_gather",
        "rope",
        "rope_cache_write",
    ),
    kills=("semaphore_not_reset", "fused_queries_in_place"),
)
