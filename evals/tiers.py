"""Two signals that see what accuracy does not: each layer's output, and the logits of given answers.

Tier 1, shadow: the reference serves the model, and in every layer the candidate is called as well, with the
same queries and the very same cache. Nothing of it is passed on, so no error is amplified or hidden.
Tier 2, teacher-forced: reference and candidate each serve the same prompts and answers on their own, in the
same steps.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from evals.model import Model, teacher_forced
from evals.path import Attention, AttentionPath, Layer, layer_of
from mla_ref.layer import layer_around
from mla_ref.naive import naive
from mla_ref.problem import AttentionOutput
from mla_ref.problems.attention import AttentionInputs

CLEAR = 0.1  # logits between the likeliest token and the next, from which on a change of order counts


class Text(NamedTuple):
    """Token ids of a prompt and of the answer that is forced on it."""

    prompt: list[int]
    answer: list[int]


class Shadow(NamedTuple):
    """Relative error of the attention output, one figure per layer, token and head: |got - want| / |want|.

    Infinite where anything is NaN. place: where the worst is.
    """

    median: float
    worst: float
    samples: int
    place: str


class Divergence(NamedTuple):
    """Candidate against reference over all tokens of the answers. Infinite where anything is NaN.

    mean_kl, max_kl: of the next-token distributions, nats. max_logit: largest difference of a logit.
    top1: share of the tokens whose likeliest one is the same, where the reference's stands out by ``CLEAR``.
    first: first question, and token of its answer, whose divergence is above 1e-3; empty where none is.
    """

    mean_kl: float
    max_kl: float
    max_logit: float
    top1: float
    tokens: int
    first: str


def shadow(
    model: Model,
    path: AttentionPath,
    candidate: Attention,
    texts: Sequence[Text],
    around: Callable[[Attention], Layer] = layer_around,
) -> Shadow:
    """Tier 1: ``candidate`` beside the reference on the steps and the cache of ``path``.

    around: what makes the model's layer of its attention.
    """
    errors: list[torch.Tensor] = []
    places: list[tuple[int, list[int]]] = []
    num_layers = len(model.hf.model.layers)

    def watched(*args: object) -> AttentionOutput:
        inputs = AttentionInputs(*args)  # type: ignore[arg-type]
        want, got = naive(*inputs), candidate(*inputs)
        wide, other = want.out.double(), got.out.double()
        error = (other - wide).norm(dim=-1) / wide.norm(dim=-1)
        places.append((len(errors) % num_layers, inputs.cache_seqlens.tolist()))
        errors.append(error.nan_to_num(nan=math.inf))
        return want

    forced_logits(model, around(watched), path, texts)
    every = torch.cat([error.flatten() for error in errors])
    call = max(range(len(errors)), key=lambda i: float(errors[i].max()))
    row, head = divmod(int(errors[call].argmax()), errors[call].shape[1])
    place = f"layer {places[call][0]}, head {head}, row {row} of a step with cached tokens {places[call][1]}"
    return Shadow(float(every.median()), float(every.max()), len(every), place)


def forced_logits(
    model: Model, layer: Layer, path: AttentionPath, texts: Sequence[Text]
) -> list[torch.Tensor]:
    """Tier 2's measurement of one side: logits before each token of each answer."""
    return teacher_forced(model, layer, path, [t.prompt for t in texts], [t.answer for t in texts])


def defined(path: AttentionPath) -> AttentionPath:
    """The definition of MLA in float32, in the steps of ``path`` and over a cache of its format and scale.

    Other steps would be other shapes to the model's projections, whose last bits are not attention's doing
    and turn over codes of the first layer: on a GPU, one such code outweighed all that a path did.
    """
    return AttentionPath(
        cache_format=path.cache_format,
        kv_scale=path.kv_scale,
        block_size=path.block_size,
        chunk=path.chunk,
        decode_threshold=path.decode_threshold,
    )


def reference_logits(model: Model, path: AttentionPath, texts: Sequence[Text]) -> list[torch.Tensor]:
    """Tier 2's other side: what ``defined`` makes of the same texts."""
    plain = defined(path)
    return forced_logits(model, layer_of(plain, model.config), plain, texts)


def references(model: Model, texts: Sequence[Text]) -> Callable[[AttentionPath], list[torch.Tensor]]:
    """``reference_logits`` of any path, made once for all that ``defined`` makes the same."""
    of = functools.cache(lambda same: reference_logits(model, same, texts))
    return lambda path: of(defined(path))


def _kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """KL divergence [m] of the distributions of logits b from those of a, both [m vocab], in nats.

    Σ p (ln p - ln q) is a small difference of large terms: in float64 it is worth nothing below 1e-14. With
    q / p = exp(-x) it is Σ p (x + expm1(-x)), whose terms are x²/2 and more, none of them negative.
    """
    x = (a - b) - (a.logsumexp(-1, keepdim=True) - b.logsumexp(-1, keepdim=True))
    return (a.softmax(-1) * (x + torch.expm1(-x))).sum(-1)


def divergence(want: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> Divergence:
    """Tier 2: how far the candidate's logits are from the reference's."""
    kl, first = [], ""
    largest, same, clear = 0.0, 0, 0
    for question, (a, b) in enumerate(zip(want, got, strict=True)):
        each = _kl(a.double(), b.double()).nan_to_num(nan=math.inf)
        kl.append(each)
        largest = max(largest, float((a - b).abs().nan_to_num(nan=math.inf).max()))
        top = a.topk(2, dim=-1)
        stands_out = top.values[:, 0] - top.values[:, 1] > CLEAR
        clear += int(stands_out.sum())
        same += int((b.argmax(-1) == top.indices[:, 0])[stands_out].sum())
        if not first and bool((each > 1e-3).any()):
            first = f"question {question}, token {int((each > 1e-3).nonzero()[0])}"
    every = torch.cat(kl)
    top1 = same / clear if clear else math.nan
    return Divergence(float(every.mean()), float(every.max()), largest, top1, len(every), first)
