"""The same inputs, seen through other strides.

Claim: with every query, weight, state, table and list of lengths a view of larger memory, with a stride and
    an offset of its own, the output is what it may be on these inputs.
Why: engines hand out views: the rope part of a query is the end of each head's channels, an absorbed query is
    a transposed product, log-sum-exps come with heads first, a block table is a corner of the largest one.
Exact or bounded: bit for bit, or within the bounds of the truth. The last axis stays packed, but for
    log-sum-exps.
Kills: strides that are assumed, or taken from another tensor; storage offsets that are not added.
"""

from typing import Any

import torch

from mla_ref.layout import POISON_BYTE
from oracles.oracle import Oracle, Trial, private_copy
from oracles.probes import OF_TENSORS, pools
from oracles.rejudge import rejudged
from oracles.verdict import Finding

# Elements on each side of a row, and rows on each side of what is above it: whole vectors of any type.
AROUND, ROWS = 64, 2

# Tensors whose first axes change places in memory: what a batched product or a kernel's own order leaves.
TURNED = {"ql_nope": (1, 0, 2), "x": (1, 0, 2), "lses": (0, 2, 1)}


def check(trial: Trial) -> Finding:
    """Run on views."""
    first, left = trial.run(trial.inputs), views(private_copy(trial.inputs))
    output = trial.call(left)
    return rejudged(trial, trial.inputs, output, left, first, "with views of larger memory")


def views(inputs: Any) -> Any:
    """The inputs with every tensor but the pools in memory of another shape, NaN wherever it is not."""
    kept = pools(inputs) if hasattr(inputs, "kv_cache") or hasattr(inputs, "key_cache") else ()
    width = AROUND

    def seen(name: str, x: torch.Tensor) -> torch.Tensor:
        nonlocal width
        width += AROUND  # no two alike
        order = TURNED.get(name, tuple(range(x.dim())))
        back = tuple(order.index(axis) for axis in range(x.dim()))
        return _inside(x.permute(order), width).permute(back)

    return inputs._replace(
        **{
            name: seen(name, x)
            for name, x in inputs._asdict().items()
            if isinstance(x, torch.Tensor) and name not in kept
        }
    )


def _inside(x: torch.Tensor, width: int) -> torch.Tensor:
    """A view in larger memory that holds ``x``: more rows than it has on each axis, and wider ones."""
    shape = [n + 2 * ROWS for n in x.shape[:-1]] + [x.shape[-1] + 2 * width] if x.dim() else [2 * width + 1]
    memory = torch.full((*shape, x.element_size()), POISON_BYTE, dtype=torch.uint8, device=x.device)
    whole = memory.flatten(-2).view(x.dtype)
    if x.dim():
        rows = (slice(ROWS, ROWS + n) for n in x.shape[:-1])
        view = whole[(*rows, slice(width, width + x.shape[-1]))]
    else:
        view = whole[width]
    view.copy_(x)
    return view


ORACLE = Oracle(
    name="strides",
    check=check,
    problems=OF_TENSORS,
    kills=(
        "queries_taken_for_packed",
        "table_taken_for_packed",
        "weights_taken_for_packed",
        "paged_query_taken_for_packed",
        "states_lse_taken_for_packed",
        "rope_taken_for_packed",
        "write_rope_by_the_latents_stride",
        "fused_keys_by_the_stride_of_a_head",
    ),
)
