"""Keys that a kernel does not find are named by request, page and slot, and by what they have in common."""

from dataclasses import replace

import pytest
import torch

from oracles.lost_keys import lost_keys
from oracles.mutants import LATENT, Mutant, departing, given
from oracles.verdict import FAIL
from oracles.verify import judge

LENGTHS, BLOCK = (37, 5, 70, 9), 16


def told(lost, lengths=LENGTHS):
    """What is said if these (request, token) are lost, and every key is looked for by one row."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    picked = torch.arange(sum(lengths))[:, None]
    bad = torch.zeros_like(picked, dtype=torch.bool)
    for request, token in lost:
        bad[starts[request] + token] = True
    return lost_keys(picked, bad, lengths, BLOCK)


def every(request, tokens):
    return [(request, token) for token in tokens]


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ([], ""),
        ([(2, 17)], "not found: key 17 of request 2 (page 1, slot 1) of 121 keys"),
        (every(2, range(48, 64)), "exactly those of page 3 of request 2"),
        (every(1, range(5)), "exactly those of page 0 of request 1"),
        (every(2, range(70)), "exactly those of request 2"),
        ([(0, 36), (1, 4), (2, 69), (3, 8)], "exactly those that are their request's newest"),
        ([(i, 0) for i in range(4)], "exactly those that are their request's first"),
        (
            every(0, range(15, 37, 16)) + every(2, range(15, 70, 16)),
            "exactly those in the last slot of a page",
        ),
        (every(0, range(32, 37)) + every(2, range(32, 70)), "exactly those from key 32 of a request on"),
        ([(i, t) for i, n in enumerate(LENGTHS) for t in range(min(n, 3))], "up to key 2 of a request"),
        (every(0, range(20, 30)) + every(2, range(20, 30)), "exactly those from key 20 to 29 of a request"),
        ([(i, t) for i, n in enumerate(LENGTHS) for t in range(n)], "no key is found"),
        ([(0, 3), (2, 17), (2, 40)], "(page 2, slot 8) of 121 keys"),
    ],
)
def test_what_lost_keys_have_in_common_is_said_and_nothing_else(lost, words):
    text = told(lost)
    assert text.endswith(words)
    assert bool(text) == bool(lost)


def test_of_many_the_first_are_named():
    assert told(every(2, range(48, 64))) == (
        "not found: key 48 of request 2 (page 3, slot 0), key 49 of request 2 (page 3, slot 1), "
        "key 50 of request 2 (page 3, slot 2) and 13 more of 121 keys: exactly those of page 3 of request 2"
    )


def test_a_key_that_somebody_finds_is_not_lost():
    picked = torch.tensor([[0, 1], [1, -1]])
    bad = torch.tensor([[False, True], [False, True]])
    assert lost_keys(picked, bad, (2,), BLOCK) == ""
    assert lost_keys(picked, torch.ones_like(bad), (2,), BLOCK) == "no key is found"


def page_twice(inputs):
    """The fourth page of request 2 is read in the place of its third, too."""
    table = inputs.block_table.clone()
    table[2, 2] = table[2, 3]
    return table


PLANTED = {
    "a page": (given(block_table=page_twice), "exactly those of page 2 of request 2"),
    "keys from a split on": (
        departing(mask=lambda mask, _: mask & (torch.arange(mask.shape[1]) < 40)),
        "exactly those from key 43 of a request on",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_bug_is_told_by_its_keys(what):
    run, words = PLANTED[what]
    case = replace(LATENT, q_lens=(8, 3, 9, 4), block_size=16)
    [verdict] = judge(Mutant(what, case, run).backend, case, oracles=["needle"])
    assert verdict.status == FAIL
    assert words in verdict.detail, verdict.detail
