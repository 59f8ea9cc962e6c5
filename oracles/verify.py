"""Judging: every claim about every variant of a backend, on one case."""

import importlib
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from mla_ref.backend import Backend, backends_in
from mla_ref.case import Case
from mla_ref.problem import Problem, problem
from oracles.asked import declined, missing
from oracles.bounds import ADMISSIBLE, Admissible
from oracles.compare import why_not_comparable, why_not_strided
from oracles.exits import first_line
from oracles.mirror import Mirror
from oracles.misreading import misread
from oracles.oracle import Oracle, Raised, Trial, foul, in_order, named_tensors, private_copy, rules
from oracles.probes import admitted, materialized
from oracles.process_state import kept
from oracles.sources import BACKEND_PACKAGES
from oracles.verdict import ERROR, FAIL, PASS, UNAVAILABLE, UNSUPPORTED, Finding, Verdict, Worst

# The variant that is the backend's own function.
DEFAULT = "default"

# Of a claim about elements, tokens or requests where there are none.
NOTHING = "there is nothing in this case to look at"

# What would explain the output that an element is of, or "".
Guess = Callable[[Worst], str]

# Is told of a verdict.
Broken = Callable[[Verdict], None]

# Oracles that look at nothing but what was returned on the case's own inputs.
OF_THE_OUTPUT = ("value", "lse")

# Packages whose lines say nothing of where an implementation went wrong.
NOT_THEIRS = ("oracles", "mla_ref", "torch", "triton")


def backends() -> dict[str, Backend]:
    """Every backend of the house by name."""
    return {name: backend for package in BACKEND_PACKAGES for name, backend in backends_in(package).items()}


def find_backend(spec: str) -> Backend:
    """A backend by name ("mla_fast.triton_decode"), or a stranger's as "module:ATTRIBUTE".

    A name is a module that defines BACKEND.
    Raises: ValueError in one line: no such module, no such attribute, no Backend, or of no problem.
    """
    attribute = spec.partition(":")[2] or "BACKEND"
    try:
        module = named_module(spec)
    except ValueError as error:
        raise ValueError(f"backend {spec!r}: {error}") from None
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except (ImportError, ValueError) as error:
        raise ValueError(f"backend {spec!r}: cannot import {module!r}: {first_line(error)}") from None
    if found is None:
        here = vars(importlib.import_module(module)).items()
        others = ", ".join(f"{module}:{name}" for name, value in here if isinstance(value, Backend))
        raise ValueError(f"backend {spec!r}: {module} has no {attribute}" + (others and f", but {others}"))
    if not isinstance(found, Backend):
        raise ValueError(f"backend {spec!r}: {attribute} is {type(found).__name__}, not a Backend")
    try:
        problem(found.problem)
    except ValueError as error:
        raise ValueError(f"backend {spec!r}: {error}") from None
    return found


def named_module(spec: str) -> str:
    """The module of "module:ATTRIBUTE". Raises: ValueError if that is no name, but a file's."""
    module, _, attribute = spec.partition(":")
    if not module:
        raise ValueError("names no module")
    if "/" in module or module.endswith(".py"):
        name = ":".join(filter(None, (Path(module).stem, attribute)))
        raise ValueError(f"{module} is a file, and modules have names: say {name} where it lies")
    return module


def use_device(device: str) -> None:
    """Make ready to judge on a device: without a GPU, Triton kernels run in Triton's interpreter.

    Raises: ValueError if torch has no such device, or nothing can be read from it.
    """
    try:
        found = torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{device!r}: {first_line(error)}") from None
    if found.is_meta:
        raise ValueError(f"{device!r}: holds no values")
    if torch.device(device).type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when triton is first imported


def oracles_for(contract: Problem, names: Iterable[str] | None = None) -> list[Oracle]:
    """The oracles that judge a problem, in their order; only those named, where names are given.

    Raises: ValueError that names an unknown oracle, or one that does not judge this problem.
    """
    judging = {name: o for name, o in rules().items() if not o.problems or contract.name in o.problems}
    wanted = list(judging if names is None else names)
    for name in wanted:
        if name not in judging:
            raise ValueError(
                f"oracle {name!r} does not judge {contract.name}; these do: {', '.join(judging)}"
            )
    return [judging[name] for name in in_order(wanted)]


class _Malformed(Exception):
    """The implementation returned something that has not the fields of an output."""


def judge(
    backend: Backend,
    case: Case,
    *,
    device: str = "cpu",
    oracles: Iterable[str] | None = None,
    judge_on: str | None = None,
) -> list[Verdict]:
    """One verdict for each variant and oracle; whatever did not run says so, and why.

    device: where the implementation runs. judge_on: where inputs are made and outputs judged; None: there.

    Raises: ValueError if the case is of another problem, or an oracle does not judge it. Nothing that the
    backend does raises: an exception of its own becomes an "error" verdict.
    """
    return list(judgements(backend, case, device=device, oracles=oracles, judge_on=judge_on))


def judgements(
    backend: Backend,
    case: Case,
    *,
    device: str = "cpu",
    oracles: Iterable[str] | None = None,
    judge_on: str | None = None,
    broken: Broken | None = None,
) -> Iterator[Verdict]:
    """The verdicts of ``judge``, each as soon as it is known.

    broken: told of what did not hold before anybody looks for what would explain it.
    """
    if case.problem != backend.problem:
        raise ValueError(f"{backend.name}: implements {backend.problem}, but the case is of {case.problem}")
    contract = problem(case.problem)
    wanted = oracles_for(contract, oracles)
    variants, disturbed = {DEFAULT: backend.fn, **backend.variants}, list[str]()
    try:
        status, reason = UNAVAILABLE, missing(backend, device, disturbed)
        if reason is None:
            status, reason = UNSUPPORTED, contract.why_not(case) or declined(backend, case, disturbed)
    except Raised as error:
        status, reason = ERROR, str(error)
    for name, fn in variants.items():
        if reason is not None:
            yield from (_verdict(status, backend, name, o, case, device, reason) for o in wanted)
        else:
            # What is prepared is of the backend's own function.
            alone = backend if name == DEFAULT else replace(backend, fn=fn, prepare=None)
            start = partial(_trial, alone, fn, contract, case, device, list(disturbed))
            yield from _judge_variant(start, name, device, wanted, judge_on, broken)


def _judge_variant(
    start: Callable[[str], Trial],
    variant: str,
    device: str,
    wanted: list[Oracle],
    judge_on: str | None,
    broken: Broken | None,
) -> Iterator[Verdict]:
    """start: the trial, looked at from that device."""
    trials: dict[str, Trial] = {}
    guesses: dict[str, Guess] = {}
    for oracle in wanted:
        here = device if oracle.on_device else judge_on or device
        if here not in trials:
            trials[here] = start(here)
            guesses[here] = _guesser(trials[here])
        yield _check(trials[here], oracle, variant, device, guesses[here], broken)


def _guesser(trial: Trial) -> Guess:
    """Tells what would explain the output on the case's own inputs, of which a wrong element is given."""
    told: list[str] = []

    def guess(worst: Worst) -> str:
        truth = ADMISSIBLE.get(trial.problem.name)
        if not told and truth is not None and not trial.problem.writes:
            output = trial.run(trial.inputs)
            told.append(misread(trial.problem, output, trial.inputs, trial.backend.numerics, truth, worst))
        return told[0] if told else ""

    return guess


def _trial(
    backend: Backend,
    fn: Callable[..., Any],
    contract: Problem,
    case: Case,
    device: str,
    disturbed: list[str],
    here: str,
) -> Trial:
    """What oracles look at ``here`` of an implementation that runs on ``device``.

    disturbed: what questions to the backend have changed; what calls change is added, wherever it is seen.
    """
    mirror = Mirror(here, device) if here != device else None
    inputs = materialized(case, here)  # implementations see copies, so all of them may share these
    judged = _Judged(backend, fn, contract, case, device, here, inputs, mirror, disturbed)
    return Trial(
        run=judged.run,
        call=judged.call,
        inputs=inputs,
        case=case,
        backend=backend,
        problem=contract,
        left=judged.left,
        expected=judged.expected,
        device=here,
        runs_on=device,
        disturbed=judged.disturbed,
    )


@dataclass
class _Judged:
    """An implementation on its case, and what is known of it; no cycle, so that memory goes with the trial.

    first: what it returned for ``inputs`` themselves, and these as it left them.
    """

    backend: Backend
    fn: Callable[..., Any]
    contract: Problem
    case: Case
    device: str
    here: str
    inputs: Any
    mirror: Mirror | None
    disturbed: list[str] = field(default_factory=list)
    first: tuple[Any, Any] | None = None
    admissible: Mapping[str, Admissible] | None = None

    def expected(self) -> Mapping[str, Admissible]:
        """As in ``Trial``."""
        if self.admissible is None:
            self.admissible = self._expected()
        return self.admissible

    def _expected(self) -> Mapping[str, Admissible]:
        name, numerics = self.contract.name, self.backend.numerics
        if name not in ADMISSIBLE:
            return {}
        if not self.contract.writes:
            return admitted(materialized, self.case, self.here, numerics)
        written = {part: getattr(self.left(), part) for part in self.contract.writes}
        return ADMISSIBLE[name](self.inputs._replace(**written), numerics)

    def call(self, given: Any) -> Any:
        """As in ``Trial``."""
        there = given if self.mirror is None else self.mirror.sent(given)
        if not self.contract.writes or self.admissible is not None:  # of a first call that writes it follows
            foul(self.expected(), self.device)
        try:
            with kept(self.disturbed):
                output = self.fn(*there)
            if torch.device(self.device).type == "cuda":
                torch.cuda.synchronize(self.device)
        except (Exception, SystemExit) as error:
            raise Raised(_raised(error, self.contract)) from error
        output = _as_output(self.contract, output)
        if reason := _why_misplaced(self.contract, output, there):
            raise _Malformed(reason)
        return output if self.mirror is None else self.mirror.back(output)

    def run(self, given: Any) -> Any:
        """As in ``Trial``."""
        if given is self.inputs and self.first is not None:
            return self.first[0]
        private = private_copy(given)
        output = _own(self.contract, self.call(private))
        if given is self.inputs:
            self.first = output, private
        return output

    def left(self) -> Any:
        """As in ``Trial``."""
        self.run(self.inputs)
        assert self.first is not None
        return self.first[1]


def _check(
    trial: Trial, oracle: Oracle, variant: str, device: str, guess: Guess, broken: Broken | None
) -> Verdict:
    start = time.perf_counter()
    try:
        output = trial.run(trial.inputs)
        if reason := why_malformed(trial, output):
            finding = Finding(ok=False, detail=reason)
        else:
            finding = oracle.check(trial)
        if finding.ok and not finding.num_checked and not finding.detail:
            finding = replace(finding, detail=NOTHING)
        status = PASS if finding.ok else FAIL
    except _Malformed as error:
        status, finding = FAIL, Finding(ok=False, detail=str(error))
    except Raised as error:
        status, finding = ERROR, Finding(ok=False, detail=str(error))
    seconds = time.perf_counter() - start
    verdict = _verdict(
        status, trial.backend, variant, oracle, trial.case, device, finding.detail, finding, seconds
    )
    if finding.ok:
        return verdict
    if broken is not None and (finding.pattern or finding.more):
        broken(verdict)
    return _explained(verdict, finding, guess if oracle.name in OF_THE_OUTPUT else None)


def _explained(verdict: Verdict, finding: Finding, guess: Guess | None) -> Verdict:
    """The verdict, and what is behind it. Whatever goes wrong meanwhile is a remark, and no other verdict."""
    remarks: list[str] = []

    def tried(explain: Callable[[], Any], nothing: Any) -> Any:
        try:
            return explain()
        except Exception as error:
            remarks.append(f"; {unexplained(first_line(error) or type(error).__name__)}")
            return nothing

    more = tried(finding.more, "") if finding.more else ""
    pattern = tried(finding.pattern, None) if finding.pattern else None
    if pattern is not None and guess is not None and (worst := finding.worst) is not None:
        pattern = replace(pattern, guess=tried(lambda: guess(worst), "") or pattern.guess)
    where = tried(pattern.text, "") if pattern else ""
    detail = "; ".join(filter(None, (finding.detail, more)))
    detail = f"{detail}. Bad: {where}" if where else detail
    return replace(verdict, detail="".join((detail, *dict.fromkeys(remarks))), pattern=pattern)


def unexplained(why: str) -> str:
    """What is said of a verdict that stands alone."""
    return f"it could not be explained: {why}"


def _verdict(
    status: str,
    backend: Backend,
    variant: str,
    oracle: Oracle,
    case: Case,
    device: str,
    detail: str,
    finding: Finding | None = None,
    seconds: float = 0.0,
) -> Verdict:
    finding = finding or Finding(ok=False)
    return Verdict(
        status=status,
        backend=backend.name,
        variant=variant,
        oracle=oracle.name,
        case=case,
        device=device,
        detail=detail,
        worst=finding.worst,
        num_bad=finding.num_bad,
        num_checked=finding.num_checked,
        seconds=seconds,
    )


def why_malformed(trial: Trial, output: Any) -> str | None:
    """Which field of an output has not its problem's type, shape or device, or None."""
    expected = trial.expected()
    for name, tensor in zip(trial.problem.output_shapes, output, strict=True):
        if name in expected:
            reason = why_not_comparable(name, tensor, expected[name].mid, expected[name].dtype)
        elif name in trial.problem.writes:
            given = getattr(trial.inputs, name)
            reason = why_not_comparable(name, tensor, given, given.dtype)
        else:
            reason = None
        if reason is not None:
            return reason
    return None


def _as_output(contract: Problem, output: Any) -> Any:
    """The problem's output from any tuple of its fields. Raises: _Malformed."""
    fields = tuple(contract.output_shapes)
    if not isinstance(output, tuple) or len(output) != len(fields):
        what = f"a tuple of {len(output)}" if isinstance(output, tuple) else type(output).__name__
        raise _Malformed(f"output: is {what}, must be ({', '.join(fields)})")
    for name, tensor in zip(fields, output, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise _Malformed(f"{name}: is {type(tensor).__name__}, must be a tensor")
    return contract.output(*output)


def _why_misplaced(contract: Problem, output: Any, given: Any) -> str | None:
    """Which field of an output is not in memory as its inputs are, or of other sizes than follow from theirs.

    Of every call: what a rule makes of an output is no place to find that out.
    """
    sizes = {
        letter: size
        for name, letters in contract.shapes.items()
        for letter, size in zip(letters.split(), getattr(given, name).shape, strict=True)
    }
    devices = {x.device for x in named_tensors(given).values()}
    for name, letters in contract.output_shapes.items():
        tensor, axes = getattr(output, name), letters.split()
        if reason := why_not_strided(name, tensor):
            return reason
        if set(axes) <= set(sizes) and list(tensor.shape) != (want := [sizes[axis] for axis in axes]):
            return f"{name}: shape is {list(tensor.shape)}, must be {want}"
        if devices and tensor.device not in devices:
            return f"{name}: is on {tensor.device}, must be on {', '.join(map(str, devices))}"
    return None


def _own(contract: Problem, output: Any) -> Any:
    """The output in memory that no later call can write into, but for what is written in place."""
    written = contract.writes
    fields = {name: getattr(output, name) for name in contract.output_shapes if name not in written}
    # Where gradients are off, a copy of what asks for one asks for none.
    return output._replace(**{name: x.clone().requires_grad_(x.requires_grad) for name, x in fields.items()})


def _raised(error: BaseException, contract: Problem) -> str:
    """What an implementation raised, and the last line of its own that it passed, or how it was called."""
    line = first_line(error)
    what = f"{type(error).__name__}: {line}" if line else type(error).__name__
    for frame, at in reversed([*traceback.walk_tb(error.__traceback__)]):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in NOT_THEIRS:
            return f"{what}, in {frame.f_code.co_name}, {Path(frame.f_code.co_filename).name}:{at}"
    never_entered = error.__traceback__ is not None and error.__traceback__.tb_next is None
    if isinstance(error, TypeError) and never_entered:
        return f"{what}; it is called with {', '.join(signature(contract.inputs).parameters)}"
    return what
