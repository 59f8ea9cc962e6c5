"""The house rules that can be checked by reading: import arrows, signatures, names, tables, tolerances."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_ref.problem import problems
from oracles.tables import MARKED, TABLES, main, pages, refresh
from oracles.verify import backends

ROOT = Path(__file__).parent.parent
PACKAGES = ("mla_ref", "mla_fast", "oracles", "evals", "tests")
TOP_LEVEL = {
    *("mla_ref", "mla_fast", "oracles", "tests", "evals", "docs", ".ci", ".github"),
    *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"),
    *(".gitignore", ".pre-commit-config.yaml"),
}


def sources(*packages):
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(nodes):
    """Modules that the nodes import, as "package.module" or "package.module.name"."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrow"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def short(path):
    return str(path.relative_to(ROOT))


ARROWS = {
    "mla_ref": {"mla_ref", "torch"},
    "mla_fast": {"mla_fast", "mla_ref", "torch", "triton"},
    "oracles": {"oracles", "mla_ref", "torch"},
    "evals": {"evals", "oracles", "mla_ref"},
}


@pytest.mark.parametrize("package", ["mla_ref", "mla_fast", "oracles", "evals"])
def test_import_arrows_point_down(package):
    house = {"mla_ref", "mla_fast", "oracles", "evals", "tests"}
    for path in sources(package):
        for name in imports(ast.walk(tree(path))):
            root = name.split(".")[0]
            assert root not in house or root in ARROWS[package], f"{short(path)} imports {name}"


def test_the_reference_needs_torch_alone():
    for path in sources("mla_ref"):
        for name in imports(ast.walk(tree(path))):
            root = name.split(".")[0]
            assert root in {"mla_ref", "torch"} | sys.stdlib_module_names, f"{short(path)} imports {name}"


def test_optional_packages_are_imported_where_they_are_used():
    """A module of the house imports with its required dependencies alone: no extra at its top level."""
    always = {"torch", "numpy", "typer", "rich", "packaging", *PACKAGES} | sys.stdlib_module_names
    for path in sources("mla_ref", "mla_fast", "oracles"):
        if path.parent.name == "mla_fast" and path.name.startswith("_"):
            continue  # jitted halves, imported by their launchers on first call
        if path.name == "pytest_plugin.py":
            continue  # imported by pytest, and by nothing else
        for name in imports(tree(path).body):
            assert name.split(".")[0] in always, f"{short(path)} imports {name} at its top level"


def test_fast_paths_call_no_reference():
    references = {
        f"{b.fn.__module__}.{b.fn.__name__}" for b in backends().values() if b.name.startswith("mla_ref")
    }
    modules = {name.rpartition(".")[0] for name in references}
    for path in sources("mla_fast"):
        for name in imports(ast.walk(tree(path))):
            assert name not in references | modules, f"{short(path)} imports {name}"
            assert not (name.rpartition(".")[0] in modules and name.endswith(".BACKEND")), short(path)


def test_truth_is_independent_of_what_it_judges():
    """It shares the reference's data types and the formats' decode, never its maths or its paging."""
    for path in (ROOT / "oracles" / "exact.py", ROOT / "oracles" / "bounds.py"):
        for name in imports(ast.walk(tree(path))):
            if name.startswith("mla_ref."):
                data = name.split(".")[1] in {"numerics", "case", "config", "formats", "problem"}
                types = re.fullmatch(r"mla_ref\.problems\.\w+\.\w+(Inputs|Output|Weights)", name)
                assert data or types, f"{short(path)} imports {name}"


@pytest.mark.parametrize("name", sorted(backends()))
def test_signature_is_the_inputs(name):
    backend = backends()[name]
    fields = list(problems()[backend.problem].inputs._fields)
    for label, fn in {"fn": backend.fn, **backend.variants}.items():
        assert list(inspect.signature(fn).parameters) == fields, label


@pytest.mark.parametrize("name", sorted(problems()))
def test_inputs_are_documented_once_and_in_the_words_of_shapes(name):
    contract = problems()[name]
    fields = contract.inputs._fields
    documented = re.findall(
        r"(?:^|\. )(\w+(?:, \w+)*): (?:\[([^\]]*)\])?",
        inspect.cleandoc(contract.inputs.__doc__),
        re.MULTILINE,
    )
    stated = {name: shape for names, shape in documented for name in names.split(", ")}
    assert list(stated) == list(fields)
    assert {name: stated[name] for name in contract.shapes} == dict(contract.shapes)
    hints = inspect.get_annotations(contract.inputs)
    assert {field for field in fields if hints[field] is torch.Tensor} == set(contract.shapes)
    assert set(contract.writes) <= set(fields)
    assert tuple(contract.output_shapes) == contract.output._fields


def test_tolerances_live_in_bounds_alone():
    forbidden = {"allclose", "isclose", "assert_close", "assert_allclose", "approx", "rtol", "atol"}
    for path in sources(*PACKAGES):
        if path == ROOT / "oracles" / "bounds.py":
            continue
        for node in ast.walk(tree(path)):
            used = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)
            assert used not in forbidden, f"{short(path)}:{getattr(node, 'lineno', '?')} uses {used}"


def test_random_inputs_come_from_values_alone():
    forbidden = {
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal_",
        "uniform_",
        "manual_seed",
        "rand_like",
        "randn_like",
    }
    for path in sources("mla_ref", "mla_fast", "oracles"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute):
                assert node.attr not in forbidden, f"{short(path)}:{node.lineno} uses {node.attr}"


def test_every_file_says_what_it_is():
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    for path in sources(*PACKAGES):
        assert path.stem.strip("_") not in vague, short(path)
        if path.parent.name != "tests" and path.stat().st_size:
            assert ast.get_docstring(tree(path)), f"{short(path)} has no docstring"


def test_top_level_holds_what_is_listed():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} <= TOP_LEVEL


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: page.name)
def test_tables_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert refresh(text) == text, "run: make tables"


def test_every_scan_has_its_table_in_the_docs():
    marked = {match[2] for page in pages(ROOT) for match in MARKED.finditer(page.read_text(encoding="utf-8"))}
    assert marked == set(TABLES)


def test_stale_tables_are_made_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table: regimes -->\nstale\n<!-- end -->\nafter\n", encoding="utf-8")
    main()
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- table: regimes -->\n| regime | values |\n| --- | --- |\n| plain |")
    assert text.endswith("|\n<!-- end -->\nafter\n")
    assert "stale" not in text


def test_a_mark_must_name_a_table():
    with pytest.raises(ValueError, match="table 'nope' is not one of problems, backends"):
        refresh("<!-- table: nope -->\n<!-- end -->")
