"""What there is to choose from, read off the scans: for `mla-verify list`, the README and the docs.

``python -m oracles.tables`` rewrites every table between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mla_ref.formats import CacheFormat, formats
from mla_ref.presets import PRESETS
from mla_ref.problem import problems
from mla_ref.scan import scan
from mla_ref.values import REGIMES
from oracles.corpus import corpus
from oracles.dimensions import DIMENSIONS, names_of
from oracles.field import RULES
from oracles.kill_matrix import recorded
from oracles.matrix import STAGES
from oracles.mutants import mutants
from oracles.oracle import rules
from oracles.verify import backends

MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Table(NamedTuple):
    """A header and rows of as many cells."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _first_line(text: str | None) -> str:
    return inspect.cleandoc(text).splitlines()[0] if text else ""


def _module_lines(package: str, constant: str) -> dict[str, str]:
    """First line of the module that defines each ``constant``, by the constant's own name."""
    found = scan(package, constant)
    return {
        item.name: _first_line(importlib.import_module(f"{package}.{module}").__doc__)
        for module, item in found.items()
    }


def _claim(module: str) -> str:
    """The "Claim:" of an oracle's docstring."""
    return _labelled(module, "Claim")


def _labelled(module: str, label: str) -> str:
    """What follows a label of an oracle's docstring, up to the next label, on one line."""
    doc = importlib.import_module(module).__doc__ or ""
    match = re.search(rf"^{label}: (.*?)^\w[\w ]*: ", doc, re.DOTALL | re.MULTILINE)
    return " ".join(match[1].split()) if match else _first_line(doc)


def _problems() -> Table:
    lines = _module_lines("mla_ref.problems", "PROBLEM")
    rows = ((name, ", ".join(_fields(item.inputs)), lines[name]) for name, item in problems().items())
    return Table(("problem", "inputs", "contract"), tuple(rows))


def _fields(inputs: Any) -> tuple[str, ...]:
    fields: tuple[str, ...] = inputs._fields
    return fields


def _shapes() -> Table:
    rows = ((name, _stated(item.shapes), _stated(item.output_shapes)) for name, item in problems().items())
    return Table(("problem", "inputs", "output"), tuple(rows))


def _stated(shapes: Mapping[str, str]) -> str:
    return ", ".join(f"{name} [{letters}]" for name, letters in shapes.items())


def _backends() -> Table:
    rows = (
        (item.name, item.problem, ", ".join(item.variants) or "-", _first_line(item.fn.__doc__))
        for item in backends().values()
    )
    return Table(("backend", "problem", "variants", "what is true of its result"), tuple(rows))


def _formats() -> Table:
    lines = _module_lines("mla_ref.formats", "FORMAT")
    rows = (
        (name, _bytes(fmt, 512, 64), str(fmt.dtype).removeprefix("torch."), lines.get(name, _brought(fmt)))
        for name, fmt in formats().items()
    )
    return Table(("format", "bytes at c=512, r=64", "elements", "layout"), tuple(rows))


def _brought(fmt: CacheFormat) -> str:
    """Where a format comes from that another package brings."""
    return f"Brought by {fmt.encode.__module__}."


def _bytes(fmt: CacheFormat, c: int, r: int) -> str:
    return "-" if fmt.why_not_dims(c, r) else str(fmt.entry_bytes(c, r))


def _presets() -> Table:
    rows = (
        (
            name,
            *(str(n) for n in (model.num_heads, model.kv_lora_rank, model.qk_rope_head_dim)),
            *(str(n) for n in (model.qk_nope_head_dim, model.v_head_dim)),
            f"{model.softmax_scale:.4f}",
        )
        for name, model in PRESETS.items()
    )
    return Table(("preset", "heads", "c", "r", "p", "v", "softmax_scale"), tuple(rows))


def _oracles() -> Table:
    found = scan("oracles.rules", "ORACLE").items()
    rows = (
        (
            item.name,
            ", ".join(item.problems) or "all",
            _claim(f"oracles.rules.{module}"),
            str(len(item.kills)),
        )
        for module, item in found
    )
    return Table(("oracle", "problems", "claim", "mutants"), tuple(rows))


def _claims() -> Table:
    rows = tuple(
        (
            item.name,
            ", ".join(item.problems) or "all",
            *(_labelled(f"oracles.rules.{module}", label) for label in ("Claim", "Why", "Exact or bounded")),
            ", ".join(item.kills),
        )
        for module, item in scan("oracles.rules", "ORACLE").items()
    )
    return Table(("oracle", "problems", "claim", "why", "exact or bounded", "kills"), rows)


def _mutants() -> Table:
    found: dict[str, list[str]] = {}
    for mutant in mutants():
        found.setdefault(mutant.name, []).append(mutant.case.problem)
    rows = (
        (
            name,
            ", ".join(dict.fromkeys(of)),
            ", ".join(oracle.name for oracle in rules().values() if name in oracle.kills),
        )
        for name, of in found.items()
    )
    return Table(("mutant", "problems", "killed by"), tuple(rows))


def _kills() -> Table:
    """The recorded kill matrix: what each mutant dies of, how soon, and how often others' rules see it."""
    rows = (
        (
            row.mutant,
            row.problem,
            f"{row.killed} of {row.cases}",
            f"{row.cases_to_kill(0.5)}, {row.cases_to_kill(0.95)}",
            f"{row.quickest[0]} {row.quickest[1]:.2f}" if row.quickest else "-",
            ", ".join(f"{name} {row.by[name]}" for name in row.beyond_values[:3]) or "-",
            *(str(row.field.get(name, "")) for name in RULES),
        )
        for row in recorded()
    )
    header = ("mutant", "problem", "killed", "cases, 50 and 95 %", "quickest, s", "surest beyond values")
    return Table((*header, *RULES), tuple(rows))


def _field() -> Table:
    return Table(("rule", "from"), tuple((rule.name, rule.source) for rule in RULES.values()))


def _regimes() -> Table:
    return Table(("regime", "values"), tuple((name, _regime_line(name)) for name in REGIMES))


def _regime_line(name: str) -> str:
    return _first_line(REGIMES[name].__doc__)


def _lengths() -> Table:
    rows = (
        (
            stage,
            _commas(row.q_lens),
            _commas(row.kv_lens),
            str(row.heads),
            str(row.block_size),
            row.regime,
            row.dtype,
        )
        for stage, table in STAGES.items()
        for row in table
    )
    return Table(("stage", "q_lens", "kv_lens", "heads", "block", "regime", "dtype"), tuple(rows))


def _dimensions() -> Table:
    rows = (
        (name, "; ".join(dimension.values), ", ".join(p for p in problems() if name in names_of(p)))
        for name, dimension in DIMENSIONS.items()
    )
    return Table(("dimension", "values, the plainest first", "problems"), tuple(rows))


def _corpus() -> Table:
    rows = (
        (entry.name, entry.case.problem, ", ".join(entry.oracles), entry.mutant, ", ".join(entry.bugs))
        for entry in corpus()
    )
    return Table(("failure", "problem", "seen by", "mutant", "happened in"), tuple(rows))


def _commas(lengths: tuple[int, ...]) -> str:
    return ", ".join(str(n) for n in lengths)


TABLES: dict[str, Callable[[], Table]] = {
    "problems": _problems,
    "backends": _backends,
    "formats": _formats,
    "presets": _presets,
    "oracles": _oracles,
    "claims": _claims,
    "mutants": _mutants,
    "kills": _kills,
    "field": _field,
    "regimes": _regimes,
    "shapes": _shapes,
    "lengths": _lengths,
    "dimensions": _dimensions,
    "corpus": _corpus,
}


def contract(name: str) -> str | None:
    """What is agreed of a problem's inputs and outputs, or of a format's bytes, or None."""
    if name in problems():
        found = problems()[name]
        return "\n\n".join(inspect.cleandoc(part.__doc__ or "") for part in (found.inputs, found.output))
    for module, fmt in scan("mla_ref.formats", "FORMAT").items():
        if fmt.name == name:
            return inspect.cleandoc(importlib.import_module(f"mla_ref.formats.{module}").__doc__ or "")
    if name not in formats():
        return None
    return inspect.cleandoc(importlib.import_module(formats()[name].encode.__module__).__doc__ or "")


def markdown(table: Table) -> str:
    """The table as GitHub prints it."""
    lines = [table.header, tuple("---" for _ in table.header), *table.rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def refresh(text: str) -> str:
    """``text`` with every marked table made anew. Raises: ValueError on a mark that names no table."""

    def made_anew(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"table {match[2]!r} is not one of {', '.join(TABLES)}")
        return match[1] + markdown(TABLES[match[2]]()) + match[3]

    return MARKED.sub(made_anew, text)


def pages(root: Path) -> list[Path]:
    """The files that may hold tables."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def main() -> None:
    """Rewrite the tables of the README and the docs below the working directory."""
    for page in pages(Path.cwd()):
        text = page.read_text(encoding="utf-8")
        if (new := refresh(text)) != text:
            page.write_text(new, encoding="utf-8")
            sys.stdout.write(f"{page.name}: tables made anew\n")


if __name__ == "__main__":
    main()
