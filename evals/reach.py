"""How far beyond the limits each planted bug is: over every cache format in float32, and in 16 bits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from evals.calibration import DTYPES, FORMATS
from evals.model import load
from evals.parity import finite
from evals.path import AttentionPath
from evals.planted import Planted, bugs, in_16_bits
from evals.spawned import spawned
from evals.survey import here
from evals.tiers import references
from evals.trial import Line, limits, lines_of, measure, texts_of

PLAIN = AttentionPath.cache_format
SEEN_BY = (("T1",), ("T2",), ("T1", "T2"))


def planted(scale: float) -> dict[str, tuple[Planted, ...]]:
    """Each bug by its name, wherever it can be. scale: of the checkpoint's fp8_e4m3 cache.

    In float32 over every cache format, but where the bug is in one of them; and in 16 bits.
    """
    every = {}
    for bug in bugs(scale):
        over = [bug]
        if bug.path.cache_format == PLAIN:
            paths = [replace(bug.path, cache_format=fmt, kv_scale=scale) for fmt in FORMATS if fmt != PLAIN]
            over += [replace(bug, path=path) for path in paths]
        every[bug.name] = (*over, in_16_bits(bug))
    return every


def reaches(
    folder: Path, noise: Mapping[str, Any], device: str = "cpu", jobs: int = 1
) -> list[dict[str, Any]]:
    """A row for every bug, in each place: name, type and format, and what T1 and T2 found.

    noise: the checkpoint's. jobs: processes, each with its share of the bugs.
    """
    names = [*planted(noise["kv_scale"])]
    shares = [names[first::jobs] for first in range(min(jobs, len(names)))]
    found = [row for rows in spawned(jobs, partial(_find, folder, noise, device), shares) for row in rows]
    return sorted(found, key=lambda row: names.index(row["name"]))


def _find(folder: Path, noise: Mapping[str, Any], device: str, names: Sequence[str]) -> list[dict[str, Any]]:
    model, texts = load(folder, device), texts_of(folder)
    every, reference = planted(noise["kv_scale"]), references(model, texts)
    rows = []
    for name, bug in [(each, bug) for each in names for bug in every[each]]:
        allowed = limits(noise, bug.path)
        if allowed is None:
            raise ValueError(f"{name}: no noise was measured for {bug.path}")
        seen = measure(model, bug.path, bug.attend(model), bug.layer(model), texts, reference(bug.path))
        found = [[line.tier, line.measure, line.found] for line in lines_of(*seen, allowed)]
        rows.append({"name": name, "kind": f"{bug.path.dtype}/{bug.path.cache_format}", "found": found})
    return rows


def record(
    rows: Sequence[Mapping[str, Any]], folder: Path, noise: Mapping[str, Any], device: str
) -> dict[str, Any]:
    """The rows as JSON, with what they were measured on."""
    about = {"checkpoint": folder.name, "sha256": noise["sha256"]}
    return about | here(device) | {"rows": finite(rows)}


def held(row: Mapping[str, Any], noise: Mapping[str, Any]) -> list[Line]:
    """What was found of a bug beside the limits of ``noise``."""
    dtype, fmt = row["kind"].split("/")
    allowed = limits(noise, AttentionPath(dtype=dtype, cache_format=fmt))
    assert allowed is not None
    return [
        Line(tier=tier, measure=name, found=math.inf if found is None else found, limit=allowed[name])
        for tier, name, found in row["found"]
    ]


def markdown(record: Mapping[str, Any], noise: Mapping[str, Any]) -> str:
    """How many times its limit each bug's farthest measure is, the faintest bug first, by type and format."""
    kinds = _kinds(record)
    shares: dict[str, dict[str, Line]] = {}
    for row in record["rows"]:
        shares.setdefault(row["name"], {})[row["kind"]] = farthest(held(row, noise))
    lines = [f"| bug | {' | '.join(kinds)} |", f"|---|{'--:|' * len(kinds)}"]
    for name in sorted(shares, key=lambda name: min(line.share for line in shares[name].values())):
        cells = (shares[name].get(kind) for kind in kinds)
        lines.append(f"| {name} | {' | '.join(_cell(line) if line else '' for line in cells)} |")
    return "\n".join(lines)


def summary(record: Mapping[str, Any], noise: Mapping[str, Any]) -> str:
    """By type and format: how many bugs T1, T2 and either of them see, and the faintest beside its limit."""
    lines = ["| type and cache | bugs | T1 | T2 | either | the faintest | of its limit |"]
    lines.append("|---|--:|--:|--:|--:|---|--:|")
    for kind in _kinds(record):
        found = {row["name"]: held(row, noise) for row in record["rows"] if row["kind"] == kind}
        tiers = [{line.tier for line in each if not line.ok} for each in found.values()]
        seen = (sum(any(tier[:2] in over for tier in each) for each in tiers) for over in SEEN_BY)
        name, line = min(
            ((name, farthest(each)) for name, each in found.items()), key=lambda pair: pair[1].share
        )
        lines.append(f"| {kind} | {len(found)} | {' | '.join(map(str, seen))} | {name} | {_cell(line)} |")
    return "\n".join(lines)


def farthest(lines: Sequence[Line]) -> Line:
    """The measure that is the most of its limit."""
    return max(lines, key=lambda line: line.share)


def _kinds(record: Mapping[str, Any]) -> list[str]:
    has = {row["kind"] for row in record["rows"]}
    return [kind for kind in map("/".join, product(DTYPES, FORMATS)) if kind in has]


def _cell(line: Line) -> str:
    share = line.share
    times = f"{share:.1f}" if share < 10 else f"{share:,.0f}" if share < 1e6 else f"{share:.0e}"
    return f"{times} ({line.tier[:2]})"


def unseen(record: Mapping[str, Any], noise: Mapping[str, Any]) -> list[str]:
    """The bugs that are within every limit somewhere, with where that is."""
    return [
        f"{row['name']} ({row['kind']})"
        for row in record["rows"]
        if all(line.ok for line in held(row, noise))
    ]
