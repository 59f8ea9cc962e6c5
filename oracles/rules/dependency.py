"""Every key counts.

Claim: a key that becomes by far the closest to every query raises lse in each row that sees it, in every
    head, and changes nothing in any other row.
Why: a key that no row depends on has been dropped: by a length that is too short, a context that is skipped,
    a chunk that is lost, an index that is off.
Exact or bounded: the rise is 8 or more and needs no bound; other rows are the same, bit for bit where the
    backend repeats itself, else within both radii. The keys tried stand where the needles do.
Kills: skipped contexts, ignored new tokens, masks, lost keys.
"""

import math
from functools import partial
from typing import Any

import torch

from mla_ref.case import Case
from mla_ref.values import integers
from oracles.compare import place
from oracles.oracle import Oracle, Trial
from oracles.probes import (
    ATTENTION,
    admissible,
    alike,
    asked,
    code_width,
    exactly_scaled,
    first_keys,
    lengths,
    made,
    materialized,
    nothing,
    only,
    payload,
    picked,
    planted,
    runnable,
    value_channels,
)
from oracles.rules.needle import candidates
from oracles.verdict import Finding

# A score of the closest key, up to a power of two; no other is above half of it.
CLOSEST = 32.0

ROUNDS = 3


def check(trial: Trial) -> Finding:
    """Run with no key close, then with one of each request, three times."""
    if not code_width(trial.inputs):
        return nothing("without rope channels a key is its value")
    case = exactly_scaled(trial.case)
    if not runnable(trial, case):
        return nothing("the backend does not take the probe")
    inputs = made(level, case, trial.device)
    first = trial.run(inputs)
    for raised in RAISED:
        again = trial.run(made(raised, case, trial.device))
        tokens = closest(case, RAISED.index(raised))
        sees = seeing(case, tokens).to(trial.device)
        still = sees[:, None] & ~(again.lse > first.lse + 1.0)
        if bool(still.any()):
            row, head = still.nonzero()[0].tolist()
            where = place("t h", (row, head), inputs)
            return Finding(
                ok=False,
                detail=f"lse does not rise where a key that is seen becomes the closest: {where}, of the "
                f"tokens {tokens} of requests 0 to {len(tokens) - 1}",
                num_bad=int(still.sum()),
                num_checked=still.numel(),
            )
        rows = (~sees).nonzero().flatten()
        expected = {name: picked(x, rows) for name, x in admissible(level, trial, case).items()}
        what = "with a key changed that is not seen"
        finding = alike(trial, only(again, rows), only(first, rows), expected, what, exact=True)
        if not finding.ok:
            return finding
    return Finding(ok=True, num_checked=len(RAISED) * first.lse.numel())


def closest(case: Case, number: int) -> list[int]:
    """The token of each request that is raised; -1 where there is none."""
    found = [candidates(kv_len, case.block_size, ROUNDS, case.seed) for kv_len in case.kv_lens]
    return [tokens[number % len(tokens)] if tokens else -1 for tokens in found]


def seeing(case: Case, tokens: list[int]) -> torch.Tensor:
    """[t], True where a row sees the raised token of its request."""
    sees = [
        0 <= token <= kv_len - q_len + s
        for q_len, kv_len, token in zip(case.q_lens, case.kv_lens, tokens, strict=True)
        for s in range(q_len)
    ]
    return torch.tensor(sees, dtype=torch.bool)


def level(case: Case, device: str) -> Any:
    """Equal queries, and keys of -1, 0 and 1 of which none is close."""
    return _planted(case, device, None)


def _planted(case: Case, device: str, number: int | None) -> Any:
    inputs = materialized(case, device)
    width, starts = code_width(inputs), first_keys(inputs)
    factor = 2.0 ** math.ceil(math.log2(CLOSEST / (2.0 * width * inputs.softmax_scale)))
    key = integers(case.seed, "dependency", 3, starts[-1], width).double() - 1.0
    if number is not None:
        for i, (token, (_, kv_len)) in enumerate(zip(closest(case, number), lengths(inputs), strict=True)):
            if kv_len:
                key[starts[i] + token] = 2.0
    query = torch.full((sum(case.q_lens), case.config.num_heads, width), factor, dtype=torch.float64)
    values = payload(case, starts[-1], value_channels(inputs), device)
    return planted(asked(inputs, query.to(device)), key.to(device), values)[0]


RAISED = [partial(_planted, number=number) for number in range(ROUNDS)]

ORACLE = Oracle(
    name="dependency",
    check=check,
    problems=ATTENTION,
    kills=(
        "causal_one_less",
        "causal_one_more",
        "not_causal",
        "causal_top_left",
        "context_skipped",
        "new_tokens_ignored",
        "paged_key_dropped",
        "last_page_stale",
    ),
)
