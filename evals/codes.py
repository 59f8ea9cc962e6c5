"""Whether a path over a cache that rounds parts from the definition by the codes that it writes alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from evals.model import Model, load
from evals.parity import finite
from evals.path import Attention, AttentionPath, attention_of
from evals.survey import here
from evals.tiers import Text, defined, divergence, forced_logits
from evals.trial import measured_noise, texts_of
from mla_ref.layer import layer_around
from mla_ref.problem import AttentionOutput

Caches = list[torch.Tensor]  # one a layer
OWN, ON_CODES = "the definition", "the definition, on its codes"
WHOLE, STEPS = "the definition, prompts whole", "these two"


def codes(folder: Path, path: AttentionPath, device: str = "cpu") -> dict[str, Any]:
    """How far the path is from the definition on its own codes, and on those that the definition wrote.

    Also from the definition on whole prompts, and how far apart the definition is in these two kinds of
    steps. bytes: of the caches that differ, layer by layer; none in the first where steps are the same.
    """
    noise, model, texts = measured_noise(folder), load(folder, device), texts_of(folder)
    attention = attention_of(path, model.config, model.device.type)
    want, kept = _served(model, defined(path), texts)
    got, theirs = _served(model, path, texts, attention)
    whole, unbroken = _served(model, replace(defined(path), chunk=0), texts)
    given = forced_logits(model, layer_around(_given(attention, kept)), path, texts)
    found = {
        OWN: (divergence(want, got), _differing(kept, theirs)),
        ON_CODES: (divergence(want, given), None),
        WHOLE: (divergence(whole, got), _differing(unbroken, theirs)),
        STEPS: (divergence(whole, want), _differing(unbroken, kept)),
    }
    about = {"checkpoint": folder.name, "sha256": noise["sha256"], "path": str(path), **here(device)}
    rows = [
        {"beside": name, "mean_kl": apart.mean_kl, "max_kl": apart.max_kl, "bytes": differ}
        for name, (apart, differ) in found.items()
    ]
    return about | {"rows": finite(rows)}


def markdown(record: Mapping[str, Any]) -> str:
    """The path beside each of them."""
    lines = ["| beside | mean_kl | max_kl | bytes that differ, by layer |", "|---|--:|--:|---|"]
    for row in record["rows"]:
        differ = "" if row["bytes"] is None else ", ".join(map(str, row["bytes"]))
        figures = ("" if row[name] is None else f"{row[name]:.1e}" for name in ("mean_kl", "max_kl"))
        lines.append(f"| {row['beside']} | {' | '.join(figures)} | {differ} |")
    return "\n".join(lines)


def _served(
    model: Model, path: AttentionPath, texts: Sequence[Text], attention: Attention | None = None
) -> tuple[list[torch.Tensor], Caches]:
    """The logits of a path, and what stands in every layer's cache at the end."""
    attend = attention or attention_of(path, model.config, model.device.type)
    caches: Caches = []

    def watched(*args: Any) -> AttentionOutput:
        if len(caches) < len(model.hf.model.layers):
            caches.append(args[2])
        return attend(*args)

    return forced_logits(model, layer_around(watched), path, texts), caches


def _given(attention: Attention, caches: Caches) -> Callable[..., AttentionOutput]:
    """The attention that reads these caches in place of what its layers wrote."""
    calls = 0

    def swapped(*args: Any) -> AttentionOutput:
        nonlocal calls
        args[2].copy_(caches[calls % len(caches)])
        calls += 1
        return attention(*args)

    return swapped


def _differing(one: Caches, other: Caches) -> list[int]:
    pairs = zip(one, other, strict=True)
    return [int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs]
