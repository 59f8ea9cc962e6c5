"""Contestants in turns, in one process, on the same inputs, beside the machine's own ceilings.

- What runs: a CUDA graph of some calls where the call can be captured, else plain calls, and the record says
  which and why. The calls of a graph rotate over copies of the inputs, at least two, and as many as it takes
  for a copy to have left the cache before its next turn, where memory has room for them.
- Turns: every contestant runs for a fixed time, then the next, each round in another order, so that none is
  always behind the same one: near the power limit a turn begins under the clock that the one before it left.
  The first third of a turn, while clocks settle, is not counted. Medians and the 10th and 90th percentile are
  of all counted samples.
- Control: the first contestant that is a graph runs once more under another name. The difference is noise.
- Ceilings: a large copy and a large bfloat16 product, before the first shape and after the last; the larger
  of each pair counts.
- Verdict: each contestant's output is judged before it may run, and what its graph left is judged after its
  last turn. What is wrong has no time.
- Memory: a shape whose inputs or truth do not fit is not run, and says so; the race goes on with the next.
"""

import itertools
import json
import math
import platform
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import Any, NamedTuple

import torch

from evals.speed.cases import label
from evals.speed.inputs import filled, inputs_of
from evals.speed.verdicts import Judged, jury
from evals.speed.work import work
from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.problem import problem
from oracles.asked import declined, missing
from oracles.exits import first_line
from oracles.matrix import load
from oracles.memory import ran_out
from oracles.oracle import Raised, private_copy
from oracles.verdict import ERROR, PASS, UNAVAILABLE, UNSUPPORTED
from oracles.verify import DEFAULT, backends

PREPARED = "prepared"  # how a backend's own division of a call is named beside its variants
CONTROL = " (again)"
PACKAGES = (
    "torch",
    "triton",
    "tokenspeed-flashmla",
    "flash-attn",
    "flash-attn-3",
    "fa3-fwd",
    "tokenspeed-fa3",
    "flashinfer-python",
    "numpy",
)
MAX_COPIES = 16
CALLS = 8  # of one graph, at least
VERSION = 1  # of the record


@dataclass(frozen=True, kw_only=True)
class Pace:
    """turn: seconds of one turn. rounds: turns of each contestant. copy_bytes, width: of the ceilings."""

    turn: float = 0.04
    rounds: int = 4
    copy_bytes: int = 2**30
    width: int = 8192


SLOW = Pace(turn=0.02, rounds=2, copy_bytes=2**24, width=512)  # where there is no accelerator


@dataclass(kw_only=True)
class Contestant:
    """One way to call one backend.

    variant: "default", one of its own, or "prepared". how: "graph" or "calls", and ``why`` not a graph.
    seconds: of one call, a sample each. clocks: MHz, seen once a turn.
    """

    name: str
    variant: str
    backend: Backend
    status: str = PASS
    detail: str = ""
    judged: Judged | None = None
    how: str = ""
    why: str = ""
    turn: Callable[[float], list[float]] | None = None
    output: Callable[[], Any] | None = None
    seconds: list[float] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)


class Run(NamedTuple):
    """What is left to call on one copy of the inputs, and its result as the problem's output."""

    call: Callable[[], Any]
    finish: Callable[[Any], Any]


def race(
    cases: Sequence[Case],
    specs: Sequence[str] = (),
    *,
    device: torch.device,
    pace: Pace,
    seen: Callable[[dict[str, Any]], object] = len,
) -> dict[str, Any]:
    """Every case's contestants against each other, as a record that JSON can hold.

    specs: backends, as "mla_fast.gluon_decode" or with a variant, "mla_fast.gluon_decode/batch_invariant";
        none: see ``specs_for``. seen: called with the record whenever a case has been added.
    Raises: ValueError on a backend, variant or problem that is not known, before anything is timed.
    """
    todo = [(case, specs_for(case.problem, specs)) for case in cases]
    for case, _ in todo:
        work(case)
    if not any(names for _, names in todo):
        raise ValueError(f"none of {', '.join(specs)} implements a problem that is timed here")
    record: dict[str, Any] = {
        "version": VERSION,
        "run": uuid.uuid4().hex,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(device),
        "pace": asdict(pace),
        "ceilings": [ceilings(device, pace)],
        "cases": [],
    }
    for case, names in todo:
        start = time.perf_counter()
        record["cases"].append({"run": record["run"], **_raced(case, names, device, pace)})
        record["cases"][-1]["seconds"] = round(time.perf_counter() - start, 1)
        seen(record)
    record["ceilings"].append(ceilings(device, pace))
    seen(record)
    return record


def specs_for(name: str, specs: Sequence[str]) -> list[tuple[str, str]]:
    """(backend, variant) of the contestants for a problem, in order.

    Where none are named: every backend but the references, which say what is right and not how fast, in its
    own form, prepared where it can be, and batch-invariant where it has such a variant.
    """
    if specs:
        parsed = [(spec.partition("/")[0], spec.partition("/")[2] or DEFAULT) for spec in specs]
        for spec, variant in parsed:
            backend = load(spec)
            known = (DEFAULT, *([PREPARED] if backend.prepare else []), *backend.variants)
            if variant not in known:
                raise ValueError(f"variant {variant!r} of {spec} is not one of {', '.join(known)}")
        return [(spec, variant) for spec, variant in parsed if load(spec).problem == name]
    found = []
    for spec, backend in backends().items():
        if backend.problem == name and not spec.startswith("mla_ref."):
            found.append((spec, DEFAULT))
            found += [(spec, PREPARED)] if backend.prepare else []
            found += [(spec, variant) for variant in backend.variants if variant == "batch_invariant"]
    return found


def named(cases: Sequence[Case], specs: Sequence[str]) -> list[str]:
    """Every contestant as it is asked for: "backend" or "backend/variant"."""
    found = [pair for case in cases for pair in specs_for(case.problem, specs)]
    return list(dict.fromkeys(spec if way == DEFAULT else f"{spec}/{way}" for spec, way in found))


def machine(device: torch.device) -> dict[str, Any]:
    """What the times hold on."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": device.type,
        "name": name,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": versions,
    }


def ceilings(device: torch.device, pace: Pace) -> dict[str, float]:
    """Bytes a second, read and written, of a copy, and operations a second of a product of bfloat16."""
    source = torch.empty(pace.copy_bytes, dtype=torch.uint8, device=device)
    filled_in = filled(0, "copy", (pace.copy_bytes // 1024, 256), torch.float32, device)
    source.copy_(filled_in.flatten().view(torch.uint8)[: pace.copy_bytes])
    del filled_in
    target = torch.empty_like(source)
    a, b = (filled(0, name, (pace.width,) * 2, torch.bfloat16, device) for name in ("a", "b"))
    c = torch.empty_like(a)
    rates = {}
    for name, call, amount in (
        ("copy", lambda: target.copy_(source), 2 * pace.copy_bytes),
        ("matmul", lambda: torch.matmul(a, b, out=c), 2 * pace.width**3),
    ):
        turn = _calls([call], device)
        turn(pace.turn)
        rates[name] = amount / statistics.median(turn(pace.turn))
    return rates


def num_copies(case: Case, device: torch.device) -> int:
    """Copies of the inputs: a round is four times the cache, and they fit in a third of what is free."""
    amount = max(work(case).num_bytes, 1)
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = max(2, min(MAX_COPIES, math.ceil(4 * cache / amount)))
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(wanted, free // 3 // amount))


def _raced(case: Case, names: Sequence[tuple[str, str]], device: torch.device, pace: Pace) -> dict[str, Any]:
    contestants = [Contestant(name=n, variant=v, backend=load(n)) for n, v in names]
    for entrant in contestants:
        entrant.status, entrant.detail = _admitted(entrant.backend, case, device)
    copies: list[Any] = []
    entering = [entrant for entrant in contestants if entrant.status == PASS]
    if entering:
        try:
            fresh = _fitting("the inputs", inputs_of, case, device)
            copies = [_fitting("the inputs", private_copy, fresh) for _ in range(num_copies(case, device))]
            judge = _fitting("the truth", jury, case, fresh)
        except _NoRoom as error:
            for entrant in entering:
                entrant.status, entrant.detail = UNAVAILABLE, str(error)
        else:
            contestants += _contested(entering, fresh, copies, judge, pace, device)
    done = work(case)
    return {
        "label": label(case),
        "case": json.loads(case.to_json()),
        "flop": done.flop,
        "bytes_read": done.bytes_read,
        "bytes_written": done.bytes_written,
        "copies": len(copies),
        "contestants": [_result(entrant) for entrant in contestants],
    }


def _contested(
    entering: Sequence[Contestant],
    fresh: Any,
    copies: Sequence[Any],
    judge: Callable[..., Judged],
    pace: Pace,
    device: torch.device,
) -> list[Contestant]:
    """Whoever is right has taken turns; the control among them is returned."""
    for entrant in entering:
        _enter(entrant, fresh, copies, judge, device)
    fit = [entrant for entrant in entering if entrant.status == PASS]
    if not fit:
        return []
    twice = next((entrant for entrant in fit if entrant.how == "graph"), fit[0])
    control = replace(twice, name=twice.name + CONTROL, seconds=[], clocks=[])
    with _answered_by(control):
        _ready(control, _runs(control, copies), device)
    _take_turns([*fit, control], pace, device)
    for entrant in [*fit, control]:
        _judge_again(entrant, judge)
    return [control]


@contextmanager
def _answered_by(entrant: Contestant) -> Iterator[None]:
    """Whatever is raised ends this contestant's race alone."""
    try:
        yield
    except _NoRoom as error:
        entrant.status, entrant.detail = UNAVAILABLE, str(error)
    except Exception as error:
        entrant.status, entrant.detail = ERROR, _line(error)


class _NoRoom(Exception):
    """Memory ran out for something that is no contestant's."""


def _fitting(what: str, make: Callable[..., Any], *of: Any) -> Any:
    """Raises: _NoRoom."""
    try:
        return make(*of)
    except Exception as error:
        if not ran_out(error):
            raise
        raise _NoRoom(f"no memory for {what}: {_line(error)}") from None


def _admitted(backend: Backend, case: Case, device: torch.device) -> tuple[str, str]:
    """("pass", "") or the status and the reason for which a backend does not take part."""
    try:
        if reason := missing(backend, device):
            return UNAVAILABLE, reason
        reason = problem(case.problem).why_not(case) or declined(backend, case)
        return (UNSUPPORTED, reason) if reason else (PASS, "")
    except Raised as error:
        return ERROR, str(error)


def _runs(entrant: Contestant, copies: Sequence[Any]) -> list[Run]:
    backend = entrant.backend
    if entrant.variant == PREPARED and backend.prepare is not None:
        return [Run(*backend.prepare(inputs)) for inputs in copies]
    fn = backend.fn if entrant.variant == DEFAULT else backend.variants[entrant.variant]

    def run(inputs: Any) -> Run:
        return Run(lambda: fn(*inputs), lambda output: output)

    return [run(inputs) for inputs in copies]


def _enter(
    entrant: Contestant, fresh: Any, copies: Sequence[Any], judge: Callable[..., Judged], device: torch.device
) -> None:
    """Run, and be judged; whoever is wrong does not start.

    What is written in place is judged in a copy that nobody wrote before. Any other output is judged in
    memory that the run before left full of NaN, where the allocator gives out again what was freed last.
    """
    with _answered_by(entrant):
        own = _fitting("the inputs", private_copy, fresh)
        (first,) = _runs(entrant, [own])
        if not problem(entrant.backend.problem).writes:
            for tensor in first.finish(first.call()):
                tensor.fill_(torch.nan)
        _verdict(entrant, _fitting("the truth", judge, entrant.backend, first.finish(first.call()), own))
        if entrant.status == PASS:
            _ready(entrant, _runs(entrant, copies), device)


def _verdict(entrant: Contestant, judged: Judged) -> None:
    entrant.judged, entrant.status, entrant.detail = judged, judged.status, judged.detail


def _ready(entrant: Contestant, runs: list[Run], device: torch.device) -> None:
    """Give the contestant its turn: a graph where that can be, else plain calls."""
    entrant.how, entrant.why, entrant.output = "calls", "not on a GPU", None
    if device.type == "cuda":
        entrant.why = _why_not_capturable(runs[0])
        if not entrant.why:
            try:
                entrant.turn, entrant.output = _graph(runs, device)
                entrant.how = "graph"
                return
            except Exception as error:
                entrant.why = _line(error)
    entrant.turn = _calls([run.call for run in runs], device)


def _why_not_capturable(run: Run) -> str:
    """The first line of what a wait for the device raises, or nothing."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.call()
    except Exception as error:
        return f"waits for the device: {_line(error)}"
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return ""


def _graph(
    runs: Sequence[Run], device: torch.device
) -> tuple[Callable[[float], list[float]], Callable[[], Any]]:
    """(turn, output of the first copy in the last replay)."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for run in runs:
            run.call()
    torch.cuda.synchronize(device)
    num_calls = len(runs) * math.ceil(CALLS / len(runs))
    graph = torch.cuda.CUDAGraph()
    kept: dict[int, Any] = {}
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            kept[i % len(runs)] = runs[i % len(runs)].call()

    def turn(seconds: float) -> list[float]:
        return [x / num_calls for x in _events(graph.replay, seconds, device)]

    turn(0.0)
    return turn, lambda: runs[0].finish(kept[0])


def _events(call: Callable[[], Any], seconds: float, device: torch.device) -> list[float]:
    """Seconds of each of so many calls as take ``seconds``, enqueued at once; at least two are counted."""

    def timed(count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]

    with torch.cuda.device(device):
        count = max(3, math.ceil(seconds / max(timed(1)[0], 1e-6)))
        samples = timed(count)
    return samples[count // 3 :]


def _calls(calls: Sequence[Callable[[], Any]], device: torch.device) -> Callable[[float], list[float]]:
    """A turn of plain calls, what the host does between them included."""
    if device.type == "cuda":
        turns = itertools.cycle(calls)
        return lambda seconds: _events(lambda: next(turns)(), seconds, device)

    def turn(seconds: float) -> list[float]:
        samples: list[float] = []
        end = time.perf_counter() + seconds
        for call in itertools.cycle(calls):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
            if len(samples) >= 3 and time.perf_counter() >= end:
                return samples[len(samples) // 3 :]
        return samples

    return turn


def _take_turns(contestants: Sequence[Contestant], pace: Pace, device: torch.device) -> None:
    for entrant in _order(contestants, pace.rounds):
        if entrant.status != PASS or entrant.turn is None:
            continue
        with _answered_by(entrant):
            entrant.seconds += entrant.turn(pace.turn)
            entrant.clocks += _clock(device)


def _order(contestants: Sequence[Contestant], rounds: int) -> Iterator[Contestant]:
    """Rounds that are rows of a Williams square: of an even number, nobody follows the same one twice.

    An odd number is made even by a contestant who never comes.
    """
    size = len(contestants) + len(contestants) % 2
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(size)]
    for row in range(rounds):
        places = ((place + row * max(1, size // rounds)) % size for place in zigzag)
        yield from (contestants[place] for place in places if place < len(contestants))


def _clock(device: torch.device) -> list[int]:
    """The multiprocessors' clock in MHz right after a turn, where it can be read."""
    if device.type != "cuda":
        return []
    try:
        return [torch.cuda.clock_rate(device)]
    except Exception:  # the library that knows it is optional, and raises errors of its own
        return []


def _judge_again(entrant: Contestant, judge: Callable[..., Judged]) -> None:
    """What a graph left behind after its last replay; written bytes were judged before they were repeated."""
    if entrant.status != PASS or entrant.output is None or problem(entrant.backend.problem).writes:
        return
    with _answered_by(entrant):
        _verdict(entrant, _fitting("the truth", judge, entrant.backend, entrant.output()))


def _result(entrant: Contestant) -> dict[str, Any]:
    """One line of the record; times only of who is right."""
    result: dict[str, Any] = {
        "backend": entrant.name,
        "variant": entrant.variant,
        "status": entrant.status,
        "detail": entrant.detail,
        "how": entrant.how,
        "why_no_graph": entrant.why,
    }
    if entrant.judged is not None:
        result |= {
            "oracles": list(entrant.judged.oracles),
            "rows_judged": entrant.judged.rows,
            "error_over_bound": entrant.judged.ratio if math.isfinite(entrant.judged.ratio) else None,
        }
    if entrant.status == PASS and entrant.seconds:
        cuts = sorted(entrant.seconds)
        result["us"] = statistics.median(cuts) * 1e6
        result["us_p10"], result["us_p90"] = (
            cuts[min(int(share * len(cuts)), len(cuts) - 1)] * 1e6 for share in (0.1, 0.9)
        )
        result["samples"] = len(cuts)
        if entrant.clocks:
            result["mhz"] = round(statistics.median(entrant.clocks))
    return result


def _line(error: BaseException) -> str:
    """The type and first line of an error."""
    return f"{type(error).__name__}: {first_line(error)}"
