"""A run as one page of HTML that stands alone: who held, what broke and where, what was not tried and why.

Everything that a backend may have said, its name and the text of its errors, is escaped; figures hold numbers
and words of ours only, in colours that the page decides. There is no script, and nothing is loaded.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from oracles.compare import wanted
from oracles.console import INFINITE, distinct, group_of, label, reasons, replay_command, why
from oracles.run_directory import RunDirectory, is_run_directory, versions
from oracles.verdict import BROKEN, FAIL, HELD, NOT_RUN, Pattern, Verdict

TEMPLATE = Path(__file__).with_name("report.html.j2")

# Colours that no figure has otherwise, and the variables of the page that stand for them.
INK, FAINT, GOOD, BAD = "#010203", "#040506", "#070809", "#0a0b0c"
VARIABLES = {INK: "var(--ink)", FAINT: "var(--line)", GOOD: "var(--good)", BAD: "var(--bad)"}

# Of errors in units of their bound. Whatever is outside is in one more.
BINS = 25

MAX_FAILURES = 50


class Subject(NamedTuple):
    """Whose verdicts are counted together."""

    problem: str
    backend: str


@dataclass(frozen=True)
class Found:
    """Everything that the page says, gathered in one pass.

    statuses: of each subject's verdicts. claims: likewise, by oracle. nearest: the largest error over its
    bound, by oracle. errors: how many verdicts had their worst error in each bin, the last being outside.
    broken: all of them. idle: one verdict of each subject's, case and reason.
    """

    statuses: dict[Subject, Counter[str]] = field(default_factory=dict)
    claims: dict[tuple[Subject, str], Counter[str]] = field(default_factory=dict)
    nearest: dict[tuple[Subject, str], float] = field(default_factory=dict)
    errors: dict[Subject, Counter[int]] = field(default_factory=dict)
    broken: list[Verdict] = field(default_factory=list)
    idle: dict[tuple[Subject, Any, str], Verdict] = field(default_factory=dict)
    devices: Counter[str] = field(default_factory=Counter)


def gathered(verdicts: Iterable[Verdict]) -> Found:
    """One pass over verdicts, of which only the broken ones are kept."""
    found = Found()
    for v in verdicts:
        subject = Subject(v.case.problem, v.backend)
        found.statuses.setdefault(subject, Counter())[v.status] += 1
        found.claims.setdefault((subject, v.oracle), Counter())[v.status] += 1
        found.devices[v.device] += 1
        if v.worst is not None:
            key = subject, v.oracle
            found.nearest[key] = max(found.nearest.get(key, 0.0), v.worst.ratio)
            at = BINS if v.status in BROKEN else min(int(v.worst.ratio * BINS), BINS - 1)
            found.errors.setdefault(subject, Counter())[at] += 1
        if v.status in BROKEN:
            found.broken.append(v)
        if v.status in NOT_RUN:
            found.idle.setdefault((subject, v.case, v.detail), v)
    return found


def verdicts_of(path: Path) -> Iterator[Verdict]:
    """Of a run directory, or of the lines that ``run --json`` wrote.

    Raises: ValueError naming the file and the line that cannot be read.
    """
    if path.is_dir():
        yield from RunDirectory(path).verdicts()
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                verdict = Verdict.from_json(line.decode())
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            yield verdict


def page(path: Path, title: str = "") -> str:
    """The report of a run directory or a file of verdicts.

    Raises: ValueError if it cannot be read, or holds no verdict; ImportError without jinja2 or matplotlib.
    """
    from jinja2 import Environment

    manifest = RunDirectory(path).manifest if is_run_directory(path) else {}
    found = gathered(verdicts_of(path))
    if not found.statuses:
        raise ValueError(f"{path}: holds no verdicts")
    small = RunDirectory(path).failures() if manifest else []
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["ratio"] = _ratio
    environment.filters["wanted"] = wanted
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=title or path.name,
        total=_counts(sum(found.statuses.values(), Counter())),
        num_backends=len({subject.backend for subject in found.statuses}),
        devices=[name for name, _ in found.devices.most_common()],
        problems=_problems(found),
        failures=_failures(found, small),
        kinds=len(distinct(found.broken)),
        histograms=[
            {"subject": subject, "svg": _histogram(bins)} for subject, bins in sorted(found.errors.items())
        ],
        claims=_claims(found),
        idle=_idle(found),
        manifest=_manifest(manifest),
    )


def _counts(statuses: Mapping[str, int]) -> dict[str, int]:
    held, broken, not_run = (sum(statuses.get(s, 0) for s in kind) for kind in (HELD, BROKEN, NOT_RUN))
    return {"held": held, "failed": broken, "not_run": not_run, "all": held + broken + not_run}


def _problems(found: Found) -> list[dict[str, Any]]:
    """A table for each problem, a line for each of its backends."""
    ordered = sorted(found.statuses)
    return [
        {
            "name": problem,
            "rows": [
                {"backend": s.backend, "counts": _counts(found.statuses[s]), "nearest": _nearest(found, s)}
                for s in subjects
            ],
        }
        for problem, subjects in groupby(ordered, key=lambda subject: subject.problem)
    ]


def _nearest(found: Found, subject: Subject) -> dict[str, str] | None:
    ratios = [(ratio, oracle) for (of, oracle), ratio in found.nearest.items() if of == subject]
    if not ratios:
        return None
    ratio, oracle = max(ratios)
    return {"ratio": _ratio(ratio), "oracle": oracle}


def _claims(found: Found) -> list[dict[str, Any]]:
    """Of each subject, its oracles one by one."""
    return [
        {
            "subject": subject,
            "failed": _counts(found.statuses[subject])["failed"],
            "rows": [
                {"oracle": oracle, "counts": _counts(statuses), "nearest": found.nearest.get((of, oracle))}
                for (of, oracle), statuses in found.claims.items()
                if of == subject
            ],
        }
        for subject in sorted(found.statuses)
    ]


def _failures(found: Found, small: Iterable[Verdict]) -> list[dict[str, Any]]:
    """One entry for each kind of failure: its smallest case, how many there are, and where it sits."""
    made_small = {group_of(v): v for v, _ in distinct(small)}
    entries = []
    for first, count in distinct(found.broken)[:MAX_FAILURES]:
        verdict = made_small.get(group_of(first), first)
        pattern = verdict.pattern
        entries.append(
            {
                "verdict": verdict,
                "count": count,
                "made_small": group_of(first) in made_small,
                "case": label(verdict.case),
                "claim": verdict.oracle if verdict.status == FAIL else "",
                "again": replay_command(verdict),
                "why": why(verdict),
                "svg": _heat_map(pattern) if pattern is not None and _cells(pattern) > 1 else "",
            }
        )
    return entries


def _ratio(x: float) -> str:
    """An error over its bound."""
    return "∞" if x >= INFINITE else f"{x:.3f}" if x < 10 else f"{x:,.0f}" if x < 1e6 else f"{x:.2e}"


def _cells(pattern: Pattern) -> int:
    return sum(map(len, pattern.shares))


def _idle(found: Found) -> list[dict[str, str]]:
    """Backends and why they were not tried."""
    lines = (line.partition(": ") for line in sorted(reasons(found.idle.values())))
    return [{"backend": backend, "why": why} for backend, _, why in lines]


def _manifest(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a run says about itself, part by part; without a manifest, who wrote this page."""
    parts = {name: part for name, part in manifest.items() if isinstance(part, Mapping) and part}
    if not parts:
        parts = {"versions of what wrote this page": versions()}
    tables = [
        {"name": name, "rows": [(k, _plain(v)) for k, v in part.items()]} for name, part in parts.items()
    ]
    if isinstance(manifest.get("command"), list):
        tables.insert(0, {"name": "command", "rows": [("", " ".join(map(str, manifest["command"])))]})
    return tables


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) if value else "none"
    return "none" if value is None else str(value)


def _histogram(bins: Counter[int]) -> Any:
    """Verdicts by the worst error over its bound; those outside in one bar at the right."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        width = 1.0 / BINS
        heights = [bins[i] for i in range(BINS)]
        axes.bar([i * width for i in range(BINS)], heights, width * 0.86, align="edge", color=GOOD)
        axes.bar([1.05], [bins[BINS]], 0.06, align="edge", color=BAD)
        axes.axvline(1.0, color=INK, linewidth=0.8)
        axes.set_xlim(0.0, 1.13)
        axes.set_xticks([0.0, 0.25, 0.5, 0.75, 1.0, 1.08], ["0", "0.25", "0.5", "0.75", "1", ">1"])
        axes.yaxis.set_major_locator(_whole_numbers())

    return _svg(draw, (3.4, 1.5))


def _heat_map(pattern: Pattern) -> Any:
    """The share of bad elements in each cell, the fuller the more; 0 is left blank."""

    def draw(figure: Any) -> None:
        from matplotlib.patches import Rectangle

        axes = figure.subplots()
        for i, shares in enumerate(pattern.shares):
            for j, share in enumerate(shares):
                colour, alpha = (BAD, 0.2 + 0.8 * share / 100) if share else (FAINT, 0.35)
                axes.add_patch(
                    Rectangle((j - 0.47, i - 0.47), 0.94, 0.94, facecolor=colour, alpha=alpha, linewidth=0)
                )
        axes.set_xlim(-0.6, len(pattern.shares[0]) - 0.4)
        axes.set_ylim(len(pattern.shares) - 0.4, -0.6)
        for axis, word, step in (
            (axes.xaxis, pattern.column, pattern.column_step),
            (axes.yaxis, pattern.row, pattern.row_step),
        ):
            axis.set_major_locator(_whole_numbers())
            axis.set_major_formatter(lambda at, _, step=step: f"{round(at) * step}")
            axis.set_label_text(word)

    return _svg(draw, (3.4, min(0.9 + 0.2 * len(pattern.shares), 3.4)))


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(6, integer=True, min_n_ticks=1)


def _svg(draw: Callable[[Any], None], inches: tuple[float, float]) -> Any:
    """A figure as SVG to be put into HTML as it is: in the page's font and colours."""
    import matplotlib
    from markupsafe import Markup
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "mla-verify",
        "font.size": 8.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        text = StringIO()
        figure.savefig(
            text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The page's own font; and the figure is as wide as its column.
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r'<svg \1role="img"', svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*" ([^>]*?)width="[^"]*"', r'<svg \1\2role="img"', svg, count=1)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return Markup(svg)  # ours alone: no text of a backend's is in it
