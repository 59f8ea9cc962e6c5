"""A record as a person reads it. Times are compared within one run alone: never a ratio across two."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oracles.exits import printable
from oracles.terminal import cell
from oracles.verdict import BROKEN, PASS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_RATIO = (
    "no ratios: these are different runs. Clocks, temperature, drivers and neighbours differ between runs, "
    "so only contestants of one run are compared; put both into one."
)


def load(path: Path) -> dict[str, Any]:
    """A record. Raises: ValueError where the file holds none, or cases of another run among its own."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        run, cases = record["run"], record["cases"]
        foreign = [case["label"] for case in cases if case["run"] != run]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no record of a race: {type(error).__name__}: {error}") from None
    if foreign:
        raise ValueError(
            f"{path}: {foreign[0]} is of another run than the file; no ratio would mean anything"
        )
    return record


def ceiling(record: dict[str, Any], name: str) -> float:
    """The larger of the readings of "copy", bytes a second, or "matmul", operations a second."""
    return float(max(reading[name] for reading in record["ceilings"]))


def share(record: dict[str, Any], case: dict[str, Any], us: float) -> tuple[float, str]:
    """(share of the nearer ceiling, which it is): the floor of the case over its time."""
    floors = {
        "copy": (case["bytes_read"] + case["bytes_written"]) / ceiling(record, "copy"),
        "matmul": case["flop"] / ceiling(record, "matmul"),
    }
    bound = max(floors, key=lambda name: floors[name])
    return floors[bound] / (us * 1e-6), bound


def name_of(entry: dict[str, Any]) -> str:
    """A contestant as it is asked for: "backend" or "backend/variant"."""
    return entry["backend"] if entry["variant"] == "default" else f"{entry['backend']}/{entry['variant']}"


def base_of(case: dict[str, Any], base: str) -> dict[str, Any] | None:
    """The contestant that ratios divide by: the one named; the first that has a time where none is."""
    timed = [entry for entry in case["contestants"] if "us" in entry]
    return next((entry for entry in timed if not base or name_of(entry) == base), None)


def check_base(base: str, names: Sequence[str]) -> None:
    """Raises: ValueError where ratios should divide by somebody who does not take part."""
    if base and base not in names:
        raise ValueError(f"--base {base!r} takes no part; who does: {', '.join(names)}")


def show(record: dict[str, Any], base: str = "") -> RenderableType:
    """Machine and ceilings, then a table for each case."""
    return Group(*_lines(record), *(_case(record, case, base) for case in record["cases"]))


def _lines(record: dict[str, Any]) -> Iterator[Text]:
    packages = ", ".join(f"{k} {v}" for k, v in record["machine"]["packages"].items())
    yield cell(f"run {record['run'][:12]} on {record['machine']['name']}, {record['when']}")
    yield cell(f"{packages}, Python {record['machine']['python']}")
    yield cell(
        f"ceilings: copy {ceiling(record, 'copy') / 1e9:,.0f} GB/s, bfloat16 product "
        f"{ceiling(record, 'matmul') / 1e12:,.1f} TFLOP/s"
    )


def _case(record: dict[str, Any], case: dict[str, Any], base: str) -> RenderableType:
    amount = case["bytes_read"] + case["bytes_written"]
    title = (
        f"{case['label']}: {case['flop'] / 1e9:,.1f} GFLOP, {amount / 1e6:,.1f} MB, {case['copies']} copies"
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("contestant", no_wrap=True)
    for column in ("µs", "10-90 %", "ratio", "TFLOP/s", "GB/s", "of ceiling", "MHz"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    divisor = base_of(case, base)
    notes = [cell(line) for line in _absent(case)]
    for entry in case["contestants"]:
        if "us" not in entry:
            continue
        us = entry["us"]
        part, bound = share(record, case, us)
        table.add_row(
            cell(name_of(entry) + ("" if entry["how"] == "graph" else " *")),
            f"{us:,.1f}",
            f"{entry['us_p10']:,.1f}-{entry['us_p90']:,.1f}",
            f"{us / divisor['us']:.3f}" if divisor else "-",
            f"{case['flop'] / us / 1e6:,.1f}",
            f"{amount / us / 1e3:,.0f}",
            f"{part:.1%} {bound}",
            cell(str(entry.get("mhz", "-"))),
            cell(f"{entry['status']} {entry['error_over_bound']:.2f}"),
        )
    plain = {
        entry["why_no_graph"] for entry in case["contestants"] if "us" in entry and entry["how"] != "graph"
    }
    notes += [cell(f"  * plain calls, the host's time included: {why}") for why in sorted(plain)]
    if divisor:
        notes.append(cell(f"  ratio: time over that of {name_of(divisor)}, below 1 is faster"))
    elif base and len(table.rows):
        notes.append(cell(f"  no ratios: {base} has no time here"))
    return Group("", cell(title), table, *notes)


def _absent(case: dict[str, Any]) -> list[str]:
    """Why contestants have no time, once for all of a backend that have the same reason."""
    why: dict[tuple[str, str, str], list[str]] = {}
    for entry in case["contestants"]:
        if "us" not in entry:
            reason = entry["backend"], entry["status"], entry["detail"]
            why.setdefault(reason, []).append(entry["variant"])
    return [
        f"  {name} ({', '.join(variants)}): {status}: {detail}"
        for (name, status, detail), variants in why.items()
    ]


def side_by_side(records: Sequence[dict[str, Any]]) -> RenderableType:
    """Medians of several runs, a column each, and no ratio of any two."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("case", no_wrap=True)
    table.add_column("contestant", no_wrap=True)
    for record in records:
        table.add_column(cell(f"µs, run {record['run'][:12]}"), justify="right", no_wrap=True)
    times: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        for case in record["cases"]:
            for entry in case["contestants"]:
                if "us" in entry:
                    key = (case["label"], name_of(entry))
                    times.setdefault(key, {})[record["run"]] = entry["us"]
    for (case_label, name), by_run in times.items():
        times_of = [f"{by_run[r['run']]:,.1f}" if r["run"] in by_run else "-" for r in records]
        table.add_row(cell(case_label), cell(name), *times_of)
    return Group(table, cell(NO_RATIO))


def outcome(record: dict[str, Any]) -> tuple[int, int]:
    """(contestants that were timed, contestants that were wrong or raised)."""
    entries = [entry for case in record["cases"] for entry in case["contestants"]]
    return sum("us" in e and e["status"] == PASS for e in entries), sum(
        e["status"] in BROKEN for e in entries
    )


def plot(record: dict[str, Any]) -> "Figure":
    """Shares of the nearer ceiling, a bar a contestant under its case, with the 10th to 90th percentile.

    Raises: ValueError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install 'mla-verify[report]'") from None
    lines = [line for case in record["cases"] for line in _bars(record, case)]
    figure = Figure(figsize=(8.0, 1.0 + 0.17 * len(lines)), layout="constrained")
    axes = figure.subplots()
    backends = list(dict.fromkeys(bar.backend for bar in lines if bar.backend))
    bars = [(at, bar) for at, bar in enumerate(lines) if bar.backend]
    axes.barh(
        [at for at, _ in bars],
        [bar.share for _, bar in bars],
        0.8,
        xerr=[[bar.below for _, bar in bars], [bar.above for _, bar in bars]],
        color=[f"C{backends.index(bar.backend)}" for _, bar in bars],
        error_kw={"elinewidth": 0.8},
    )
    for at, bar in bars:
        axes.text(bar.share + bar.above + 1.0, at, bar.time, va="center", fontsize=6)
    for tick, bar in zip(axes.set_yticks(range(len(lines)), [bar.name for bar in lines]), lines, strict=True):
        tick.label1.set(fontsize=6, fontweight="normal" if bar.backend else "bold", parse_math=False)
    axes.set(
        ylim=(len(lines) - 0.4, -0.6), xlim=(0.0, 115.0), xlabel="% of the nearer ceiling of the same run"
    )
    title = axes.set_title(f"{record['machine']['name']}, run {record['run'][:12]}", fontsize=9)
    title.set_parse_math(False)
    return figure


class _Bar(NamedTuple):
    """One line of the plot; of a case itself, its label alone. share, below, above: in percent."""

    name: str
    backend: str = ""
    share: float = 0.0
    below: float = 0.0
    above: float = 0.0
    time: str = ""


def _bars(record: dict[str, Any], case: dict[str, Any]) -> list[_Bar]:
    """A case and whoever has a time there, in their order; nothing where nobody has."""
    bars = []
    for entry in case["contestants"]:
        if "us" in entry:
            slow, middle, fast = (
                100.0 * share(record, case, entry[x])[0] for x in ("us_p90", "us", "us_p10")
            )
            backend = entry["backend"].split(" (")[0]
            errors = max(middle - slow, 0.0), max(fast - middle, 0.0)
            bars.append(_Bar(printable(name_of(entry)), backend, middle, *errors, f"{entry['us']:,.1f} µs"))
    return [_Bar(printable(case["label"])), *bars] if bars else []
