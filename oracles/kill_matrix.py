"""Which oracle kills which mutant, on how many cases, in what time; and what others' rules make of it.

A mutant is tried on its own case, and on cases that differ from it in the seed and the regime of values. What
share of them an oracle fails is the chance that one more random case kills the mutant; from it follows how
many cases are needed, half of the time and nineteen times out of twenty. Rules of other projects are tried on
the same outputs. Theirs and ours alike count as kills only where they accept the right implementation on the
same case.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

import torch

from mla_ref.backend import Prepared, supports_all
from mla_ref.case import Case
from mla_ref.problem import problem
from mla_ref.values import REGIMES, integers
from oracles import field as other_projects
from oracles.mutants import Mutant, mutants, right
from oracles.oracle import private_copy, rules
from oracles.process_state import kept
from oracles.source_mutants import EDITS, LAUNCHERS, source_mutants, why_not
from oracles.verdict import PASS
from oracles.verify import find_backend, judge
from oracles.whole_file import write_whole

# These compare with the truth, element by element; a mutant that nothing else kills is seen by them alone.
PLAIN = ("value", "lse", "likely", "head_order")

RECORD = Path(__file__).parents[1] / "docs" / "results" / "mutants.json"


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What became of one mutant.

    cases: how many were tried. killed: on how many some oracle failed. by: oracle -> on how many it did.
    seconds: oracle -> what it took for all of them. field: rule of another project -> on how many it rejects
    the mutant and accepts the right implementation. spurned: rule -> on how many it rejects the right one.
    false_alarms: oracle -> on how many it failed the mutant and the right one alike, which is no kill.
    """

    mutant: str
    problem: str
    cases: int
    killed: int
    by: dict[str, int]
    seconds: dict[str, float]
    field: dict[str, int]
    spurned: dict[str, int]
    false_alarms: dict[str, int] = dataclass_field(default_factory=dict)

    @property
    def beyond_values(self) -> list[str]:
        """Oracles other than the plain comparisons that kill it, the surest first."""
        return sorted((name for name in self.by if name not in PLAIN), key=lambda name: -self.by[name])

    def cases_to_kill(self, chance: float) -> int | None:
        """Random cases after which it is dead with this probability; None if it survives all."""
        return cases_needed(self.killed / self.cases, chance)

    @property
    def quickest(self) -> tuple[str, float] | None:
        """The oracle that kills it soonest, and the seconds that it needs on average."""
        rates = {name: self.seconds[name] / count for name, count in self.by.items()}
        name = min(rates, key=rates.__getitem__, default=None)
        return None if name is None else (name, rates[name])


def cases_needed(share: float, chance: float) -> int | None:
    """The fewest cases of which one kills with probability ``chance``, if each does with ``share``."""
    if share <= 0.0:
        return None
    return 1 if share >= 1.0 else math.ceil(math.log(1.0 - chance) / math.log(1.0 - share))


def every_mutant() -> list[Mutant]:
    """Those of the simulated kernels, and edited sources where they can run."""
    return mutants() + ([] if why_not() else source_mutants())


def cases_of(mutant: Mutant, count: int) -> list[Case]:
    """The mutant's own case, and others of its lengths: all regimes in turn, seeds of their own."""
    contract, own = problem(mutant.case.problem), mutant.case
    seeds = integers(own.seed, f"kills/{mutant.name}", 2**31 - 1, count).tolist()
    regimes = list(REGIMES)
    start = regimes.index(own.regime) + 1
    cases = [own]
    for i, seed in enumerate(seeds):
        other = replace(own, seed=seed, regime=regimes[(start + i) % len(regimes)])
        if len(cases) < count and contract.why_not(other) is None:
            cases.append(other)
    return cases


def measure(name: str, of: str, count: int, oracles: Sequence[str] | None = None) -> Killed:
    """What kills the mutant ``name`` of a problem, on ``count`` cases.

    Each case meets the mutant afresh, since some remember what they saw. What fails it is then held against
    the right implementation on the same case.
    """
    by: dict[str, int] = {}
    seconds: dict[str, float] = {}
    rejected: dict[str, int] = {}
    spurned: dict[str, int] = {}
    alarms: dict[str, int] = {}
    killed = 0
    cases = cases_of(_find(name, of), count)
    for case in cases:
        verdicts = judge(_find(name, of).backend, case, oracles=oracles)
        failing = [v.oracle for v in verdicts if v.status != PASS]
        wrong = _failing_the_right(_find(name, of), case, failing) if failing else set()
        killed += not wrong.issuperset(failing)
        for v in verdicts:
            seconds[v.oracle] = seconds.get(v.oracle, 0.0) + v.seconds
        for oracle in failing:
            counts = alarms if oracle in wrong else by
            counts[oracle] = counts.get(oracle, 0) + 1
        if "lse" in problem(of).output_shapes and of != "merge_states":
            against, unjust = _others(_find(name, of), case)
            for rule in other_projects.RULES:
                rejected[rule] = rejected.get(rule, 0) + (rule in against - unjust)
                spurned[rule] = spurned.get(rule, 0) + (rule in unjust)
    return Killed(
        mutant=name,
        problem=of,
        cases=len(cases),
        killed=killed,
        by=by,
        seconds={oracle: round(spent, 4) for oracle, spent in seconds.items()},
        field=rejected,
        spurned=spurned,
        false_alarms=alarms,
    )


def _find(name: str, of: str) -> Mutant:
    found = source_mutants() if name in EDITS else mutants()
    return next(mutant for mutant in found if (mutant.name, mutant.case.problem) == (name, of))


def _failing_the_right(mutant: Mutant, case: Case, oracles: Sequence[str]) -> set[str]:
    """Which of the oracles fail what the mutant was before its edit."""
    run, inputs = _right(mutant), problem(case.problem).inputs
    backend = replace(
        mutant.backend,
        name=f"right.{mutant.name}",
        fn=lambda *given: run(inputs(*given)),
        prepare=mutant.prepare and (lambda given: Prepared(lambda: run(given), lambda output: output)),
        supports=supports_all,
    )
    return {v.oracle for v in judge(backend, case, oracles=oracles) if v.status != PASS}


def _others(mutant: Mutant, case: Case) -> tuple[set[str], set[str]]:
    """Which rules reject the mutant's output, and which the right one's; all do where it raises."""
    inputs = problem(case.problem).materialize(case, torch.device("cpu"))
    right_run = _right(mutant)
    unjust = other_projects.rejecting(inputs, right_run(private_copy(inputs)))
    try:
        with kept([]):
            output = mutant.run(private_copy(inputs))
        return other_projects.rejecting(inputs, output), unjust
    except Exception:  # another shape, no lse: a test of any kind would notice
        return set(other_projects.RULES), unjust


def _right(mutant: Mutant) -> Callable[[Any], Any]:
    if mutant.name in EDITS:
        backend = find_backend(LAUNCHERS[EDITS[mutant.name].module])
        return lambda inputs: backend.fn(*inputs)
    return right(mutant.case)[0]


def matching(
    found: Sequence[Mutant],
    names: Sequence[str] | None,
    problems: Sequence[str] | None,
    oracles: Sequence[str] | None,
) -> list[Mutant]:
    """Those of the mutants that are named, of the problems named, that the oracles named judge.

    Raises: ValueError on a name that is not there.
    """
    known = {
        "mutant": (names, {mutant.name for mutant in found}),
        "problem": (problems, {mutant.case.problem for mutant in found}),
        "oracle": (oracles, set(rules())),
    }
    for what, (asked, there) in known.items():
        for name in asked or ():
            if name not in there:
                raise ValueError(f"{what} {name!r} is not one of {', '.join(sorted(there))}")
    judged = [rules()[name].problems for name in oracles or rules()]
    return [
        mutant
        for mutant in found
        if (not names or mutant.name in names)
        and (not problems or mutant.case.problem in problems)
        and any(not of or mutant.case.problem in of for of in judged)
    ]


def to_json(rows: Sequence[Killed]) -> str:
    """One mutant a line."""
    return "[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n"


def from_json(text: str) -> list[Killed]:
    """What ``to_json`` wrote."""
    return [Killed(**row) for row in json.loads(text)]


def why_no_record() -> str | None:
    """What keeps this installation from having the record; None if nothing does."""
    if RECORD.parent.is_dir():
        return None
    there = "/".join(RECORD.parts[-3:])
    return f"the record of mutants is a checkout's {there}, which an installed package has not"


def recorded() -> list[Killed]:
    """The matrix that the docs show. Raises: ValueError where there is no checkout around this package."""
    if reason := why_no_record():
        raise ValueError(reason)
    return from_json(RECORD.read_text(encoding="utf-8"))


def put_on_record(rows: Sequence[Killed], path: Path = RECORD) -> None:
    """Rows in place of those that the record has of the same mutants; mutants that are gone leave it."""
    old = from_json(path.read_text(encoding="utf-8")) if path.exists() else []
    known = {(row.mutant, row.problem): row for row in (*old, *rows)}
    there = [(mutant.name, mutant.case.problem) for mutant in mutants()]
    there += [(name, edit.case.problem) for name, edit in EDITS.items()]
    write_whole(path, to_json([known[key] for key in there if key in known]))
