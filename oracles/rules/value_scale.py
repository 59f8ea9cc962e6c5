"""Outputs are linear in the values.

Claim: with scores that do not depend on the latent part, values four times as large give an output four
    times as large, and the same lse.
Why: out is a weighted sum of values. Formats with scales are scaled by them, so a scale that is not
    read, read twice, or read for a tile's neighbour shows without any knowledge of its value.
Exact or bounded: bit for bit, but for outputs that are near the smallest numbers of float32; claimed where
    the backend repeats itself and rounds to no narrow type, whose smallest numbers are near.
Kills: scales ignored, squared or not applied to the values, values that are read from somewhere else.
"""

from dataclasses import replace
from typing import Any

import torch

from mla_ref.case import Case
from oracles.bounds import LEAST_SCALED
from oracles.compare import identical, told, worst_of
from oracles.oracle import Oracle, Trial
from oracles.probes import (
    ATTENTION,
    asked,
    decoded,
    encoded,
    is_strange,
    made,
    materialized,
    nothing,
    queries,
    repeats,
    restored,
    runnable,
    stored,
    wide,
)
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with the values as they are, and times 4."""
    if not wide(trial):
        return nothing("a narrow type rounds small numbers at an absolute distance")
    if not runnable(
        trial, replace(trial.case, kv_scale=4.0 * trial.case.kv_scale, v_scale=4.0 * trial.case.v_scale)
    ):
        return nothing("the backend does not take other scales")
    if is_strange(trial.inputs) and not scales_exactly(trial.case, trial.device):
        return nothing("the cache format does not store four times as much as four times what it stores")
    once, larger = (trial.run(made(make, trial.case, trial.device)) for make in (by_rope_alone, scaled))
    shapes = trial.problem.output_shapes
    values, four = above(larger.out, 4.0 * LEAST_SCALED), above(once.out, LEAST_SCALED) * 4.0
    finding = worst_of(
        [
            identical("out", values, four, shapes["out"], trial.inputs),
            identical("lse", larger.lse, once.lse, shapes["lse"], trial.inputs),
        ]
    )
    if not finding.ok and not repeats(trial):
        return nothing("the backend does not repeat itself")
    return told("with values times 4", finding)


def above(out: Any, least: float) -> Any:
    """The output with 0 for what is smaller than ``least``."""
    return out.masked_fill(out.abs() < least, 0.0) if isinstance(out, torch.Tensor) else out


def by_rope_alone(case: Case, device: str) -> Any:
    """The case's inputs, the latent part of its queries 0."""
    inputs = materialized(case, device)
    if is_strange(inputs):  # as its own codes are, so that four times as much may be, too
        inputs = restored(inputs, encoded(inputs, *decoded(inputs)))
    return asked(inputs, getattr(inputs, queries(inputs)[-1]))


def scales_exactly(case: Case, device: str) -> bool:
    """Whether what is cached in ``scaled`` is four times what is cached in ``by_rope_alone``."""
    once, larger = (decoded(made(make, case, device)) for make in (by_rope_alone, scaled))
    return torch.equal(larger[0], 4.0 * once[0]) and torch.equal(larger[1], once[1])


def scaled(case: Case, device: str) -> Any:
    """The same with values times 4."""
    inputs = by_rope_alone(case, device)
    if hasattr(inputs, "value_cache"):
        if inputs.value_cache.dtype == torch.float8_e4m3fn:
            return inputs._replace(v_scale=inputs.v_scale * 4.0)
        return restored(inputs, {"value_cache": stored(inputs)["value_cache"] * 4.0})
    if is_strange(inputs):
        kv_c, k_pe = decoded(materialized(case, device))
        return restored(inputs, encoded(inputs, 4.0 * kv_c, k_pe))
    if inputs.cache_format.per_tensor_scale:
        # The rope part is under the same scale, so the scores are made small again.
        return inputs._replace(kv_scale=inputs.kv_scale * 4.0, softmax_scale=inputs.softmax_scale / 4.0)
    c, entries = case.config.kv_lora_rank, stored(inputs)["kv_cache"].clone()
    if entries.dtype == torch.uint8:
        scales = entries[:, c : c + c // 32].contiguous().view(torch.float32) * 4.0
        entries[:, c : c + c // 32] = scales.view(torch.uint8)
    else:
        entries[:, :c] *= 4.0
    return restored(inputs, {"kv_cache": entries})


ORACLE = Oracle(
    name="value_scale",
    check=check,
    problems=ATTENTION,
    kills=(
        "fp8_scale_ignored",
        "fp8_scale_twice",
        "value_scale_dropped",
        "rope_lanes_in_values",
        "paged_value_scale_of_keys",
        "paged_scales_ignored",
    ),
)
