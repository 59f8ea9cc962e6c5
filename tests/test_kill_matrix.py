"""The kill matrix: what it counts, what the record holds, and what a survivor does."""

import json
import os
from dataclasses import replace

import numpy
import pytest
import torch

from mla_ref.problem import problem
from oracles import kill_matrix
from oracles.command import main
from oracles.field import RULES, compared, rejecting
from oracles.kill_matrix import (
    Killed,
    cases_needed,
    cases_of,
    from_json,
    matching,
    measure,
    put_on_record,
    recorded,
    to_json,
)
from oracles.mutants import LATENT, attend, mutants
from oracles.oracle import private_copy
from oracles.precision_mutants import MANY, kernel, precision_mutants
from oracles.source_mutants import EDITS, why_not
from oracles.tables import TABLES


def test_the_record_has_every_mutant_and_every_one_is_dead():
    there = {(mutant.name, mutant.case.problem) for mutant in mutants()}
    there |= {(name, edit.case.problem) for name, edit in EDITS.items()}
    assert {(row.mutant, row.problem) for row in recorded()} == there
    assert [row.mutant for row in recorded() if not row.killed] == []


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")
def test_edited_kernels_do_run_under_the_interpreter():
    """Their own tests are skipped where they cannot, and would be silent if that were everywhere."""
    pytest.importorskip("triton", reason="the kernels are Triton's")
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4) and why_not():
        pytest.skip(f"numpy {numpy.__version__}: {why_not()}")
    assert why_not() is None


# The truth, taken element by element, is all that tells these from what is right.
VALUES_ALONE = {
    "rope_theta",
    "rope_not_rotated",
    "rope_single_token_not_rotated",
    "rope_turned_back",
    "rope_yarn_ignored",
    "rope_yarn_without_ramp",
    "rope_frequencies_in_bf16",
    "read_rows_late",
    "read_scale_ignored",
    "read_scale_in_bf16",
    "gather_without_tile_scales",
    "layer_softmax_scale_without_mscale",
    "layer_query_gain_forgotten",
    "layer_growth_forgotten",
    "layer_bias_forgotten",
    "layer_norm_weight_forgotten",
    "layer_values_first",
}


def test_every_mutant_dies_of_more_than_its_values_but_for_those_that_are_known():
    assert {row.mutant for row in recorded() if not row.beyond_values} == VALUES_ALONE


@pytest.mark.parametrize(
    ("name", "of", "oracle"),
    [("key_dropped", "latent_attention", "census"), ("states_averaged", "merge_states", "merge_algebra")],
)
def test_a_row_is_what_a_run_gives(name, of, oracle):
    row = measure(name, of, 2, [oracle])
    assert (row.cases, row.killed, row.by) == (2, 2, {oracle: 2})
    assert row.beyond_values == [oracle]
    assert row.quickest[0] == oracle
    (old,) = (x for x in recorded() if (x.mutant, x.problem) == (name, of))
    assert old.by[oracle] == old.cases
    assert from_json(to_json([row])) == [row]


@pytest.mark.parametrize("name", ["key_dropped", "kernel_sees_one_more_key"])
def test_an_oracle_that_fails_the_right_implementation_too_kills_nothing(name, monkeypatch, capsys):
    if name in EDITS and why_not():
        pytest.skip(why_not())
    wrong = kill_matrix._find(name, "latent_attention").run
    honest = kill_matrix._right(kill_matrix._find(name, "latent_attention"))
    row = measure(name, "latent_attention", 1, ["value", "contract"])
    assert (row.killed, row.by, row.false_alarms) == (1, {"value": 1}, {})
    monkeypatch.setattr(kill_matrix, "_right", lambda _: wrong)
    row = measure(name, "latent_attention", 1, ["value", "contract"])
    assert (row.killed, row.by, row.false_alarms) == (0, {}, {"value": 1})
    assert from_json(to_json([row])) == [row]
    words = [
        "mutants",
        "--mutant",
        name,
        "--problem",
        "latent_attention",
        "--cases",
        "1",
        "--oracle",
        "value",
    ]
    assert main(words) == 1
    told = f"no kill: {name} of latent_attention: value failed it and the right implementation alike"
    assert f"{told}, on 1 of 1 cases" in capsys.readouterr().out.splitlines()
    monkeypatch.setattr(kill_matrix, "_right", lambda _: honest)
    assert main(words) == 0
    assert "no kill" not in capsys.readouterr().out


def test_no_oracle_on_record_fails_what_is_right():
    assert [row.mutant for row in recorded() if row.false_alarms] == []


def test_cases_to_kill():
    assert cases_needed(0.0, 0.95) is None
    assert cases_needed(1.0, 0.95) == 1
    assert cases_needed(0.5, 0.95) == 5  # 1 - 0.5^5 = 0.97
    assert cases_needed(0.5, 0.5) == 1


def test_cases_differ_in_seed_and_regime_alone_and_begin_with_the_mutants_own():
    mutant = next(m for m in mutants() if m.name == "key_dropped")
    cases = cases_of(mutant, 5)
    assert cases[0] == mutant.case
    assert len({case.regime for case in cases}) == 5
    assert len({case.seed for case in cases}) == 5
    assert {(case.q_lens, case.kv_lens, case.cache_format) for case in cases} == {
        (LATENT.q_lens, LATENT.kv_lens, LATENT.cache_format)
    }


def test_other_projects_rules_accept_what_is_right_and_see_what_is_gross():
    inputs = problem("latent_attention").materialize(LATENT, torch.device("cpu"))
    right = attend(private_copy(inputs), {})
    assert rejecting(inputs, right) == set()
    zero = right._replace(out=torch.zeros_like(right.out))
    assert rejecting(inputs, zero) >= {"vllm-0.05", "cosine", "flash-mla", "flashinfer", "cutlass"}
    nan = right._replace(out=right.out * torch.nan)
    assert rejecting(inputs, nan) == set(RULES)
    shifted = right._replace(lse=right.lse + 0.02)
    assert rejecting(inputs, shifted) == {"cosine", "flash-mla", "flashinfer", "cutlass"}


def test_the_plain_implementation_has_the_error_of_its_type():
    inputs = problem("latent_attention").materialize(MANY, torch.device("cpu"))
    x = compared(inputs, kernel()(private_copy(inputs)))
    error = (x.plain - x.want).abs().max()
    assert 2.0**-9 < error < 0.5


def test_names_are_checked():
    with pytest.raises(ValueError, match="mutant 'nobody' is not one of"):
        matching(mutants(), ["nobody"], None, None)
    with pytest.raises(ValueError, match="oracle 'nobody' is not one of"):
        matching(mutants(), None, None, ["nobody"])
    assert {m.case.problem for m in matching(mutants(), None, None, ["stored"])} == {
        "cache_write",
        "rope_cache_write",
        "layer",
    }


def test_the_command_counts_survivors(capsys):
    asked = ["mutants", "--mutant", "weights_truncated", "--cases", "1", "--oracle"]
    assert main([*asked, "statistics"]) == 0
    assert "1 mutants, 0 survived" in capsys.readouterr().out
    assert main([*asked, "census"]) == 1
    assert "survived: weights_truncated of latent_attention" in capsys.readouterr().out
    assert main([*asked, "statistics", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["by"] == {"statistics": 1}
    assert Killed(**row).mutant in precision_mutants()


def test_the_record_takes_new_rows_and_loses_those_of_mutants_that_are_gone(tmp_path):
    path = tmp_path / "mutants.json"
    row = measure("states_averaged", "merge_states", 1, ["merge_algebra"])
    put_on_record([replace(row, mutant="nobody"), row], path)
    assert from_json(path.read_text()) == [row]
    put_on_record([replace(row, cases=7)], path)
    assert [x.cases for x in from_json(path.read_text())] == [7]


def test_tables_show_the_record():
    assert len(TABLES["kills"]().rows) == len(recorded())
    assert [row[0] for row in TABLES["field"]().rows] == list(RULES)


@pytest.mark.parametrize("asked", [["list", "kills"], ["mutants", "--record", "--mutant", "states_averaged"]])
def test_an_installed_package_says_that_the_record_is_a_checkouts(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kill_matrix, "RECORD", tmp_path / "docs" / "results" / "mutants.json")
    monkeypatch.setattr("oracles.mutants_cli.measure", None)  # it is said before anything is measured
    assert main(asked) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "the record of mutants is a checkout's docs/results/mutants.json, which an installed package" in said
    )
