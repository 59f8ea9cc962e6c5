"""Partial attention results are a commutative monoid: this is its sum, and no keys at all is its zero."""

import torch

from mla_ref.backend import Backend
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.merge_states import PROBLEM
from mla_ref.rows import compute_dtype


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [… v], lse […]) over all keys of the states outs [s … v], lses [s …], in their dtype.

    weight[i] = exp(lse[i] - max lse)
    out = Σ weight[i] · out[i] / Σ weight[i],   lse = max lse + ln Σ weight[i]

    A state of weight 0 is selected away, never multiplied. One state, and any number of empty ones beside it,
    come back bit for bit; only empty ones give 0 and -inf.
    """
    peak = lses.amax(0)
    weight = torch.exp(lses - peak.masked_fill(peak == -torch.inf, 0.0))
    total = weight.sum(0)
    parts = weight[..., None] * outs.masked_fill((weight == 0.0)[..., None], 0.0)
    # The largest weight is 1, so a sum below it is the sum of nothing.
    return parts.sum(0) / total.clamp(min=1.0)[..., None], peak + torch.log(total)


@implements(PROBLEM)
def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> AttentionOutput:
    """Attention over the union of the states' keys.

    Error: float32 weights and sums (float64 for float64 outputs); only ``out`` is rounded further.
    Source: FlashAttention, arXiv 2205.14135, section 3.1: the softmax of concatenated blocks of keys.
    """
    dtype = compute_dtype(outs)
    out, lse = merge(outs.to(dtype), lses.to(dtype))
    return AttentionOutput(out.to(outs.dtype), lse.to(torch.float32))


BACKEND = Backend("mla_ref.merge_states", "merge_states", merge_states, Numerics())
