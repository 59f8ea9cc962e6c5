"""Partial attention results merged in plain Triton: how split keys and chunked prefill end.

Contract: any number of states, any float type, any strides of states, tokens and heads. An empty
state may hold NaN. The launch depends on shapes alone, so it can be captured in a CUDA graph.

``merge_into`` writes where the caller says, which may be where one of the states is.
"""

import torch

from mla_fast._split_keys import launching, requires
from mla_ref.backend import Backend
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.merge_states import PROBLEM

# Bytes of a state in one program, and the warps that share them: the fastest of twelve on an H200.
BYTES, WARPS = 1024, 1
AHEAD = 4  # states that are loaded at a time
INTERPRETED_BYTES = 2**16  # the interpreter's time goes by operations, not by elements


def merge_into(out: torch.Tensor, lse: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor) -> None:
    """Writes out [t h v] and lse [t h], contiguous, from the states outs [s t h v] and lses [s t h].

    out and lse may be those of one of the states: ``merge_into(outs[0], lses[0], outs, lses)`` folds the
    others into the first.
    """
    from mla_fast._triton_copy_kernels import _merge_states_kernel

    num_states, t, h, v = outs.shape
    num_rows, v_padded = t * h, 1 << (max(v, 1) - 1).bit_length()
    if num_rows == 0:
        return
    amount = BYTES if out.device.type == "cuda" else INTERPRETED_BYTES
    rows = max(1, amount // (v_padded * out.element_size()))
    with launching(out.device):
        _merge_states_kernel[(-(-num_rows // rows),)](
            outs,
            lses,
            out,
            lse,
            num_rows,
            h,
            num_states,
            *outs.stride()[:3],
            *lses.stride(),
            *out.stride()[:2],
            V=v,
            V_PADDED=v_padded,
            AHEAD=min(num_states, AHEAD),
            ROWS=rows,
            num_warps=WARPS,
        )


@implements(PROBLEM, values=False)
def triton_merge_states(outs: torch.Tensor, lses: torch.Tensor) -> AttentionOutput:
    """Attention over the union of the states' keys.

    weight[i] = exp(lse[i] - max lse)
    out = Σ weight[i] · out[i] / Σ weight[i],   lse = max lse + ln Σ weight[i]

    Error: weights and sums in float32, in float64 for float64 outputs; only ``out`` is rounded further.
    Source: FlashAttention, arXiv 2205.14135, section 3.1.
    """
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
    merge_into(out, lse, outs, lses)
    return AttentionOutput(out, lse)


BACKEND = Backend(
    "mla_fast.triton_merge_states", "merge_states", triton_merge_states, Numerics(), requires=requires
)
