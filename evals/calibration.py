"""The noise of right paths, measured on a checkpoint and stored beside it."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import torch

from evals.model import Model, load
from evals.path import Attention, AttentionPath, attention_of
from evals.tiers import Divergence, Text, divergence, forced_logits, reference_logits, references, shadow
from evals.trial import COSTS, FACTORS, MEASURES, NOISE, TURNED, digest, texts_of
from mla_ref.formats._e4m3 import E4M3_MAX
from mla_ref.layer import layer_around
from mla_ref.naive import naive
from mla_ref.problem import AttentionOutput
from mla_ref.values import bell
from oracles.whole_file import write_whole

# Right paths over every cache format, in both operand types: their largest deviation is the noise.
VARIANTS: tuple[AttentionPath, ...] = (
    AttentionPath(decode="mla_ref.absorbed", prefill="mla_ref.chunked", chunk=96, workspace_rows=64),
    AttentionPath(decode="mla_ref.split[num_splits=7]", prefill="mla_ref.absorbed", chunk=96),
    AttentionPath(decode="mla_fast.sdpa", prefill="mla_fast.sdpa"),
)
# In 16 bits too: the references round what goes in and what comes out, kernels also the softmax weights.
KERNELS: tuple[AttentionPath, ...] = (
    AttentionPath(decode="evals.flash_latent", prefill="mla_fast.chunked_sdpa", chunk=96),
    AttentionPath(decode="evals.flash_latent[lazy maximum]", prefill="mla_fast.chunked_sdpa"),
    AttentionPath(decode="evals.flash_latent[lazy maximum]", prefill="mla_ref.chunked", chunk=96),
)
FORMATS = ("fp32", "bf16", "fp8_e4m3", "fp8_ds_mla")
DTYPES = ("float32", "bfloat16")

# In float32, over a cache that rounds, paths part where a value lies so near the middle of two codes that it
# takes the other one, and a few such values decide the divergence: whether a path turns them over is chance,
# and another one on every machine. So the reference is moved as far as T1 lets a path be, often enough that
# each of the values that rounding can turn over has been turned over: one that lies within three times the
# noise of its middle is turned by a move of ten times in 38 of 100 runs, and is missed by all 32 in 2 of 10
# million. What they come to is the limit. The tenfold move is the margin, and there is no second one.
MOVED = 32


def fp8_scale(model: Model, texts: Sequence[Text]) -> float:
    """The per-tensor scale under which the largest cached channel of the texts has the largest e4m3 code."""
    largest = 0.0

    def watched(*args: Any) -> AttentionOutput:
        nonlocal largest
        largest = max(largest, float(args[2].nan_to_num(nan=0.0).abs().max()))
        return naive(*args)

    forced_logits(model, layer_around(watched), AttentionPath(), texts)
    return largest / E4M3_MAX


def moved(attention: Attention, by: float, seed: int) -> Attention:
    """``attention`` whose outputs are off by a share of themselves: normal, of deviation ``by``."""
    calls = count()

    def off(*args: Any) -> AttentionOutput:
        out, lse = attention(*args)
        share = bell(seed, f"call {next(calls)}", *out.shape).to(out.device)
        return AttentionOutput((out * (1.0 + by * share)).to(out.dtype), lse)

    return off


def parted(
    model: Model, over: AttentionPath, texts: Sequence[Text], by: float, seeds: Iterable[int]
) -> Iterator[Divergence]:
    """How far the definition is from its own logits when its outputs are moved: once a seed."""
    reference = reference_logits(model, over, texts)
    for seed in seeds:
        layer = layer_around(moved(naive, by, seed))
        yield divergence(reference, forced_logits(model, layer, over, texts))


def calibrate(
    folder: Path, report: Callable[[str], None] = print, device: str = "cpu", model_dtype: str = "float32"
) -> dict[str, Any]:
    """Measure the noise of right variants in every cache format and write it beside the checkpoint.

    Also stored: how far a float32 path over a cache that rounds parts when it is as far off as T1 allows; the
    cost of each format, which is how far from a float32 cache the definition and the right variants over it
    are; and the scale of the per-tensor format.
    """
    model, texts = load(folder, device, getattr(torch, model_dtype)), texts_of(folder)
    scale = fp8_scale(model, texts)
    reference = references(model, texts)
    found: dict[str, dict[str, Any]] = {"noise": {}, "turned": {}, "cost": {}}
    for kind in product(DTYPES, FORMATS):
        for part, values in measured(model, texts, reference, scale, *kind, report).items():
            found[part]["/".join(kind)] = values
    stored = {"sha256": digest(folder), "model_dtype": model_dtype, "kv_scale": scale, **found}
    write_whole(folder / NOISE, json.dumps(stored, indent=2) + "\n")
    return stored


def measured(
    model: Model,
    texts: Sequence[Text],
    reference: Callable[[AttentionPath], list[torch.Tensor]],
    scale: float,
    dtype: str,
    fmt: str,
    report: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """The noise of right paths of a type over a format, its cost, and what codes that are turned come to.

    reference: that of any path over these texts, as ``references`` makes it.
    """
    over = AttentionPath(cache_format=fmt, kv_scale=scale)
    plain = reference(AttentionPath())
    noise = dict.fromkeys(MEASURES, 0.0)
    cost = dict.fromkeys(COSTS, 0.0)
    cost = _larger(cost, divergence(plain, reference(over))._asdict())
    for path, attention in _right(model, replace(over, dtype=dtype), report):
        seen = shadow(model, path, attention, texts)
        logits = forced_logits(model, layer_around(attention), path, texts)
        noise = _larger(noise, seen._asdict() | divergence(reference(path), logits)._asdict())
        cost = _larger(cost, divergence(plain, logits)._asdict())
    found = {"noise": noise, "cost": cost}
    if dtype == AttentionPath.dtype and fmt != AttentionPath.cache_format:
        turned = {name: noise[name] for name in TURNED}
        for apart in parted(model, over, texts, FACTORS[dtype] * noise["median"], range(MOVED)):
            turned = _larger(turned, apart._asdict())
        found["turned"] = turned
    for part, values in found.items():
        said = "  ".join(f"{name} {value:.1e}" for name, value in values.items())
        report(f"{dtype}/{fmt} {part}: {said}")
    return found


def _right(
    model: Model, over: AttentionPath, report: Callable[[str], None]
) -> Iterator[tuple[AttentionPath, Attention]]:
    """The right paths of a type over a cache; one that does not take the model is reported and left out."""
    for variant in VARIANTS if over.dtype == AttentionPath.dtype else VARIANTS + KERNELS:
        path = replace(variant, cache_format=over.cache_format, dtype=over.dtype, kv_scale=over.kv_scale)
        try:
            attention = attention_of(path, model.config, model.device.type)
        except ValueError as error:  # such as widths that a kernel does not have
            report(f"left out: {error}")
            continue
        yield path, attention


def _larger(known: Mapping[str, float], found: Mapping[str, float]) -> dict[str, float]:
    """The larger of each measure that is known; what was not found stays."""
    return {name: max(value, found.get(name, value)) for name, value in known.items()}
