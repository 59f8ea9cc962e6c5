"""A backend of a narrow contract is tried on as many cases as a wide one: all rows, as it takes them."""

import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mla_ref.formats import cache_format, formats
from mla_ref.presets import PRESETS
from mla_ref.problem import problems
from oracles import narrow
from oracles.claims import Claim, Selection, claims_of, judged
from oracles.command import main
from oracles.coverage import covered
from oracles.dimensions import DIMENSIONS, elements
from oracles.matrix import ROWS, STAGES, jobs_of, matrix, stage_of, trials
from oracles.narrow import Dealing, own_cases
from oracles.pool import describe, described
from oracles.verdict import NOT_RUN, Verdict
from oracles.verify import backends
from oracles.worker import PATIENCE, STEP, Limits

ALL_ROWS = len(ROWS)
NARROW = (
    *("flash_mla", "gluon_decode", "gluon_decode_few", "gluon_decode_fp8"),
    *("flash_attn_3", "flash_attn_3_paged", "flashinfer"),
)


def own(supports, problem="latent_attention", presets=None, names=None, seed=0):
    configs = [PRESETS[name] for name in presets or PRESETS]
    return own_cases(
        problems()[problem], configs, [cache_format(n) for n in names or formats()], supports, seed
    )


def table(supports, problem="latent_attention", presets=None):
    configs = [PRESETS[name] for name in presets or PRESETS]
    cases = matrix(problems()[problem], configs, list(formats().values()))
    return [case for case in cases if supports(case) is None]


def only(**allowed):
    """A contract: of each question about a case, the answers that are taken."""
    questions = {
        "widths": lambda case: (case.config.kv_lora_rank, case.config.qk_rope_head_dim),
        "heads": lambda case: case.config.num_heads,
        "most_tokens": lambda case: max(case.q_lens),
        "token_counts": lambda case: len(set(case.q_lens)) == 1 and case.q_lens[0] > 0,
        "fresh": lambda case: case.q_lens == case.kv_lens,
        "whole_tiles": lambda case: all(n % 64 == 0 < n for n in case.kv_lens),
        "packed": lambda case: case.layout.entry_align == case.layout.block_align == 1,
    }

    def supports(case):
        for name, values in allowed.items():
            answer = questions[name](case) if name in questions else getattr(case, name)
            if answer not in values:
                return f"{name} {answer}"
        return None

    return supports


BF16 = {"dtype": ("bfloat16",), "cache_format": ("bf16",)}
CONTRACTS = {
    "one width, one block, one query length": only(
        widths=[(512, 64)], block_size=[64], token_counts=[True], **BF16
    ),
    "many heads": only(heads=[64, 128], widths=[(512, 64)], **BF16),
    "one head count, one block": only(heads=[16], block_size=[128], **BF16),
    "decode": only(most_tokens=[1], **BF16),
    "two tokens at most": only(most_tokens=[1, 2], token_counts=[True], widths=[(512, 64)], **BF16),
    "nothing cached": only(fresh=[True], token_counts=[True], **BF16),
    "whole tiles": only(whole_tiles=[True], **BF16),
    "no scale": only(kv_scale=[1.0], cache_format=["fp8_e4m3"], dtype=["float16"]),
    "one rare format": only(cache_format=["fp8_ds_mla"], dtype=["float32"], block_size=[256], packed=[True]),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_row_that_was_declined_is_dealt_again(name):
    supports = CONTRACTS[name]
    taken, cases = table(supports), own(supports)
    assert len(taken) < ALL_ROWS // 3
    assert len(taken) + len(cases) == ALL_ROWS
    assert [why for case in cases if (why := supports(case))] == []
    assert [why for case in cases if (why := problems()["latent_attention"].why_not(case))] == []
    assert not set(taken) & set(cases)
    assert len(set(cases)) == len(cases)
    # Lengths, scores and values go on being unlike each other.
    assert len({case.regime for case in [*taken, *cases]}) == len({row.regime for row in ROWS})
    assert len({case.kv_lens for case in cases}) > 12
    assert max(map(elements, cases)) <= 4_000_000


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_row_keeps_its_stage_where_the_contract_has_it(name):
    supports = CONTRACTS[name]
    stages = Counter(stage_of(case) for case in [*table(supports), *own(supports)])
    if name == "decode":
        assert set(stages) == {"decode"}
    elif name == "nothing cached":
        assert set(stages) == {"decode", "prefill"}  # where one token is all that there is
    elif name == "two tokens at most":
        assert set(stages) == {"decode", "mtp", "prefill"}
    else:
        assert set(stages) == set(STAGES)
        assert min(stages.values()) >= 7


def test_a_narrow_contract_is_filled_out():
    """Every value of what a kernel is made for, in many pairs, and not that of the first that fits."""
    supports = only(widths=[(512, 64)], **BF16)
    before, cases = table(supports), own(supports)
    had = covered("latent_attention", [*before, *cases], supports)
    for name in ("model c/p/r/v", "block", "memory", "dtype", "format"):
        assert had.values[name] == (had.values[name][1],) * 2, name
    assert had.pairs[0] > 3 * covered("latent_attention", before, supports).pairs[0]
    assert len({case.config.name for case in cases}) > 12
    assert {case.block_size for case in cases} == set(map(int, DIMENSIONS["block"].values))


@pytest.mark.parametrize(
    "supports", [lambda case: None, only(widths=[(512, 64)], **BF16)], ids=["all", "narrow"]
)
def test_some_heads_fill_one_tile_and_part_of_another(supports):
    """What is left over beyond whole tiles of sixteen heads, which a kernel may leave unwritten."""
    heads = {case.config.num_heads for case in [*table(supports), *own(supports)]}
    assert any(n > 16 and n % 16 for n in heads), heads


def test_own_cases_follow_from_a_number_of_questions_and_from_no_clock(monkeypatch):
    """Whoever is asked too often is dealt what was found until then, on every machine the same."""
    supports, asked = only(widths=[(512, 64)], block_size=[64], token_counts=[True], **BF16), []

    def counting(case):
        asked.append(case)
        return supports(case)

    whole = own(counting)
    assert 1000 < len(asked) < narrow.QUESTIONS
    monkeypatch.setattr(narrow, "QUESTIONS", len(asked) // 2)
    asked.clear()
    part = own(counting)
    assert len(asked) == narrow.QUESTIONS
    assert 0 < len(part) < len(whole)
    assert part[:-1] == whole[: len(part) - 1]
    assert own(supports) == part


def test_each_question_has_time_of_its_own(monkeypatch):
    """All of them together may take longer than one may; those that are answered at once are one step."""
    supports, asked, clock = only(block_size=[64], **BF16), [], itertools.count()

    def counting(case):
        asked.append(case)
        return supports(case)

    backend = replace(backends()["mla_ref.latent"], variants={}, supports=counting)
    monkeypatch.setattr("oracles.pool.load", lambda _: backend)
    monkeypatch.setattr("oracles.pool.time", SimpleNamespace(monotonic=lambda: next(clock) / 2))
    said = []
    argument = {"spec": "mla_ref.latent", "device": "cpu", "dealing": DEALING, PATIENCE: 60.0}
    describe(argument, lambda kind, body: said.append((kind, body)))
    steps = said.count((STEP, {PATIENCE: 60.0})) - 1  # the import's
    assert 100 < steps < len(asked) < 3 * steps
    assert len(said[-1][1].own) > 20


def test_equal_contracts_have_equal_cases():
    first, again = (only(widths=[(512, 64)], block_size=[64], **BF16) for _ in range(2))
    assert own(first) == own(again)
    assert own(first, seed=5) == [replace(case, seed=case.seed + 5) for case in own(first)]
    assert own(first) != own(only(widths=[(512, 64)], block_size=[32], **BF16))


def test_who_takes_most_of_the_table_has_no_more():
    assert own(lambda case: None) == []
    assert own(lambda case: "float64" if case.dtype == "float64" else None) == []
    assert own(lambda case: "nothing") == []
    rows = table(lambda case: None)
    for num_taken, has_more in ((ALL_ROWS * 2 // 3, False), (ALL_ROWS * 2 // 3 - 1, True)):
        declined = set(rows[num_taken:])  # and of all others, none
        assert bool(own(lambda case, no=declined: "no" if case in no else None)) is has_more


def test_each_of_many_models_is_dealt_to_a_row():
    configs = [replace(PRESETS["glm-5"], name=str(i)) for i in range(ALL_ROWS + 2)]
    dealt = {case.config.name for case in matrix(problems()["rope"], configs, [cache_format("bf16")])}
    assert dealt == {config.name for config in configs}


def test_only_what_was_asked_for_is_dealt():
    supports = only(block_size=[64], dtype=["bfloat16"])
    cases = own(supports, presets=["glm-5", "a.x-k2"], names=["bf16"])
    assert len(cases) > 12
    assert {case.config.name for case in cases} == {"glm-5", "a.x-k2"}
    assert {case.cache_format for case in cases} == {"bf16"}
    assert own(only(widths=[(256, 32)]), presets=["glm-5"]) == []


def test_the_least_is_changed():
    """A row that is declined for its block size and its type alone keeps its model and its lengths."""
    rows = table(lambda case: None)
    for case in own(only(block_size=[16], dtype=["float16"])):
        row = rows[case.seed]
        assert (case.config.name, case.q_lens, case.kv_lens) == (row.config.name, row.q_lens, row.kv_lens)
        assert (case.regime, case.kv_layout) == (row.regime, row.kv_layout)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_backends_of_ours_are_tried_on_many_cases(name):
    backend = backends()[f"mla_fast.{name}"]
    taken = table(backend.supports, backend.problem)
    cases = own(backend.supports, backend.problem)
    assert len(taken) < 8
    assert len(taken) + len(cases) == ALL_ROWS
    assert {stage_of(case) for case in cases} == set(STAGES)


@pytest.mark.parametrize("name", ["mla_fast.flash_mla", "mla_fast.transformers_layer"])
def test_every_claim_of_every_stage_has_its_turn_on_a_backends_own_cases(name):
    backend = backends()[name]
    cases = own(backend.supports, backend.problem)
    asked = {
        "specs": [name, "mla_ref.latent"],
        "problems": [problems()[backend.problem]],
        "configs": list(PRESETS.values()),
        "formats": list(formats().values()),
        "oracles": None,
        "device": "cpu",
        "seed": 0,
    }
    plain, jobs = jobs_of(**asked), jobs_of(**asked, own={name: cases})
    assert jobs[: len(plain)] == plain
    added = jobs[len(plain) :]
    assert [job.case for job in added] == cases
    assert {job.specs for job in added} == {(name,)}
    met, tried = {}, set()
    for job in added:
        for variant, oracles in trials(job, tuple(backend.variants), backend.supports):
            met.setdefault(stage_of(job.case), set()).update(oracles)
            tried.add(variant)
    assert met == {stage: set(plain[0].oracles) for stage in STAGES}
    assert tried == {"", *backend.variants}
    full = jobs_of(**asked, own={name: cases}, full=True)[len(plain) :]
    assert [(job.case, job.turn, job.mates) for job in full] == [(case, None, ()) for case in cases]


# Takes bfloat16 in blocks of one size, which is found in the environment.
STRANGER = """
import os, signal
from dataclasses import replace
from mla_ref.latent import BACKEND

def supports(case):
    {first}
    if (case.dtype, case.cache_format) != ("bfloat16", "bf16"):
        return "bfloat16 alone"
    if case.block_size != int(os.environ["BLOCK"]):
        return "one block size"

def requires(device):
    return {requires!r}

KERNEL = replace(BACKEND, variants={{}}, supports=supports, requires=requires)
"""
ASKED = ["--preset", "a.x-k2", "--oracle", "value"]
DEALING = Dealing(0, ("latent_attention",), ("a.x-k2",), ("bf16", "fp16"))


@pytest.fixture
def stranger(tmp_path, monkeypatch, request):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLOCK", "64")
    names = (f"narrow_{abs(hash(request.node.nodeid))}_{i}" for i in itertools.count())

    def written(first="", requires=None):
        name = next(names)
        (tmp_path / f"{name}.py").write_text(STRANGER.format(first=first or "pass", requires=requires))
        return f"{name}:KERNEL"

    return written


def lines_of(path):
    return [json.loads(line) | {"seconds": 0} for line in path.read_text().splitlines()]


def test_a_run_tries_a_backends_own_cases_in_whatever_process(stranger, tmp_path, capsys):
    spec, found = stranger(), []
    for words in (["--jobs", "2"], ["--jobs", "1", "--no-isolate"]):
        assert (spec.partition(":")[0] in sys.modules) is False
        path = tmp_path / f"{len(found)}.jsonl"
        assert main(["run", "--backend", spec, *ASKED, *words, "--json", str(path)]) == 0
        assert " 36 claims held, 0 failed," in f" {capsys.readouterr().out.splitlines()[-1]}"
        found.append(lines_of(path))
    assert found[0] == found[1]
    ran = [
        verdict for verdict in map(Verdict.from_json, map(json.dumps, found[0])) if verdict.status == "pass"
    ]
    assert {verdict.case.block_size for verdict in ran} == {64}
    assert len({verdict.case for verdict in ran}) == ALL_ROWS


def test_claims_of_a_suite_are_held_on_own_cases_too(stranger):
    selection = Selection(stranger(), preset=("a.x-k2",), oracle=("value",))
    claims = claims_of(selection)
    assert {claim.stage for claim in claims} == set(STAGES)
    ran = [v for claim in claims for v in judged(claim, ["value"]) if v.status not in NOT_RUN]
    assert len({verdict.case for verdict in ran}) == ALL_ROWS
    assert claims[0] == Claim(selection, "latent_attention", "value", "decode")


def test_a_question_that_the_table_does_not_ask_ends_no_run(stranger, capsys):
    """No row has such blocks; a process that dies while rows are dealt leaves the table's cases."""
    spec = stranger("case.block_size == 256 and os.kill(os.getpid(), signal.SIGKILL)")
    assert main(["run", "--backend", spec, *ASKED, "--jobs", "1", "--isolate"]) == 0
    out = capsys.readouterr().out
    [held] = re.findall(r"^(\d+) claims held, 0 failed", out, re.MULTILINE)
    assert 0 < int(held) == len(table(only(block_size=[64], **BF16), presets=["a.x-k2"])) < 24
    assert f"{spec}: no cases of its own could be dealt: the process died of SIGKILL" in out


def test_what_supports_raises_about_what_the_table_does_not_ask_is_told(stranger, capsys):
    spec = stranger("if case.block_size == 256: raise LookupError('which block?')")
    assert main(["run", "--backend", spec, *ASKED, "--jobs", "1", "--no-isolate"]) == 1
    assert "supports raised LookupError: which block?" in capsys.readouterr().out


def test_what_cannot_run_has_no_cases_of_its_own(stranger):
    limits = Limits(20.0)
    able, unable = stranger(), stranger(requires="a GPU")
    found = described([able, unable], "cpu", limits, DEALING)
    assert len(found[able].own_cases()) > 20
    assert (found[unable].unavailable, found[unable].own_cases()) == ("a GPU", [])
    assert described([able], "cpu", None, DEALING) == {able: found[able]}
    assert described([able], "cpu", None)[able].own_cases() == []
    assert described([able], "cpu", None, DEALING._replace(problems=("rope",)))[able].own_cases() == []


def test_a_run_goes_on_with_the_same_cases_alone(stranger, tmp_path, monkeypatch, capsys):
    asked = [*ASKED, "--jobs", "1", "--no-isolate"]
    words = ["run", "--backend", stranger(), *asked, "--out", str(tmp_path / "run")]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert main(words) == 0
    assert re.sub(r"in .* s", "", capsys.readouterr().out) == re.sub(r"in .* s", "", first)
    monkeypatch.setenv("BLOCK", "32")
    assert main(words) == 2
    assert "its own cases is" in capsys.readouterr().err
