"""Keys are a set.

Claim: with the keys that every row of a request sees in another order, the output is the same.
Why: softmax sums over keys. A rotation is part of a cached key, so a key keeps its meaning wherever it is.
Exact or bounded: within both radii, since sums are taken in another order.
Kills: weights of low precision, sums that are not rescaled, keys and values that are not read alike.
"""

from typing import Any

import torch

from mla_ref.case import Case
from mla_ref.values import permutation
from oracles.oracle import Oracle, Trial
from oracles.probes import ATTENTION, first_keys, lengths, made, materialized, restored, same, stored
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Run with the entries of each context exchanged."""
    again = trial.run(made(shuffled, trial.case, trial.device))
    return same(trial, again, "with the keys in another order", exact=False)


def shuffled(case: Case, device: str) -> Any:
    """The case's inputs with the context's entries in random order; the last q_len tokens stay."""
    inputs = materialized(case, device)
    order, starts = torch.arange(sum(case.kv_lens)), first_keys(inputs)
    for i, (q_len, kv_len) in enumerate(lengths(inputs)):
        common = max(kv_len - max(q_len, 1) + 1, 0)
        order[starts[i] : starts[i] + common] = starts[i] + permutation(case.seed + i, "keys", common)
    return restored(inputs, {name: x[order.to(device)] for name, x in stored(inputs).items()})


ORACLE = Oracle(
    name="key_order",
    check=check,
    problems=ATTENTION,
    kills=(
        "key_dropped",
        "value_one_row_late",
        "sum_not_rescaled",
        "out_not_rescaled",
        "weights_in_fp8",
        "exponential_to_a_hundredth",
        "sum_in_bf16_in_the_noise",
    ),
)
