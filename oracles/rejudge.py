"""Further runs, held to the truth as the first one is: what rules end with that ask for no bits.

A run whose output is the first one's, bit for bit, needs no second judgement. Any other is judged by the
derived bounds, so that no right implementation can fail, however it sums and whether it repeats itself or
not.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oracles.bounds import ADMISSIBLE, Admissible
from oracles.compare import identical, told, within, worst_of
from oracles.oracle import Trial, naming, private_copy
from oracles.rules import stored
from oracles.verdict import Finding


def admitted_by_truth(
    trial: Trial, inputs: Any, output: Any, left: Any, expected: Mapping[str, Admissible] | None = None
) -> Finding:
    """The output is what it may be on these inputs, and so is what was written in place.

    inputs: as they were before the call, and left: after it. expected: of the output, where it is known.
    """
    letters, findings = trial.problem.output_shapes, []
    written = {name: getattr(left, name) for name in trial.problem.writes}
    if written:
        fresh = replace(trial, inputs=inputs, run=lambda _: output, left=lambda: left)
        findings.append(stored.check(fresh))
    if expected is None and trial.problem.name in ADMISSIBLE:
        expected = ADMISSIBLE[trial.problem.name](inputs._replace(**written), trial.backend.numerics)
    for name, want in (expected or {}).items():
        findings.append(within(name, getattr(output, name), want, letters[name], inputs))
    return worst_of(findings)


def admitted_instead(trial: Trial, inputs: Any, what: str) -> Finding:
    """A call on these inputs, in place of the case's own, returns and writes what it may.

    what: what is different about them.
    """
    left = private_copy(inputs)
    with naming(what):
        output = trial.call(left)
    return told(what, admitted_by_truth(trial, inputs, output, left))


def rejudged(
    trial: Trial,
    inputs: Any,
    output: Any,
    left: Any,
    first: Any,
    what: str,
    expected: Mapping[str, Admissible] | None = None,
) -> Finding:
    """The output is ``first`` bit for bit, or what it may be on these inputs.

    what: what is different about this run.
    """
    shapes = trial.problem.output_shapes
    again = worst_of([identical(name, getattr(output, name), getattr(first, name)) for name in shapes])
    if again.ok:
        return again
    return told(what, admitted_by_truth(trial, inputs, output, left, expected))
