"""The newest token is seen by the newest row alone.

Claim: with another entry for the newest token of every request, all rows but the newest of each are the same,
    bit for bit.
Why: a mask that is one too wide, absent, or aligned with the beginning instead of the end lets a draft token
    see the tokens drafted after it; in a long context that is a small error.
Exact or bounded: bit for bit where the backend repeats itself, else within both radii. Where no request of a
    case has two rows, each is given three.
Kills: masks that are missing, one too wide, or for all rows that of the newest.
"""

from dataclasses import replace
from typing import Any

import torch

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial
from oracles.probes import (
    ATTENTION,
    admissible,
    alike,
    first_keys,
    is_strange,
    lengths,
    made,
    materialized,
    nothing,
    only,
    picked,
    restored,
    runnable,
    stored,
)
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run twice, the newest tokens exchanged in between."""
    case = with_rows(trial.case)
    if not runnable(trial, case):
        return nothing("the backend does not take three rows a request")
    rows = torch.tensor(older_rows(case), dtype=torch.int64, device=trial.device)
    first, again = (trial.run(made(make, case, trial.device)) for make in (materialized, changed))
    expected = {name: picked(x, rows) for name, x in admissible(materialized, trial, case).items()}
    return alike(
        trial, only(again, rows), only(first, rows), expected, "with other newest tokens", exact=True
    )


def with_rows(case: Case) -> Case:
    """The case, or three rows for each of its requests where none has two."""
    if older_rows(case):
        return case
    return replace(case, q_lens=tuple(min(3, kv_len) for kv_len in case.kv_lens))


def older_rows(case: Case) -> list[int]:
    """All rows but the newest of each request."""
    rows: list[int] = []
    first = 0
    for q_len in case.q_lens:
        rows += range(first, first + max(q_len - 1, 0))
        first += q_len
    return rows


def changed(case: Case, device: str) -> Any:
    """The case's inputs; the newest token of each request has its neighbour's entry, backwards."""
    inputs = materialized(case, device)
    entries = {name: x.clone() for name, x in stored(inputs).items()}
    starts = first_keys(inputs)
    for i, (_, kv_len) in enumerate(lengths(inputs)):
        if kv_len:
            newest = starts[i] + kv_len - 1
            for values in entries.values():
                values[newest] = _other(values[newest - 1 if kv_len > 1 else newest], case, inputs)
    return restored(inputs, entries)


def _other(entry: torch.Tensor, case: Case, inputs: Any) -> torch.Tensor:
    """Another entry of the same format: its latent channels in reverse order."""
    if is_strange(inputs):
        fmt, scale = inputs.cache_format, inputs.kv_scale
        widths = case.config.kv_lora_rank, case.config.qk_rope_head_dim
        kv_c, k_pe = fmt.decode(entry[None], *widths, scale, torch.float32)
        backwards: torch.Tensor = fmt.encode(kv_c.flip(-1), k_pe, scale)
        return backwards[0]
    width = case.config.kv_lora_rank if entry.dtype == torch.uint8 else entry.shape[-1]
    order = torch.arange(entry.shape[-1], device=entry.device)
    order[:width] = order[:width].flip(0)
    return entry[..., order]


ORACLE = Oracle(
    name="causal",
    check=check,
    problems=ATTENTION,
    kills=(
        "causal_one_more",
        "not_causal",
    ),
)
