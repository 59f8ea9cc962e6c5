"""A conformance run cut into tests: one for each problem, oracle and stage that a backend is held to.

The verdicts are those of ``mla-verify run`` on the same backend: same matrix, same turns. Those of one stage
are made together, since claims look at the same runs, and only of the oracles that somebody is waiting for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.formats import cache_format, formats
from mla_ref.presets import PRESETS
from mla_ref.presets import preset as find_preset
from mla_ref.problem import problem as find_problem
from mla_ref.problem import problems
from oracles.asked import told_later
from oracles.console import describe, distinct, left_out, reasons
from oracles.coverage import draw
from oracles.exits import first_line, printable
from oracles.fuzz_cli import duration
from oracles.lookup import cases_in
from oracles.matrix import Job, jobs_of, jobs_on, load, stage_of, trials
from oracles.narrow import Dealing
from oracles.pool import described, judge_all
from oracles.shrink import smallest
from oracles.verdict import BROKEN, ERROR, FAIL, HELD, UNAVAILABLE, Verdict
from oracles.verify import use_device
from oracles.worker import Limits

DRAWN, GIVEN = "drawn", "given"

# How long a function may take for a case where nobody says it.
PATIENCE = "10m"

# How often a case that failed is judged again while it is made small.
SHRINKING = 200


class Selection(NamedTuple):
    """What is asked of one backend. Empty names stand for all there are.

    case: recordings, or files of one case, that are judged besides the matrix, in the stage ``GIVEN``.
    cases: how many cases are drawn besides the matrix, in the stage ``DRAWN``; only ``problem`` and
        ``oracle`` narrow those.
    require: whether it is a failure that the backend cannot run here.
    timeout: how long one of its functions may take for a case, such as "60s". It then runs in a process of
        its own, and whatever ends that is a failure; "0": in this process. Empty: ``PATIENCE``, but "0" on
        a CPU.
    """

    backend: str
    problem: tuple[str, ...] = ()
    preset: tuple[str, ...] = ()
    format: tuple[str, ...] = ()
    oracle: tuple[str, ...] = ()
    case: tuple[str, ...] = ()
    device: str = "cpu"
    seed: int = 0
    full: bool = False
    cases: int = 0
    require: bool = False
    timeout: str = ""


class Claim(NamedTuple):
    """What one test holds: that one oracle finds nothing in one stage of one problem."""

    selection: Selection
    problem: str
    oracle: str
    stage: str

    @property
    def name(self) -> str:
        """What the test is called, and what an expected failure is matched with."""
        return f"{self.selection.backend}/{self.problem}/{self.oracle}/{self.stage}"


def claims_of(selection: Selection) -> list[Claim]:
    """Every claim that some case of the selection is judged by, stage by stage.

    Raises: ValueError in one line if a name is unknown, or no case is left.
    """
    use_device(selection.device)
    _limits(selection)
    backend = load(selection.backend)
    variants, supports = tuple(backend.variants), told_later(backend)
    found: dict[tuple[str, str], dict[str, None]] = {}
    for stage, job in _jobs(selection):
        judging = {oracle for _, oracles in trials(job, variants, supports) for oracle in oracles}
        kept = found.setdefault((job.case.problem, stage), {})
        kept.update(dict.fromkeys(oracle for oracle in job.oracles if oracle in judging))
    if not found:
        of = load(selection.backend).problem
        why = left_out(of, selection.problem, selection.oracle) or "nothing that was selected is judged"
        raise ValueError(f"backend {selection.backend!r}: {why}")
    return [
        Claim(selection, problem, oracle, stage)
        for (problem, stage), oracles in found.items()
        for oracle in oracles
    ]


def _jobs(selection: Selection) -> list[tuple[str, Job]]:
    """Every case, by stage."""
    spec, oracles = selection.backend, selection.oracle or None
    dealing = Dealing(
        problems=selection.problem or tuple(problems()),
        presets=selection.preset or tuple(PRESETS),
        formats=selection.format or tuple(formats()),
        seed=selection.seed,
    )
    jobs = jobs_of(
        specs=[spec],
        problems=[find_problem(name) for name in dealing.problems],
        configs=[find_preset(name) for name in dealing.presets],
        formats=[cache_format(name) for name in dealing.formats],
        oracles=oracles,
        device=selection.device,
        seed=selection.seed,
        full=selection.full,
        own={spec: described([spec], selection.device, None, dealing)[spec].own_cases()},
    )
    cases = [case for file in selection.case for case in cases_in(file, problems(), selection.format or None)]
    given = jobs_on(cases, {spec: load(spec).problem}, oracles, selection.device)
    return [
        *((stage_of(job.case), job) for job in jobs),
        *((GIVEN, job) for job in given),
        *((DRAWN, job) for job in _drawn(selection, jobs)),
    ]


def _drawn(selection: Selection, jobs: Sequence[Job]) -> Iterator[Job]:
    """Cases that the backend takes, any pair of dimensions early; oracles and variants take turns again."""
    if not jobs:
        return
    backend, oracles = load(selection.backend), jobs[0].oracles
    supports = told_later(backend)
    for i in range(selection.cases):
        case = draw(backend.problem, selection.seed, i, supports)
        turn = None if selection.full else (i, selection.cases)
        yield Job(case, (selection.backend,), oracles, selection.device, turn)


def _limits(selection: Selection) -> Limits | None:
    """None: in this process. Raises: ValueError on a timeout that is no length of time."""
    timeout = selection.timeout or ("0" if torch.device(selection.device).type == "cpu" else PATIENCE)
    return None if timeout == "0" else Limits(duration(timeout))


def judged(claim: Claim, wanted: Sequence[str]) -> list[Verdict]:
    """The verdicts of the ``wanted`` oracles on every case of a claim's stage."""
    chosen = [
        job._replace(only=tuple(wanted))
        for stage, job in _jobs(claim.selection)
        if (job.case.problem, stage) == (claim.problem, claim.stage)
    ]
    by_job = dict(judge_all(chosen, 1, _limits(claim.selection)))
    return [verdict for index in range(len(chosen)) for verdict in by_job[index]]


class Outcome(NamedTuple):
    """failed: what to print if the claim broke. skipped: why, if nothing of it could be tried."""

    failed: str = ""
    skipped: str = ""


def outcome_of(claim: Claim, of_stage: Sequence[Verdict]) -> Outcome:
    """What the verdicts of its stage say of a claim."""
    # A process that ended outside of every claim broke them all.
    verdicts = [verdict for verdict in of_stage if verdict.oracle in (claim.oracle, "")]
    if any(verdict.status in BROKEN for verdict in verdicts):
        small = claim.stage == DRAWN
        lines = _failures(verdicts, claim.selection if small else None)
        return Outcome(failed="\n".join(map(printable, lines)))
    if any(verdict.claims for verdict in verdicts):
        return Outcome()
    silent = dict.fromkeys(verdict.detail for verdict in verdicts if verdict.status in HELD)
    why = (
        printable("; ".join([*reasons(verdicts), *silent]))
        or "not tried: its process had ended under another claim"
    )
    if claim.selection.require and any(verdict.status == UNAVAILABLE for verdict in verdicts):
        return Outcome(failed=f"required, but it did not run: {why}")
    return Outcome(skipped=why)


def _failures(verdicts: Sequence[Verdict], shrinking: Selection | None) -> list[str]:
    """As ``mla-verify run`` prints them: the smallest case of each kind, made smaller where it was drawn."""
    lines: list[str] = []
    for verdict, count in distinct(verdicts):
        lines += describe(verdict if shrinking is None else _smaller(verdict, shrinking))
        if count > 1:
            lines.append(f"  and   {count - 1} more like it")
    return lines


def _smaller(verdict: Verdict, selection: Selection) -> Verdict:
    """The same failure on the plainest case that shows it; a crash is left as it is."""
    if verdict.status not in (FAIL, ERROR) or not verdict.oracle:
        return verdict
    seen = {verdict.case: verdict}

    def still_fails(case: Case) -> bool:
        job = Job(case, (selection.backend,), (verdict.oracle,), selection.device)
        [(_, verdicts)] = judge_all([job], 1, _limits(selection))
        same = [v for v in verdicts if (v.status, v.variant) == (verdict.status, verdict.variant)]
        if same:
            seen[case] = same[0]
        return bool(same)

    try:
        return seen[smallest(verdict.case, still_fails, SHRINKING)]
    except Exception as error:  # ours
        why = f"{type(error).__name__}: {first_line(error)}"
        return replace(verdict, detail=f"{verdict.detail}; it was not made smaller: {why}")
