"""Proof that the gate is alive, on the CPU: right paths pass it, planted bugs do not."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from evals.model import Model, load
from evals.planted import SERVED, Planted, bugs, right
from evals.statistics import FAIL, PASS
from evals.tiers import Text, reference_logits
from evals.trial import accuracy, limits, lines_of, measure, measured_noise, texts_of

RIGHT = ("absorbed", "chunked prefill, absorbed decode", "fp8_e4m3 cache", "fp8_ds_mla cache")
WRONG = ("mask one key too far", "first page dropped", "softmax scale + 1 %")
TRITON = Planted(
    name="interpreted Triton decode",
    path=replace(SERVED, decode="mla_fast.triton_decode", cache_format="bf16", dtype="bfloat16"),
)
FEW = 4  # tokens that the interpreter decodes
QUESTIONS = 56  # the fewest that can bound a loss below the margin of 5 %


class Row(NamedTuple):
    """One path: what the gate should say, what it says, and its measures above their limits."""

    name: str
    expected: str
    outcome: str
    detail: str


def rows(folder: Path, out: Path) -> Iterator[Row]:
    """Tiers 1 and 2 of each path, then tier 3 of one, whose runs are written to ``out``.

    Triton's path needs TRITON_INTERPRET=1 before triton is imported.
    """
    noise = measured_noise(folder)
    model, texts = load(folder), texts_of(folder)[::2]
    for planted in right(noise["kv_scale"]):
        if planted.name in RIGHT:
            yield _row(planted, PASS, model, texts, noise)
    yield _triton(model, texts, noise)
    for planted in bugs(noise["kv_scale"]):
        if planted.name in WRONG:
            yield _row(planted, FAIL, model, texts, noise)
    yield answers(folder, out)


def _triton(model: Model, texts: list[Text], noise: dict[str, object]) -> Row:
    if importlib.util.find_spec("triton") is None:
        return Row(TRITON.name, PASS, "", "triton is not installed")
    short = [Text(text.prompt, text.answer[:FEW]) for text in texts[:1]]
    return _row(TRITON, PASS, model, short, noise)


def _row(planted: Planted, expected: str, model: Model, texts: list[Text], noise: dict[str, object]) -> Row:
    path = planted.path
    allowed = limits(noise, path)
    if allowed is None:
        raise ValueError(f"{planted.name}: no noise was measured for {path.dtype}/{path.cache_format}")
    reference = reference_logits(model, path, texts)
    attention, layer = planted.attend(model), planted.layer(model)
    lines = lines_of(*measure(model, path, attention, layer, texts, reference), allowed)
    over = [
        f"{line.tier} {line.measure} {line.found:.1e} > {line.limit:.1e}" for line in lines if not line.ok
    ]
    return Row(planted.name, expected, FAIL if over else PASS, "; ".join(over))


def answers(folder: Path, out: Path) -> Row:
    """Tier 3 of the path that an engine would serve, over a cache of 8 bits."""
    path = replace(SERVED, cache_format="fp8_ds_mla")
    paired = accuracy(folder, path, QUESTIONS, out, 0.05)
    pair = paired.pair
    detail = f"{pair.baseline:.0%} and {pair.candidate:.0%} of {pair.n}; {paired.decision.reason}"
    return Row("gsm8k, fp8_ds_mla cache", PASS, paired.decision.outcome, detail)
