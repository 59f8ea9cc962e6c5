"""The log-sum-exp of the scores.

Claim: every row's lse is within its derived radius of the float64 truth; -inf exactly where it sees no key.
Why: split and chunked attention merge by it; and it moves with the scale where the output hardly does.
Exact or bounded: bounded by ln Σ p e^η, η the error of each score, plus the roundings of the logarithm.
Kills: base-2 logarithms, wrong scale, lost or foreign keys, a denominator of low precision.
"""

from oracles.compare import within
from oracles.oracle import Oracle, Trial
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Judge ``lse``."""
    shapes, expected = trial.problem.output_shapes, trial.expected()["lse"]
    return within("lse", trial.run(trial.inputs).lse, expected, shapes["lse"], trial.inputs)


ORACLE = Oracle(
    name="lse",
    check=check,
    problems=("latent_attention", "attention", "paged_attention", "merge_states"),
    kills=(
        "scale_one_percent",
        "scale_of_latent_width",
        "scale_without_mscale",
        "exp2_of_natural_scores",
        "key_dropped",
        "key_twice",
        "causal_one_less",
        "lse_base_2",
        "lse_of_unscaled_maximum",
        "tail_of_zeros",
        "rope_part_dropped",
        "scores_in_bf16",
        "sum_in_bf16",
        "sum_not_rescaled",
        "paged_scale_one_percent",
        "paged_key_dropped",
        "states_keep_the_largest_lse",
        "scores_in_fp16",
        "scores_in_bf16_in_the_noise",
        "sum_in_bf16_in_the_noise",
        "exponential_to_a_thousandth",
        "scale_one_in_a_thousand",
        "scale_in_bf16",
    ),
)
