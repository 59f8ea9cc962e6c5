"""What belongs to the whole process is seen when it changes, and put back."""

import random

import pytest
import torch

from mla_ref.backend import Backend
from mla_ref.merge_states import BACKEND
from oracles.mutants import MERGE
from oracles.process_state import ON_GPUS, SETTINGS, kept
from oracles.verdict import FAIL, PASS
from oracles.verify import judge

ACTS = {
    "the default dtype": lambda: torch.set_default_dtype(torch.bfloat16),
    "the default device": lambda: torch.set_default_device("meta"),
    "the gradient mode": lambda: torch.set_grad_enabled(False),
    "whether algorithms are deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "the precision of float32": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "the precision of float32 matmuls on a GPU": lambda: torch.set_float32_matmul_precision("high"),
    "the precision of float32 matmuls on the CPU": lambda: setattr(
        torch.backends.mkldnn.matmul, "fp32_precision", "bf16"
    ),
    "whether products in 16 bits are summed in them": lambda: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "which attention torch may choose": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "autocast on the CPU": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast on a GPU": lambda: torch.set_autocast_enabled("cuda", True),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "whether denormal numbers are flushed": lambda: torch.set_flush_denormal(True),
    "torch's random stream": lambda: torch.manual_seed(5),
    "Python's random stream": random.random,
}


def test_every_setting_has_an_act():
    assert set(ACTS) == set(SETTINGS)


@pytest.mark.parametrize("name", ACTS)
def test_a_change_is_named_and_put_back(name):
    before, changed = {other: setting.read() for other, setting in SETTINGS.items()}, []
    with kept(changed):
        ACTS[name]()
    assert any(line.startswith(name) for line in changed), changed
    assert {other: setting.read() for other, setting in SETTINGS.items()} == before


class GPUs:
    """What torch.cuda tells of GPUs that this machine need not have, before and after somebody uses one."""

    def __init__(self, monkeypatch, in_use):
        self.in_use, self.current, self.queues = in_use, 0, ["first", "first"]
        self.streams = [torch.tensor([n], dtype=torch.uint8) for n in (3, 4)]
        for name in (
            "is_initialized",
            "current_device",
            "current_stream",
            "get_rng_state_all",
            "set_rng_state",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name, write in (
            ("the current GPU", self.set_device),
            ("the GPU's current stream", self.set_stream),
        ):
            monkeypatch.setitem(ON_GPUS, name, ON_GPUS[name]._replace(write=write))

    def is_initialized(self):
        return self.in_use

    def current_device(self):
        assert self.in_use
        return self.current

    def set_device(self, index):
        self.in_use, self.current = True, index

    def current_stream(self):
        assert self.in_use
        return self.queues[self.current]

    def set_stream(self, queue):
        self.queues[self.current] = queue

    def get_rng_state_all(self):
        assert self.in_use
        return [stream.clone() for stream in self.streams]

    def set_rng_state(self, state, index):
        self.streams[index] = state.clone()


def test_what_a_call_does_to_gpus_is_named_and_put_back(monkeypatch):
    gpus, changed = GPUs(monkeypatch, in_use=True), []
    with kept(changed):
        gpus.set_device(1)
        gpus.streams[1] += 1
    assert changed == ["the current GPU: is 1", "a GPU's random stream"]
    assert (gpus.current, [int(stream) for stream in gpus.streams]) == (0, [3, 4])
    with kept(changed):
        gpus.get_rng_state_all()
    assert len(changed) == 2


def test_a_stream_that_a_call_leaves_the_current_one_is_named_and_put_back(monkeypatch):
    gpus, changed = GPUs(monkeypatch, in_use=True), []
    with kept(changed):
        gpus.set_stream("side")
    assert (changed, gpus.queues) == (["the GPU's current stream: is side"], ["first", "first"])


def test_the_first_use_of_a_gpu_is_seen_where_it_changes_which_is_current(monkeypatch):
    gpus, changed = GPUs(monkeypatch, in_use=False), []
    with kept(changed):
        pass
    assert not gpus.in_use
    with kept(changed):
        gpus.set_device(0)
    assert changed == []
    gpus.in_use = False
    with kept(changed):
        gpus.set_device(1)
    assert changed == ["the current GPU: is 1"]
    assert gpus.current == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_random_number_that_a_call_draws_on_a_gpu_is_seen_and_put_back():
    torch.cuda.init()
    before, changed = torch.cuda.get_rng_state_all(), []
    with kept(changed):
        torch.rand(3, device="cuda")
    assert changed == ["a GPU's random stream"]
    assert all(torch.equal(a, b) for a, b in zip(torch.cuda.get_rng_state_all(), before, strict=True))


def test_nothing_is_said_where_nothing_changes():
    changed = []
    with kept(changed):
        torch.ones(3).sum()
    assert changed == []


def test_a_call_that_raises_is_looked_at_too():
    changed = []

    def fall():
        torch.set_default_dtype(torch.float64)
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"), kept(changed):
        fall()
    assert torch.get_default_dtype() == torch.float32
    assert changed == ["the default dtype: is torch.float64"]


def test_what_the_first_call_leaves_behind_is_a_verdict():
    calls = []

    def fn(*args):
        if not calls:
            torch.set_default_dtype(torch.float64)
        calls.append(None)
        return BACKEND.fn(*args)

    verdicts = judge(Backend("left", "merge_states", fn), MERGE, oracles=["value", "process_state"])
    assert [v.status for v in verdicts] == [PASS, FAIL]
    assert "the default dtype: is torch.float64" in verdicts[1].detail
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("where", ["a call", "supports"])
def test_what_the_last_call_or_question_of_all_claims_leaves_behind_is_a_verdict(where):
    """Other claims call with other sizes, and ask about other cases: what they see is decided after them."""
    done = []

    def planted(what):
        done.append(what)
        if what == where and done.count(where) == last:
            torch.set_default_dtype(torch.float64)

    def fn(*args):
        planted("a call")
        return BACKEND.fn(*args)

    def supports(case):
        planted("supports")

    last = 0
    backend, names = (
        Backend("left", "merge_states", fn, supports=supports),
        ["process_state", "merge_algebra"],
    )
    assert [(v.oracle, v.status) for v in judge(backend, MERGE, oracles=names)] == [
        ("merge_algebra", PASS),
        ("process_state", PASS),
    ]
    last = done.count(where)
    assert last > 2
    done.clear()
    verdicts = judge(backend, MERGE, oracles=names)
    assert [(v.oracle, v.status) for v in verdicts] == [("merge_algebra", PASS), ("process_state", FAIL)]
    assert "the default dtype: is torch.float64" in verdicts[1].detail
    assert verdicts[1].detail.endswith(", in supports") == (where == "supports")


def test_outputs_that_share_memory_do_not_hide_a_second_run():
    """Two runs in one buffer would always be equal, were they not copied."""
    buffers, calls = {}, []

    def fn(*args):
        output, calls[:] = BACKEND.fn(*args), [*calls, None]
        buffer = buffers.setdefault(output.out.shape, output)
        for old, new in zip(buffer, output, strict=True):
            old.copy_(new * (len(calls) % 2))
        return buffer

    (verdict,) = judge(Backend("shared", "merge_states", fn), MERGE, oracles=["repeat"])
    assert verdict.status == FAIL


def test_an_output_in_a_graph_is_seen_where_gradients_are_off():
    def fn(*args):
        output = BACKEND.fn(*args)
        return output._replace(out=output.out.requires_grad_())

    with torch.no_grad():
        (verdict,) = judge(Backend("graph", "merge_states", fn), MERGE, oracles=["contract"])
    assert verdict.status == FAIL
    assert "out: asks for gradients" in verdict.detail
