"""Races: what is counted, what is made, who is judged, and what is printed. No claim about any time."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.speed import cases as shapes
from evals.speed import race as racing
from evals.speed.cases import SUITES, Shape, case_of, label
from evals.speed.inputs import DRAWN, INPUTS, inputs_of, rows_of
from evals.speed.race import SLOW, race, specs_for
from evals.speed.report import base_of, load, outcome, plot, show, side_by_side
from evals.speed.verdicts import places, sample
from evals.speed.work import WORK, pairs, work
from mla_ref.backend import Backend, Prepared
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.formats import cache_format
from mla_ref.latent import BACKEND as LATENT
from mla_ref.problem import problem
from oracles.command import main
from oracles.verdict import ERROR, FAIL, PASS, UNAVAILABLE, UNSUPPORTED

CPU = torch.device("cpu")
FAST = replace(SLOW, turn=0.0, rounds=1, copy_bytes=2**16, width=16)
MODEL = MLAConfig(
    name="small", hidden_size=64, num_heads=4, q_lora_rank=None, kv_lora_rank=128,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
)  # fmt: skip


def small(name: str, **changes: Any) -> Case:
    return Case(
        **{
            "problem": name, "config": MODEL, "q_lens": (3, 1, 0, 30), "kv_lens": (20, 1, 7, 41),
            "block_size": 16, **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize("q_len", [0, 1, 3, 9])
@pytest.mark.parametrize("kv_len", [0, 1, 5, 9])
def test_pairs_are_those_of_the_mask(q_len: int, kv_len: int) -> None:
    assert pairs(q_len, kv_len) == sum(t <= kv_len - q_len + s for s in range(q_len) for t in range(kv_len))


@pytest.mark.parametrize("name", sorted(WORK))
def test_bytes_are_those_of_the_tensors(name: str) -> None:
    """What is read once and written once, counted on the tensors themselves."""
    case = small(name, cache_format="fp8_ds_mla", q_lens=(3, 1, 2, 30), kv_lens=(20, 1, 7, 41))
    inputs, counted = problem(name).materialize(case, CPU), work(case)
    output = next(b.fn for b in racing.backends().values() if b.problem == name)(*inputs)
    skipped = {
        "kv_cache",
        "block_table",
        "cu_seqlens",
        "cu_seqlens_q",
        "cache_seqlens",
        "seq_starts",
        "kv_scale",
    }
    read = sum(
        x.numel() * x.element_size()
        for field, x in inputs._asdict().items()
        if isinstance(x, torch.Tensor) and field not in skipped
    )
    entry, tokens = cache_format(case.cache_format).entry_bytes(128, 8), sum(case.kv_lens)
    written = sum(x.numel() * x.element_size() for x in output)
    if name == "cache_gather":
        read, tokens = 0, inputs.num_tokens
    if name in ("cache_write", "rope_cache_write"):
        beside = output.q_pe.numel() * output.q_pe.element_size() if name == "rope_cache_write" else 0
        assert counted.bytes_read == read
        assert counted.bytes_written == entry * len(inputs.slot_mapping) + beside
        return
    assert counted.bytes_read == read + (0 if name == "merge_states" else entry * tokens)
    assert counted.bytes_written == written


def test_operations_are_those_of_the_products() -> None:
    """Two for each element of the inner dimension of each product, over the seen keys of each query."""
    case = small("latent_attention")
    seen = [s + kv - q + 1 for q, kv in zip(case.q_lens, case.kv_lens, strict=True) for s in range(q)]
    assert work(case).flop == sum(4 * (2 * (128 + 8) * n + 2 * n * 128) for n in seen)
    expanded = sum(4 * 2 * (16 + 8 + 24) * n for n in seen) + 4 * 2 * 128 * (16 + 24) * (20 + 1 + 41)
    absorbed = work(case).flop + 4 * 2 * 128 * (16 + 24) * 34
    assert work(small("attention")).flop == min(expanded, absorbed)
    alone = small("attention", q_lens=(1,), kv_lens=(500,))
    assert work(alone).flop == 4 * 2 * (2 * 128 + 8) * 500 + 4 * 2 * 128 * (16 + 24)
    with pytest.raises(ValueError, match="problem 'rope' is not timed; these are: latent_attention"):
        work(small("rope"))


def test_shapes_are_cases_of_their_own() -> None:
    found = [case for suite in SUITES for case in shapes.cases([suite])]
    assert len({label(case) for case in found}) == len(found)
    assert all(problem(case.problem).why_not(case) is None for case in found)
    copied = [case for case in shapes.cases(["copy"]) if case.problem != "merge_states"]
    assert all(sum(case.q_lens) >= 2**16 for case in copied)
    assert label(shapes.cases(["decode"])[0]) == "latent_attention b128 h128 q1 s4096 bf16"
    with pytest.raises(ValueError, match="suite 'nope' is not one of decode"):
        shapes.cases(["nope"])
    with pytest.raises(ValueError, match="heads: 3 is no share of the 128 heads"):
        case_of(Shape("latent_attention", 1, 3, 1, 5))


def test_no_two_rows_are_alike(seed: int) -> None:
    """Well past what is drawn: reading one row for another always shows."""
    width = 5
    total = 2 * width * (DRAWN // width) + 7
    parts = list(rows_of(seed, "x", total, width, CPU))
    x = torch.cat([values for _, values in parts])
    assert x.shape == (total, width)
    assert [rows.start for rows, _ in parts] == [sum(len(v) for _, v in parts[:i]) for i in range(len(parts))]
    drawn = DRAWN // width
    assert torch.equal(x[drawn], x[0].roll(-37 % width))
    assert torch.equal(x[width * drawn], -x[0])
    distinct = x[::drawn][: 2 * width]
    assert len(distinct.unique(dim=0)) == 2 * width


@pytest.mark.parametrize("name", sorted(INPUTS))
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_inputs_keep_their_contract(name: str, fmt: str) -> None:
    case = small(name, cache_format=fmt, kv_scale=0.5)
    inputs, contract = inputs_of(case, CPU), problem(name)
    contract.check(inputs)
    contract.check_values(inputs)
    assert type(inputs) is type(contract.materialize(case, CPU))
    if name in ("latent_attention", "attention", "cache_gather"):
        dead = inputs.kv_cache.view(torch.uint8) == 0xFF
        assert dead.all(-1).sum() == inputs.kv_cache.shape[0] * 16 - sum(case.kv_lens)


@pytest.mark.parametrize("name", ["latent_attention", "attention"])
def test_sampled_rows_have_the_truth_of_the_whole(name: str) -> None:
    """The reference on the sample gives what the reference on the whole gives in these rows."""
    case = small(name, dtype="float64")
    inputs = inputs_of(case, CPU)
    fn = {b.problem: b.fn for b in racing.backends().values() if b.name.startswith("mla_ref.")}[name]
    part = sample(name, inputs)
    assert part.rows.tolist() == [0, 1, 2, 3, *range(4, 12), *range(15, 23), *range(26, 34)]
    problem(name).check_values(part.inputs)
    whole, own = fn(*inputs), fn(*part.inputs)
    assert torch.equal(whole.out[part.rows].float(), own.out.float())
    assert torch.equal(whole.lse[part.rows], own.lse)


def test_places() -> None:
    assert places(0, 8) == []
    assert places(24, 8) == [range(24)]
    assert places(100, 8) == [range(8), range(46, 54), range(92, 100)]


def run(*specs: str, name: str = "latent_attention") -> dict[str, Any]:
    return race([small(name)], specs, device=CPU, pace=FAST)


def plant(monkeypatch: pytest.MonkeyPatch, **backends: Backend) -> None:
    """Backends that are found by a name of one word."""
    known = racing.load
    monkeypatch.setattr(racing, "load", lambda spec: backends.get(spec) or known(spec))


def test_a_race() -> None:
    seen = []
    record = race(
        [small("latent_attention")],
        ["mla_ref.latent", "mla_fast.flash_mla"],
        device=CPU,
        pace=FAST,
        seen=lambda r: seen.append(len(json.dumps(r))),
    )
    (case,) = record["cases"]
    first, other, control = case["contestants"]
    assert first["status"] == PASS
    assert first["us_p10"] <= first["us"] <= first["us_p90"]
    assert (first["how"], first["why_no_graph"]) == ("calls", "not on a GPU")
    assert first["rows_judged"] == 28
    assert (other["status"], "us" in other) == ("unavailable", False)
    assert control["backend"] == "mla_ref.latent (again)"
    assert case["copies"] == 2
    assert Case.from_json(json.dumps(case["case"])) == small("latent_attention")
    assert len(record["ceilings"]) == 2
    assert len(seen) == 2


@pytest.mark.parametrize("name", sorted(set(WORK) - {"latent_attention"}))
def test_a_race_of_every_problem(name: str) -> None:
    spec = next(
        b for b in racing.backends() if b.startswith("mla_ref.") and racing.backends()[b].problem == name
    )
    (case,) = race([small(name)], [spec], device=CPU, pace=FAST)["cases"]
    assert [entry["status"] for entry in case["contestants"]] == [PASS, PASS]


def wrong(ql_nope: torch.Tensor, *rest: Any) -> Any:
    out, lse = LATENT.fn(ql_nope, *rest)
    return out * 1.25, lse


def test_whoever_is_wrong_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, wrong=replace(LATENT, name="wrong", fn=wrong))
    (case,) = run("wrong", "mla_ref.latent")["cases"]
    bad, good, control = case["contestants"]
    assert bad["status"] == FAIL
    assert "of the bound" in bad["detail"] or "the bound" in bad["detail"]
    assert not {"us", "us_p10", "samples"} & set(bad)
    assert good["status"] == PASS
    assert control["backend"] == "mla_ref.latent (again)"


@pytest.mark.parametrize("problem_name", ["latent_attention", "cache_write"])
def test_whoever_writes_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch, problem_name: str) -> None:
    """Memory that is given out again held NaN; a cache that is written is one that nobody wrote before."""
    right = next(
        b for b in racing.backends().values() if b.name.startswith("mla_ref.") and b.problem == problem_name
    )
    calls = []

    def idle(*inputs: Any) -> Any:
        calls.append(1)
        if problem_name == "cache_write":
            return (inputs[2],)
        if len(calls) == 1:
            return right.fn(*inputs)
        lse = torch.full(inputs[0].shape[:2], torch.nan, dtype=torch.float32)
        return torch.full_like(inputs[0], torch.nan), lse

    plant(monkeypatch, idle=replace(right, name="idle", fn=idle), right=right)
    (case,) = run("right", "idle", name=problem_name)["cases"]
    assert [entry["status"] for entry in case["contestants"]] == [PASS, FAIL, PASS]


def test_whoever_raises_or_declines_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*inputs: Any) -> Any:
        raise RuntimeError("no such kernel\nand more")

    plant(
        monkeypatch,
        broken=replace(LATENT, name="broken", fn=broken),
        choosy=replace(LATENT, name="choosy", supports=lambda case: "not this one"),
    )
    (case,) = run("broken", "choosy")["cases"]
    assert [(e["status"], e["detail"]) for e in case["contestants"]] == [
        (ERROR, "RuntimeError: no such kernel"),
        (UNSUPPORTED, "not this one"),
    ]


NO_ROOM = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB."),
    MemoryError("no room"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
)


@pytest.mark.parametrize("error", NO_ROOM, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("what", ["inputs_of", "private_copy"])
def test_a_shape_that_does_not_fit_is_not_run_and_the_race_goes_on(
    monkeypatch: pytest.MonkeyPatch, what: str, error: Exception
) -> None:
    fits = getattr(racing, what)
    calls = []

    def too_large(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise error
        return fits(*args)

    monkeypatch.setattr(racing, what, too_large)
    plant(monkeypatch, choosy=replace(LATENT, name="choosy", supports=lambda case: "not this one"))
    both = [small("latent_attention"), small("latent_attention", seed=1)]
    record = race(both, ["mla_ref.latent", "choosy"], device=CPU, pace=FAST)
    first, second = ([e["status"] for e in case["contestants"]] for case in record["cases"])
    assert first == [UNAVAILABLE, UNSUPPORTED]
    assert second == [PASS, UNSUPPORTED, PASS]
    told = f"no memory for the inputs: {type(error).__name__}: {error}"
    assert record["cases"][0]["contestants"][0]["detail"] == told
    assert outcome(record) == (2, 0)
    assert "mla_ref.latent (default): unavailable: no memory for the inputs" in printed(show(record))


def test_only_memory_excuses_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(racing, "inputs_of", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        run("mla_ref.latent")


def test_a_truth_that_does_not_fit_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*inputs: Any) -> Any:
        raise NO_ROOM[0]

    plant(monkeypatch, hungry=replace(LATENT, name="hungry", fn=hungry))
    (case,) = run("hungry")["cases"]
    assert [(e["status"], e["detail"]) for e in case["contestants"]] == [
        (ERROR, f"OutOfMemoryError: {NO_ROOM[0]}")
    ]
    for no_truth in (hungry, lambda *_: hungry):  # where its rows are chosen, or where it is computed
        monkeypatch.setattr(racing, "jury", no_truth)
        record = run("mla_ref.latent")
        assert [e["status"] for e in record["cases"][0]["contestants"]] == [UNAVAILABLE]
        assert record["cases"][0]["contestants"][0]["detail"].startswith("no memory for the truth: OutOfMem")
        assert outcome(record) == (0, 0)


def test_a_control_that_cannot_be_made_ends_nobody_elses_race(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def prepare(inputs: Any) -> Prepared:
        made.append(1)
        if len(made) > 3:  # one that is judged and two copies, and then the control
            raise NO_ROOM[0]
        return Prepared(lambda: LATENT.fn(*inputs), lambda result: result)

    plant(monkeypatch, twice=replace(LATENT, name="twice", prepare=prepare))
    (case,) = run("twice/prepared")["cases"]
    assert [entry["status"] for entry in case["contestants"]] == [PASS, ERROR]


def test_prepared_calls_are_judged_as_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(inputs: Any) -> Prepared:
        return Prepared(lambda: LATENT.fn(*inputs)[::-1], lambda result: result[::-1])

    def careless(inputs: Any) -> Prepared:
        return Prepared(lambda: LATENT.fn(*inputs), lambda result: (result[0] * 1.25, result[1]))

    plant(
        monkeypatch,
        good=replace(LATENT, name="good", prepare=prepare),
        bad=replace(LATENT, name="bad", prepare=careless),
    )
    (case,) = run("good/prepared", "bad/prepared")["cases"]
    assert [entry["status"] for entry in case["contestants"]] == [PASS, FAIL, PASS]


def test_who_runs() -> None:
    everybody = specs_for("latent_attention", [])
    assert ("mla_fast.gluon_decode", "prepared") in everybody
    assert ("mla_fast.triton_decode", "batch_invariant") in everybody
    assert not any(name.startswith("mla_ref.") for name, _ in everybody)
    assert specs_for("latent_attention", ["mla_ref.merge_states"]) == []
    with pytest.raises(ValueError, match=r"variant 'fast' of mla_ref\.latent is not one of default"):
        specs_for("latent_attention", ["mla_ref.latent/fast"])
    with pytest.raises(ValueError, match=r"none of mla_ref\.rope implements"):
        run("mla_ref.rope")


RECORD: dict[str, Any] = {
    "version": 1,
    "run": "a" * 32,
    "when": "2026-11-30T00:00:00Z",
    "machine": {"name": "a chip", "packages": {"torch": "2"}, "python": "3"},
    "ceilings": [{"copy": 1e12, "matmul": 5e14}, {"copy": 2e12, "matmul": 4e14}],
    "cases": [
        {
            "run": "a" * 32, "label": "one", "flop": 10**9, "bytes_read": 10**8, "bytes_written": 10**8,
            "copies": 2,
            "contestants": [
                {"backend": "x", "variant": "default", "status": "fail", "detail": "off by 3", "how": ""},
                *(
                    {"backend": name, "variant": variant, "status": "pass", "detail": "", "how": how,
                     "why_no_graph": "waits", "us": us, "us_p10": us - 1, "us_p90": us + 1,
                     "error_over_bound": 0.5, "rows_judged": 3}
                    for name, variant, how, us in (
                        ("y", "default", "graph", 200.0), ("z", "prepared", "calls", 100.0),
                    )
                ),
            ],
        }
    ],
}  # fmt: skip


def printed(renderable: Any) -> str:
    from rich.console import Console

    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_record_is_shown_with_ratios_of_its_own() -> None:
    text = printed(show(RECORD))
    assert "ceilings: copy 2,000 GB/s, bfloat16 product 500.0 TFLOP/s" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "  x (default): fail: off by 3" in text
    assert lines["y"].split()[1:] == [
        "200.0",
        "199.0-201.0",
        "1.000",
        "5.0",
        "1,000",
        "50.0%",
        "copy",
        "-",
        "pass",
        "0.50",
    ]
    assert lines["z/prepared"].split()[1:5] == ["*", "100.0", "99.0-101.0", "0.500"]
    assert "* plain calls, the host's time included: waits" in text
    (case,) = RECORD["cases"]
    assert base_of(case, "z/prepared")["us"] == 100.0
    assert base_of(case, "x") is None
    text = printed(show(RECORD, "x")).split("verdict")[1]
    assert "ratio: " not in text
    assert "  no ratios: x has no time here" in text


def test_names_in_a_record_are_shown_as_they_are() -> None:
    hostile = json.loads(json.dumps(RECORD).replace('"backend": "y"', '"backend": "[red]y\\u001b[2J"'))
    assert hostile != RECORD
    for text in (printed(show(hostile)), printed(side_by_side([hostile, hostile]))):
        assert r"[red]y\x1b[2J" in text
        assert "\x1b" not in text


def test_two_runs_have_no_ratio() -> None:
    other = json.loads(json.dumps(RECORD).replace("a" * 32, "b" * 32).replace("200.0", "150.0"))
    text = printed(side_by_side([RECORD, other]))
    assert [line.split() for line in text.splitlines()[1:3]] == [
        ["one", "y", "200.0", "150.0"],
        ["one", "z/prepared", "100.0", "100.0"],
    ]
    assert "no ratios: these are different runs" in text
    assert "1.333" not in text
    assert "0.750" not in text


def test_cases_of_another_run_are_refused(tmp_path: Path) -> None:
    mixed = json.loads(json.dumps(RECORD))
    mixed["cases"][0]["run"] = "c" * 32
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps(mixed))
    with pytest.raises(ValueError, match="one is of another run than the file"):
        load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no record of a race: KeyError"):
        load(path)


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    figure = plot(RECORD)
    (axes,) = figure.axes
    assert [round(bar.get_width()) for bar in axes.patches] == [50, 100]
    assert [round(bar.get_y() + bar.get_height() / 2) for bar in axes.patches] == [1, 2]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "y", "z/prepared"]
    assert [text.get_text() for text in axes.texts] == ["200.0 µs", "100.0 µs"]
    figure.savefig(tmp_path / "race.svg")


def test_a_plot_shows_names_and_does_not_obey_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    text = (
        json.dumps(RECORD)
        .replace('"backend": "y"', '"backend": "$\\\\frac{y$"')
        .replace("a chip", "a $\\\\chip$")
    )
    figure = plot(json.loads(text))
    figure.savefig(tmp_path / "race.png")
    assert figure.axes[0].get_yticklabels()[1].get_text() == "$\\frac{y$"


@pytest.mark.parametrize("count", range(1, 15))
def test_nobody_is_always_behind_the_same_one(count: int) -> None:
    order = list(racing._order(range(count), 4))
    rounds = [order[i * count : (i + 1) * count] for i in range(4)]
    assert len(order) == 4 * count
    assert all(sorted(one) == list(range(count)) for one in rounds)
    behind = [pair for one in rounds for pair in pairwise(one)]
    if count >= 4 and count != 5:
        assert len(set(behind)) == len(behind)
    positions = [sum(one.index(i) for one in rounds) / 4 for i in range(count)]
    assert max(positions) - min(positions) <= 2.0


SMALL_BENCH = (
    "bench", "--problem", "latent_attention", "--heads", "1", "--kv-len", "33", "--backend", "mla_ref.latent",
)  # fmt: skip


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evals.speed.cli.SLOW", FAST)
    files = [str(tmp_path / name) for name in ("one.json", "two.json")]
    for file in files:
        assert main([*SMALL_BENCH, "--json", file]) == 0
    assert "mla_ref.latent (again) *" in capsys.readouterr().out
    assert main(["bench", "show", files[0]]) == 0
    assert "ratio: time over that of mla_ref.latent" in capsys.readouterr().out
    assert main(["bench", "show", *files]) == 0
    assert "no ratios" in capsys.readouterr().out
    assert main(["bench", "show", files[0], "--base", "mla_ref.latent (again)"]) == 0
    for words, message in (
        ([files[0], "--base", "nobody"], "--base 'nobody' takes no part; who does: mla_ref.latent, mla"),
        ([*files, "--base", "mla_ref.latent"], "--base is of one run, and these are 2"),
    ):
        capsys.readouterr()
        assert main(["bench", "show", *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "nope"], "suite 'nope' is not one of decode"),
        (["--suite", "copy", "--problem", "cache_write"], "--suite and --problem: one or the other"),
        (["--problem", "rope"], "problem 'rope' is not timed"),
        (["--problem", "cache_write", "--backend", "nope.nope"], "cannot import 'nope.nope'"),
        (["--device", "nope"], "--device 'nope'"),
        (["show", "nope.json"], "nope.json"),
        (["--suite", "copy", "--kv-len", "9"], "--kv-len: goes with --problem; a suite has its own"),
        (["--format", "bf16"], "--format: goes with --problem"),
        (["--json", "none/x.json"], "none/x.json: there is no directory none"),
        (["--plot", "none/x.png"], "none/x.png: there is no directory none"),
        (
            ["--problem", "cache_write", "--backend", "mla_ref.cache_write", "--base", "nope"],
            "--base 'nope' takes no part; who does: mla_ref.cache_write",
        ),
    ],
)
def test_what_is_wrong_with_a_command_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_nobody_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--problem", "latent_attention", "--kv-len", "9", "--backend", "mla_fast.flash_mla"]
    assert main(["bench", *words]) == 3
    assert "unavailable: needs a CUDA device" in capsys.readouterr().out
