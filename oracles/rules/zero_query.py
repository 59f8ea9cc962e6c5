"""A query of zero asks for the mean.

Claim: where every query is 0, out is the mean of the values that the row sees, and lse ln of their number.
Why: equal scores are equal weights. The case's own values are used: outliers, ties and scales of tiles, which
    the count of keys leaves out.
Exact or bounded: bounded, the mean being the truth.
Kills: lost and foreign keys, masks, wrong dequantisation, values of another row or slice.
"""

import torch

from mla_ref.case import Case
from oracles.oracle import Oracle, Trial
from oracles.probes import Probe, asked, code_width, decoded, first_keys, lengths, materialized, shows
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with the case's cache and queries of zero."""
    if trial.backend.numerics.kv != "exact":
        return Finding(ok=True, detail="keys are rounded before they are mixed")
    return shows(trial, plant, trial.case, "with queries of 0")


def plant(case: Case, device: str) -> Probe:
    """The probe of a case."""
    inputs = materialized(case, device)
    rows, num_heads = sum(case.q_lens), case.config.num_heads
    silent = torch.zeros(rows, num_heads, code_width(inputs), dtype=torch.float64, device=device)
    values, starts = decoded(inputs)[0], first_keys(inputs)
    out = torch.zeros(rows, values.shape[1], dtype=torch.float64, device=device)
    count, row = torch.zeros(rows, dtype=torch.float64, device=device), 0
    for i, (q_len, kv_len) in enumerate(lengths(inputs)):
        for s in range(q_len):
            seen = max(kv_len - q_len + s + 1, 0)
            out[row] = values[starts[i] : starts[i] + seen].sum(0) / max(seen, 1)
            count[row] = seen
            row += 1
    out, lse = (x[:, None].repeat_interleave(num_heads, dim=1) for x in (out, count.log()))
    return Probe(asked(inputs, silent), {"out": out, "lse": lse})


ORACLE = Oracle(
    name="zero_query",
    check=check,
    problems=("latent_attention",),
    kills=(
        "key_dropped",
        "not_causal",
        "causal_top_left",
        "tile_scale_of_neighbour",
        "fp8_scale_ignored",
        "page_of_another_request",
        "value_one_row_late",
        "merge_average",
    ),
)
