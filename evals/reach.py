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
    has = {row["kind"] for row in record["rows"]}
    kinds = [kind for kind in map("/".join, product(DTYPES, FORMATS)) if kind in has]
    shares: dict[str, dict[str, Line]] = {}
    for row in record["rows"]:
        shares.setdefault(row["name"], {})[row["kind"]] = max(held(row, noise), key=lambda line: line.share)
    lines = [f"| bug | {' | '.join(kinds)} |", f"|---|{'--:|' * len(kinds)}"]
    for name in sorted(shares, key=lambda name: min(line.share for line in shares[name].values())):
        cells = (shares[name].get(kind) for kind in kinds)
        lines.append(f"| {name} | {' | '.join(_cell(line) if line else '' for line in cells)} |")
    return "\n".join(lines)


def _cell(line: Line) -> str:
    share = f"{line.share:,.0f}" if line.share >= 10 else f"{line.share:.1f}"
    return f"{share} ({line.tier[:2]})"


def unseen(record: Mapping[str, Any], noise: Mapping[str, Any]) -> list[str]:
    """The bugs that are within every limit somewhere, with where that is."""
    return [
        f"{row['name']} ({row['kind']})"
        for row in record["rows"]
        if all(line.ok for line in held(row, noise))
    ]
