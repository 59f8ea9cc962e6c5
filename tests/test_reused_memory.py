"""Memory that is given up is nobody's; what an implementation has of its own is no concern of the judge."""

import pytest
import torch

from mla_ref.backend import Backend
from mla_ref.merge_states import BACKEND
from oracles.mutants import MERGE
from oracles.verdict import FAIL, PASS
from oracles.verify import judge


def verdict_of(fn, **where):
    (verdict,) = judge(Backend("kept", "merge_states", fn), MERGE, oracles=["reused_memory"], **where)
    return verdict


def keeping(keep):
    def fn(*args):
        keep(args)
        return BACKEND.fn(*args)

    return fn


def in_a_cycle(args):
    cycle = [args]
    cycle.append(cycle)


def the_latest(kept):
    def keep(args):
        kept[:] = args

    return keep


KEPT_RIGHTLY = {
    "nothing": lambda: lambda _: None,
    "the last inputs, as a plan does": lambda: the_latest([]),
    "copies": lambda: lambda args, kept=[]: kept.append([x.clone() for x in args]),
    "workspaces": lambda: lambda args, kept=[]: kept.append([torch.empty_like(x) for x in args]),
    "a cycle that is garbage": lambda: in_a_cycle,
}

KEPT_WRONGLY = {
    "outs": lambda args, kept: kept.append(args[0][:, :1]),
    "lses": lambda args, kept: kept.append({"detached": args[1].detach()}),
}


@pytest.mark.parametrize("what", KEPT_RIGHTLY)
def test_a_right_implementation_may_keep(what):
    verdict = verdict_of(keeping(KEPT_RIGHTLY[what]()))
    assert verdict.status == PASS, verdict.detail


@pytest.mark.parametrize("name", KEPT_WRONGLY)
def test_a_view_of_an_input_is_not_to_be_kept(name):
    kept = []
    verdict = verdict_of(keeping(lambda args: KEPT_WRONGLY[name](args, kept)))
    assert verdict.status == FAIL
    assert verdict.detail == f"{name}: a call keeps its memory, after another one in other memory too"


def test_judged_from_elsewhere_nothing_of_the_judges_is_taken_for_kept():
    assert verdict_of(BACKEND.fn, judge_on="cpu:0").status == PASS
