"""Planned ahead, and replayed.

Claim: what is left of a call once it is prepared gives the output of that call, each time that it runs; and a
    call that a CUDA graph holds gives, when the graph is replayed, the output of what is in memory by then.
Why: an engine plans once a step, repeats the rest in every layer, and replays steps of decode as graphs. A
    plan that its first run uses up, a workspace that is filled while the plan is made, a length that is baked
    in, a kernel on a stream that the graph does not see: each is right whenever it is called.
Exact or bounded: as the call itself on these values, bit for bit, or within the bounds of the truth. Graphs
    are a GPU's, and of calls that do not wait for it; what was returned is NaN before anything runs again.
Kills: plans that serve one run, plans of other lengths than the call's.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from oracles.compare import worst_of
from oracles.exits import first_line
from oracles.oracle import Oracle, Raised, Trial, foul, named_tensors, private_copy, storage_bytes
from oracles.probes import ATTENTION, made, nothing
from oracles.process_state import BEYOND_REPAIR, kept
from oracles.rejudge import rejudged
from oracles.rules.reused_memory import another, overwrite
from oracles.verdict import Finding

RUNS = 2
NO_GPU = "there are graphs on a GPU alone"


class Graph(NamedTuple):
    """A captured call: ``replay`` does what it does again, and leaves it in ``result``."""

    replay: Callable[[], Any]
    result: Any


def check(trial: Trial) -> Finding:
    """Run what is prepared, and replay that and the call itself from graphs, where there are any."""
    memory, findings = private_copy(trial.inputs), []
    prepared = _prepared(trial, memory)
    if prepared is not None:
        findings += _runs(trial, prepared, memory)
        if not findings[-1].ok:
            return findings[-1]
    graphs = [partial(_of_a_plan, trial, prepared, memory), partial(_of_the_call, trial)]
    missing = ["", ""]
    # A capture that fails may be the last of its process: each of the two is the first in half of all cases.
    for which in (0, 1) if trial.case.seed % 2 == 0 else (1, 0):
        finding = graphs[which]()
        if isinstance(finding, str):
            missing[which] = finding
        elif not finding.ok:  # known, whatever becomes of the other
            return finding
        else:
            findings.append(finding)
    why_not = "; ".join(dict.fromkeys(filter(None, missing)))
    if not findings:
        return nothing(why_not)
    return replace(worst_of(findings), detail=why_not)


def _prepared(trial: Trial, memory: Any) -> Any:
    """What is left of a call once it is prepared; None if nothing is ever prepared."""
    prepare = trial.backend.prepare
    return None if prepare is None else _theirs(trial, "prepare", lambda: prepare(memory))


def _runs(trial: Trial, prepared: Any, memory: Any) -> list[Finding]:
    """What the runs of a plan show, up to one that is wrong."""
    findings: list[Finding] = []
    for number in range(RUNS):
        result = _theirs(trial, "what is prepared", prepared.run)
        output = _theirs(trial, "finish", partial(prepared.finish, result))
        findings.append(_judged(trial, trial.inputs, output, memory, f"prepared, run {number + 1}"))
        if not findings[-1].ok:
            break
        _clear(result, memory)
    return findings


def _of_a_plan(trial: Trial, prepared: Any, memory: Any) -> Finding | str:
    """What a graph of a plan's run shows, or why there is none."""
    if prepared is None:
        return "the backend prepares nothing"
    graph = _graph(trial, prepared.run)
    if not isinstance(graph, Graph):
        return graph if graph == NO_GPU else f"what is prepared: {graph}"
    _clear(graph.result, memory)
    _blamed("a replay", graph.replay)
    output = _theirs(trial, "finish", lambda: prepared.finish(graph.result))
    return _judged(trial, trial.inputs, output, memory, "prepared, and replayed from a graph")


def _of_the_call(trial: Trial) -> Finding | str:
    """The call itself, over the memory in which it was captured, with the values of another seed."""
    memory = private_copy(trial.inputs)
    graph = _graph(trial, lambda: trial.backend.fn(*memory))
    if not isinstance(graph, Graph):
        return graph
    other = made(another, trial.case, trial.device)
    overwrite(memory, other)
    _clear(graph.result, memory)
    _blamed("a replay", graph.replay)
    return _judged(trial, other, graph.result, memory, "replayed from a graph, over other values")


def _judged(trial: Trial, inputs: Any, output: Any, memory: Any, what: str) -> Finding:
    fields = tuple(trial.problem.output_shapes)
    if not isinstance(output, tuple) or len(output) != len(fields):
        return Finding(ok=False, detail=f"{what}: output is no tuple of ({', '.join(fields)})")
    return rejudged(trial, inputs, trial.problem.output(*output), memory, trial.run(inputs), what)


def _theirs(trial: Trial, what: str, do: Callable[[], Any]) -> Any:
    """What a part of a prepared call returns; the process is afterwards as it was. Raises: Raised."""
    foul(trial.expected(), trial.device)
    with kept(trial.disturbed):
        return _blamed(what, lambda: _done(do(), trial.device))


def _done(result: Any, device: str) -> Any:
    """The result, once the device has computed it: what goes wrong there is told here, too."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return result


def _graph(trial: Trial, call: Callable[[], Any]) -> Graph | str:
    """As ``graph_of``; the process is afterwards as it was."""
    with kept(trial.disturbed):
        return graph_of(call, trial.device)


def _blamed(what: str, do: Callable[[], Any]) -> Any:
    """What ``do`` returns. Raises: Raised, naming whose error it is."""
    try:
        return do()
    except (Exception, SystemExit) as error:
        raise Raised(f"{what} raised {type(error).__name__}: {first_line(error)}") from error


def graph_of(call: Callable[[], Any], device: str) -> Graph | str:
    """A CUDA graph of a call that was made before, or why there is none."""
    if torch.device(device).type != "cuda":
        return NO_GPU
    if BEYOND_REPAIR:
        return f"in this process there are no more graphs: {BEYOND_REPAIR[0]}"
    with torch.cuda.device(torch.device(device)):
        torch.cuda.synchronize()  # inputs are made on another stream
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            _blamed("a call", call)  # what is compiled or allocated once is there from now on
        torch.cuda.synchronize()
        if reason := _why_it_waits(call):
            return f"no graph holds a call that waits for the device: {reason}"
        graph, failed = torch.cuda.CUDAGraph(), ""
        try:
            # A capture that fails leaves its stream the current one.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=stream):
                result = call()
        except (Exception, SystemExit) as error:
            failed = f"it cannot be captured: {first_line(error) or type(error).__name__}"
        if failed:
            if damage := _damage(graph, stream):
                BEYOND_REPAIR.append(f"a capture that failed has left behind: {damage}")
            return failed

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return Graph(replay, result)


def _damage(graph: Any, stream: Any) -> str:
    """What goes wrong on the current GPU since a capture has failed; empty if nothing does, any more.

    A call that leaves another stream the current one leaves the capture going on. Where the driver says that
    it has failed, torch does not tell its generator that it is over, nor in some versions its allocator: no
    number is drawn, no memory is given back, and no further capture begins.
    """
    try:
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                graph.capture_end()
        device = torch.cuda.current_device()
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
        with torch.random.fork_rng([device]):
            torch.empty(1, device="cuda").bernoulli_()  # draws a number
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    except Exception as error:
        return first_line(error) or type(error).__name__
    return ""


def _why_it_waits(call: Callable[[], Any]) -> str:
    """What a call that waits for the device says of it; empty if it does not wait."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except (Exception, SystemExit) as error:
            return first_line(error) or type(error).__name__
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return ""


def _clear(result: Any, memory: Any) -> None:
    """NaN in all floating-point numbers of a result, but for an input that is returned as it is."""
    given = {storage_bytes(x).data_ptr() for x in named_tensors(memory).values()}
    with torch.inference_mode():  # in which the result may have been made
        for tensor in _tensors(result):
            if tensor.is_floating_point() and storage_bytes(tensor).data_ptr() not in given:
                tensor.fill_(torch.nan)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _tensors(part)


ORACLE = Oracle(
    name="captured",
    check=check,
    problems=(*ATTENTION, "merge_states", "cache_gather", "rope"),
    kills=("prepared_for_one_run", "prepared_without_the_last_key"),
    on_device=True,
)
