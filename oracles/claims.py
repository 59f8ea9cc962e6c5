"""A conformance run cut into tests: one for each problem, oracle and stage that a backend is held to.

The verdicts are those of ``mla-verify run`` on the same backend: same matrix, same turns. They are made once in
a process for all tests of a stage, on first use, and only of the oracles that somebody is waiting for.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from mla_ref.case import Case
from mla_ref.formats import cache_format, formats
from mla_ref.presets import PRESETS
from mla_ref.presets import preset as find_preset
from mla_ref.problem import problem as find_problem
from mla_ref.problem import problems
from oracles.console import describe, distinct, reasons
from oracles.matrix import Job, jobs_of, trials
from oracles.pool import judge_job
from oracles.verdict import BROKEN, NOT_RUN, UNAVAILABLE, Verdict
from oracles.verify import find_backend, use_device


class Selection(NamedTuple):
    """What is asked of one backend. Empty names stand for all there are.

    require: whether it is a failure that the backend cannot run here.
    """

    backend: str
    problem: tuple[str, ...] = ()
    preset: tuple[str, ...] = ()
    format: tuple[str, ...] = ()
    oracle: tuple[str, ...] = ()
    device: str = "cpu"
    seed: int = 0
    full: bool = False
    require: bool = False


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


def stage_of(case: Case) -> str:
    """decode: one query a request at most; prefill: nothing cached before; mtp: up to four; else chunked."""
    if max(case.q_lens, default=0) <= 1:
        return "decode"
    if case.q_lens == case.kv_lens:
        return "prefill"
    return "mtp" if max(case.q_lens) <= 4 else "chunked"


def claims_of(selection: Selection) -> list[Claim]:
    """Every claim that some case of the selection is judged by, stage by stage.

    Raises: ValueError in one line if a name is unknown, or no case is left.
    """
    use_device(selection.device)
    variants = tuple(find_backend(selection.backend).variants)
    found: dict[tuple[str, str], dict[str, None]] = {}
    for job in _jobs(selection):
        judging = {oracle for _, oracles in trials(job, variants) for oracle in oracles}
        kept = found.setdefault((job.case.problem, stage_of(job.case)), {})
        kept.update(dict.fromkeys(oracle for oracle in job.oracles if oracle in judging))
    if not found:
        raise ValueError(f"backend {selection.backend!r}: nothing that was selected is judged")
    return [
        Claim(selection, problem, oracle, stage)
        for (problem, stage), oracles in found.items()
        for oracle in oracles
    ]


@cache
def _jobs(selection: Selection) -> list[Job]:
    return jobs_of(
        specs=[selection.backend],
        problems=[find_problem(name) for name in selection.problem or problems()],
        configs=[find_preset(name) for name in selection.preset or PRESETS],
        formats=[cache_format(name) for name in selection.format or formats()],
        oracles=selection.oracle or None,
        device=selection.device,
        seed=selection.seed,
        full=selection.full,
    )


@cache
def _judged(selection: Selection, problem: str, stage: str, wanted: tuple[str, ...]) -> list[Verdict]:
    return [
        verdict
        for job in _jobs(selection)
        if (job.case.problem, stage_of(job.case)) == (problem, stage)
        for verdict in judge_job(job._replace(only=wanted))
    ]


class Outcome(NamedTuple):
    """failed: what to print if the claim broke. skipped: why, if nothing of it could be tried."""

    failed: str = ""
    skipped: str = ""


def outcome_of(claim: Claim, wanted: Sequence[str]) -> Outcome:
    """The claim, judged together with the other ``wanted`` oracles of its stage."""
    judged = _judged(claim.selection, claim.problem, claim.stage, tuple(wanted))
    verdicts = [verdict for verdict in judged if verdict.oracle == claim.oracle]
    if any(verdict.status in BROKEN for verdict in verdicts):
        return Outcome(failed="\n".join(_failures(verdicts)))
    if any(verdict.status not in NOT_RUN for verdict in verdicts):
        return Outcome()
    why = "; ".join(reasons(verdicts))
    if claim.selection.require and any(verdict.status == UNAVAILABLE for verdict in verdicts):
        return Outcome(failed=f"required, but it did not run: {why}")
    return Outcome(skipped=why)


def _failures(verdicts: Sequence[Verdict]) -> list[str]:
    """As ``mla-verify run`` prints them: the smallest case of each kind."""
    lines: list[str] = []
    for verdict, count in distinct(verdicts):
        lines += describe(verdict)
        if count > 1:
            lines.append(f"  and   {count - 1} more like it")
    return lines
