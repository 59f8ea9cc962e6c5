"""One key.

Claim: a row that sees a single key returns that key's value as it is, and scale · q · k as its lse. Where the
    weights are rounded, and once for all channels, it is the value times one factor in all of them.
Why: softmax of one score is 1, whatever the score; nothing is left that could hide a wrong scale, a wrong
    slice or a wrong dequantisation, and lse shows the score itself. A weight in bfloat16 may be off by the
    last bit of an output, which hides any error of that size; but not in one channel and not in another.
Exact or bounded: values have four significant bits, which no type of the path rounds: bit for bit in
    sixteen-bit outputs, within the roundings of one term else. lse within the radius of one dot product. Of
    the factor: every channel is within half a spacing of the output's type and its own few roundings.
Kills: every wrong scale, lost channels, scores of low precision, tails, stores that stop early, last bits.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mla_ref.case import Case
from mla_ref.values import integers
from oracles.bounds import factors, shares_a_factor
from oracles.compare import place
from oracles.oracle import Oracle, Trial
from oracles.probes import (
    ATTENTION,
    Probe,
    code_width,
    decoded,
    exactly_scaled,
    materialized,
    payload,
    planted,
    shows,
    value_channels,
)
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with one token in every request."""
    also = partial(one_factor, trial) if shares_a_factor(trial.backend.numerics) else None
    return shows(trial, plant, shortest(trial.case), "with one key in every request", also=also)


def one_factor(trial: Trial, inputs: Any, output: Any) -> Finding:
    """Every row is its key's value times a number."""
    low, high = factors(inputs, trial.backend.numerics, output.out)
    if not output.out.numel():
        return Finding(ok=True)
    least, most = low.max(-1), high.min(-1)
    apart = least.values - most.values
    num_bad = int((apart > 0.0).sum())
    if not num_bad:
        return Finding(ok=True, num_checked=output.out.numel())
    t, h = divmod(int(apart.argmax()), apart.shape[1])
    channels = [f"channel {int(x.indices[t, h])} by {float(x.values[t, h]):.6g}" for x in (least, most)]
    return Finding(
        ok=False,
        detail=f"out: {num_bad} of {apart.numel()} rows are no multiple of their key's value: at "
        f"{place('t h', (t, h), inputs)}, {channels[0]} or more, {channels[1]} or less; "
        "shared_p=False declares weights that are rounded more than once",
        num_bad=num_bad,
        num_checked=apart.numel(),
    )


def shortest(case: Case) -> Case:
    """One new token in every request, and nothing else."""
    ones = (1,) * len(case.kv_lens)
    return exactly_scaled(replace(case, q_lens=ones, kv_lens=ones))


def plant(case: Case, device: str) -> Probe:
    """The probe of a case with one token in every request."""
    inputs = materialized(case, device)
    num_requests, width = len(case.kv_lens), code_width(inputs)
    key = (integers(case.seed, "single", 7, num_requests, width).double() - 3.0).to(device) / 2.0
    inputs, value = planted(inputs, key, payload(case, num_requests, value_channels(inputs), device))
    names = [name for name in ("ql_nope", "q_nope", "q_pe", "query") if hasattr(inputs, name)]
    small = {
        name: (integers(case.seed, name, 9, *getattr(inputs, name).shape).double() - 4.0).to(device) / 8.0
        for name in names
    }
    inputs = inputs._replace(**{name: x.to(getattr(inputs, name).dtype) for name, x in small.items()})
    stored = decoded(inputs)[1] if hasattr(inputs, "kv_cache") else key
    score = torch.einsum("thw,tw->th", small[names[-1]], stored)
    if hasattr(inputs, "ql_nope"):
        score = score + torch.einsum("thc,thc->th", small["ql_nope"], value)
    if hasattr(inputs, "q_nope"):
        score = score + _absorbed(inputs, small["q_nope"])
    return Probe(inputs, {"out": value, "lse": inputs.softmax_scale * score})


def _absorbed(inputs: Any, query: torch.Tensor) -> torch.Tensor:
    picked = inputs.w_uk.argmax(2)
    return (query * decoded(inputs)[0][:, picked]).sum(-1)


ORACLE = Oracle(
    name="single",
    check=check,
    problems=ATTENTION,
    kills=(
        "scale_one_percent",
        "scale_of_latent_width",
        "scale_without_mscale",
        "exp2_of_natural_scores",
        "lse_base_2",
        "fp8_scale_ignored",
        "fp8_scale_twice",
        "tile_scale_of_neighbour",
        "tail_unmasked",
        "tail_of_zeros",
        "nan_times_zero",
        "rope_part_dropped",
        "scores_in_bf16",
        "end_not_stored",
        "empty_split_counted",
        "paged_scale_one_percent",
        "paged_value_scale_of_keys",
        "paged_scales_ignored",
        "paged_values_from_keys",
        "paged_tail_unmasked",
        "scores_in_fp16",
        "scale_one_in_a_thousand",
        "scale_in_bf16",
        "scale_with_one_mscale",
        "last_bits_off_a_lone_key",
    ),
)
