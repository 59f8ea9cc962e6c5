"""One key out of many.

Claim: where every query is far closer to one key than to all others, the row returns that key's value as it
    is, and its score as lse.
Why: the other weights underflow to 0, so any key that is lost, moved, read twice or masked wrongly shows as
    another value. The keys stand at the edges of blocks, tiles, halves and quarters; every head looks for
    another one, and scores are in the hundreds, where an exponential without a maximum overflows.
    Nothing but values are added, so in every second case they go from 2⁻²⁰ to 2²³ where all types have those.
    What is not found names its request, page and slot.
Exact or bounded: values as for a single key. A key's code is its number in signs, repeated over the channels
    that carry no value; keys that nobody looks for have none. So a score is a count of signs times a power of
    two, which no accumulator rounds up to 256, and lse is within the roundings of the scale and of its base.
Kills: pages, masks, splits and merges that lose or confuse a key, rescaling that is forgotten, overflow, and
    a cache that is cast to float16 on its way.
"""

import math
from typing import Any

import torch

from mla_ref.case import Case
from mla_ref.values import permutation
from oracles.bounds import type_named
from oracles.lost_keys import lost_keys
from oracles.oracle import Oracle, Trial
from oracles.probes import (
    ATTENTION,
    Probe,
    asked,
    code_width,
    exactly_scaled,
    first_keys,
    is_strange,
    lengths,
    materialized,
    nothing,
    payload,
    planted,
    shows,
    value_channels,
    wide,
)
from oracles.verdict import Finding

# How far below the key that is looked for all others score: exp gives 0 there, in float32 and in float64.
GAP = {False: 120.0, True: 800.0}

MAX_CANDIDATES = 64

# Channels of signs whose sums every accumulator holds: bfloat16 has eight bits.
EXACTLY_SUMMED = 256

# Powers of two of values. Formats that end with float16, at 2¹⁶, or have one scale do not hold the far ones;
# that of scales which are powers of two begins at 2⁻²². What a stranger's format holds is not known.
FAR, NEAR = range(-20, 15), range(-8, -1)
OF_NARROW_RANGE = ("fp16", "fp8_e4m3")


def check(trial: Trial) -> Finding:
    """Run with one key to be found by each row and head."""
    if not code_width(trial.inputs):
        return nothing("without rope channels a key is its value")
    exact_dots = code_width(trial.inputs) <= EXACTLY_SUMMED
    case, accumulate = trial.case, trial.backend.numerics.accumulate
    if accumulate != "compute":
        limit = torch.finfo(type_named(accumulate, getattr(torch, case.dtype))).max
        if _factor(case, trial.inputs) * code_width(trial.inputs) > limit:
            return nothing(f"{accumulate} ends before the products of this probe")
    strange = is_strange(trial.inputs)
    far = case.seed % 2 == 1 and case.cache_format not in OF_NARROW_RANGE and not strange and wide(trial)
    probe, what = plant_far if far else plant, "with queries that are close to one key each"
    scaled = exactly_scaled(case)

    def lost(wrong: torch.Tensor) -> str:
        return lost_keys(sought(scaled, trial.device)[1], wrong.cpu(), case.kv_lens, case.block_size)

    return shows(trial, probe, scaled, what, exact_dots=exact_dots, more=lost)


def plant(case: Case, device: str) -> Probe:
    """The probe of a case, of values that every type holds."""
    return _planted(case, device, NEAR)


def plant_far(case: Case, device: str) -> Probe:
    """The probe of a case, of values far beyond those of float16."""
    return _planted(case, device, FAR)


def _planted(case: Case, device: str, powers: range) -> Probe:
    inputs = materialized(case, device)
    width, starts = code_width(inputs), first_keys(inputs)
    (key, query), picked = sought(case, device)
    factor = _factor(case, inputs)
    inputs, values = planted(
        asked(inputs, query.to(device)),
        key.to(device),
        payload(case, starts[-1], value_channels(inputs), device, powers),
    )
    found = (picked >= 0).to(device)
    if not starts[-1]:
        none = values.new_zeros(*picked.shape, values.shape[-1])
        return Probe(inputs, {"out": none, "lse": none.new_full(picked.shape, -torch.inf)})
    head = torch.arange(case.config.num_heads, device=device)
    out = values[picked.clamp(min=0).to(device), head].masked_fill(~found[..., None], 0.0)
    lse = torch.full_like(found, inputs.softmax_scale * factor * width, dtype=torch.float64)
    return Probe(inputs, {"out": out, "lse": lse.masked_fill(~found, -torch.inf)})


def sought(case: Case, device: str) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """((keys [n w], queries [t h w]), the number of the key that each row and head looks for; -1: none)."""
    inputs = materialized(case, device)
    width, num_heads, starts = code_width(inputs), case.config.num_heads, first_keys(inputs)
    bits = _bits(width)
    codes, factor = _codes(bits, width), _factor(case, inputs)
    key = torch.zeros(starts[-1], width, dtype=torch.float64)
    query = torch.zeros(sum(case.q_lens), num_heads, width, dtype=torch.float64)
    picked = torch.full((sum(case.q_lens), num_heads), -1)
    row = 0
    for i, (q_len, kv_len) in enumerate(lengths(inputs)):
        tokens = candidates(kv_len, case.block_size, 2**bits, case.seed + i)
        key[[starts[i] + token for token in tokens]] = codes[: len(tokens)]
        for s in range(q_len):
            seen = [n for n, token in enumerate(tokens) if token <= kv_len - q_len + s]
            if seen:
                number = torch.tensor([seen[(s * num_heads + h) % len(seen)] for h in range(num_heads)])
                query[row] = factor * codes[number]
                picked[row] = starts[i] + torch.tensor(tokens)[number]
            row += 1
    return (key, query), picked


def _bits(width: int) -> int:
    return min(width, MAX_CANDIDATES.bit_length() - 1)


def _factor(case: Case, inputs: Any) -> float:
    """What multiplies a query's signs, so that the gap to every other key is wide enough."""
    repeats = code_width(inputs) // _bits(code_width(inputs))
    gap = GAP[case.dtype == "float64"]
    return float(2.0 ** math.ceil(math.log2(gap / (2.0 * repeats * inputs.softmax_scale))))


def candidates(kv_len: int, block_size: int, most: int, seed: int) -> list[int]:
    """Tokens at the edges of whatever a kernel may cut at, then any others, as many as there are codes."""
    edges = [kv_len, 1, kv_len // 2, kv_len // 4, 3 * kv_len // 4]
    edges += [n for step in (block_size, 64, 16, 128) for n in (step, kv_len // step * step)]
    found = [edge + step for edge in edges for step in (-1, 0, 1)]
    found += permutation(seed, "needles", kv_len)[:most].tolist()
    return list(dict.fromkeys(token for token in found if 0 <= token < kv_len))[:most]


def _codes(bits: int, width: int) -> torch.Tensor:
    """[2^bits width] of -1 and 1: bit i of the number in every channel that is i modulo ``bits``."""
    number = torch.arange(2**bits)[:, None]
    return ((number >> (torch.arange(width) % bits)) % 2 * 2 - 1).double()


ORACLE = Oracle(
    name="needle",
    check=check,
    problems=ATTENTION,
    kills=(
        "scale_one_percent",
        "key_dropped",
        "key_twice",
        "causal_one_less",
        "causal_top_left",
        "page_of_another_request",
        "pages_swapped",
        "value_one_row_late",
        "heads_swapped",
        "rows_one_late",
        "merge_average",
        "merge_overflow",
        "end_not_stored",
        "rows_not_written",
        "tile_scale_of_neighbour",
        "fp8_scale_twice",
        "rope_part_dropped",
        "paged_heads_interleaved",
        "paged_key_dropped",
        "last_page_stale",
        "splits_exchanged",
        "one_element_five_percent",
        "logarithm_of_two_to_four_digits",
        "cache_cast_to_float16",
    ),
)
