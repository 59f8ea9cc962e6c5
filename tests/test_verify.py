"""What the judge says when nothing ran, when something broke, and what it shares between variants."""

import gc
import sys
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from mla_ref.backend import Backend, missing
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput, problem
from oracles import bounds, verify
from oracles.mutants import LATENT, LAYER, PAGED, WRITE, attend
from oracles.oracle import private_copy, rules, storage_bytes
from oracles.verdict import ERROR, FAIL, PASS, UNAVAILABLE, UNSUPPORTED
from oracles.verify import BACKEND_PACKAGES, NOTHING, backends, find_backend, judge, oracles_for

CASE = replace(LATENT, seed=7)


def backend(fn, **fields) -> Backend:
    return Backend("tests.backend", "latent_attention", fn, **fields)


def right(*args):
    return attend(problem("latent_attention").inputs(*args), {})


def test_backends_are_those_of_the_packages_by_their_own_names():
    assert set(backends()) >= {"mla_ref.latent", "mla_ref.naive"}
    assert {name.split(".")[0] for name in backends()} <= set(BACKEND_PACKAGES)
    assert find_backend("mla_ref.latent") is backends()["mla_ref.latent"]


def test_a_backend_is_asked_on_the_gpu_that_is_meant(monkeypatch):
    gpus, current = [(9, 0), (8, 0)], [0]

    @contextmanager
    def on(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "device", on)
    asked = backend(right, requires=lambda device: f"{device}: {gpus[current[0]]}")
    assert missing(asked, "cuda:1") == "cuda: (8, 0)"
    assert missing(asked, torch.device("cuda", 0)) == missing(asked, "cuda") == "cuda: (9, 0)"
    assert missing(asked, "cuda:2") == "cuda: (9, 0)"
    assert missing(asked, "cpu") == "cpu: (9, 0)"
    assert {verdict.detail for verdict in judge(asked, CASE, device="cuda:1")} == {"cuda: (8, 0)"}


def test_a_strangers_backend_is_found_by_module_and_attribute(monkeypatch):
    module = ModuleType("stranger")
    module.BACKEND, module.OTHER = backend(right), backend(right)
    monkeypatch.setitem(sys.modules, "stranger", module)
    assert find_backend("stranger") is module.BACKEND
    assert find_backend("stranger:OTHER") is module.OTHER


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_module:X", "backend 'no_such_module:X': cannot import 'no_such_module': No module named"),
        ("mla_ref.latent:X", "backend 'mla_ref.latent:X': mla_ref.latent has no X"),
        ("mla_ref.latent:torch", "backend 'mla_ref.latent:torch': torch is module, not a Backend"),
        ("mla_ref.config", "backend 'mla_ref.config': mla_ref.config has no BACKEND"),
        ("", "backend '': names no module"),
    ],
)
def test_a_backend_that_is_not_there(spec, message):
    with pytest.raises(ValueError, match="^" + message) as raised:
        find_backend(spec)
    assert "\n" not in str(raised.value)


def test_a_strangers_backend_of_no_problem_is_refused_before_anything_runs(monkeypatch):
    module = ModuleType("stranger")
    module.BACKEND = replace(backend(right), problem="latent")
    monkeypatch.setitem(sys.modules, "stranger", module)
    with pytest.raises(ValueError, match=r"^backend 'stranger': problem 'latent' is not one of attention, "):
        find_backend("stranger")


def test_where_nothing_can_be_said_of_the_bad_elements_nothing_is():
    def off(*args):
        out, lse = right(*args)
        return AttentionOutput(out, 4 * lse + 1)

    one = replace(CASE, q_lens=(1,), kv_lens=(1,), config=replace(CASE.config, num_heads=1))
    (verdict,) = judge(backend(off), one, oracles=["lse"])
    assert (verdict.status, verdict.pattern.text()) == (FAIL, "")
    assert verdict.detail.endswith("× the bound)")


def test_a_wrong_question_is_refused():
    with pytest.raises(ValueError, match="implements latent_attention, but the case is of attention"):
        judge(backend(right), replace(CASE, problem="attention"))
    with pytest.raises(
        ValueError, match=r"oracle 'stored' does not judge latent_attention; these do: .*value"
    ):
        judge(backend(right), CASE, oracles=["value", "stored"])


def test_a_right_backend_holds_every_claim_and_says_how_close_it_came():
    verdicts = judge(backend(right, variants={"again": right}), CASE)
    names = [oracle.name for oracle in oracles_for(problem("latent_attention"))]
    assert [(v.variant, v.oracle) for v in verdicts] == [(v, o) for v in ("default", "again") for o in names]
    assert {v.status for v in verdicts} == {PASS}
    value = next(v for v in verdicts if v.oracle == "value")
    assert value.worst is not None
    assert 0.0 < value.worst.ratio <= 1.0
    assert value.num_checked == value.case.config.num_heads * sum(CASE.q_lens) * CASE.config.kv_lora_rank
    assert value.seconds > 0.0
    assert all(v.case == CASE and v.device == "cpu" and v.backend == "tests.backend" for v in verdicts)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"requires": lambda device: f"no luck on {device}"}, UNAVAILABLE),
        ({"supports": lambda case: f"no luck on {case.problem}"}, UNSUPPORTED),
    ],
)
def test_what_did_not_run_says_why(fields, status):
    def never(*args):
        raise AssertionError

    verdicts = judge(backend(never, variants={"other": never}, **fields), CASE)
    assert {v.status for v in verdicts} == {status}
    assert len(verdicts) == 2 * len(oracles_for(problem("latent_attention")))
    assert all(v.detail.startswith("no luck on ") and v.worst is None for v in verdicts)


def test_a_case_that_cannot_be_made_is_unsupported():
    verdicts = judge(
        backend(right), replace(CASE, cache_format="fp8_ds_mla", config=replace(CASE.config, kv_lora_rank=96))
    )
    assert {(v.status, v.detail) for v in verdicts} == {
        (UNSUPPORTED, "fp8_ds_mla needs c to be a multiple of 128, got 96")
    }


def test_an_exception_is_a_verdict_of_one_line():
    def raises(*args):
        raise RuntimeError("first line\nsecond line")

    verdicts = judge(backend(raises), CASE)
    line = raises.__code__.co_firstlineno + 1
    place = f"in raises, test_verify.py:{line}"
    assert {(v.status, v.detail) for v in verdicts} == {(ERROR, f"RuntimeError: first line, {place}")}


def test_an_exception_from_below_is_told_with_the_last_line_of_the_implementations_own():
    def raises(*args):
        return torch.nn.functional.pad(args[0], "wide")

    [verdict] = judge(backend(raises), CASE, oracles=["value"])
    assert verdict.status == ERROR
    assert verdict.detail.endswith(f", in raises, test_verify.py:{raises.__code__.co_firstlineno + 1}")


def test_who_does_not_take_the_inputs_is_told_what_they_are():
    def other(q, kv_cache):
        raise AssertionError("never called")

    [verdict] = judge(backend(other), CASE, oracles=["value"])
    fields = ", ".join(problem(CASE.problem).inputs._fields)
    assert verdict.status == ERROR
    assert "takes 2 positional arguments" in verdict.detail
    assert verdict.detail.endswith(f"; it is called with {fields}")


def test_an_exception_on_changed_inputs_is_a_verdict_of_that_oracle_alone():
    calls = []

    def raises_later(*args):
        calls.append(args)
        if len(calls) > 1:
            raise RuntimeError("again")
        return right(*args)

    statuses = {
        v.oracle: v.status for v in judge(backend(raises_later), CASE, oracles=["value", "poison", "lse"])
    }
    assert statuses == {"value": PASS, "poison": ERROR, "lse": PASS}


def test_a_defect_of_the_judge_is_no_verdict(monkeypatch):
    def broken(inputs, numerics):
        raise ZeroDivisionError

    monkeypatch.setitem(bounds.ADMISSIBLE, "latent_attention", broken)
    with pytest.raises(ZeroDivisionError):
        judge(backend(right), replace(CASE, seed=8))


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda o: None, "output: is NoneType, must be (out, lse)"),
        (lambda o: (o.out,), "output: is a tuple of 1, must be (out, lse)"),
        (lambda o: AttentionOutput(o.out.float(), o.lse), "out: dtype is float32, must be bfloat16"),
        (lambda o: AttentionOutput(o.out, o.lse[:1]), "lse: shape is [1, 4], must be [6, 4]"),
        (lambda o: AttentionOutput(o.out, None), "lse: is NoneType, must be a tensor"),
    ],
)
def test_a_malformed_output_fails_every_claim(change, detail):
    verdicts = judge(backend(lambda *args: change(right(*args))), CASE)
    assert {(v.status, v.detail) for v in verdicts} == {(FAIL, detail)}


def test_a_plain_tuple_is_an_output():
    assert {v.status for v in judge(backend(lambda *args: tuple(right(*args))), CASE)} == {PASS}


def test_one_call_serves_every_oracle_and_one_truth_every_variant(monkeypatch):
    calls, truths = [], []

    def counted(*args):
        calls.append(args)
        return right(*args)

    def truth(inputs, numerics):
        truths.append(numerics)
        return bounds.attention(inputs, numerics)

    monkeypatch.setitem(bounds.ADMISSIBLE, "latent_attention", truth)
    case = replace(CASE, seed=9)
    judge(
        backend(counted, variants={"again": counted}),
        case,
        oracles=["value", "lse", "empty_rows", "contract"],
    )
    assert (len(calls), len(truths)) == (2, 1)
    judge(backend(counted, numerics=Numerics(p="bfloat16")), case, oracles=["value"])
    assert truths == [Numerics(), Numerics(p="bfloat16")]


def test_an_implementation_cannot_change_what_it_is_judged_by():
    def vandal(*args):
        output = right(*args)
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                storage_bytes(tensor).fill_(1)
        return output

    oracles = ("inputs_unchanged", "value", "lse", "empty_rows", "poison", "head_order")
    trespasser = backend(vandal, variants={"again": right})
    statuses = {(v.variant, v.oracle): v.status for v in judge(trespasser, CASE, oracles=oracles)}
    assert statuses.pop(("default", "inputs_unchanged")) == FAIL
    assert set(statuses.values()) == {PASS}
    assert {v.status for v in judge(backend(right), CASE)} == {PASS}


def test_a_private_copy_has_the_layout_of_the_original():
    case = replace(PAGED, layout=replace(PAGED.layout, block_gap=64, offset=128))
    inputs = problem("paged_attention").materialize(case, torch.device("cpu"))
    copy = private_copy(inputs)
    for name in ("key_cache", "value_cache", "query"):
        mine, other = getattr(inputs, name), getattr(copy, name)
        assert (mine.stride(), mine.storage_offset()) == (other.stride(), other.storage_offset())
        assert torch.equal(storage_bytes(mine), storage_bytes(other))
        assert mine.data_ptr() != other.data_ptr()
    assert copy.key_cache.untyped_storage().data_ptr() == copy.value_cache.untyped_storage().data_ptr()


def test_memory_is_fouled_before_every_call(monkeypatch):
    """What an allocator hands out next should hold NaN and no earlier, right output."""
    order = []

    def recorded(*args):
        order.append("call")
        return right(*args)

    def fouled(outputs, device):
        order.append(sorted(outputs))

    monkeypatch.setattr(verify, "foul", fouled)
    judge(backend(recorded), CASE, oracles=["value", "head_order"])
    assert order == [["lse", "out"], "call"] * 2


def test_a_later_output_that_is_malformed_fails():
    calls = []

    def gives_up(*args):
        calls.append(args)
        return right(*args) if len(calls) == 1 else None

    (verdict,) = judge(backend(gives_up), CASE, oracles=["head_order"])
    assert (verdict.status, verdict.detail) == (FAIL, "output: is NoneType, must be (out, lse)")


@pytest.mark.parametrize("case", [WRITE, LAYER], ids=lambda case: case.problem)
def test_what_is_written_in_place_is_judged_as_it_was_left(case):
    reference = backends()[f"mla_ref.{case.problem}"]
    assert {v.status for v in judge(reference, case)} == {PASS}
    inputs = problem(case.problem).materialize(case, torch.device("cpu"))
    before = storage_bytes(inputs.kv_cache).clone()
    judge(reference, case)
    assert torch.equal(storage_bytes(verify.materialized(case, "cpu").kv_cache), before)


def test_what_held_of_nothing_is_no_claim():
    """Of a batch without a token there are no elements to be right or wrong; that it was taken is one."""
    nobody = replace(LATENT, q_lens=(0, 0), kv_lens=(11, 6))
    verdicts = judge(find_backend("mla_ref.latent"), nobody)
    assert {v.status for v in verdicts} == {PASS}
    assert {v.oracle: v.detail for v in verdicts}["value"] == NOTHING
    for v in verdicts:
        assert v.claims == (v.num_checked > 0)
        assert v.claims or v.detail
    assert "contract" in {v.oracle for v in verdicts if v.claims}


def test_every_rule_says_what_it_claims():
    for name in rules():
        text = sys.modules[f"oracles.rules.{name}"].__doc__
        assert [
            label for label in ("Claim:", "Why:", "Exact or bounded:", "Kills:") if label not in text
        ] == []


@pytest.mark.parametrize("judge_on", [None, "cpu"])
def test_a_case_that_is_judged_leaves_no_memory_to_the_collector(judge_on):
    """Cycles of objects would keep gigabytes of tensors: the collector counts objects, not their bytes."""
    given, device = [], "cpu" if judge_on is None else "cpu:0"

    def noted(*args):
        given.extend(weakref.ref(x) for x in args if isinstance(x, torch.Tensor))
        return right(*args)

    names = ["value", "inputs_unchanged", "poison", "reused_memory"]
    gc.collect()
    gc.disable()
    try:
        found = judge(backend(noted), CASE, device=device, oracles=names, judge_on=judge_on)
        assert {verdict.status for verdict in found} == {PASS}
        assert given
        assert all(tensor() is None for tensor in given)
    finally:
        gc.enable()


def test_tensors_that_share_memory_share_its_copy():
    inputs = problem("latent_attention").materialize(CASE, torch.device("cpu"))
    inputs = inputs._replace(q_pe=inputs.ql_nope[..., :2])
    other = private_copy(inputs)
    assert storage_bytes(other.q_pe).data_ptr() == storage_bytes(other.ql_nope).data_ptr()
    assert storage_bytes(other.q_pe).data_ptr() != storage_bytes(inputs.q_pe).data_ptr()


@pytest.mark.parametrize(
    ("spoiled", "told"),
    [
        (lambda x: x[:-1], "shape is "),
        (lambda x: x.flatten(), "shape is "),
        (lambda x: x[:0], "shape is "),
        (lambda x: x.to_sparse(), "layout is sparse_coo, must be strided"),
        (lambda x: x.to("meta"), "is on meta, must be on cpu"),
    ],
)
@pytest.mark.parametrize(
    "oracle", ["batch_mates", "dependency", "shift", "union", "value_scale", "reused_memory"]
)
def test_what_a_later_call_returns_is_malformed_for_every_rule(oracle, spoiled, told):
    """It is no error of the judge's, whatever the rule would have made of it."""
    calls = []

    def fn(*args):
        calls.append(args)
        output = right(*args)
        return output if len(calls) == 1 else AttentionOutput(*map(spoiled, output))

    [verdict] = judge(backend(fn), CASE, oracles=[oracle])
    assert (verdict.status, verdict.detail.startswith(f"out: {told}")) == (FAIL, True), verdict.detail
