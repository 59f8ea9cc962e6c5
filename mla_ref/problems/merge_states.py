"""Attention over a union of key sets from the attention over each: how split-KV and chunked prefill end."""

from typing import NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.problem import AttentionOutput, Problem, bind_shapes
from mla_ref.problems._paged import QUERY_DTYPES, check_device, check_dtype
from mla_ref.values import bell, integers


class MergeStatesInputs(NamedTuple):
    """What every implementation of ``merge_states`` is called with, in this order.

    outs: [s t h v]. Output of each of s ≥ 1 states (s counts states here), each over keys of its own; any
        strides but the last, which is 1. Not read where the state is empty: it may hold NaN there.
    lses: [s t h] float32, any strides. Natural log-sum-exp of each state's scores, finite; -inf where it is
        empty.
    """

    outs: torch.Tensor
    lses: torch.Tensor


SHAPES = {"outs": "s t h v", "lses": "s t h"}

# Channels beyond v in memory, as of values padded to the width of keys.
PADDING = 64

# Standard deviations of the log-sum-exps of one row: equal, close, far, and up to ±1000.
SPREADS = (0.0, 1.0, 16.0, 288.0)


def check(inputs: MergeStatesInputs) -> None:
    """Raises: ValueError on a shape, dtype or device that breaks the contract."""
    sizes = bind_shapes(SHAPES, inputs._asdict())
    if sizes["s"] < 1:
        raise ValueError("outs: s=0, but a merge needs at least one state")
    check_dtype("outs", inputs.outs, *QUERY_DTYPES)
    check_dtype("lses", inputs.lses, torch.float32)
    check_device(inputs)


def check_values(inputs: MergeStatesInputs) -> None:
    """Raises: ValueError on a log-sum-exp that is NaN or +inf, which some kernels write for "no keys"."""
    bad = (~(inputs.lses < torch.inf)).nonzero()
    if len(bad):
        place = bad[0].tolist()
        value = float(inputs.lses[tuple(place)])
        raise ValueError(f"lses[{', '.join(map(str, place))}]: is {value}, must be finite or -inf")


def materialize(case: Case, device: torch.device) -> MergeStatesInputs:
    """The tensors of a case: sum(q_lens) rows, and one state for each of the kv_lens.

    State i summarises kv_lens[i] keys: its log-sum-exp grows with them, and where there are none it is empty
    in every row. A quarter of all others are empty too, and one row in eight has nothing but empty states.
    Outputs have unit variance whatever the regime; empty ones are NaN.
    """
    config, seed = case.config, case.seed
    kv_lens = case.kv_lens or (0,)
    s, t, h, v = len(kv_lens), sum(case.q_lens), config.num_heads, config.v_head_dim
    spread = torch.tensor(SPREADS, dtype=torch.float64)[integers(seed, "spread", len(SPREADS), t, h)]
    doublings = torch.tensor([float(kv_len.bit_length()) for kv_len in kv_lens], dtype=torch.float64)
    lses = bell(seed, "lses", s, t, h) * spread + doublings[:, None, None]
    empty = (
        (torch.tensor(kv_lens) == 0)[:, None, None]
        | (integers(seed, "empty", 4, s, t, h) == 0)
        | (integers(seed, "nothing", 8, t, h) == 0)
    )
    outs = torch.full((s, t, h, v + PADDING), torch.nan, dtype=torch.float64)
    outs[..., :v] = bell(seed, "outs", s, t, h, v).masked_fill(empty[..., None], torch.nan)
    return MergeStatesInputs(
        outs=outs.to(getattr(torch, case.dtype)).to(device)[..., :v],
        lses=lses.masked_fill(empty, -torch.inf).to(torch.float32).to(device),
    )


PROBLEM = Problem(
    name="merge_states",
    inputs=MergeStatesInputs,
    output=AttentionOutput,
    shapes=SHAPES,
    output_shapes={"out": "t h v", "lse": "t h"},
    check=check,
    check_values=check_values,
    materialize=materialize,
)
