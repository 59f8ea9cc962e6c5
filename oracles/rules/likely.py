"""The output and the log-sum-exp, as close as rounded weights let them be but for one case in 10⁹.

Claim: every element is within its likely radius: that of ``value``, with roundings of different weights
    independent of each other.
Why: a bound that always holds lets every weight err in the worst direction; over n keys most of it cancels,
    and what is left is about sqrt(n) times smaller.
Exact or bounded: bounded, with a false alarm in one of 10⁹ cases (``likely.py``); where weights are not
    rounded it says nothing beyond ``value`` and ``lse``.
Kills: an accumulator in the type of the weights, a single element that is off in a long row.
"""

from oracles.compare import within, worst_of
from oracles.directions import likely
from oracles.likely import claimed
from oracles.oracle import Oracle, Trial
from oracles.probes import ATTENTION, nothing
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Judge ``out`` and ``lse``."""
    if not claimed(trial.backend.numerics, trial.inputs[0].dtype):
        return nothing("weights are not rounded")
    output, shapes = trial.run(trial.inputs), trial.problem.output_shapes
    expected = likely(trial.case, trial.device, trial.backend.numerics)
    return worst_of(
        [
            within(name, getattr(output, name), want, shapes[name], trial.inputs)
            for name, want in expected.items()
        ]
    )


ORACLE = Oracle(
    name="likely",
    check=check,
    problems=ATTENTION,
    kills=("one_element_off_in_a_long_row", "accumulator_in_bf16_in_the_noise", "key_dropped_among_many"),
)
