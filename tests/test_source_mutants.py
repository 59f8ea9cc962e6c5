"""Mistakes that people made, edited into the real Triton kernels: each is killed, and edits cannot rot."""

import pytest
import torch

from mla_ref.problem import problem
from oracles import source_mutants
from oracles.source_mutants import DECODE, EDITS, edited_source, why_not
from oracles.verdict import FAIL, PASS
from oracles.verify import find_backend, judge

PLAIN = ("value", "lse", "likely", "head_order")

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_kernel_is_killed(name):
    (mutant,) = (m for m in source_mutants.source_mutants() if m.name == name)
    beyond = [oracle for oracle in EDITS[name].killed_by if oracle not in PLAIN]
    verdicts = judge(mutant.backend, mutant.case, oracles=beyond[:2] or EDITS[name].killed_by)
    assert {v.oracle: v.status for v in verdicts} == {v.oracle: FAIL for v in verdicts}


def test_the_kernel_is_itself_again_afterwards():
    edit = EDITS["kernel_context_left_out"]
    (mutant,) = (m for m in source_mutants.source_mutants() if m.name == "kernel_context_left_out")
    inputs = problem(edit.case.problem).materialize(edit.case, torch.device("cpu"))
    wrong = mutant.run(inputs)
    backend = find_backend(source_mutants.LAUNCHERS[edit.module])
    assert not torch.equal(backend.fn(*inputs).lse, wrong.lse)
    (verdict,) = judge(backend, edit.case, oracles=["value"])[:1]
    assert verdict.status == PASS


def test_an_edit_fails_loudly_where_its_line_is_gone():
    gone = EDITS["kernel_context_left_out"]._replace(edits=(("no such line", ""),))
    with pytest.raises(ValueError, match=f"{DECODE} has 0 times, and must have once: no such line"):
        edited_source(gone, "gone")
    twice = gone._replace(edits=(("tl.load(", ""),))
    with pytest.raises(ValueError, match=r"must have once: tl\.load"):
        edited_source(twice, "twice")


def test_every_edit_says_where_it_was_seen_and_names_an_oracle_beyond_the_values():
    for name, edit in EDITS.items():
        project, _, number = edit.seen.partition("#")
        assert project.count("/") == 1, name
        assert number.isdigit(), name
        assert set(edit.killed_by) - set(PLAIN) or name == "kernel_tile_scales_in_bf16", name
