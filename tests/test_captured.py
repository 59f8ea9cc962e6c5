"""What is prepared and what a graph holds: with a stand-in for graphs, which are a GPU's."""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch

from mla_ref.backend import Prepared
from mla_ref.problem import problem
from oracles.command import main
from oracles.engine_mutants import prepared_mutants
from oracles.mutants import LATENT, Mutant, mutants, right
from oracles.rules import captured
from oracles.rules.captured import Graph, _tensors
from oracles.verdict import ERROR, FAIL, PASS
from oracles.verify import backends, judge


def stand_in(replays=True):
    """A graph that makes the call again, and leaves what it returns where the first call did."""

    def graph_of(call, device):
        result = call()

        def replay():
            if replays:
                for old, new in zip(_tensors(result), _tensors(call()), strict=True):
                    old.copy_(new)

        return Graph(replay, result)

    return graph_of


def divided(backend):
    """The backend with everything left to be done in each run."""
    prepare = lambda inputs: Prepared(lambda: backend.fn(*inputs), lambda output: output)  # noqa: E731
    return replace(backend, variants={}, prepare=prepare)


def verdict(backend, case=LATENT):
    [found] = judge(backend, case, oracles=["captured"])
    return found


def wrong(name):
    return next(m for m in mutants() if (m.name, m.case.problem) == (name, "latent_attention")).backend


@pytest.mark.parametrize("of", sorted(captured.ORACLE.problems))
def test_what_is_right_holds(of, monkeypatch):
    case = next(mutant.case for mutant in mutants() if mutant.case.problem == of)
    backend = next(b for b in backends().values() if b.problem == of and b.name.startswith("mla_ref."))
    monkeypatch.setattr(captured, "graph_of", stand_in())
    found = verdict(divided(backend), case)
    assert (found.status, found.detail) == (PASS, "")
    assert found.num_checked > 0


def test_why_there_is_no_graph_is_told_beside_what_is_prepared(monkeypatch):
    run, numerics = right(LATENT)
    backend = divided(Mutant("none", LATENT, run, numerics).backend)
    for seed, told in (
        (1, "what is prepared: it waits; it fails"),
        (2, "what is prepared: it fails; it waits"),
    ):
        reasons = iter(["it fails", "it waits"])
        monkeypatch.setattr(captured, "graph_of", lambda call, device, reasons=reasons: next(reasons))
        found = verdict(backend, replace(LATENT, seed=seed))
        assert (found.status, found.num_checked > 0) == (PASS, True)
        assert found.detail == told


@pytest.mark.parametrize(("seed", "told"), [(2, "replayed from a graph"), (1, "prepared, and replayed from")])
def test_of_a_plan_and_a_call_either_is_captured_first(seed, told, monkeypatch):
    """Where the one that fails costs the process its graphs, the other is judged in half of all cases."""
    run, numerics = right(LATENT)
    asked = []

    def graph_of(call, device):
        asked.append(call)
        return "it fails" if len(asked) == 1 else stand_in(replays=False)(call, device)

    monkeypatch.setattr(captured, "graph_of", graph_of)
    backend = divided(Mutant("none", LATENT, run, numerics).backend)
    found = verdict(backend, replace(LATENT, seed=seed))
    assert found.status == FAIL
    assert found.detail.startswith(told)


def test_memory_is_fouled_before_every_part_of_a_plan(monkeypatch):
    """A row that a run does not store would else show what the call before left there, which was right."""
    order = []
    run, numerics = right(LATENT)

    def told(what, result):
        order.append(what)
        return result

    def prepare(inputs):
        part = Prepared(lambda: told("run", run(inputs)), lambda output: told("finish", output))
        return told("prepare", part)

    monkeypatch.setattr(captured, "foul", lambda outputs, device: order.append(sorted(outputs)))
    verdict(replace(Mutant("none", LATENT, run, numerics).backend, prepare=prepare))
    foul = ["lse", "out"]
    assert order == [foul, "prepare", *[foul, "run", foul, "finish"] * captured.RUNS]


def test_without_a_graph_and_a_plan_nothing_is_claimed():
    found = verdict(wrong("key_dropped"))
    assert found.status == PASS
    assert found.detail == "the backend prepares nothing; there are graphs on a GPU alone"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("prepared_for_one_run", "prepared, run 2: out: "),
        ("prepared_without_the_last_key", "prepared, run 1: "),
    ],
)
def test_a_plan_that_is_wrong_is_told_from_a_call_that_is(name, told):
    mutant = next(mutant for mutant in prepared_mutants(LATENT) if mutant.name == name)
    found = verdict(mutant.backend)
    assert (found.status, found.detail[: len(told)]) == (FAIL, told)
    [value] = judge(mutant.backend, LATENT, oracles=["value"])
    assert value.status == PASS


def test_what_a_graph_does_not_see_is_nan_when_it_is_replayed(monkeypatch):
    monkeypatch.setattr(captured, "graph_of", stand_in(replays=False))
    run, numerics = right(LATENT)
    found = verdict(Mutant("none", LATENT, run, numerics).backend)
    assert found.status == FAIL
    assert found.detail.startswith("replayed from a graph, over other values: ")


def test_a_value_that_is_baked_in_is_that_of_the_step_before(monkeypatch):
    monkeypatch.setattr(captured, "graph_of", stand_in())
    assert verdict(wrong("cache_decoded_once")).detail.startswith(
        "replayed from a graph, over other values: "
    )


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda inputs: 1 / 0, "prepare raised ZeroDivisionError: division by zero"),
        (
            lambda inputs: Prepared(lambda: 1 / 0, lambda output: output),
            "what is prepared raised ZeroDivisionError",
        ),
    ],
)
def test_what_a_plan_raises_is_the_backends(prepare, told):
    found = verdict(replace(wrong("key_dropped"), prepare=prepare))
    assert found.status == ERROR
    assert found.detail.startswith(told)


def test_a_run_that_leaves_what_the_run_before_wrote_is_told():
    run, numerics = right(LATENT)

    def prepare(inputs):
        output, runs = run(inputs), itertools.count()
        kept = [x.clone() for x in output]

        def once():
            if not next(runs):
                for new, old in zip(output, kept, strict=True):
                    new.copy_(old)
            return output

        return Prepared(once, lambda output: output)

    found = verdict(replace(Mutant("none", LATENT, run, numerics).backend, prepare=prepare))
    assert (found.status, found.detail[:21]) == (FAIL, "prepared, run 2: out:")


def test_an_input_that_is_returned_stays_as_it_is():
    inputs = problem("latent_attention").materialize(LATENT, torch.device("cpu"))
    with torch.inference_mode():
        made = torch.zeros(3)
    captured._clear((inputs.ql_nope[1:], [made]), inputs)
    assert bool(made.isnan().all())
    assert not bool(inputs.ql_nope.isnan().any())


@pytest.fixture
def device(monkeypatch):
    """A GPU's streams without a GPU: what was called of them, and which stream is the current one."""
    streams, modes = ["first"], []

    class Capture:
        """As torch's: whether the capture fails or not, its end is what puts the stream back."""

        def __init__(self, graph, stream):
            self.graph = graph

        def __enter__(self):
            self.before = streams[-1]
            streams.append("capture")

        def __exit__(self, kind, *_):
            if kind is not None:
                raise RuntimeError("capture failed") from None
            streams.append(self.before)

    @contextlib.contextmanager
    def stream_of(stream):
        before = streams[-1]
        streams.append(stream)
        try:
            yield
        finally:
            streams.append(before)

    fakes = {
        "device": lambda _: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "Stream": lambda: "side",
        "stream": stream_of,
        "current_stream": lambda: streams[-1],
        "CUDAGraph": object,
        "graph": Capture,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": modes.append,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(captured, "_damage", lambda *_: "")
    monkeypatch.setattr(captured, "BEYOND_REPAIR", [])
    return streams, modes


def test_after_a_capture_that_spoilt_the_process_there_are_no_more(device, monkeypatch):
    monkeypatch.setattr(captured, "_damage", lambda *_: "captures_underway.empty()")
    made = iter(["warm", "waits not", RuntimeError("no")])

    def call():
        if isinstance(found := next(made), BaseException):
            raise found
        return found

    assert captured.graph_of(call, "cuda") == "it cannot be captured: capture failed"
    [damage] = captured.BEYOND_REPAIR
    assert damage == "a capture that failed has left behind: captures_underway.empty()"
    assert captured.graph_of(call, "cuda") == f"in this process there are no more graphs: {damage}"


@pytest.mark.parametrize("error", [RuntimeError, LookupError, SystemExit])
def test_what_a_call_raises_that_a_graph_does_not_take_is_no_error_of_the_judges(error, device):
    streams, modes = device
    made = iter(["warm", "waits not", error("no\nmore")])

    def call():
        if isinstance(found := next(made), BaseException):
            raise found
        return found

    assert captured.graph_of(call, "cuda") == "it cannot be captured: capture failed"
    assert (streams[-1], modes) == ("first", ["error", 0])


@pytest.mark.parametrize("error", [RuntimeError, LookupError])
def test_a_call_that_waits_has_no_graph(error, device):
    made = iter(["warm", error()])

    def call():
        if isinstance(found := next(made), BaseException):
            raise found
        return found

    told = f"no graph holds a call that waits for the device: {error.__name__}"
    assert captured.graph_of(call, "cuda") == told
    assert device[1] == ["error", 0]


@pytest.mark.parametrize("where", ["prepare", "run", "finish", "captured"])
def test_what_a_plan_leaves_behind_in_the_process_is_put_back(where, monkeypatch):
    found = set()
    run, numerics = right(LATENT)

    def disturbing(here, result):
        if here == where:
            torch.set_default_dtype(torch.float64)
        return result

    def prepare(inputs):
        output = run(inputs)
        return disturbing(
            "prepare",
            Prepared(lambda: disturbing("run", output), lambda result: disturbing("finish", result)),
        )

    graphs = stand_in(replays=False)
    monkeypatch.setattr(captured, "_clear", lambda *_: found.add(torch.get_default_dtype()))
    monkeypatch.setattr(captured, "graph_of", lambda *given: disturbing("captured", graphs(*given)))
    try:
        verdict(replace(Mutant("none", LATENT, run, numerics).backend, prepare=prepare))
        found.add(torch.get_default_dtype())
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == {torch.float32}


def test_what_is_no_output_is_told():
    prepare = lambda inputs: Prepared(lambda: inputs.ql_nope, lambda output: output)  # noqa: E731
    found = verdict(replace(wrong("key_dropped"), prepare=prepare))
    assert (found.status, found.detail) == (FAIL, "prepared, run 1: output is no tuple of (out, lse)")


def test_a_variant_has_no_plan_of_the_backends_own_function():
    backend = wrong("prepared_without_the_last_key")
    found = judge(replace(backend, variants={"again": backend.fn}), LATENT, oracles=["captured"])
    assert [(v.variant, v.status) for v in found] == [("default", FAIL), ("again", PASS)]


def test_a_run_in_which_nothing_is_claimed_is_none_that_held(capsys):
    words = ["run", "--backend", "mla_ref.rope", "--preset", "a.x-k2", "--oracle", "captured"]
    assert main([*words, "--jobs", "1", "--no-isolate"]) == 3
    out = capsys.readouterr().out
    why = "the backend prepares nothing; there are graphs on a GPU alone"
    assert f"no claim says anything of these cases: {why}" in out
    assert main([*words, "--jobs", "1", "--no-isolate", "--require", "mla_ref.rope"]) == 1


@pytest.mark.parametrize("oracle", ["captured", "repeat"])
def test_a_run_that_was_wrong_stays_so_whatever_a_later_one_does(oracle):
    run, numerics = right(LATENT)
    calls = itertools.count()

    def wrong_then_raising(inputs):
        number = next(calls)
        if number > 2:
            raise LookupError("later")
        output = run(inputs)
        return output._replace(out=output.out * (1 + number))

    backend = Mutant("none", LATENT, wrong_then_raising, numerics).backend
    if oracle == "captured":
        fn = Mutant("none", LATENT, run, numerics).backend.fn
        prepare = lambda inputs: Prepared(lambda: wrong_then_raising(inputs), lambda output: output)  # noqa: E731
        backend = replace(backend, fn=fn, prepare=prepare)
        assert [next(calls), next(calls)] == [0, 1]
    [found] = judge(backend, LATENT, oracles=[oracle])
    assert (found.status, "out: " in found.detail) == (FAIL, True), found.detail
