"""Attention paths side by side: every choice of their axes, held to the definition of MLA."""

import html
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from evals.model import Model, greedy, load
from evals.path import AttentionPath, attention_of
from evals.tiers import Text, divergence, forced_logits, references
from evals.train.examination import strict_match
from evals.train.tokenizer import Encoder
from evals.trial import measured_noise, texts_of
from mla_ref.layer import layer_around

MOST_NEW = 96
HEADER = (
    "decode",
    "prefill",
    "cache",
    "chunk",
    "threshold",
    "block",
    "dtype",
    "right",
    "texts equal",
    "KL, same cache",
    "KL, fp32 cache",
    "top-1",
    "seconds",
)


class Cell(NamedTuple):
    """One path: strict-match and texts against the reference's, divergence, wall time of its answers.

    reason: why it did not run; the figures are then meaningless.
    """

    path: AttentionPath
    right: float = 0.0
    equal: float = 0.0
    kl: float = 0.0
    cost: float = 0.0
    top1: float = 0.0
    seconds: float = 0.0
    reason: str = ""

    def words(self) -> tuple[str, ...]:
        """The row as it is printed."""
        p = self.path
        axes = (
            p.decode,
            p.prefill,
            p.cache_format,
            p.chunk or "whole",
            p.decode_threshold,
            p.block_size,
            p.dtype,
        )
        figures = (
            f"{self.right:.1%}",
            f"{self.equal:.1%}",
            f"{self.kl:.1e}",
            f"{self.cost:.1e}",
            f"{self.top1:.1%}",
            f"{self.seconds:.1f}",
        )
        return (*map(str, axes), *((self.reason,) + ("",) * 5 if self.reason else figures))


def paths(
    backends: Sequence[tuple[str, str]],
    formats: Sequence[str],
    chunks: Sequence[int],
    thresholds: Sequence[int],
    block_sizes: Sequence[int],
    dtypes: Sequence[str],
) -> list[AttentionPath]:
    """The product of the axes. backends: (decode, prefill)."""
    return [
        AttentionPath(
            decode=decode,
            prefill=prefill,
            cache_format=fmt,
            chunk=chunk,
            decode_threshold=threshold,
            block_size=block_size,
            dtype=dtype,
        )
        for (decode, prefill), fmt, chunk, threshold, block_size, dtype in product(
            backends, formats, chunks, thresholds, block_sizes, dtypes
        )
    ]


def cells(folder: Path, asked: Sequence[AttentionPath], each: int) -> Iterator[Cell]:
    """One cell a path; ``each`` questions of every set. What cannot run says why."""
    from tokenizers import Tokenizer

    scale = measured_noise(folder)["kv_scale"]
    model, texts = load(folder), texts_of(folder, each)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stop = Encoder(tokenizer)("Question:")[0]
    plain = AttentionPath()
    reference = references(model, texts)
    wide = reference(plain)
    written, _ = _answers(model, plain, texts, stop)
    for choice in asked:
        path = replace(choice, kv_scale=scale if choice.cache_format == "fp8_e4m3" else 1.0)
        try:
            layer = layer_around(attention_of(path, model.config))
        except ValueError as error:
            yield Cell(path, reason=str(error).removeprefix("path: "))
            continue
        got = forced_logits(model, layer, path, texts)
        answers, seconds = _answers(model, path, texts, stop)
        right = [strict_match(tokenizer, a, text.answer) for a, text in zip(answers, texts, strict=True)]
        equal = [a == b for a, b in zip(answers, written, strict=True)]
        apart = divergence(wide, got)
        yield Cell(
            path=path,
            right=sum(right) / len(right),
            equal=sum(equal) / len(equal),
            kl=divergence(reference(path), got).mean_kl,
            cost=apart.mean_kl,
            top1=apart.top1,
            seconds=seconds,
        )


def _answers(
    model: Model, path: AttentionPath, texts: Sequence[Text], stop: int
) -> tuple[list[list[int]], float]:
    begun = time.monotonic()
    layer = layer_around(attention_of(path, model.config))
    prompts = [text.prompt for text in texts]
    written = greedy(model, layer, path, prompts, MOST_NEW, lambda ids: ids[-1] == stop)
    return [ids[:-1] if ids[-1] == stop else ids for ids in written], time.monotonic() - begun


def markdown(rows: Sequence[Cell]) -> str:
    """The table."""
    lines = [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row.words())} |" for row in rows)])


def page(rows: Sequence[Cell], title: str) -> str:
    """The table as one HTML page that loads nothing."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEADER)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{html.escape(word)}</td>' for word in row.words())}</tr>" for row in rows
    )
    style = (
        "body{font:14px sans-serif}td,th{padding:2px 8px;text-align:right}tr:nth-child(even){background:#eee}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style><h1>{html.escape(title)}</h1><table><tr>{head}</tr>\n{body}\n</table></html>\n"
    )
