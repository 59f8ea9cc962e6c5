"""Every fast path of a checkpoint held to the reference: one record, from which the docs' tables are printed.

Each path is on trial in a process of its own, so that one that hangs, crashes or poisons its device costs no
other its result. The record is written anew as each of them ends.
"""

import contextlib
import importlib.metadata
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evals.parity import Comparison, compare, finite, table
from evals.path import REFERENCE, AttentionPath, parse
from evals.runs import load
from evals.statistics import PASS, Decision, Paired
from evals.task import TASK
from evals.trial import (
    MARGIN,
    MEASURES,
    Line,
    costs,
    decided,
    limits,
    limits_digest,
    measured_noise,
    run_folder,
)

FILTERS = ("strict-match", "flexible-extract")  # the first decides
FLIPS = 10  # that are kept of each path
PENDING = "had not ended when this was written"
ABSENT = "is not in the record"
PACKAGES = ("torch", "triton", "transformers", "lm_eval")
FIELDS = (
    *("checkpoint", "sha256", "limits", "model_dtype", "questions", "margin", "device", "versions", "date"),
    *("jobs", "seconds", "paths"),
)  # of a record

SERVED = "block_size=64 chunk=256"
CHUNKED = f"prefill=mla_fast.chunked_sdpa {SERVED}"
GLUON = f"prefill=mla_fast.gluon_prefill {SERVED}"
NARROW = "cache_format=bf16 dtype=bfloat16"
EIGHT_BITS = "cache_format=fp8_ds_mla dtype=bfloat16"

# What an engine would serve; the reference's own row is the baseline of the others.
PATHS = {
    REFERENCE: "",
    "reference, chunked prefill": f"decode=mla_ref.absorbed prefill=mla_ref.chunked {SERVED}",
    "Triton decode": f"decode=mla_fast.triton_decode {CHUNKED} {NARROW}",
    "Gluon decode": f"decode=mla_fast.gluon_decode {CHUNKED} {NARROW}",
    "Gluon prefill and decode": f"decode=mla_fast.gluon_decode {GLUON} {NARROW}",
    "Gluon decode, fp8 cache": f"decode=mla_fast.gluon_decode_fp8 {CHUNKED} {EIGHT_BITS}",
    "Triton decode, fp8 cache": f"decode=mla_fast.triton_decode {CHUNKED} {EIGHT_BITS}",
    "FlashMLA": f"decode=mla_fast.flash_mla {CHUNKED} {NARROW}",
    "FlashAttention-3": f"decode=mla_fast.flash_attn_3 {CHUNKED} {NARROW}",
    "drafts of three": f"decode=mla_fast.gluon_decode {CHUNKED} {NARROW} decode_threshold=3",
    "torch SDPA": f"decode=mla_fast.sdpa prefill=mla_fast.sdpa {SERVED}",
    "torch SDPA, fp8 cache": f"decode=mla_fast.sdpa prefill=mla_fast.sdpa {SERVED} cache_format=fp8_ds_mla",
}


def survey(
    folder: Path,
    paths: Mapping[str, str],
    questions: int,
    out: Path,
    *,
    device: str = "cpu",
    model_dtype: str = "float32",
    margin: float = MARGIN,
    jobs: int = 1,
    seconds: float = 600.0,
) -> Iterator[dict[str, Any]]:
    """The record at the beginning and after each path that came to an end, with a row for every path.

    paths: name -> path as it is printed, the reference included, which is begun first. out: where lm_eval's
    runs are kept; those that are finished are not asked again, and one that was cut short goes on. A path
    that is through its own questions waits for the reference, and asks it where nobody does.
    jobs: processes at a time. seconds: the longest that one of them may take, waiting included. Who stops to
    iterate ends the processes that run; the same ``out`` goes on where they were.

    Raises: ValueError if the checkpoint's noise was not measured, or the reference is not among the paths.
    """
    if REFERENCE not in paths:
        raise ValueError(f"paths: {REFERENCE} is not among {', '.join(paths)}")
    begun = time.monotonic()
    rows = {name: {"name": name, "path": path, "reason": PENDING} for name, path in paths.items()}
    children: list[subprocess.Popen[str]] = []
    about = _about(folder, questions, device, model_dtype, margin) | {"jobs": jobs}
    command = [*_trials(folder, questions, device, model_dtype, margin), "--out", str(out)]

    def ended(name: str) -> dict[str, Any]:
        return {"name": name} | _trial([*command, "--path", paths[name]], seconds, out, margin, children)

    def record() -> dict[str, Any]:
        return about | {"seconds": round(time.monotonic() - begun, 1), "paths": [*rows.values()]}

    yield record()
    with _ending(children, jobs) as pool:
        order = sorted(paths, key=lambda name: name != REFERENCE)
        running = {pool.submit(ended, name): name for name in order}
        for future in as_completed(running):
            rows[running[future]] = future.result()
            yield record()


@contextlib.contextmanager
def _ending(children: Sequence[subprocess.Popen[str]], jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for children; however they are left, nothing more is begun and no child goes on."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.kill()


def _trials(folder: Path, questions: int, device: str, model_dtype: str, margin: float) -> list[str]:
    command = [sys.executable, "-m", "evals", "trial", str(folder), "--json", "--device", device]
    command += ["--model-dtype", model_dtype, "--questions", str(questions), "--margin", str(margin)]
    return command


def _about(folder: Path, questions: int, device: str, model_dtype: str, margin: float) -> dict[str, Any]:
    noise = measured_noise(folder, model_dtype)
    return {
        "checkpoint": folder.name,
        "sha256": noise["sha256"],
        "limits": limits_digest(noise),
        "model_dtype": model_dtype,
        "questions": questions,
        "margin": margin,
        **here(device),
    }


def here(device: str) -> dict[str, Any]:
    """On what, with what and when."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    name = torch.cuda.get_device_name(device) if device != "cpu" else "CPU"
    return {"device": name, "versions": versions, "date": _today()}


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _trial(
    command: Sequence[str], seconds: float, out: Path, margin: float, children: list[subprocess.Popen[str]]
) -> dict[str, Any]:
    """One path's row: what its process printed, and both filters of its run beside the reference's.

    children: where the process is kept, for whoever has to end it.
    """
    row, found = _printed(command, seconds, children)
    if found is None:
        return row
    row |= {key: found[key] for key in ("outcome", "reason", "lines", "place")}
    return row | _answers(out, AttentionPath(**found["path"]), margin)


def _printed(
    command: Sequence[str], seconds: float, children: list[subprocess.Popen[str]]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Path and seconds of a trial's process and what it printed; if that is no trial, why, and None."""
    begun = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children.append(child)
    try:
        printed, complaint = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"path": command[-1], "reason": f"not ended after {seconds:.0f} s"}, None
    row: dict[str, Any] = {"path": command[-1], "seconds": round(time.monotonic() - begun, 1)}
    try:
        return row, json.loads(printed)
    except ValueError:  # it was refused, or ended on an error: exit code 1 is then no verdict
        said = complaint.strip().splitlines() or [f"ended with {child.returncode} and no word"]
        return row | {"reason": said[-1].removeprefix("trial: ").removeprefix("path: ")}, None


def _answers(out: Path, path: AttentionPath, margin: float) -> dict[str, Any]:
    baseline, candidate = (load(run_folder(out, each), TASK) for each in (AttentionPath(), path))
    filters = {}
    for name in FILTERS:
        one = asdict(compare(baseline, candidate, name, margin))
        filters[name] = one | {"flips": one["flips"][:FLIPS]}
    return {"table": table(candidate), "filters": filters}


def again(record: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The record decided anew: what was found in it, beside the limits that its checkpoint has now.

    It says so under ``rejudged``: when, the limits of its run, and the outcomes and reasons by them that are
    others now. A path of the survey that is not in the record gets a row that says so.

    Raises: ValueError if it is no record, or of other weights.
    """
    if not isinstance(record, Mapping):
        raise ValueError("record: is no object; survey --json writes one")
    if lacks := [name for name in FIELDS if name not in record]:
        raise ValueError(f"record: has no {', '.join(lacks)}; survey --json writes one")
    noise = measured_noise(folder, record["model_dtype"])
    if record["sha256"] != noise["sha256"]:
        raise ValueError(
            f"record: is of weights {str(record['sha256'])[:12]}…, {folder} has {noise['sha256'][:12]}…"
        )
    try:
        rows = {row["name"]: _again(row, noise) if "outcome" in row else row for row in record["paths"]}
        first = record.get("rejudged") or {"limits": record["limits"], "verdicts": {}}
        verdicts = {
            old["name"]: {key: old[key] for key in ("outcome", "reason")}
            for old in record["paths"]
            if "outcome" in old
        } | first["verdicts"]
        changed = {name: was for name, was in verdicts.items() if was["outcome"] != rows[name]["outcome"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"record: a path is not as survey writes it: {error!r}") from None
    missing = {name: {"name": name, "path": PATHS[name], "reason": ABSENT} for name in PATHS}
    return {
        **record,
        "limits": limits_digest(noise),
        "rejudged": {"date": _today(), "limits": first["limits"], "verdicts": changed},
        "paths": [*(missing | rows).values()],
    }


def remeasured(
    record: Mapping[str, Any], folder: Path, *, device: str = "cpu", jobs: int = 1, seconds: float = 600.0
) -> dict[str, Any]:
    """The record with T1 and T2 of its paths as they are now, on this machine; T3 is that of its run.

    It says so under ``measured``. A path that does not run now gets a row that says why. Not decided:
    ``again`` does that. jobs, seconds: as of ``survey``.
    """
    command = _trials(folder, 0, device, record["model_dtype"], record["margin"])
    children: list[subprocess.Popen[str]] = []

    def anew(row: dict[str, Any]) -> dict[str, Any]:
        if "outcome" not in row:
            return row
        ended, found = _printed([*command, "--path", row["path"]], seconds, children)
        if found is None:
            return {"name": row["name"]} | ended
        return row | {key: found[key] for key in ("lines", "place")}

    with _ending(children, jobs) as pool:
        rows = [*pool.map(anew, record["paths"])]
    return {**record, "measured": here(device), "paths": rows}


def _again(row: Mapping[str, Any], noise: Mapping[str, Any]) -> dict[str, Any]:
    path = parse(row["path"])
    allowed = dict.fromkeys(MEASURES, math.nan) | (limits(noise, path) or {})
    cost = costs(noise, path) or {}
    lines = []
    for each in row["lines"]:
        limit = (cost if each["tier"] == "T2 cost" else allowed)[each["measure"]]
        found = math.inf if each["found"] is None else each["found"]
        lines.append(Line(tier=each["tier"], measure=each["measure"], found=found, limit=limit))
    one = row["filters"][FILTERS[0]]
    paired = Comparison(**one | {"pair": Paired(**one["pair"]), "decision": Decision(**one["decision"])})
    outcome, reason = decided(path, lines, paired, row["place"])
    new: dict[str, Any] = finite({"lines": [asdict(line) for line in lines]})
    return {**row, **new, "outcome": outcome, "reason": reason}


def about(record: Mapping[str, Any]) -> str:
    """Where, on what, when and by which limits; of a record that was rejudged also what its run had said, and
    when T1 and T2 were measured anew.
    """
    asked = f"{record['questions']} questions, margin {record['margin']:.0%}"
    took = f"{record['seconds']:.0f} s, {record['jobs']} paths at a time"
    lines = [
        f"{record['checkpoint']}, {record['device']}, {asked}",
        ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        f"{record['date']}, {took}, limits {record['limits'][:12]}",
    ]
    if measured := record.get("measured"):
        with_what = f"{measured['device']}, torch {measured['versions']['torch']}"
        lines.append(f"T1 and T2 measured {measured['date']}, {with_what}")
    if rejudged := record.get("rejudged"):
        lines.append(f"rejudged {rejudged['date']}; by the limits of its run, {rejudged['limits'][:12]}:")
        changed = [
            f"- {name}: {was['outcome']}, {was['reason']}" for name, was in rejudged["verdicts"].items()
        ]
        lines += changed or ["- all verdicts were the same"]
    return "\n".join(lines)


def markdown(record: Mapping[str, Any]) -> str:
    """lm_eval's table of every path, and the paired decisions under it."""
    ran = [row for row in record["paths"] if "table" in row]
    head = ran[0]["table"].splitlines()[:2] if ran else []
    lines = [f"|path{head[0]}", f"|----{head[1]}"] if ran else []
    for row in ran:
        first, *others = row["table"].splitlines()[2:]
        lines += [f"|{row['name']}{first}", *(f"|{line}" for line in others)]
    lines += [
        "",
        f"| path | verdict | T1, T2 | {FILTERS[0]} | lost, won | 95 % bound | McNemar p | texts equal | s |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in record["paths"]:
        lines.append(f"| {row['name']} | {' | '.join(_cells(row))} |")
    reasons = [f"- {row['name']}: {row['reason']}" for row in ran if row["outcome"] != PASS]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "outcome" not in row:
        return (f"did not run: {row['reason']}", *[""] * 7)
    one = row["filters"][FILTERS[0]]
    pair, decision = one["pair"], one["decision"]
    n = sum(pair.values())
    return (
        row["outcome"],
        _nearest(row["lines"]),
        f"{(pair['both'] + pair['won']) / n:.2%} of {n}",
        f"{pair['lost']}, {pair['won']}",
        f"{decision['bound']:.2%}",
        f"{decision['p']:.2g}",
        f"{one['text_equal']:.1%}",
        f"{row['seconds']:.0f}",
    )


def _nearest(lines: Sequence[Mapping[str, Any]]) -> str:
    """The measure that is nearest to its limit. In JSON, what was not measured or is no number is None."""
    if any(line["limit"] is None for line in lines):
        return "no limits"
    if any(line["found"] is None for line in lines):
        return "no number"
    return f"{max(Line(**line).share for line in lines):.0%} of the limits"
