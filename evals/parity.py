"""Two lm_eval runs over the same questions: are they comparable, and did the candidate lose anything?

Reads what ``lm_eval run … --output_path DIR --log_samples`` writes, whatever engine answered.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.statistics import Decision, Paired, decide, stderr

METRIC = "exact_match"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question as one filter saw it. The hashes are lm_eval's own."""

    doc_hash: str
    prompt_hash: str
    target_hash: str
    target: str
    text: str
    extracted: str
    right: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one task.

    settings: whatever must be equal for two runs to be comparable, by the name under which it is reported.
    answers: filter -> doc_id -> answer.
    """

    path: Path
    task: str
    model: str
    shots: int
    settings: dict[str, Any]
    answers: dict[str, dict[int, Answer]]


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


def load(path: Path, task: str) -> Run:
    """The newest run of ``task`` under ``path``, a folder or a results file.

    Raises: ValueError, in one line, on a missing, truncated or inconsistent file.
    """
    file = _results_file(path, task)
    results = _json(file)
    if task not in results.get("results", {}):
        known = ", ".join(results.get("results", {})) or "no task"
        raise ValueError(f"{file}: has {known}, not {task}")
    samples = file.with_name(f"samples_{task}_{file.stem.removeprefix('results_')}.jsonl")
    if not samples.is_file():
        raise ValueError(f"{file}: {samples.name} is not beside it; run lm_eval with --log_samples")
    run = Run(
        path=file,
        task=task,
        model=_model(results),
        shots=int(results.get("n-shot", {}).get(task, 0)),
        settings=_settings(results, task),
        answers=_answers(samples),
    )
    _check_whole(run, results, samples)
    return run


def _results_file(path: Path, task: str) -> Path:
    if path.is_file():
        return path
    found = [
        file
        for file in path.rglob("results_*.json")
        if file.with_name(f"samples_{task}_{file.stem.removeprefix('results_')}.jsonl").is_file()
    ]
    if not found:
        raise ValueError(f"{path}: no results_*.json with a samples_{task}_*.jsonl beside it")
    return max(found, key=lambda file: file.name)  # the name ends with the date


def _json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file}: holds a {type(data).__name__}, not the results of a run")
    return data


def _model(results: dict[str, Any]) -> str:
    config = results.get("config", {})
    name = results.get("model_name") or config.get("model_args") or ""
    return f"{config.get('model', 'model')} {name}".strip()


def _settings(results: dict[str, Any], task: str) -> dict[str, Any]:
    config = results.get("config", {})
    made = results.get("configs", {}).get(task, {})
    return {
        "task version": results.get("versions", {}).get(task),
        "n-shot": results.get("n-shot", {}).get(task),
        "limit": config.get("limit"),
        "few-shot seed": config.get("fewshot_seed"),
        "filters": made.get("filter_list"),
        "metrics": made.get("metric_list"),
        "generation settings": made.get("generation_kwargs"),
        "generation settings of the command": config.get("gen_kwargs") or None,
        "system instruction": results.get("system_instruction_sha"),
        "chat template": results.get("chat_template_sha"),
        "few-shot as multi-turn": results.get("fewshot_as_multiturn"),
    }


def _answers(samples: Path) -> dict[str, dict[int, Answer]]:
    answers: dict[str, dict[int, Answer]] = {}
    with samples.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                sample = json.loads(line)
                score = float(sample[METRIC])
                answer = Answer(
                    doc_hash=sample["doc_hash"],
                    prompt_hash=sample["prompt_hash"],
                    target_hash=sample["target_hash"],
                    target=str(sample["target"]),
                    text=_first(sample["resps"]),
                    extracted=_first(sample["filtered_resps"]),
                    right=score == 1.0,
                )
                seen = answers.setdefault(sample["filter"], {})
                doc_id = int(sample["doc_id"])
            except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                what = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{samples}:{number}: {what}") from None
            if score not in (0.0, 1.0):
                raise ValueError(f"{samples}:{number}: {METRIC} is {score}, must be 0 or 1")
            if doc_id in seen:
                raise ValueError(f"{samples}:{number}: question {doc_id} a second time")
            seen[doc_id] = answer
    return answers


def _first(responses: Any) -> str:
    while isinstance(responses, list):
        responses = responses[0] if responses else ""
    return str(responses)


def _check_whole(run: Run, results: dict[str, Any], samples: Path) -> None:
    """The samples are those that the results were computed from."""
    expected = results.get("n-samples", {}).get(run.task, {}).get("effective")
    if not run.answers:
        raise ValueError(f"{samples}: holds no answers")
    for name, answers in run.answers.items():
        if expected is not None and len(answers) != expected:
            raise ValueError(
                f"{samples}: {len(answers)} answers of {name}, but the run had {expected} questions"
            )
        written = results["results"][run.task].get(f"{METRIC},{name}")
        if written is None:
            raise ValueError(f"{run.path}: no {METRIC},{name}, which the samples have")
        counted = sum(answer.right for answer in answers.values()) / len(answers)
        if round(counted, 6) != round(float(written), 6):
            raise ValueError(f"{samples}: {name} counts to {counted:.4f}, but the results say {written:.4f}")


def why_not_comparable(baseline: Run, candidate: Run) -> str | None:
    """The first thing that two runs do not share and must, with both values; None if they are comparable."""
    for name, value in baseline.settings.items():
        if value != (other := candidate.settings[name]):
            return f"{name}: {_short(value)} in the baseline, {_short(other)} in the candidate"
    if set(baseline.answers) != set(candidate.answers):
        return f"filters: {', '.join(sorted(baseline.answers))}, but {', '.join(sorted(candidate.answers))}"
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


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 120 else f"{text[:117]}…"


def compare(baseline: Run, candidate: Run, name: str, margin: float) -> Comparison:
    """The paired decision on the answers that filter ``name`` extracted.

    Raises: ValueError if the runs are not comparable, with the reason, or have no such filter.
    """
    if reason := why_not_comparable(baseline, candidate):
        raise ValueError(f"not comparable: {reason}")
    if name not in baseline.answers:
        raise ValueError(f"filter {name!r} is not one of {', '.join(baseline.answers)}")
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
        error = f"{stderr(accuracy, n):.4f}" if n > 1 else "N/A"
        lines.append(
            f"|{task:5}|{version!s:>7}|{name:16}|{run.shots:6}|{METRIC}|↑  |{accuracy:.4f}|±  |{error:>6}|"
        )
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
    first = comparisons[0]
    if first.flips:
        shown = first.flips[:most_flips]
        lines += ["", f"flips of {first.filter}, {len(shown)} of {len(first.flips)}:"]
        lines += [
            f"  question {f.doc_id}: {'lost' if f.lost else 'won '}  target {f.target}  "
            f"baseline {f.baseline}  candidate {f.candidate}  texts part at character {f.differs_at}"
            for f in shown
        ]
    decision = first.decision
    lines += ["", f"{decision.outcome} ({first.filter}, margin {margin:.2%}): {decision.reason}"]
    return "\n".join(lines)
