"""Every code block of the README and the docs runs, and prints what the page shows; every name exists."""

import importlib
import re

import pytest
from docs_blocks import ROOT, Step, agree, blocks, files, run, run_page, steps

from oracles.tables import pages
from oracles.verify import backends

PAGES = pages(ROOT)


@pytest.mark.parametrize("page", [p for p in PAGES if not files(p.read_text())], ids=lambda p: p.name)
def test_blocks_print_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if files(p.read_text())], ids=lambda p: p.name)
def test_files_of_the_page_are_picked_up(page):
    check(page.read_text(encoding="utf-8"))


def check(text):
    todo = [step for step in steps(text) if not step.slow]
    for step, got in zip(todo, run_page(text, todo), strict=True):
        assert agree(step, got), f"{step.source}\nprinted:\n{got}\nthe page shows:\n{step.shown}"


def test_slow_blocks_name_the_backends_of_today():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = "".join(step.shown for step in steps(text) if step.slow)
    assert set(re.findall(r"^(mla_\w+\.\w+) ", shown, re.MULTILINE)) == set(backends())
    assert re.search(r"^\d+ claims held, 0 failed", shown, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_in_the_text_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r'(?<![\w./"])((?:mla_ref|mla_fast|oracles|evals)(?:\.\w+)+)', text):
        if name.endswith((".py", ".md")) or any(name.replace(".", "/") in path for path in files(text)):
            continue
        assert exists(name), f"{page.name} speaks of {name}"


def exists(name):
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            if not hasattr(found, part):
                return name in backends()
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_comparison_can_fail():
    step = Step("console", "mla-verify run", "held 3\nin 1.5 s\n", 0, 0, False)
    assert agree(step, "held   3\nin 2.75 s\n")
    assert not agree(step, "held 4\nin 1.5 s\n")
    assert not agree(step._replace(source="mla-verify list"), "held 3\nin 2.5 s\n")
    assert agree(step._replace(shown="held 3\n…\n"), "held 3\nwhatever\nelse\n")
    assert agree(step._replace(shown="held …\nin 1.5 s\n"), "held 3\nin 2.5 s\n")
    assert not agree(step._replace(shown="held …\nin 1.5 s\n"), "lost 3\nin 2.5 s\n")
    assert not agree(step._replace(shown=None), "unexpected\n")
    failing = step._replace(shown="held 3\n\nFAIL value\n 7 of 9 outside\n")
    assert agree(failing, "held 3\n\nFAIL value\n 6 of 9 outside\n")
    assert not agree(failing, "held 3\n\nFAIL lse\n 7 of 9 outside\n")


def test_a_block_that_raises_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        run([("python", "1 / 0")])


def test_every_language_is_known():
    known = {"python", "text", "console", "sh", "json", "yaml"}
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            assert block.language in known, page.name
        assert len(re.findall(r"^```", page.read_text(), re.MULTILINE)) == 2 * len(
            blocks(page.read_text())
        ), page
