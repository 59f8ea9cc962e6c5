"""Every failure of the corpus: right implementations hold on it, and the mutant that makes it is failed."""

import json
from dataclasses import replace

import pytest

from mla_ref.problem import problem
from oracles.command import main
from oracles.corpus import FILE, Entry, corpus, read
from oracles.mutants import mutants
from oracles.oracle import rules
from oracles.shrink import smallest
from oracles.verdict import FAIL, PASS
from oracles.verify import backends, judge, oracles_for

NAMES = [entry.name for entry in corpus()]
BY_NAME = {entry.name: entry for entry in corpus()}


@pytest.mark.parametrize("name", NAMES)
def test_right_implementations_hold(name):
    entry = BY_NAME[name]
    claims = {
        *entry.oracles,
        *(o.name for o in oracles_for(problem(entry.case.problem)) if o.name == "value"),
    }
    right = [
        b for b in backends().values() if b.problem == entry.case.problem and b.name.startswith("mla_ref.")
    ]
    assert right
    for backend in right:
        for verdict in judge(replace(backend, variants={}), entry.case, oracles=sorted(claims)):
            assert verdict.status == PASS, (backend.name, verdict.oracle, verdict.detail)


@pytest.mark.parametrize("name", [entry.name for entry in corpus() if entry.mutant])
def test_the_mutant_is_failed_by_every_oracle_named(name):
    entry = BY_NAME[name]
    for oracle in entry.oracles:
        (verdict,) = judge(entry.wrong().backend, entry.case, oracles=[oracle])
        assert verdict.status == FAIL, (oracle, verdict.status, verdict.detail)


def test_the_corpus_is_large_and_its_names_are_unique():
    assert len(corpus()) >= 100
    assert len(set(NAMES)) == len(NAMES)
    assert len({bug for entry in corpus() for bug in entry.bugs}) >= 100
    assert {entry.case.problem for entry in corpus()} == {m.case.problem for m in mutants()}


def test_a_line_without_a_mutant_still_names_what_it_was_about():
    for entry in corpus():
        assert entry.oracles
        assert set(entry.oracles) <= set(rules())
        assert entry.mutant == "" or entry.wrong() is not None, entry.name


def test_cases_are_small():
    """A person reads them: few requests, few keys, and no more of a model than it takes."""
    for entry in corpus():
        case = entry.case
        assert len(case.kv_lens) <= 5
        assert sum(case.kv_lens) <= 320, entry.name
        assert case.config.hidden_size <= 16


def test_a_mutants_memory_is_not_shared_between_entries():
    entry = next(entry for entry in corpus() if entry.mutant == "first_output_remembered")
    for _ in range(2):
        assert judge(entry.wrong().backend, entry.case, oracles=["value"])[0].status == PASS


def test_a_line_of_the_corpus_cannot_be_made_much_smaller():
    entry = next(entry for entry in corpus() if entry.mutant == "lse_base_2")

    def fails(case):
        return judge(replace(entry, case=case).wrong().backend, case, oracles=["lse"])[0].status == FAIL

    found = smallest(entry.case, fails)
    assert (found.q_lens, found.kv_lens, found.config.num_heads) == ((1,), (1,), 1)


def test_entries_pass_through_json():
    for entry in corpus():
        assert Entry.from_json(entry.to_json()) == entry


def test_a_bad_line_is_named():
    good = corpus()[0].to_json()
    data = json.loads(good)
    del data["oracles"]
    with pytest.raises(ValueError, match="line 2: corpus: 'oracles'"):
        list(read([good, json.dumps(data)]))
    with pytest.raises(ValueError, match="line 1: corpus: Expecting value"):
        list(read(["nonsense"]))
    with pytest.raises(ValueError, match=r"line 1: case: unknown field 'widht'"):
        list(read([good.replace('"dtype"', '"widht"', 1)]))


@pytest.mark.parametrize("given", ["corpus", str(FILE)])
def test_any_backend_is_tried_on_it(given, tmp_path, capsys):
    verdicts = tmp_path / "verdicts.jsonl"
    words = ["run", "--case", given, "--backend", "mla_ref.merge_states", "--oracle", "value", "--no-isolate"]
    assert main([*words, "--jobs", "1", "--json", str(verdicts)]) == 0
    judged = [json.loads(line)["case"] for line in verdicts.read_text().splitlines()]
    mine = [json.loads(e.case.to_json()) for e in corpus() if e.case.problem == "merge_states"]
    assert judged == mine
    assert f"{len(mine)} claims held, 0 failed" in capsys.readouterr().out


def test_lines_that_are_cases_themselves_are_tried_too(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text(corpus()[0].case.to_json() + "\n", encoding="utf-8")
    words = ["run", "--case", str(path), "--backend", "mla_ref.latent", "--oracle", "lse"]
    assert main([*words, "--no-isolate", "--jobs", "1"]) == 0
    path.write_text("[1]\n", encoding="utf-8")
    assert main([*words, "--no-isolate"]) == 2
