"""Two lm_eval runs over the same questions: are they comparable, and did the candidate lose anything?"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from evals.runs import TOKENS, Run
from evals.statistics import CONFIDENCE, HARM, POWER, Decision, Paired, decide, stderr
from oracles.exits import printable

DECIDES = "flexible-extract"
UNTAKEN = "so they are, too, where the candidate's setting was never taken"
ABSENT = object()  # equal to nothing that a file may hold


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A question that one run answered rightly and the other did not."""

    doc_id: int
    lost: bool
    target: str
    baseline: str
    candidate: str
    differs_at: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One filter's pairing. text_equal: share of questions with the same text, word for word."""

    filter: str
    pair: Paired
    decision: Decision
    text_equal: float
    flips: tuple[Flip, ...]


def why_not_comparable(baseline: Run, candidate: Run) -> str | None:
    """The first thing that two runs do not share and must, with both values; None if they are comparable."""
    for name, value in baseline.settings.items():
        other = candidate.settings[name]
        if value == other or (name in TOKENS and None in (value, other)):  # not every engine says its tokens
            continue
        where, one, two = _parting(value, other)
        return f"{name}{where}: {_short(one)} in the baseline, {_short(two)} in the candidate"
    if set(baseline.answers) != set(candidate.answers):
        one, two = (", ".join(run.answers) for run in (baseline, candidate))
        return f"filters: {one} in the baseline, {two} in the candidate"
    for name, answers in baseline.answers.items():
        others = candidate.answers[name]
        if missing := sorted(set(answers) ^ set(others)):
            side = "baseline" if missing[0] in answers else "candidate"
            return f"questions: {len(missing)} are in one run only, for example {missing[0]} in the {side}"
        for field, what in (("doc_hash", "question"), ("prompt_hash", "prompt"), ("target_hash", "target")):
            differing = [i for i in answers if getattr(answers[i], field) != getattr(others[i], field)]
            if differing:
                first = min(differing)
                return f"{what}s: {len(differing)} of {len(answers)} differ, first that of question {first}"
    return None


def _parting(a: Any, b: Any) -> tuple[str, Any, Any]:
    """Where two values first part, and both there: the names and numbers that lead to it. A part may lack."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        names = [name for name in {**a, **b} if a.get(name, ABSENT) != b.get(name, ABSENT)]
        where, one, two = _parting(a.get(names[0], ABSENT), b.get(names[0], ABSENT))
        return f".{names[0]}{where}", one, two
    if isinstance(a, list) and isinstance(b, list):
        pairs = zip_longest(a, b, fillvalue=ABSENT)
        number, (x, y) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
        where, one, two = _parting(x, y)
        return f"[{number}]{where}", one, two
    return "", a, b


def _short(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 120 else f"{text[:117]}…"


def deciding(run: Run, name: str = "") -> str:
    """The filter whose answers decide: ``name``, else ``DECIDES`` where the run has it, else its only one.

    Raises: ValueError that lists the filters, if none of these is there.
    """
    if not name and len(run.answers) == 1:
        return next(iter(run.answers))
    if (chosen := name or DECIDES) in run.answers:
        return chosen
    raise ValueError(f"filter {chosen!r} is not one of {', '.join(run.answers)}")


def compare(baseline: Run, candidate: Run, name: str, margin: float) -> Comparison:
    """The paired decision on the answers of filter ``name``, as ``deciding`` takes it.

    Raises: ValueError if the runs are not comparable, with the reason, or have no such filter.
    """
    if reason := why_not_comparable(baseline, candidate):
        raise ValueError(f"not comparable: {reason}")
    name = deciding(baseline, name)
    ours, theirs = baseline.answers[name], candidate.answers[name]
    counts = dict.fromkeys(((True, True), (True, False), (False, True), (False, False)), 0)
    for doc_id, answer in ours.items():
        counts[answer.right, theirs[doc_id].right] += 1
    pair = Paired(
        both=counts[True, True],
        lost=counts[True, False],
        won=counts[False, True],
        neither=counts[False, False],
    )
    return Comparison(
        filter=name,
        pair=pair,
        decision=decide(pair, margin),
        text_equal=sum(answer.text == theirs[i].text for i, answer in ours.items()) / len(ours),
        flips=tuple(
            Flip(
                doc_id=i,
                lost=ours[i].right,
                target=ours[i].target.rsplit("#### ", 1)[-1],
                baseline=ours[i].extracted,
                candidate=theirs[i].extracted,
                differs_at=_common_prefix(ours[i].text, theirs[i].text),
            )
            for i in sorted(ours)
            if ours[i].right != theirs[i].right
        ),
    )


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def table(run: Run) -> str:
    """The run's table as lm_eval prints it, computed from the answers."""
    lines = [
        "|Tasks|Version|     Filter     |n-shot|  Metric   |   |Value |   |Stderr|",
        "|-----|------:|----------------|-----:|-----------|---|-----:|---|-----:|",
    ]
    task, version = run.task, run.settings["task version"]
    for name, answers in run.answers.items():
        n = len(answers)
        accuracy = sum(answer.right for answer in answers.values()) / n
        error = "N/A" if n == 1 else f"{stderr(accuracy, n):.4f}"
        metric = f"{run.metric:11}|↑  |{accuracy:.4f}|±  |{error:>6}"
        lines.append(f"|{task:5}|{version!s:>7}|{name:16}|{run.shots:6}|{metric}|")
        task, version = "", ""
    return "\n".join(lines)


def report(
    baseline: Run, candidate: Run, comparisons: list[Comparison], margin: float, most_flips: int
) -> str:
    """Both tables, the paired figures of every filter, the flips of the first, and the decision."""
    lines = [
        f"baseline:  {baseline.model} ({baseline.path})",
        table(baseline),
        "",
        f"candidate: {candidate.model} ({candidate.path})",
        table(candidate),
        "",
        "|     Filter     | n  |both|lost|won|neither| loss  |95 % bound|McNemar p|detectable|text equal|",
        "|----------------|---:|---:|---:|--:|------:|------:|---------:|--------:|---------:|---------:|",
    ]
    for one in comparisons:
        pair, decision = one.pair, one.decision
        lines.append(
            f"|{one.filter:16}|{pair.n:4}|{pair.both:4}|{pair.lost:4}|{pair.won:3}|{pair.neither:7}|"
            f"{pair.loss:7.2%}|{decision.bound:10.2%}|{decision.p:9.2g}|{decision.detectable:10.2%}|"
            f"{one.text_equal:10.2%}|"
        )
    lines.append(
        f"detectable: the least true loss of which {POWER:.0%} of such runs show p < {1 - CONFIDENCE:.2g}; "
        f"FAIL asks for p < {HARM}"
    )
    first = comparisons[0]
    if first.text_equal == 1.0:
        lines += ["", f"note: all {first.pair.n} texts are the same to the letter; {UNTAKEN}"]
    if first.flips:
        shown = first.flips[:most_flips]
        lines += ["", f"flips of {first.filter}, {len(shown)} of {len(first.flips)}:"]
        lines += [
            f"  question {f.doc_id}: {'lost' if f.lost else 'won '}  target {_shown(f.target)}  "
            f"baseline {_shown(f.baseline)}  candidate {_shown(f.candidate)}  "
            f"texts part at character {f.differs_at}"
            for f in shown
        ]
    decision = first.decision
    lines += ["", f"{decision.outcome} ({first.filter}, margin {margin:.2%}): {decision.reason}"]
    return "\n".join(lines)


def _shown(text: str, most: int = 40) -> str:
    """On one line, and harmless to a terminal; the end of a long text, where its answer is."""
    plain = printable(" ".join(text.split()))
    return plain if len(plain) <= most else f"…{plain[1 - most :]}"


def finite(value: Any) -> Any:
    """``value`` with None for every number that JSON does not have: NaN and the infinities."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
