"""What many elements show together: a gain, a wrong slope of the scores, the weight of a key.

Claim: along the direction in which a gain, another softmax scale, or another weight of some key would move a
    row, and along all rows' together, the output is off by no more than independent roundings of the weights
    and of the output allow but for one case in 10⁹.
Why: along a direction an error adds up over the channels and the rows, and noise does not; a bias that is a
    tenth of an element's bound is many times that of the whole.
Exact or bounded: bounded by Hoeffding's inequality, and by bounds.py for all other errors
    (``directions.py``); rows are left out whose noise the output's own rounding hides.
Kills: truncation instead of rounding, of the weights or of the output.
"""

from oracles.directions import filters, finding, sampled
from oracles.oracle import Oracle, Trial
from oracles.probes import ATTENTION, nothing
from oracles.verdict import Finding

WORDS = {
    "gain": "the output is {times:.4g} times what it should be",
    "slope": "scores are {times:.4g} times what they should be",
    "weight": "its share of the weights is off by {effect:+.3g}",
}


def check(trial: Trial) -> Finding:
    """Judge the sampled rows of ``out``, each and together."""
    numerics, query = trial.backend.numerics, trial.inputs[0].dtype
    found = sampled(trial.case, trial.device, numerics)
    readings = filters(found, trial.run(trial.inputs).out, numerics, query)
    if not readings:
        return nothing("no row has noise above the output's grid, or channels have weights of their own")
    worst = max(readings, key=lambda reading: reading.ratio)
    return finding(readings, trial.inputs, WORDS[worst.name.split()[0]])


ORACLE = Oracle(
    name="matched_filters",
    check=check,
    problems=ATTENTION,
    kills=(
        "weights_truncated",
        "output_truncated_in_the_noise",
        "key_dropped_among_many",
        "scale_with_one_mscale",
    ),
)
