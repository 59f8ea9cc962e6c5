"""Mutants of a kernel that rounds its weights to bfloat16 and says so: what is left to see is in its noise.

The edits are lost digits: a type narrower than declared, truncation instead of rounding, an exponential by a
short polynomial. ``value`` admits most of them, because a right kernel could be as far off in one element.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mla_ref.case import Case
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput
from mla_ref.rows import Request
from oracles.mutants import (
    CONFIG,
    LATENT,
    YARN_ROPE,
    Run,
    Steps,
    attend,
    merged_at_once,
    narrowed,
    truncated,
    without_middle,
)

NUMERICS = Numerics(p="bfloat16", sum_rounded_p=False, max_splits=2)

# Enough rows and keys for a statistic; the keys' number is no multiple of a tile.
MANY = replace(LATENT, q_lens=(9, 7), kv_lens=(199, 83), regime="plain")


LONG = replace(MANY, q_lens=(16,), kv_lens=(1201,), regime="small")


def kernel(**steps: Callable[..., Any]) -> Run:
    """``attend`` with weights in bfloat16, and these steps in place of its own."""
    rounded: Steps = {"p": narrowed(torch.bfloat16), **steps}
    return lambda inputs: attend(inputs, rounded)


def precision_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits, of ``latent_attention``."""
    flat = replace(MANY, regime="small")
    yarn = replace(MANY, config=replace(CONFIG, rope=YARN_ROPE))
    bf16, fp16 = narrowed(torch.bfloat16), narrowed(torch.float16)
    return {
        "weights_truncated": (flat, kernel(p=truncated)),
        "weights_in_fp8_for_bf16": (MANY, kernel(p=narrowed(torch.float8_e4m3fn))),
        "output_truncated_in_the_noise": (flat, kernel(round=truncated)),
        "accumulator_in_bf16_in_the_noise": (MANY, kernel(acc=bf16)),
        "accumulator_in_bf16_over_many_keys": (LONG, kernel(acc=bf16)),
        "sum_in_bf16_in_the_noise": (MANY, kernel(total=bf16)),
        "scores_in_bf16_in_the_noise": (MANY, kernel(scores=bf16)),
        "scores_in_fp16": (MANY, kernel(scores=fp16)),
        "products_added_in_bf16": (MANY, kernel(dots=_added_in_bf16)),
        "exponential_to_a_thousandth": (MANY, kernel(exp=_rippled(1e-3))),
        "exponential_to_a_hundredth": (MANY, kernel(exp=_rippled(1e-2))),
        "exponential_to_a_ten_thousandth": (MANY, kernel(exp=_rippled(1e-4))),
        "light_tiles_skipped": (MANY, kernel(exp=_without_light_tiles)),
        "scale_one_in_a_thousand": (MANY, kernel(scores=lambda scores, _: scores * 1.001)),
        "scale_in_bf16": (MANY, _scaled_in_bf16),
        "scale_with_one_mscale": (yarn, _scaled_once),
        "splits_exchanged": (MANY, kernel(merge=_exchanged)),
        "last_bits_off_a_lone_key": (MANY, kernel(round=_last_bits_off)),
        "one_element_five_percent": (MANY, _one_element(1.05)),
        "one_element_off_in_a_long_row": (LONG, _one_element(1.1)),
        "key_dropped_among_many": (LONG, kernel(mask=without_middle)),
        "last_page_stale": (MANY, _stale_page),
    }


def _rippled(size: float) -> Callable[[torch.Tensor, Request], torch.Tensor]:
    """A power of two by a parabola between the whole ones: off by ``size`` in the middle, exact at them."""

    def step(weight: torch.Tensor, request: Request) -> torch.Tensor:
        part = torch.log2(weight.clamp(min=torch.finfo(weight.dtype).tiny)) % 1.0
        return weight * (1.0 + size * 4.0 * part * (1.0 - part))

    return step


def _without_light_tiles(weight: torch.Tensor, request: Request) -> torch.Tensor:
    """Tiles whose heaviest key has less than e^-8 of the heaviest so far are left out."""
    return weight.masked_fill(weight.amax(-1, keepdim=True) < math.exp(-8.0), 0.0)


def _added_in_bf16(
    q: torch.Tensor, key: torch.Tensor, q_pe: torch.Tensor, k_pe: torch.Tensor
) -> torch.Tensor:
    """Sixty-four channels at a time, the sum so far kept in bfloat16."""
    dots = q_pe @ k_pe.T
    for start in range(0, q.shape[-1], 64):
        part = slice(start, start + 64)
        dots = (dots + q[..., part] @ key[..., part].transpose(1, 2)).bfloat16().to(dots)
    return dots


def _scaled_in_bf16(inputs: Any) -> AttentionOutput:
    scale = float(torch.tensor(inputs.softmax_scale).bfloat16())
    output: AttentionOutput = kernel()(inputs._replace(softmax_scale=scale))
    return output


def _scaled_once(inputs: Any) -> AttentionOutput:
    """The magnitude of YaRN multiplies the scale once instead of twice."""
    plain = CONFIG.qk_head_dim**-0.5
    output: AttentionOutput = kernel()(inputs._replace(softmax_scale=math.sqrt(plain * inputs.softmax_scale)))
    return output


def _stale_page(inputs: Any) -> AttentionOutput:
    """The newest page of request 0 is not the one that was just written, but the one before it."""
    table = inputs.block_table.clone()
    last = (int(inputs.cache_seqlens[0]) - 1) // inputs.kv_cache.shape[1]
    table[0, last] = table[0, max(last - 1, 0)]
    output: AttentionOutput = kernel()(inputs._replace(block_table=table))
    return output


def _exchanged(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each split has the other's weight."""
    return merged_at_once(outs.flip(0), lses)


def _last_bits_off(row: torch.Tensor, request: Request) -> torch.Tensor:
    """Of a request of one key, about one channel in fifty is the next number of its type."""
    if request.kv_len != 1:
        return row
    bits = row.bfloat16().view(torch.int16)
    number = torch.arange(bits.numel()).view(bits.shape)
    chosen = ((bits.long() * 2654435761 + number * 40503) >> 7) % 50 == 0
    return (bits + chosen.to(bits.dtype)).view(torch.bfloat16).to(row.dtype)


def _one_element(factor: float) -> Run:
    def run(inputs: Any) -> AttentionOutput:
        output: AttentionOutput = kernel()(inputs)
        output.out[0, 0, 0] *= factor
        return output

    return run
