"""The same in other surroundings.

Claim: where another type is torch's default, without gradients and with other random numbers to come, the
    output is what it may be on these inputs.
Why: engines have a model's type as the default while they load it, serve without gradients, and share a
    process with whoever draws numbers; a table that is built without naming its type is then in bfloat16.
Exact or bounded: bit for bit, or within the bounds of the truth.
Kills: constants and tables of the default type, results that follow the random stream or the mode.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from oracles.oracle import Oracle, Trial, naming, private_copy
from oracles.probes import OF_TENSORS
from oracles.process_state import kept
from oracles.rejudge import rejudged
from oracles.verdict import Finding

SEED = 20_261_130


def check(trial: Trial) -> Finding:
    """Run in each of the surroundings."""
    first = trial.run(trial.inputs)
    for what, surroundings in SURROUNDINGS.items():
        left = private_copy(trial.inputs)
        with naming(what), surroundings():
            output = trial.call(left)
        finding = rejudged(trial, trial.inputs, output, left, first, what)
        if not finding.ok:
            return finding
    return Finding(ok=True, num_checked=len(SURROUNDINGS))


@contextmanager
def _loading() -> Iterator[None]:
    """As while a model is loaded."""
    with kept([]):
        torch.set_default_dtype(torch.bfloat16)
        yield


@contextmanager
def _serving() -> Iterator[None]:
    """As in an engine's step."""
    with kept([]), torch.no_grad():
        torch.set_rng_state(torch.Generator().get_state())
        random.seed(SEED)
        yield


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "with bfloat16 as the default type": _loading,
    "without gradients, with other random numbers to come": _serving,
}

ORACLE = Oracle(
    name="surroundings",
    check=check,
    problems=OF_TENSORS,
    kills=(
        "scale_of_the_default_type",
        "rope_frequencies_of_the_default_type",
    ),
)
