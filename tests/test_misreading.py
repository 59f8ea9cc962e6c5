"""What explains a wrong output: each misreading is told where it was planted, and nowhere else."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.latent import latent
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput, problem
from oracles.misreading import MAX_PRODUCTS
from oracles.mutants import CONFIG, mutants
from oracles.verdict import FAIL, PASS
from oracles.verify import judge

CASE = Case(problem="latent_attention", config=CONFIG, q_lens=(3, 1, 2), kv_lens=(70, 65, 2), dtype="float32")
INPUTS = problem("latent_attention").materialize(CASE, torch.device("cpu"))


def shifted(inputs, by):
    """Every token a request of its own that sees so many keys more, or fewer."""
    sees, of = [], []
    for i, ((start, stop), length) in enumerate(
        zip(pairwise(inputs.cu_seqlens_q.tolist()), inputs.cache_seqlens.tolist(), strict=True)
    ):
        for t in range(start, stop):
            sees.append(min(max(length - (stop - 1 - t) + by, 0), length))
            of.append(i)
    return inputs._replace(
        block_table=inputs.block_table[of],
        cu_seqlens_q=torch.arange(len(of) + 1, dtype=torch.int32),
        cache_seqlens=torch.tensor(sees, dtype=torch.int32),
        max_seqlen_q=1,
    )


READ_AS = {
    "as if softmax_scale were 0.08333, 144^-0.5 (c+r), not 0.1443": lambda x: x._replace(
        softmax_scale=(x.ql_nope.shape[2] + x.q_pe.shape[2]) ** -0.5
    ),
    "as if softmax_scale were 1, not 0.1443": lambda x: x._replace(softmax_scale=1.0),
    "as if every token saw one key more, if there is one": lambda x: shifted(x, 1),
    "as if every token saw one key less": lambda x: shifted(x, -1),
    "as if there were no causal mask": lambda x: shifted(x, 10**6),
    "as if the rope channels took no part in the scores": lambda x: x._replace(q_pe=torch.zeros_like(x.q_pe)),
    "as if every request had the pages of request 0": lambda x: x._replace(
        block_table=x.block_table[:1].expand_as(x.block_table)
    ),
}


def reading(change):
    def fn(*given):
        inputs = type(INPUTS)(*given)
        return latent(*change(inputs))

    return Backend("misread", "latent_attention", fn, Numerics())


@pytest.mark.parametrize("says", READ_AS)
def test_a_planted_misreading_is_told(says):
    verdicts = judge(reading(READ_AS[says]), CASE, oracles=["value", "lse"])
    assert {v.status for v in verdicts} == {FAIL}
    assert {v.pattern.guess for v in verdicts} == {says}
    assert verdicts[0].detail.endswith(f"; {says}")


def test_an_output_in_a_graph_is_explained_by_its_values():
    says = "as if softmax_scale were 1, not 0.1443"

    def fn(*given):
        return AttentionOutput(*(x.requires_grad_(True) for x in reading(READ_AS[says]).fn(*given)))

    [verdict] = judge(Backend("b", "latent_attention", fn, Numerics()), CASE, oracles=["lse"])
    assert (verdict.status, verdict.pattern.guess) == (FAIL, says)


def test_what_is_right_is_not_explained():
    verdicts = judge(reading(lambda x: x), CASE, oracles=["value", "lse"])
    assert [(v.status, v.pattern) for v in verdicts] == [(PASS, None)] * 2


def test_two_errors_at_once_are_no_misreading():
    both = reading(lambda x: shifted(x._replace(softmax_scale=1.0), 1))
    for verdict in judge(both, CASE, oracles=["value", "lse"]):
        assert verdict.status == FAIL
        assert not verdict.pattern.guess.startswith("as if")


def test_one_wrong_row_among_right_ones_is_no_misreading():
    """All that was returned must be explained: what reads some rows another way does something else."""

    def fn(*given):
        inputs = type(INPUTS)(*given)
        right, wrong = latent(*inputs), latent(*shifted(inputs, -1))
        out, lse = right.out.clone(), right.lse.clone()
        out[3], lse[3] = wrong.out[3], wrong.lse[3]
        return AttentionOutput(out, lse)

    for verdict in judge(Backend("b", "latent_attention", fn, Numerics()), CASE, oracles=["value", "lse"]):
        assert verdict.status == FAIL
        assert "every token" not in verdict.pattern.guess


def test_rows_of_which_the_hull_alone_is_claimed_explain_nothing():
    """Half the scale, in an accumulator under which most outputs would do for most scales."""
    numerics, case = Numerics(accumulate="float16"), replace(CASE, regime="plain")

    def fn(*given):
        inputs = type(INPUTS)(*given)
        return latent(*inputs._replace(softmax_scale=inputs.softmax_scale / 2))

    [_, verdict] = judge(Backend("b", "latent_attention", fn, numerics), case, oracles=["value", "lse"])
    assert (verdict.status, verdict.pattern.guess) == (FAIL, "")


def test_rounded_weights_that_nobody_declared_are_thought_of():
    mutant = next(m for m in mutants() if m.name == "weights_in_bf16_undeclared")
    [verdict] = judge(mutant.backend, mutant.case, oracles=["value"])
    assert 'which Numerics(p="input") would declare' in verdict.pattern.guess


def test_nobody_waits_for_a_guess_on_a_large_case():
    large = replace(CASE, kv_lens=(9000, 65, 2))
    assert 9000 * 3 * CONFIG.num_heads * CONFIG.kv_lora_rank > MAX_PRODUCTS
    says = "as if every token saw one key less"
    for verdict in judge(reading(READ_AS[says]), large, oracles=["lse"]):
        assert verdict.status == FAIL
        assert verdict.pattern.guess != says


def raising(*_):
    raise LookupError("lost\nand more")


@pytest.mark.parametrize("broken", ["oracles.verify.misread", "oracles.compare.locate"])
def test_a_claim_that_cannot_be_explained_is_broken_all_the_same(broken, monkeypatch):
    monkeypatch.setattr(broken, raising)
    says = "as if softmax_scale were 1, not 0.1443"
    plain = {v.oracle: v for v in judge(reading(READ_AS[says]), CASE, oracles=["value", "lse"])}
    for oracle, found in plain.items():
        assert (found.status, found.oracle, found.num_bad > 0) == (FAIL, oracle, True)
        assert found.detail.endswith("; it could not be explained: lost")
        assert (found.pattern is None) == (broken == "oracles.compare.locate")


@pytest.mark.parametrize("explains", ["oracles.rules.needle.lost_keys", "oracles.probes._wrong"])
def test_a_probe_that_cannot_be_explained_is_broken_all_the_same(explains, monkeypatch):
    monkeypatch.setattr(explains, raising)
    [found] = judge(reading(READ_AS["as if every token saw one key less"]), CASE, oracles=["needle"])
    assert found.status == FAIL
    assert "; it could not be explained: lost" in found.detail


def test_who_fails_a_probe_is_not_asked_again():
    """What it would do then is no matter of this claim: a race may end otherwise, or a kernel may raise."""
    calls = []

    def once(*given):
        calls.append(given)
        if len(calls) == 3:
            raise LookupError("asked again")
        return reading(READ_AS["as if every token saw one key less"]).fn(*given)

    [found] = judge(Backend("b", "latent_attention", once, Numerics()), CASE, oracles=["needle"])
    assert (found.status, len(calls)) == (FAIL, 2)
    assert "; not found: key " in found.detail
