"""Whether the output is one that right kernels return: its gain, its slope, and how rough it is.

Claim: over all sampled rows, each statistic is where those of right kernels of the same declaration are.
Why: rounding once more than declared, or always towards zero, is within every element's bound, and no right
    kernel does it everywhere.
Exact or bounded: a statistic beyond Student's distribution at 10⁻⁴ is a suspicion. It fails when it comes
    back with the same sign on three cases with other seeds; a false alarm in less than one of 10⁹ cases
    (``ensemble.py``).
Kills: accumulators in low precision, truncation instead of rounding, exponentials by a short polynomial.
"""

from dataclasses import replace

from mla_ref.case import RECORDED, Case
from oracles.directions import Reading, finding, sampled
from oracles.ensemble import SUSPICION, readings, replays
from oracles.likely import FALSE_ALARM
from oracles.oracle import Oracle, Trial
from oracles.probes import ATTENTION, materialized, nothing
from oracles.verdict import Finding

WORDS = "{effect:+.3g} of what would be all of it"


def check(trial: Trial) -> Finding:
    """Judge the sampled rows of ``out``; run again on other seeds where they are suspect."""
    first = _look(trial, trial.case)
    if not first:
        return nothing("no row has noise above the output's grid")
    suspects = _suspects(first)
    again = replays(trial.case) if suspects and trial.case.regime != RECORDED else ()
    for seed in again:
        suspects &= _suspects(_look(trial, replace(trial.case, seed=seed)))
        if not suspects:
            return nothing("a suspicion that other seeds did not confirm")
    if not suspects:
        return finding(first, trial.inputs, WORDS)
    confirmed = [reading for reading in first if (reading.name, reading.value > 0) in suspects]
    return finding(confirmed, trial.inputs, WORDS)


def _look(trial: Trial, case: Case) -> list[Reading]:
    numerics, inputs = trial.backend.numerics, trial.inputs
    if case is not trial.case:
        inputs = materialized(case, trial.device)
    found = sampled(case, trial.device, numerics)
    if not found:
        return []
    rare = FALSE_ALARM if case.regime == RECORDED else SUSPICION
    return readings(found, trial.run(inputs).out, numerics, inputs[0].dtype, case.seed, rare)


def _suspects(looked: list[Reading]) -> set[tuple[str, bool]]:
    """Which statistics are beyond their limits, and in which direction."""
    return {(reading.name, reading.value > 0) for reading in looked if reading.ratio > 1.0}


ORACLE = Oracle(
    name="statistics",
    check=check,
    problems=ATTENTION,
    kills=(
        "weights_truncated",
        "output_truncated_in_the_noise",
        "accumulator_in_bf16_over_many_keys",
        "exponential_to_a_hundredth",
        "weights_in_fp8_for_bf16",
        "products_added_in_bf16",
    ),
)
