"""The edges of a format, and a second time.

Claim: channels at the edges of a format (zeros, the largest and the smallest numbers, halves between two
    codes) are stored as the format says; and what is read back and written again is stored as the same codes,
    where nothing is rotated on the way.
Why: a conversion without saturation turns an outlier into NaN, a tile of zeros divides by zero, a reader and
    a writer that scale differently drift apart at every copy of a page.
Exact or bounded: codes up to the roundings before them. The second time bit for bit: a code's neighbours are
    farther than any rounding of the path. Where scales are powers of two a second scale may be half of the
    first, so there the values are compared.
Kills: missing saturation, truncation, scales inverted or in low precision.
"""

from dataclasses import replace
from typing import Any

import torch

from mla_ref.case import Case
from mla_ref.values import integers
from oracles.bounds import is_known
from oracles.compare import identical
from oracles.oracle import Oracle, Trial, private_copy
from oracles.probes import made, materialized
from oracles.rules import stored
from oracles.verdict import Finding

# Beyond every eight-bit code and, but for float16, beyond fp16.
LARGE, SMALL = 2.0**90, 2.0**-90


def check(trial: Trial) -> Finding:
    """Write the edges and judge what is stored; read it, write it again, and compare."""
    inputs = made(edges, trial.case, trial.device)
    left = private_copy(inputs)
    output = trial.call(left)
    finding = stored.check(
        replace(trial, inputs=inputs, run=lambda _: output, left=lambda: left, expected=trial.expected)
    )
    if not finding.ok or inputs.kv_c.dtype == torch.float16 or hasattr(inputs, "rope"):
        return finding
    if not is_known(inputs.cache_format):  # its codes need not be those of what it decodes to
        return finding
    first = _written(inputs, left.kv_cache)
    again = private_copy(_with_channels(inputs, *_channels(inputs, first, inputs.kv_c.dtype)))
    trial.call(again)
    second = _written(inputs, again.kv_cache)
    return identical("codes written again", _codes(inputs, second), _codes(inputs, first))


def edges(case: Case, device: str) -> Any:
    """The case's inputs, every row of another kind."""
    inputs = materialized(case, device)
    rows, c = inputs.kv_c.shape
    r = inputs.k_pe.shape[1]
    draw = integers(case.seed, "edges", 31, rows, c + r).double().to(device) - 15.0
    kind = torch.arange(rows, device=device)[:, None] % 6
    scale = inputs.kv_scale.double().nan_to_num(nan=1.0)
    limit = float(torch.finfo(inputs.kv_c.dtype).max)
    large, small = min(LARGE, limit / 32.0), max(SMALL, 1.0 / limit)
    channels = torch.where(kind == 0, draw * 0.0, draw)
    channels = torch.where(kind == 1, draw * large, channels)
    channels = torch.where(kind == 2, draw * small, channels)
    channels = torch.where(kind == 3, (17.0 + 2.0 * (draw.abs() % 7.0)) * scale, channels)
    channels = torch.where(kind == 4, 0.37 * draw * scale, channels)
    return _with_channels(inputs, channels[:, :c], channels[:, c:])


def _with_channels(inputs: Any, kv_c: torch.Tensor, k_pe: torch.Tensor) -> Any:
    other = private_copy(inputs)
    live = inputs.slot_mapping >= 0
    other.kv_c[live] = kv_c[live].to(other.kv_c.dtype)
    other.k_pe[live] = k_pe[live].to(other.k_pe.dtype)
    return other


def _written(inputs: Any, cache: torch.Tensor) -> torch.Tensor:
    """[t e] each token's entry; of tokens that are not written, that of slot 0."""
    slot, block_size = inputs.slot_mapping.clamp(min=0), cache.shape[1]
    return cache[slot // block_size, slot % block_size]


def _channels(inputs: Any, entries: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    widths = inputs.kv_c.shape[1], inputs.k_pe.shape[1]
    channels: tuple[torch.Tensor, torch.Tensor] = inputs.cache_format.decode(
        entries, *widths, inputs.kv_scale, dtype
    )
    return channels


def _codes(inputs: Any, entries: torch.Tensor) -> torch.Tensor:
    """What has to be the same of entries that are written again."""
    live = inputs.slot_mapping >= 0
    if inputs.cache_format.name == "fp8_ds_mla_pow2":
        return _channels(inputs, entries, torch.float64)[0][live]
    if entries.dtype == torch.uint8:
        return entries[live, : inputs.kv_c.shape[1]]
    return entries[live]


ORACLE = Oracle(
    name="quantiser",
    check=check,
    problems=("cache_write", "rope_cache_write"),
    kills=(
        "write_unsaturated",
        "write_truncated",
        "write_multiplies_by_scale",
        "write_scale_in_bf16",
        "fused_keys_unscaled",
        "fused_rounded_before_quantising",
    ),
)
