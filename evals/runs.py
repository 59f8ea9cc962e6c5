"""One lm_eval run, read from what ``--output_path DIR --log_samples`` wrote, whatever engine answered.

| lm_eval | results | samples of a task | in a sample |
|---|---|---|---|
| 0.4.0 … 0.4.2 | NAME.json | MODEL_ARGS_TASK.jsonl, one JSON array | neither hashes nor the filter |
| 0.4.3 … 0.4.5 | results_DATE.json | samples_TASK_DATE.jsonl, a sample a line | hashes, no filter |
| since 0.4.7 | results_DATE.json | the same | hashes and the filter |

Where --output_path names a file, NAME_DATE.json stands for results_DATE.json. Hashes that are missing are
made as lm_eval makes them; samples without a filter come filter by filter, in the order of the task's list.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, cast

METRICS = ("exact_match", "acc")  # of a sample, 0 or 1; the first that a run has, unless one is asked for
DATED = re.compile(r"_(\d{4}-\d{2}-\d{2}T[\d.+-]+)$")
TOKENS = ("begin token", "end token")  # settings that tell tokenizers apart; [text, number], or None
NO_FILTER = "none"  # lm_eval's own name for the answers of a task without filters


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question as one filter saw it.

    doc_hash, prompt_hash, target_hash: sha256, lm_eval's own.
    text: what was generated; all responses as JSON where there are several.
    extracted: what the filter took from it.
    """

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

    path: its results file.
    metric: which of a sample's figures says whether it is right.
    settings: whatever must be equal for two runs to be comparable, by the name under which it is reported.
    clock: when it began and how many seconds it took; None for what it does not say.
    answers: filter -> doc_id -> answer.
    """

    path: Path
    task: str
    model: str
    shots: int
    metric: str
    settings: dict[str, Any]
    clock: tuple[Any, Any]
    answers: dict[str, dict[int, Answer]]


def load(path: Path, task: str, metric: str = "") -> Run:
    """The newest run of ``task`` under ``path``, a folder or a results file.

    metric: of the samples; empty: the first of ``METRICS`` that they have.

    Raises: ValueError, in one line, on a missing, truncated or inconsistent file, on runs of several models.
    """
    file = _results_file(path, task)
    results = _results(file)
    if task not in (tasks := results.part("results")):
        raise ValueError(f"{file}: has {_listed([*tasks]) or 'no task'}, not {task}")
    samples = _samples_file(file, task)
    if samples is None:
        raise ValueError(f"{file}: no samples of {task} are beside it; run lm_eval with --log_samples")
    rows = list(_samples(samples))
    if not rows:
        raise ValueError(f"{samples}: holds no answers")
    metric = metric or _metric(samples, rows[0][1])
    run = Run(
        path=file,
        task=task,
        model=_model(results),
        shots=results.whole_number("n-shot", task),
        metric=metric,
        settings=_settings(results, task) | {"metric": metric},
        clock=(results.data.get("date"), results.data.get("total_evaluation_time_seconds")),
        answers=_answers(samples, rows, _filters(results, task), metric),
    )
    _check_complete(run, results, samples)
    return run


def why_one(baseline: Run, candidate: Run) -> str | None:
    """Why the two are one run, in which nothing could ever be lost; None if they are two."""
    if baseline.path.resolve() == candidate.path.resolve():
        return f"{baseline.path}: is the baseline and the candidate; two runs are compared"
    if None not in baseline.clock and baseline.clock == candidate.clock:
        began, seconds = baseline.clock
        return (
            f"{candidate.path}: is a copy of {baseline.path}: both began at {began} and took "
            f"{seconds} s; two runs are compared"
        )
    return None


def _results_file(path: Path, task: str) -> Path:
    """The newest results file that has samples of ``task`` beside it. Raises: ValueError on two models."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"{path}: is neither a folder nor a results file of lm_eval")
    found = [file for file in sorted(path.rglob("*.json")) if _samples_file(file, task)]
    if not found:
        raise ValueError(f"{path}: {_what_lacks(path, task)}")
    if len(places := sorted({file.parent for file in found})) > 1:
        names = _listed([str(place.relative_to(path)) for place in places])
        raise ValueError(f"{path}: holds runs of {task} in {len(places)} folders, name one: {names}")
    if len(undated := [file.name for file in found if not DATED.search(file.stem)]) > 1:
        raise ValueError(f"{path}: holds {len(undated)} results without a date, name one: {_listed(undated)}")
    return max(found, key=_date)


def _what_lacks(path: Path, task: str) -> str:
    """Why a folder has no run of ``task``: its samples, their results, or both."""
    have = sorted({_task(file) for file in path.rglob("samples_*.jsonl")})
    if task in have:
        return f"samples of {task}, but no results of their date beside them"
    lacks = f"no samples of {task}" + (f", but of {_listed(have)}" if have else "")
    if results := sorted(path.rglob("results_*.json")):
        return f"{lacks} beside {results[-1].name}; run lm_eval with --log_samples and --tasks {task}"
    return f"{lacks}, and no results; it is no --output_path of lm_eval with --log_samples"


def _date(file: Path) -> str:
    found = DATED.search(file.stem)
    return found[1] if found else ""


def _task(samples: Path) -> str:
    return DATED.sub("", samples.stem).removeprefix("samples_")


def _listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _samples_file(results: Path, task: str) -> Path | None:
    """What is beside a results file and holds the samples of ``task``; None where nothing is."""
    if date := _date(results):
        file = results.with_name(f"samples_{task}_{date}.jsonl")
        return file if file.is_file() else None
    beside = [file for file in results.parent.glob("*.jsonl") if file.stem.endswith(f"_{task}")]
    return beside[0] if len(beside) == 1 else None


class _Results(NamedTuple):
    """A results file: what it says, each part by the names that lead to it."""

    file: Path
    data: Mapping[str, Any]

    def part(self, *names: str) -> Mapping[str, Any]:
        """An object, empty where there is none. Raises: ValueError where something else stands there."""
        found: Any = self.data
        for depth, name in enumerate(names, 1):
            found = found.get(name)
            if found is None:
                return {}
            if not isinstance(found, Mapping):
                raise self.odd(names[:depth], found, "an object")
        return cast("Mapping[str, Any]", found)

    def whole_number(self, *names: str) -> int:
        """0 where there is none. Raises: ValueError where something else stands there."""
        found = self.part(*names[:-1]).get(names[-1])
        if found is not None and not isinstance(found, int):
            raise self.odd(names, found, "a whole number")
        return found or 0

    def odd(self, names: Sequence[str], found: Any, wanted: str) -> ValueError:
        """What stands where something else must."""
        return ValueError(f"{self.file}: {'.'.join(names)} is {_short(found)}, must be {wanted}")


def _short(value: Any, most: int = 40) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _results(file: Path) -> _Results:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError, too
        if file.suffix == ".jsonl":
            raise ValueError(
                f"{file}: holds samples; name the results file beside it, or the folder"
            ) from None
        raise ValueError(f"{file}: not JSON, or cut short: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("results"), dict):
        raise ValueError(f"{file}: has no results; it is not the results file of an lm_eval run")
    return _Results(file, data)


def _model(results: _Results) -> str:
    config = results.part("config")
    name = results.data.get("model_name") or config.get("model_args") or ""
    return f"{config.get('model', 'model')} {name}".strip()


def _settings(results: _Results, task: str) -> dict[str, Any]:
    config, made = results.part("config"), results.part("configs", task)
    return {
        "task version": results.part("versions").get(task),
        "n-shot": results.part("n-shot").get(task),
        "limit": config.get("limit"),
        "few-shot seed": config.get("fewshot_seed"),
        "filters": made.get("filter_list"),
        "metrics": made.get("metric_list"),
        "repeats": made.get("repeats"),
        "generation settings": made.get("generation_kwargs"),
        "generation settings of the command": config.get("gen_kwargs") or None,
        "system instruction": results.data.get("system_instruction_sha"),
        "chat template": results.data.get("chat_template_sha"),
        "few-shot as multi-turn": results.data.get("fewshot_as_multiturn"),
        "begin token": results.data.get("tokenizer_bos_token"),
        "end token": results.data.get("tokenizer_eos_token"),
    }


def _filters(results: _Results, task: str) -> list[str]:
    """The names of the task's filters in the order in which they are applied."""
    made = results.part("configs", task).get("filter_list") or [{"name": NO_FILTER}]
    try:
        return [str(each["name"]) for each in made]
    except (TypeError, KeyError):
        raise results.odd(("configs", task, "filter_list"), made, "a list of filters with names") from None


def _samples(file: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, sample) of each sample: a line each, or one array of them all."""
    try:
        text = file.read_text(encoding="utf-8")
        if text.startswith("["):
            yield from ((f"{file}[{number}]", sample) for number, sample in enumerate(json.loads(text)))
            return
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError, too
        raise ValueError(f"{file}: not JSON, or cut short: {error}") from None
    # Not splitlines(): a text may hold other line separators than JSON's own.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        if not text:
            return
        try:
            yield f"{file}:{number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}:{number}: not JSON, or cut short: {error}") from None


def _metric(file: Path, sample: Any) -> str:
    has = sample if isinstance(sample, dict) else {}
    for name in METRICS:
        if name in has:
            return name
    named = f"; name one of {', '.join(has['metrics'])}" if has.get("metrics") else ""
    raise ValueError(f"{file}: its samples have none of {', '.join(METRICS)}{named}")


def _answers(
    file: Path, rows: Sequence[tuple[str, Any]], filters: Sequence[str], metric: str
) -> dict[str, dict[int, Answer]]:
    answers: dict[str, dict[int, Answer]] = {}
    times: dict[int, int] = {}  # how often a question was seen, where samples do not name their filter
    for where, sample in rows:
        try:
            doc_id, score = index(sample["doc_id"]), float(sample[metric])
            answer = _answer(sample, score)
            name = str(sample.get("filter", filters[min(times.get(doc_id, -1) + 1, len(filters) - 1)]))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            if error.args == (metric,) and (has := [name for name in METRICS if name in sample]):
                what += f", but {', '.join(has)}"
            raise ValueError(f"{where}: {what}") from None
        if score not in (0.0, 1.0):
            raise ValueError(f"{where}: {metric} is {score}, must be 0 or 1")
        times[doc_id] = times.get(doc_id, -1) + 1
        seen = answers.setdefault(name, {})
        if doc_id in seen:
            raise ValueError(f"{where}: question {doc_id} a second time")
        seen[doc_id] = answer
    return answers


def _answer(sample: Mapping[str, Any], score: float) -> Answer:
    target = str(sample["target"])
    return Answer(
        doc_hash=sample.get("doc_hash") or _sha256(json.dumps(sample["doc"], indent=2, ensure_ascii=False)),
        prompt_hash=sample.get("prompt_hash") or _sha256(str(sample["arguments"][0][0])),
        target_hash=sample.get("target_hash") or _sha256(target),
        target=target,
        text=_text(sample["resps"]),
        extracted=_text(sample["filtered_resps"]),
        right=score == 1.0,
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text(responses: Any) -> str:
    """The only response, out of its lists; several as JSON."""
    only = responses
    while isinstance(only, list) and len(only) == 1:
        only = only[0]
    return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False)


def _check_complete(run: Run, results: _Results, samples: Path) -> None:
    """Raises: ValueError unless the samples are those that the results were computed from."""
    expected = results.part("n-samples", run.task).get("effective")
    for name, answers in run.answers.items():
        if expected is not None and len(answers) != expected:
            raise ValueError(
                f"{samples}: {len(answers)} answers of {name}, but the run had {_short(expected)} questions"
            )
        key = f"{run.metric},{name}"
        written = results.part("results", run.task).get(key)
        if written is None:
            raise ValueError(f"{run.path}: no {key}, which the samples have")
        if not isinstance(written, int | float) or not 0 <= written <= 1:
            raise results.odd(("results", run.task, key), written, "between 0 and 1")
        counted = sum(answer.right for answer in answers.values()) / len(answers)
        if round(counted, 6) != round(written, 6):
            raise ValueError(f"{samples}: {name} counts to {counted:.4f}, but the results say {written:.4f}")
