"""What belongs to the whole process.

Claim: a call, and a question to a backend, leaves torch as it found it: default types, flags, precision,
    gradient mode, threads, the current device and its stream, the random streams of the host and of GPUs.
Why: an engine calls a hundred kernels; one that leaves another default type, turns TF32 on or seeds the
    generator changes what all the others compute, and what is sampled.
Exact or bounded: exact. The judge looks around every call and question, and puts back what was changed. It
    is told when all other claims are decided, so that theirs are among them.
Kills: a seed, a default type, a mode or a flag that is left behind.
"""

from oracles.oracle import Oracle, Trial
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """What the calls so far have changed."""
    trial.run(trial.inputs)
    if not trial.disturbed:
        return Finding(ok=True, num_checked=1)
    return Finding(ok=False, detail=f"a call changed {trial.disturbed[0]}", num_bad=1, num_checked=1)


ORACLE = Oracle(
    name="process_state",
    check=check,
    kills=(
        "seeds_the_generator",
        "gradients_left_off",
        "gradients_off_once_asked",
        "tf32_left_on",
        "default_type_left",
    ),
    last=True,
)
