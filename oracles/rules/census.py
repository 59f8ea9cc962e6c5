"""A count of the keys.

Claim: where every query is 0 and each key's value is 1 in one channel, out is the exact share of the visible
    keys in each channel, and lse is ln of their number.
Why: all weights are equal, so every key counts: one that is lost, read twice, foreign or seen too early
    changes a share by 1/n, and lse tells how many were read.
Exact or bounded: the counts are exact; their quotient is within the roundings of the declared numerics.
Kills: masks off by one, edges lost or doubled, tails that are read, merges in the wrong base.
"""

import torch

from mla_ref.case import Case
from mla_ref.values import integers, permutation
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
    planted,
    shows,
    value_channels,
)
from oracles.verdict import Finding

# 448 · 2⁻⁸: under it the scale of a tile is a power of two, and so is nothing that a mean would hide.
ONE = 1.75


def check(trial: Trial) -> Finding:
    """Run with equal weights over values of one channel each."""
    what = "with queries of 0, and values that count keys"
    return shows(trial, plant, exactly_scaled(trial.case), what)


def plant(case: Case, device: str) -> Probe:
    """The probe of a case."""
    inputs = materialized(case, device)
    starts, width, channels = first_keys(inputs), code_width(inputs), value_channels(inputs)
    key = (integers(case.seed, "census", 7, starts[-1], width) - 3.0).to(device)
    order = permutation(case.seed, "census", starts[-1]).to(device)
    value = torch.zeros(starts[-1], channels, dtype=torch.float64, device=device)
    value.scatter_(1, (order % channels)[:, None], ONE)
    silent = torch.zeros(sum(case.q_lens), case.config.num_heads, width, device=device)
    inputs, values = planted(asked(inputs, silent), key, value)
    outs, counts = [], []
    for i, (q_len, kv_len) in enumerate(lengths(inputs)):
        mine = values[starts[i] : starts[i + 1]]
        for s in range(q_len):
            seen = max(kv_len - q_len + s + 1, 0)
            outs.append(mine[:seen].sum(0) / max(seen, 1))
            counts.append(float(seen))
    out = torch.stack(outs) if outs else values.new_zeros(0, *values.shape[1:])
    lse = torch.tensor(counts, dtype=torch.float64, device=device).log()
    return Probe(inputs, {"out": out, "lse": lse[:, None].repeat(1, case.config.num_heads)})


ORACLE = Oracle(
    name="census",
    check=check,
    problems=ATTENTION,
    kills=(
        "key_dropped",
        "key_twice",
        "causal_one_more",
        "causal_one_less",
        "not_causal",
        "causal_top_left",
        "page_of_another_request",
        "tail_unmasked",
        "tail_of_zeros",
        "nan_times_zero",
        "lse_base_2",
        "merge_base_2",
        "merge_average",
        "fp8_scale_twice",
        "paged_key_dropped",
        "paged_tail_unmasked",
        "last_page_stale",
        "key_dropped_among_many",
        "splits_exchanged",
    ),
)
