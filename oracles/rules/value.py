"""The output itself.

Claim: every element is a rounding of a value within its derived radius of the float64 truth.
Why: bounds.py derives the radius from the declared numerics, the lengths and the case's own data.
Exact or bounded: bounded, element by element; NaN only where the truth is NaN.
Kills: wrong scale, lost or foreign keys, wrong masks, pages and heads, undeclared roundings.
"""

from dataclasses import replace

from oracles.bounds import ADMISSIBLE
from oracles.compare import within, worst_of
from oracles.oracle import Oracle, Trial
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Judge every field but ``lse``."""
    output, shapes = trial.run(trial.inputs), trial.problem.output_shapes
    judged = {name: expected for name, expected in trial.expected().items() if name != "lse"}
    worst = worst_of(
        [
            within(name, getattr(output, name), expected, shapes[name], trial.inputs)
            for name, expected in judged.items()
        ]
    )
    ill = sum(expected.ill for expected in judged.values())
    if worst.ok and ill:
        return replace(worst, detail=f"of {ill} ill-conditioned rows only the hull is claimed")
    return worst


ORACLE = Oracle(
    name="value",
    check=check,
    problems=tuple(ADMISSIBLE),
    kills=(
        "scale_one_percent",
        "key_dropped",
        "causal_one_more",
        "causal_one_less",
        "not_causal",
        "causal_top_left",
        "fp8_scale_ignored",
        "fp8_scale_twice",
        "tile_scale_of_neighbour",
        "page_of_another_request",
        "pages_swapped",
        "tail_unmasked",
        "nan_times_zero",
        "value_one_row_late",
        "heads_swapped",
        "rows_one_late",
        "end_not_stored",
        "rows_not_written",
        "sum_not_rescaled",
        "out_not_rescaled",
        "merge_base_2",
        "merge_average",
        "merge_overflow",
        "weights_in_fp8",
        "weights_in_bf16_undeclared",
        "accumulator_in_bf16",
        "output_truncated",
        "paged_heads_interleaved",
        "paged_value_scale_of_keys",
        "paged_scales_ignored",
        "paged_values_from_keys",
        "paged_tail_unmasked",
        "states_merged_in_base_2",
        "states_averaged",
        "states_merged_without_maximum",
        "states_first_ignored",
        "rope_half_split",
        "rope_theta",
        "rope_not_rotated",
        "rope_single_token_not_rotated",
        "rope_position_late",
        "rope_turned_back",
        "rope_yarn_ignored",
        "rope_yarn_without_ramp",
        "rope_yarn_without_magnitude",
        "rope_table_in_bf16",
        "rope_frequencies_in_bf16",
        "rope_positions_in_bf16",
        "rope_angle_in_float32",
        "read_from_a_blocks_start",
        "read_rows_late",
        "read_scale_ignored",
        "read_scale_in_bf16",
        "gather_without_tile_scales",
        "layer_theta",
        "layer_softmax_scale_without_mscale",
        "layer_query_gain_forgotten",
        "layer_growth_forgotten",
        "layer_bias_forgotten",
        "layer_norm_weight_forgotten",
        "layer_values_first",
        "layer_positions_from_zero",
        "one_element_five_percent",
        "products_added_in_bf16",
        "splits_exchanged",
        "last_page_stale",
        "fused_queries_half_split",
        "fused_positions_in_16_bits",
        "fused_queries_without_slots_not_rotated",
    ),
)
