"""The page about a run: complete, well-formed, alone, and deaf to what a backend says."""

import builtins
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from mla_ref.case import Case
from mla_ref.presets import preset
from oracles.command import main
from oracles.console import replay_command
from oracles.report import BAD, BINS, FAINT, GOOD, INK, TEMPLATE, gathered, page
from oracles.run_directory import VERDICTS
from oracles.verdict import Pattern, Verdict, Worst

pytest.importorskip("jinja2", reason="pages are made by jinja2")
pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")

CASE = Case(problem="attention", config=preset("a.x-k2").shard(4), q_lens=(1, 2), kv_lens=(5, 7))
WORST = Worst(
    tensor="out", index=(0, 1, 2), got=1.5, want=0.25, bound=0.5, ratio=2.5, place="request 0, head 1"
)
PATTERN = Pattern(
    where="heads 1 and 3 of 4",
    guess="each head has its neighbour's values",
    row="request",
    column="head",
    shares=((0, 100, 0, 40), (0, 0, 0, 7)),
)
PASSED = Verdict(
    status="pass", backend="right", variant="default", oracle="value", case=CASE, device="cpu", num_checked=9,
    worst=replace(WORST, ratio=0.5, got=0.3),
)  # fmt: skip
FAILED = replace(
    PASSED, status="fail", backend="wrong", worst=WORST, num_bad=3, pattern=PATTERN,
    detail="out: 3 of 9 elements are not what they may be; worst at request 0, head 1: and so on",
)  # fmt: skip
IDLE = replace(PASSED, status="unavailable", backend="far", worst=None, detail="needs a GPU", num_checked=0)

VOID = {"meta", "br", "link", "input", "img", "hr"}


class Checked(HTMLParser):
    """Raises on a tag that is not closed where it should be; keeps what a browser would act on."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.words = [], set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words += data.split()


def parsed(html):
    checked = Checked()
    checked.feed(html)
    assert checked.open == []
    return checked, " ".join(checked.words)


def written(tmp_path, *verdicts):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{v.to_json()}\n" for v in verdicts), encoding="utf-8")
    return path


def test_everything_is_counted_and_said(tmp_path):
    other = replace(CASE, kv_lens=(50, 70))
    html = page(written(tmp_path, PASSED, PASSED, FAILED, replace(FAILED, case=other), IDLE), "Tuesday")
    _, text = parsed(html)
    assert (
        "Tuesday 5 claims about 3 backends on cpu 2 claims failed, of 1 kind 2 held 2 failed 1 not run"
        in text
    )
    for line in ("far 0 0 1 –", "right 2 0 0 0.500 value", "wrong 0 2 0 2.500 value"):
        assert line in text, line
    assert "fail value of wrong default" in text
    assert "q=1,2 kv=5,7" in text  # the smaller of the two cases
    assert "kv=50,70" not in text
    assert "3 of 9 elements of out : heads 1 and 3 of 4 guess each head has its neighbour's values" in text
    assert "request 0, head 1: got 1.5, want 0.25 ± 0.5 (2.5 × the bound)" in text
    assert "2 verdicts, of which this is on the smallest case" in text
    assert replay_command(FAILED) in text
    assert "far unavailable, needs a GPU (1 case)" in text
    assert "mla-verify" in text.partition("versions of what wrote this page")[2]


def test_a_run_in_which_all_holds_says_so(tmp_path):
    _, text = parsed(page(written(tmp_path, PASSED)))
    assert "Every claim that was tried held" in text
    assert "What failed" not in text
    assert "What was not run" not in text
    _, text = parsed(page(written(tmp_path, IDLE)))
    assert "Nothing ran" in text


def test_the_page_stands_alone(tmp_path):
    html = page(written(tmp_path, PASSED, FAILED, IDLE))
    checked, _ = parsed(html)
    assert not checked.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not [name for name, _ in checked.attributes if name.startswith("on") or name in ("src", "href")]
    assert set(re.findall(r"\w+://[^\"'\s<)]+", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.findall(r"url\((?!#)|@import", html)
    assert ("content", "width=device-width, initial-scale=1") in checked.attributes


MEAN = "<script>alert('1')</script></style></pre>\"&amp;{{ 7 * 7 }}$x$"


def test_what_a_backend_says_is_text(tmp_path):
    said = replace(
        FAILED,
        backend=f"b{MEAN}",
        variant=f"v{MEAN}",
        oracle=f"o{MEAN}",
        device=f"d{MEAN}",
        detail=f"w{MEAN}",
        case=replace(CASE, config=replace(CASE.config, name=f"n{MEAN}", source=f"s{MEAN}")),
        worst=replace(WORST, place=f"p{MEAN}", tensor=f"t{MEAN}"),
        pattern=replace(PATTERN, where=f"h{MEAN}", guess=f"g{MEAN}", row=f"r{MEAN}", column=f"c{MEAN}"),
    )
    idle = replace(IDLE, detail=f"i{MEAN}", backend=f"k{MEAN}")
    checked, text = parsed(page(written(tmp_path, said, idle, PASSED), f"l{MEAN}"))
    assert "script" not in checked.tags
    for letter in "bvodwnpthgrcikl":
        assert f"{letter}{MEAN}" in text, letter


@pytest.mark.parametrize("status", ["error", "crash", "timeout"])
def test_a_process_that_ended_is_a_failure_with_its_reason(status, tmp_path):
    verdict = replace(IDLE, status=status, variant="", oracle="", detail="signal 11")
    _, text = parsed(page(written(tmp_path, verdict)))
    assert f"{status} far case attention" in text
    assert "why signal 11" in text
    assert "1 claim failed, of 1 kind" in text


def figures(html):
    return re.findall(r"<svg.*?</svg>", html, re.DOTALL)


def test_figures_take_their_colours_from_the_page(tmp_path):
    html = page(written(tmp_path, PASSED, FAILED))
    found = figures(html)
    assert len(found) == 3  # a map, and a histogram each
    for svg in found:
        assert not [colour for colour in (INK, FAINT, GOOD, BAD) if colour in svg]
        assert "var(--ink)" in svg
        assert 'role="img"' in svg
        assert not re.search(r'<svg[^>]* (width|height)="', svg)
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) == set()
    variables = set(re.findall(r"var\((--[\w-]+)\)", html))
    light, dark = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    assert variables <= set(re.findall(r"(--[\w-]+):", light)) == set(re.findall(r"(--[\w-]+):", dark))


def test_the_map_has_a_cell_for_each_share(tmp_path):
    (svg, *_) = figures(page(written(tmp_path, FAILED)))
    bad = re.findall(r"fill: var\(--bad\)(?:; opacity: ([\d.]+))?", svg)
    assert sorted(float(x or 1) for x in bad) == sorted(
        round(0.2 + 0.8 * share, 3) for share in (1.0, 0.4, 0.07)
    )
    assert len(re.findall(r"fill: var\(--line\); opacity: 0\.35", svg)) == 5
    assert ">request<" in svg
    assert ">head<" in svg


def test_axes_of_coarse_maps_count_in_their_own_units(tmp_path):
    coarse = replace(PATTERN, column_step=8, shares=((1, 2, 3, 4),))
    (svg, *_) = figures(page(written(tmp_path, replace(FAILED, pattern=coarse))))
    assert ">24<" in svg


def test_errors_are_counted_by_their_distance_from_the_bound():
    verdicts = [replace(PASSED, worst=replace(WORST, ratio=ratio)) for ratio in (0.0, 0.001, 0.5, 0.999, 1.0)]
    verdicts += [
        replace(PASSED, status="fail", worst=replace(WORST, ratio=ratio)) for ratio in (1.01, math.inf)
    ]
    (bins,) = gathered(verdicts).errors.values()
    assert bins == {0: 2, BINS // 2: 1, BINS - 1: 2, BINS: 2}


def test_the_same_run_is_the_same_page(tmp_path):
    path = written(tmp_path, PASSED, FAILED, IDLE)
    assert page(path) == page(path)


def test_a_run_directory_says_how_it_was_made(tmp_path, capsys):
    out = tmp_path / "run"
    words = ["--backend=mla_ref.latent", "--preset=a.x-k2", "--format=bf16", "--oracle=contract", "--jobs=1"]
    assert main(["run", *words, "--out", str(out), "--seed=7"]) == 0
    held = re.search(r"^(\d+) claims held", capsys.readouterr().out, re.MULTILINE)[1]
    html = tmp_path / "page.html"
    assert main(["report", str(out), "--html", str(html), "--title", "Mine"]) == 0
    assert capsys.readouterr().out == f"{html}\n"
    _, text = parsed(html.read_text(encoding="utf-8"))
    assert f"Mine {held} claims about 1 backend on cpu Every claim that was tried held" in text
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    for name in ("torch", "python", "source"):
        assert f"{name} {manifest['versions'][name]}" in text
    assert "seed 7" in text
    (out / VERDICTS).write_text("{}\n", encoding="utf-8")
    assert main(["report", str(out), "--html", str(html)]) == 2
    assert f"{out / VERDICTS}, line 1" in capsys.readouterr().err


def test_a_campaign_shows_its_failures_made_small(tmp_path, monkeypatch):
    from oracles.run_directory import RunDirectory

    small = replace(FAILED, case=replace(CASE, q_lens=(1,), kv_lens=(1,)))
    out = tmp_path / "run"
    words = ["--backend=mla_ref.latent", "--preset=a.x-k2", "--format=bf16", "--oracle=contract", "--jobs=1"]
    assert main(["run", *words, "--out", str(out)]) == 0
    monkeypatch.setattr(RunDirectory, "verdicts", lambda self: iter([FAILED, PASSED]))
    monkeypatch.setattr(RunDirectory, "failures", lambda self: [small])
    _, text = parsed(page(out))
    assert "q=1 kv=1" in text
    assert "no other verdict; the case was made small" in text
    assert "q=1,2 kv=5,7" not in text


def test_what_cannot_be_read_is_said_in_one_line(tmp_path, capsys):
    path, html = written(tmp_path, PASSED), tmp_path / "page.html"
    path.write_text(f"{path.read_text()}{{}}\n", encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for given, message in (
        (path, f"{path}, line 2: verdict"),
        (tmp_path / "binary", f"{tmp_path / 'binary'}, line 1: 'utf-8' codec"),
        (tmp_path / "empty.jsonl", "empty.jsonl: holds no verdicts"),
        (tmp_path / "nowhere", "No such file"),
        (tmp_path, "holds no"),
    ):
        assert main(["report", str(given), "--html", str(html)]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert len(err.splitlines()) == 1
    assert not html.exists()


def test_what_is_missing_is_named(tmp_path, capsys, monkeypatch):
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "jinja2":
            raise ImportError("No module named 'jinja2'")
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["report", str(written(tmp_path, PASSED)), "--html", str(tmp_path / "x.html")]) == 2
    assert capsys.readouterr().err.startswith(
        "mla-verify: report: needs jinja2 and matplotlib: pip install 'mla-verify[report]' (No module named"
    )


def test_only_so_many_kinds_are_shown(tmp_path):
    many = [replace(FAILED, oracle=f"claim{i}", pattern=None) for i in range(53)]
    _, text = parsed(page(written(tmp_path, *many)))
    assert "53 claims failed, of 53 kinds" in text
    assert "And 3 more kinds, in the run itself." in text


def test_the_template_escapes_everything():
    source = TEMPLATE.read_text(encoding="utf-8")
    assert "|safe" not in source.replace(" ", "")
    assert "autoescape" not in source


def test_counts_are_written_for_programs(tmp_path, capsys):
    other = replace(CASE, kv_lens=(50, 70))
    far = replace(PASSED, worst=replace(WORST, ratio=float("inf")), oracle="lse", status="fail")
    path = written(
        tmp_path, PASSED, replace(PASSED, case=other), far, FAILED, replace(IDLE, backend="right"), IDLE
    )
    assert main(["report", str(path), "--json", str(tmp_path / "counts.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'counts.json'}\n"
    found = json.loads((tmp_path / "counts.json").read_text(encoding="utf-8"))
    right, wrong, idle = (found["backends"][name] for name in ("right", "wrong", "far"))
    assert right == {
        "problem": CASE.problem, "cases": 2, "claims_held": 2, "claims_failed": 1, "claims_not_run": 1,
        "largest_error_over_bound": {"value": 0.5},
    }  # fmt: skip
    assert (wrong["claims_failed"], wrong["cases"]) == (1, 1)
    assert (idle["claims_not_run"], idle["cases"]) == (1, 0)
    assert main(["report", str(path)]) == 2
    assert "nothing to write" in capsys.readouterr().err
