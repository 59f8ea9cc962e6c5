"""Which tier sees which planted bug: right paths and wrong ones through all three tiers."""

import importlib.metadata
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from evals.model import load
from evals.parity import compare
from evals.path import AttentionPath
from evals.planted import bugs, right
from evals.spawned import spawned
from evals.statistics import FAIL, INCONCLUSIVE, PASS
from evals.tiers import reference_logits
from evals.trial import MARGIN, answers_of, limits, lines_of, measure, measured_noise, texts_of

MARK = {FAIL: "seen", PASS: "", INCONCLUSIVE: "inconclusive"}


class Sight(NamedTuple):
    """What the tiers say of one path.

    wrong: whether it was planted. t1, t2: whether a measure was above its limit. t3: PASS, FAIL or
    INCONCLUSIVE on strict-match, paired with the reference. baseline, candidate: shares of ``questions``
    solved. lost, won: questions that flipped. p: McNemar. text_equal: share of identical answers.
    """

    name: str
    wrong: bool
    t1: bool
    t2: bool
    t3: str
    questions: int
    baseline: float
    candidate: float
    lost: int
    won: int
    p: float
    text_equal: float


def sights(folder: Path, questions: int, out: Path, jobs: int = 1, device: str = "cpu") -> Iterator[Sight]:
    """Every path of ``evals.planted``, the right ones first. Runs are kept under ``out`` and resume."""
    scale = measured_noise(folder)["kv_scale"]
    planted = [(each, False) for each in right(scale)] + [(each, True) for each in bugs(scale)]
    answers_of(folder, AttentionPath(), questions, out, device)
    see = partial(_see, folder, questions, out, device)
    yield from spawned(jobs, see, [each.name for each, _ in planted], [wrong for _, wrong in planted])


def _see(folder: Path, questions: int, out: Path, device: str, name: str, wrong: bool) -> Sight:
    noise = measured_noise(folder)
    [planted] = (each for each in (*right(noise["kv_scale"]), *bugs(noise["kv_scale"])) if each.name == name)
    allowed = limits(noise, planted.path)
    if allowed is None:
        raise ValueError(f"{name}: no noise was measured for {planted.path}")
    model, texts = load(folder, device), texts_of(folder)
    reference = reference_logits(model, planted.path, texts)
    found = measure(model, planted.path, planted.attend(model), planted.layer(model), texts, reference)
    over = {line.tier for line in lines_of(*found, allowed) if not line.ok}
    baseline = answers_of(folder, AttentionPath(), questions, out, device)
    candidate = answers_of(folder, planted.path, questions, out, device, planted)
    paired = compare(baseline, candidate, "strict-match", MARGIN)
    return Sight(
        name=name,
        wrong=wrong,
        t1="T1 shadow" in over,
        t2="T2 logits" in over,
        t3=paired.decision.outcome,
        questions=paired.pair.n,
        baseline=paired.pair.baseline,
        candidate=paired.pair.candidate,
        lost=paired.pair.lost,
        won=paired.pair.won,
        p=paired.decision.p,
        text_equal=paired.text_equal,
    )


def markdown(rows: Sequence[Sight]) -> str:
    """The rows as a table. A wrong path is seen by a tier that fails it; a right one must pass all."""
    lines = [
        "| path | T1 shadow | T2 logits | T3 gsm8k | solved | lost, won | McNemar p | texts equal |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        t1, t2 = ("seen" if tier else "" for tier in (row.t1, row.t2))
        lines.append(
            f"| {'' if row.wrong else 'right: '}{row.name} | {t1} | {t2} | {MARK[row.t3]} | "
            f"{row.candidate:.1%} of {row.questions} | {row.lost}, {row.won} | {row.p:.2g} | "
            f"{row.text_equal:.1%} |"
        )
    return "\n".join(lines)


def record(rows: Sequence[Sight], folder: Path) -> dict[str, Any]:
    """The rows as JSON, with what they were measured on."""
    packages = ("torch", "transformers", "lm_eval")
    return {
        "checkpoint": folder.name,
        "sha256": measured_noise(folder)["sha256"],
        "margin": MARGIN,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "paths": [row._asdict() for row in rows],
    }


def unseen(rows: Sequence[Sight]) -> list[str]:
    """What is not as it must be: a bug that neither T1 nor T2 sees, a right path that a tier fails."""
    return [row.name for row in rows if (row.t1 or row.t2) != row.wrong or (not row.wrong and row.t3 == FAIL)]
