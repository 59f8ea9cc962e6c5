"""How many threads a worker computes with: as many as it was given, in torch and in numpy."""

import os

import pytest
import torch

from oracles.pool import judges
from oracles.worker import ITEM, Limits, Task

VARIABLE = "OPENBLAS_NUM_THREADS"


def told(argument, say):
    say(ITEM, [torch.get_num_threads(), os.environ.get(VARIABLE)])


def threads_of_a_worker(threads):
    todo = [Task("test_threads:told")]
    with judges(1, "cpu", Limits(60.0), threads) as pool:
        (outcome,) = (o for o in pool.outcomes(lambda slot: todo.pop() if todo else None) if o)
    return outcome.messages[0][1]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_worker_has_the_threads_it_is_given(threads, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert threads_of_a_worker(threads) == [threads, str(threads)]


def test_what_the_environment_says_stays(monkeypatch):
    monkeypatch.setenv(VARIABLE, "3")
    assert threads_of_a_worker(1) == [1, "3"]
