"""Heads do not know each other.

Claim: with the heads of every input in reverse order, the output's heads are in reverse order.
Why: no head reads another's query; key-value heads are reversed along with those that read them.
Exact or bounded: bounded, since a kernel may sum differently for another head: the same truth, reversed.
Kills: an output that is remembered instead of computed, heads that are mixed up by their index.
"""

from typing import Any

import torch

from oracles.compare import told, within, worst_of
from oracles.oracle import Oracle, Trial, private_copy
from oracles.verdict import Finding


def check(trial: Trial) -> Finding:
    """Reverse every axis of heads, run, and reverse the output back."""
    shapes, output = trial.problem.output_shapes, trial.run(_reversed(trial))
    findings = [
        within(
            name, getattr(output, name).flip(_heads(letters)), trial.expected()[name], letters, trial.inputs
        )
        for name, letters in shapes.items()
    ]
    return told("with the heads in reverse order, and back", worst_of(findings))


def _reversed(trial: Trial) -> Any:
    inputs = private_copy(trial.inputs)
    for name, letters in trial.problem.shapes.items():
        if axes := _heads(letters):
            tensor = getattr(inputs, name)
            if tensor.element_size() == 1:
                tensor = tensor.view(torch.uint8)  # not every float8 type can be flipped
            # Through the old strides: a kernel sees the layout that it was given.
            tensor.copy_(tensor.flip(axes))
    return inputs


def _heads(letters: str) -> list[int]:
    """The axes of query heads and of key-value heads."""
    return [axis for axis, letter in enumerate(letters.split()) if letter in ("h", "g")]


ORACLE = Oracle(
    name="head_order",
    check=check,
    problems=("latent_attention", "attention", "paged_attention", "merge_states", "rope"),
    kills=(
        "first_output_remembered",
        "heads_swapped",
        "one_element_five_percent",
    ),
)
