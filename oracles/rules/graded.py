"""Keys of known weights.

Claim: where every key's score is known, and keys differ by up to seven steps, out is the share of the weights
    in each channel, and lse the logarithm of their sum; in one case of four, all scores are beyond -100,000.
Why: equal weights, and one that takes all, leave out what is between: an exponential by a short polynomial,
    tiles that are skipped because they weigh little, a rescaling that is put off, weights that underflow.
    And a maximum that begins at some finite number, or a mask that is one, is right until scores are lower.
Exact or bounded: a score is one product of powers of two and small integers, which no accumulator rounds, so
    lse is within the roundings of scale, exponential, sum and logarithm: some 1e-5 in float32. Low scores are
    sums of many products, and within the radius of a dot; a type that ends before them is not asked for them.
Kills: exponentials and sums that are less precise than declared, keys left out for their weight, finite
    numbers in the place of -inf.
"""

import math

import torch

from mla_ref.case import Case
from mla_ref.numerics import Numerics
from mla_ref.values import integers, permutation
from oracles.bounds import type_named
from oracles.oracle import Oracle, Trial
from oracles.probes import (
    ATTENTION,
    Probe,
    asked,
    code_width,
    exactly_scaled,
    first_keys,
    lengths,
    materialized,
    nothing,
    planted,
    shows,
    value_channels,
)
from oracles.rules.census import ONE
from oracles.verdict import Finding

COMPUTE = "compute"

# Keys next to each other are at one of so many levels, or one below it.
TOGETHER, LEVELS = 16, 7

# Every score is lower than what fp16 ends at, -65,504. Codes of a key, and queries in float16, go this far.
DEPTH, CODE, MOST = 2.0**17, 4.0, 2.0**15


def check(trial: Trial) -> Finding:
    """Run with keys at their levels."""
    if code_width(trial.inputs) < 2:
        return nothing("without two rope channels a key is its value")
    deep = trial.case.seed % 4 == 3 and _reaches(trial.backend.numerics, trial.case)
    what = "with keys of known weights" + (", and low scores" if deep else "")
    probe = plant_deep if deep else plant
    return shows(trial, probe, exactly_scaled(trial.case), what, exact_dots=not deep)


def _reaches(numerics: Numerics, case: Case) -> bool:
    """Whether scores may be as low in the type that they are declared to have."""
    if numerics.accumulate == COMPUTE:
        return True
    lowest = torch.finfo(type_named(numerics.accumulate, getattr(torch, case.dtype))).min
    return lowest < -2.0 * DEPTH


def plant(case: Case, device: str) -> Probe:
    """The probe of a case, the highest score at 0."""
    return _planted(case, device, deep=False)


def plant_deep(case: Case, device: str) -> Probe:
    """The probe of a case, every score low."""
    return _planted(case, device, deep=True)


def _planted(case: Case, device: str, *, deep: bool) -> Probe:
    inputs = materialized(case, device)
    starts, width, channels = first_keys(inputs), code_width(inputs), value_channels(inputs)
    levels = [_levels(case.seed + i, n) for i, n in enumerate(case.kv_lens)]
    level = torch.cat([torch.zeros(0, dtype=torch.float64), *levels]).to(device)
    key = torch.zeros(starts[-1], width, dtype=torch.float64, device=device)
    key[:, 0] = -level
    order = permutation(case.seed, "graded", starts[-1]).to(device)
    value = torch.zeros(starts[-1], channels, dtype=torch.float64, device=device)
    value.scatter_(1, (order % channels)[:, None], ONE)
    step = 2.0 ** math.ceil(1.0 - math.log2(inputs.softmax_scale))
    rows, heads = sum(case.q_lens), case.config.num_heads
    # Neighbouring rows and heads go by steps of two to four, by halves and by quarters of them.
    number = torch.arange(rows, device=device)[:, None] + torch.arange(heads, device=device)
    steps = step * torch.exp2(-(number % 3).double())
    query = torch.zeros(rows, heads, width, dtype=torch.float64, device=device)
    query[..., 0] = steps
    low = 0.0
    if deep:
        low = 2.0 ** math.ceil(math.log2(DEPTH / (inputs.softmax_scale * CODE * (width - 1))))
        low = min(low, MOST)
        key[:, 1:], query[..., 1:] = CODE, -low
    inputs, values = planted(asked(inputs, query), key, value)
    floor = -inputs.softmax_scale * low * CODE * (width - 1)
    outs, lses, row = [], [], 0
    for i, (q_len, kv_len) in enumerate(lengths(inputs)):
        mine, below = values[starts[i] : starts[i + 1]], level[starts[i] : starts[i + 1]]
        for s in range(q_len):
            seen = max(kv_len - q_len + s + 1, 0)
            scores = -inputs.softmax_scale * steps[row, :, None] * below[:seen]
            lses.append(scores.logsumexp(1) + floor)
            share = (scores - scores.logsumexp(1, keepdim=True)).exp()
            outs.append(torch.einsum("hj,jhv->hv", share, mine[:seen]))
            row += 1
    none = values.new_zeros(0, *values.shape[1:])
    return Probe(
        inputs,
        {
            "out": torch.stack(outs) if outs else none,
            "lse": torch.stack(lses) if lses else none.new_zeros(0, heads),
        },
    )


def _levels(seed: int, kv_len: int) -> torch.Tensor:
    """[kv_len] float64: how many steps each key of a request is below the highest."""
    tiles = integers(seed, "levels", LEVELS, -(-kv_len // TOGETHER)).repeat_interleave(TOGETHER)[:kv_len]
    return (tiles + integers(seed, "below", 2, kv_len)).double()


ORACLE = Oracle(
    name="graded",
    check=check,
    problems=ATTENTION,
    kills=(
        "lse_base_2",
        "sum_not_rescaled",
        "out_not_rescaled",
        "merge_base_2",
        "sum_in_bf16",
        "exponential_to_a_thousandth",
        "exponential_to_a_hundredth",
        "exponential_to_a_ten_thousandth",
        "light_tiles_skipped",
        "maximum_begins_at_minus_1e4",
    ),
)
