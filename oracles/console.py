"""Verdicts as a person reads them: one table, and each failure with the command that repeats it.

Names, messages and verdicts are those of strangers: what is printed passes through ``printable``.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from mla_ref.case import Case
from mla_ref.layout import CacheLayout
from mla_ref.problem import problem as find_problem
from oracles.compare import wanted
from oracles.shrink import oddities
from oracles.terminal import cell
from oracles.verdict import BROKEN, ERROR, FAIL, HELD, NOT_RUN, Verdict
from oracles.verify import DEFAULT, oracles_for

NUMBER = re.compile(r"\b(0x[0-9a-f]+|\d+)\b")

# Of an error over its bound: what no digit behind the point is of use for, and what has overflowed.
MANY, INFINITE = 1e6, 1e300

# Reasons of one backend that a summary tells in full.
FEW = 3

GROUPINGS: dict[str, Callable[[Verdict], str]] = {
    "problem": lambda v: v.case.problem,
    "preset": lambda v: f"{v.case.problem} {v.case.config.name}",
    "format": lambda v: f"{v.case.problem} {v.case.cache_format}",
    "oracle": lambda v: f"{v.case.problem} {v.oracle}",
}


def groups(verdicts: Iterable[Verdict], by: str) -> dict[tuple[str, str], list[Verdict]]:
    """Verdicts by backend, then by a name of ``GROUPINGS``, in the order of first appearance."""
    found: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault((verdict.backend, GROUPINGS[by](verdict)), []).append(verdict)
    return found


def summary(verdicts: Iterable[Verdict], by: str) -> Table:
    """One line for each backend and group: claims that held, that failed, that could not be tried."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("backend", by):
        table.add_column(name, no_wrap=True)
    for name in ("held", "failed", "not run"):
        table.add_column(name, justify="right")
    table.add_column("worst error / bound", no_wrap=True)
    for (backend, group), members in groups(verdicts, by).items():
        held, broken, not_run = (sum(v.status in kind for v in members) for kind in (HELD, BROKEN, NOT_RUN))
        style = "red" if broken else "green" if held else "dim"
        counts = (Text(str(n), style=style if n else "dim") for n in (held, broken, not_run))
        table.add_row(cell(backend), cell(group), *counts, cell(_worst(members)))
    return table


def _worst(verdicts: Iterable[Verdict]) -> str:
    found = [(v.worst.ratio, v.oracle) for v in verdicts if v.worst is not None]
    if not found:
        return "-"
    ratio, oracle = max(found)
    return f"{short(ratio)} {oracle}"


def short(ratio: float) -> str:
    """An error over its bound, in few characters however large it is."""
    return f"{ratio:.3f}" if ratio < MANY else f"{ratio:.2e}" if ratio < INFINITE else "inf"


def reasons(verdicts: Iterable[Verdict]) -> list[str]:
    """Why backends were not tried, one line for each backend and reason."""
    return [
        f"{backend}: {status}, {detail} ({_cases(len(of))})"
        for (backend, status, detail), of in _idle(verdicts).items()
    ]


def main_reasons(verdicts: Iterable[Verdict]) -> list[str]:
    """The same in fewer lines: backends of one reason together, and each backend's ``FEW`` most frequent."""
    shared: dict[tuple[str, str, int], list[str]] = {}
    for (backend, status, detail), cases in _idle(verdicts).items():
        shared.setdefault((status, detail, len(cases)), []).append(backend)
    lines, said, unsaid = [], Counter[str](), dict[str, list[int]]()
    for (status, detail, of), backends in sorted(shared.items(), key=lambda kind: -kind[0][2] * len(kind[1])):
        new = [backend for backend in backends if said[backend] < FEW]
        for backend in (backend for backend in backends if backend not in new):
            unsaid.setdefault(backend, []).append(of)
        if new:
            said.update(new)
            each = " each" if len(new) > 1 else ""
            lines.append(f"{', '.join(new)}: {status}, {detail} ({_cases(of)}{each})")
    return lines + [
        f"{backend}: {len(rest)} other reason{'s'[: len(rest) != 1]} ({_cases(sum(rest))}), told by --json"
        for backend, rest in unsaid.items()
    ]


def left_out(of: str, problems: Collection[str] | None, oracles: Collection[str] | None) -> str | None:
    """Why a backend of problem ``of`` is not judged at all, if these names are why."""
    if problems and of not in problems:
        return f"not tried, it implements {of}, not {' or '.join(problems)}"
    if oracles and not {oracle.name for oracle in oracles_for(find_problem(of))}.intersection(oracles):
        be = "does" if len(oracles) == 1 else "do"
        return f"not tried, {' and '.join(oracles)} {be} not judge {of}, which it implements"
    return None


def _idle(verdicts: Iterable[Verdict]) -> dict[tuple[str, str, str], set[Case]]:
    """The cases that a backend was not tried on, by backend, status and reason."""
    cases: dict[tuple[str, str, str], set[Case]] = {}
    for v in verdicts:
        if v.status in NOT_RUN:
            cases.setdefault((v.backend, v.status, v.detail), set()).add(v.case)
    return cases


def more_kinds(number: int) -> str:
    """How many kinds of failure are not shown."""
    return f"{number} more kind{'s'[: number != 1]} of failure"


def _cases(number: int) -> str:
    return f"{number} case{'s'[: number != 1]}"


def label(case: Case) -> str:
    """A case in one short line; its JSON is the whole of it."""
    dims = f"{case.config.name} h={case.config.num_heads}"
    lengths = f"q={_lengths(case.q_lens)} kv={_lengths(case.kv_lens)}"
    return (
        f"{case.problem} {dims} {lengths} {case.dtype} {case.cache_format} "
        f"block={case.block_size}{_memory(case.layout)} {case.regime} seed={case.seed}"
    )


def _memory(layout: CacheLayout) -> str:
    """What puts entries elsewhere than one behind the other: what a kernel may fail on alone."""
    packed = CacheLayout()
    moved = ("entry_align", "block_align", "block_gap", "offset")
    told = {name: getattr(layout, name) for name in moved if getattr(layout, name) != getattr(packed, name)}
    return "".join(f" {name}={value}" for name, value in told.items())


def _lengths(lengths: tuple[int, ...]) -> str:
    return ",".join(str(n) for n in lengths)


def one_line(verdict: Verdict) -> str:
    """Status, claim, and how near to its bound the worst element came, or why there is none."""
    claim = f"{verdict.status:11s} {verdict.variant} {verdict.oracle}"
    if verdict.status in HELD and verdict.worst is not None:
        return f"{claim}: worst error is {verdict.worst.ratio:.3f} of its bound, {verdict.worst.place}"
    return f"{claim}: {verdict.detail}" if verdict.detail else claim


def distinct(verdicts: Iterable[Verdict]) -> list[tuple[Verdict, int]]:
    """The smallest case of each kind of failure, and how many there are: a kind a claim, or an error."""
    kinds: dict[tuple[str, ...], list[Verdict]] = {}
    for v in verdicts:
        if v.status in BROKEN:
            kinds.setdefault(group_of(v), []).append(v)
    return [(min(found, key=_size), len(found)) for found in kinds.values()]


def group_of(verdict: Verdict) -> tuple[str, ...]:
    """What failures that are shown as one have in common: a claim, or what is said of every claim alike.

    Shapes, indices and addresses in an exception, or in what was returned, differ from case to case.
    """
    what = verdict.detail
    if verdict.status == FAIL and (verdict.worst is not None or not verdict.detail):
        what = verdict.oracle
    elif verdict.status in (FAIL, ERROR):
        what = NUMBER.sub("0", verdict.detail)
    return verdict.backend, verdict.variant, verdict.status, what


def _size(verdict: Verdict) -> tuple[int, ...]:
    case = verdict.case
    keys = sum(case.kv_lens) * case.config.num_heads
    return len(oddities(case)), keys, sum(case.q_lens), len(case.q_lens)


def describe(verdict: Verdict) -> list[str]:
    """What was claimed, where it broke, what the bad elements have in common, and how to see it again."""
    lines = [
        f"{verdict.status.upper()} {verdict.backend} {verdict.variant} {verdict.oracle}",
        f"  case  {label(verdict.case)}",
    ]
    if reason := why(verdict):
        lines.append(f"  why   {reason}")
    if (worst := verdict.worst) is not None:
        lines.append(
            f"  where {worst.tensor}{list(worst.index)} ({worst.place}): got {worst.got:.9g}, {wanted(worst)}"
        )
        if verdict.num_bad:
            pattern = verdict.pattern
            found = f": {pattern.where}" if pattern is not None and pattern.where else ""
            lines.append(f"  bad   {verdict.num_bad} of {verdict.num_checked} elements{found}")
            if pattern is not None and pattern.guess:
                lines.append(f"  guess {pattern.guess}")
    lines.append(f"  again {replay_command(verdict)}")
    return lines


def why(verdict: Verdict) -> str:
    """A verdict's detail, without what its worst element and its pattern say anyway."""
    if verdict.worst is None:
        return verdict.detail
    before, found, _ = verdict.detail.partition(f"{verdict.worst.tensor}: {verdict.num_bad} of")
    return before.rstrip(": ") if found else verdict.detail


def replay_command(verdict: Verdict) -> str:
    """The shell command that judges the same backend on the same case."""
    words = ["mla-verify", "replay", _pasted(verdict.case), "--backend", verdict.backend]
    if verdict.device != "cpu":
        words += ["--device", verdict.device]
    return shlex.join(words)


def _pasted(case: Case) -> str:
    """A case as short as it gets: where a model's sizes were read is of no use to whoever runs it."""
    return replace(case, config=replace(case.config, source="")).brief()


def python_code(verdict: Verdict) -> str:
    """The fewest lines of Python that run the same implementation on the same tensors."""
    own = verdict.variant in ("", DEFAULT)
    fn = "backend.fn" if own else f"backend.variants[{verdict.variant!r}]"
    return f"""\
import torch
from mla_ref.case import Case
from mla_ref.problem import problem
from oracles.verify import find_backend

case = Case.from_json({_pasted(verdict.case)!r})
backend = find_backend({verdict.backend!r})
inputs = problem(case.problem).materialize(case, torch.device({verdict.device!r}))
output = {fn}(*inputs)
print(output)
"""
