"""Rotating and writing in one call: the two problems it is made of, one after the other, byte for byte."""

from dataclasses import replace

import pytest
import torch

from mla_ref.cache_write import cache_write
from mla_ref.case import Case
from mla_ref.config import MLAConfig, RopeConfig
from mla_ref.formats import cache_format, formats
from mla_ref.numerics import FLOAT32, INPUT, Numerics
from mla_ref.problems.rope_cache_write import PROBLEM, RopeCacheWriteInputs
from mla_ref.rope import rotate
from mla_ref.rope_cache_write import BACKEND, rope_cache_write
from oracles.bounds import Ball, new_entries, stored_parts
from oracles.compare import within
from oracles.fused_mutants import FUSED, FUSED_PER_TENSOR, fused
from oracles.mutants import Mutant, mutants
from oracles.oracle import private_copy, storage_bytes
from oracles.verdict import FAIL, PASS
from oracles.verify import judge

CPU = torch.device("cpu")
NAN = float("nan")
VLLM = Numerics(angle=FLOAT32, table=INPUT, accumulate=INPUT, stage=INPUT)


def test_a_quarter_turn_and_a_token_that_is_skipped() -> None:
    # θ = 4, r = 4: pair 0 turns by 1 a position and pair 1 by 1/2; at 0 neither does.
    kv_cache = torch.zeros(1, 2, 5, dtype=torch.float32)
    turned, same = rope_cache_write(
        q_pe=torch.tensor([[[1.0, 0.0, 1.0, 0.0]], [[0.0, 1.0, 0.0, 2.0]]], dtype=torch.float64),
        kv_c=torch.tensor([[7.0], [NAN]], dtype=torch.float64),
        k_pe=torch.tensor([[3.0, 0.0, 0.0, -1.0], [NAN] * 4], dtype=torch.float64),
        positions=torch.tensor([2, 4]),
        rope=RopeConfig(theta=4.0),
        kv_cache=kv_cache,
        slot_mapping=torch.tensor([1, -1]),
        cache_format=cache_format("fp32"),
        kv_scale=torch.tensor(NAN),
    )
    cos, sin = (
        torch.tensor([2.0, 1.0, 4.0, 2.0]).double().cos(),
        torch.tensor([2.0, 1.0, 4.0, 2.0]).double().sin(),
    )
    assert same is kv_cache
    assert torch.equal(turned[0, 0], torch.stack([cos[0], sin[0], cos[1], sin[1]]))
    assert torch.equal(turned[1, 0], torch.stack([-sin[2], cos[2], -2.0 * sin[3], 2.0 * cos[3]]))
    entry = torch.stack([torch.tensor(7.0).double(), 3.0 * cos[0], 3.0 * sin[0], sin[1], -cos[1]])
    assert torch.equal(kv_cache[0], torch.stack([torch.zeros(5), entry.float()]))


@pytest.mark.parametrize("fmt", sorted(formats()))
@pytest.mark.parametrize("interleaved", [True, False])
def test_it_is_a_rotation_and_then_a_write(fmt: str, interleaved: bool, seed: int) -> None:
    case = replace(FUSED, cache_format=fmt, seed=seed)
    inputs = PROBLEM.materialize(case, CPU)
    inputs = inputs._replace(rope=replace(inputs.rope, interleaved=interleaved))
    one, other = private_copy(inputs), private_copy(inputs)
    turned = rope_cache_write(*one).q_pe
    keys = rotate(inputs.k_pe[:, None], inputs.positions, inputs.rope).x[:, 0]
    cache_write(inputs.kv_c, keys, other.kv_cache, inputs.slot_mapping, inputs.cache_format, inputs.kv_scale)
    assert torch.equal(storage_bytes(one.kv_cache), storage_bytes(other.kv_cache))
    assert torch.equal(turned, rotate(inputs.q_pe, inputs.positions, inputs.rope).x)


def test_a_case_has_what_makes_it_hard(seed: int) -> None:
    inputs = PROBLEM.materialize(replace(FUSED, q_lens=(40,), kv_lens=(60,), seed=seed), CPU)
    skipped = inputs.slot_mapping < 0
    assert skipped[[0, 20, 39]].all()
    assert inputs.k_pe[skipped].isnan().all()
    assert inputs.q_pe.isfinite().all()
    assert inputs.positions[0] == 0
    assert inputs.positions[-1] >= 163_840
    assert not torch.equal(inputs.positions, inputs.slot_mapping)


@pytest.mark.parametrize(("stage", "status"), [(INPUT, PASS), ("exact", FAIL)])
def test_a_rounding_before_the_codes_has_to_be_declared(stage: str, status: str) -> None:
    """The reference rounds each key to bfloat16 first: allowed where it says so, and told apart where not."""
    backend = replace(BACKEND, numerics=Numerics(stage=stage))
    (verdict,) = judge(backend, FUSED_PER_TENSOR, oracles=["stored"])
    assert verdict.status == status
    assert (verdict.status == PASS) or "kv_cache's entry" in verdict.detail


@pytest.mark.parametrize(("stage", "status"), [("exact", PASS), (INPUT, FAIL)])
def test_and_so_has_its_absence(stage: str, status: str) -> None:
    mutant = Mutant("fused", FUSED_PER_TENSOR, fused(), Numerics(stage=stage))
    (verdict,) = judge(mutant.backend, FUSED_PER_TENSOR, oracles=["stored"])
    assert verdict.status == status


@pytest.mark.parametrize(("declared", "status"), [(VLLM, PASS), (Numerics(stage=INPUT), FAIL)])
def test_arithmetic_in_the_models_type_is_a_declaration(declared: Numerics, status: str) -> None:
    """A kernel whose table, products and sums are all in bfloat16, as vLLM's are."""
    (mutant,) = (m for m in mutants() if m.name == "fused_products_in_bf16")
    (verdict,) = judge(replace(mutant.backend, numerics=declared), mutant.case, oracles=["stored"])
    assert verdict.status == status


@pytest.mark.parametrize(("left_out", "where"), [("store", "kv_cache"), ("queries", "q_pe")])
def test_what_a_later_run_leaves_out_is_seen(left_out: str, where: str) -> None:
    """Though the cache holds what an earlier run has stored, and freed memory the queries it returned."""
    calls = []

    def fn(*args):
        given = RopeCacheWriteInputs(*args)
        calls.append(given)
        if len(calls) > 2 and left_out == "store":
            return rope_cache_write(*given._replace(slot_mapping=torch.full_like(given.slot_mapping, -1)))
        output = rope_cache_write(*given)
        return output._replace(q_pe=torch.empty_like(given.q_pe)) if len(calls) > 2 else output

    (verdict,) = judge(replace(BACKEND, fn=fn), FUSED, oracles=["repeat"])
    assert verdict.status == FAIL
    assert where in verdict.detail


def test_keys_beyond_the_largest_float16_saturate(seed: int) -> None:
    """Turned they are infinite in float16, stored as the largest number; in float32 they are not."""
    case = replace(FUSED, dtype="float16", cache_format="bf16", seed=seed)
    inputs = PROBLEM.materialize(case, CPU)
    inputs.k_pe[inputs.slot_mapping >= 0] = 60000.0
    for stage, run in ((INPUT, rope_cache_write), ("exact", lambda *x: fused()(RopeCacheWriteInputs(*x)))):
        left = private_copy(inputs)
        run(*left)
        slot = inputs.slot_mapping[inputs.slot_mapping >= 0]
        stored = left.kv_cache.flatten(0, 1)[slot]
        assert (stored[:, -inputs.k_pe.shape[1] :].abs() > 1e30).any() == (stage == INPUT)
        found = stored_verdict(inputs, left, stage)
        assert found == [], found


def stored_verdict(inputs: RopeCacheWriteInputs, left: RopeCacheWriteInputs, stage: str) -> list[str]:
    """Parts of the stored entries that are outside of what they may hold."""
    live = inputs.slot_mapping >= 0
    kv_c, k_pe = (Ball(x.mid[live], x.radius[live]) for x in new_entries(inputs, Numerics(stage=stage)))
    stored = left.kv_cache.flatten(0, 1)[inputs.slot_mapping[live]]
    parts = stored_parts(inputs.cache_format, stored, kv_c, k_pe, inputs.kv_scale)
    return [part.name for part in parts if not within(part.name, part.got, part.want).ok]


TINY = MLAConfig(
    name="tiny", hidden_size=64, num_heads=2, q_lora_rank=None, kv_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda x: {"positions": x.positions - 1}, r"positions\[0\]: is -1, must not be negative"),
        (lambda x: {"positions": x.positions.int()}, r"positions: dtype is int32, must be int64"),
        (lambda x: {"positions": x.positions[1:]}, r"positions: t=3, but t=4 elsewhere"),
        (lambda x: {"k_pe": x.k_pe.half()}, r"k_pe: dtype is float16, must be bfloat16"),
        (lambda x: {"q_pe": x.q_pe.float()}, r"kv_c: dtype is bfloat16, must be float32"),
        (lambda x: {"q_pe": x.q_pe[..., 1:]}, r"k_pe: r=8, but r=7 elsewhere"),
        (
            lambda x: {"q_pe": x.q_pe[..., 1:], "k_pe": x.k_pe[..., 1:]},
            r"q_pe: r=7, must be even",
        ),
        (
            lambda x: {"slot_mapping": x.slot_mapping * 0 + 1},
            r"slot_mapping\[1\]: is 1, as is slot_mapping\[0\]",
        ),
    ],
)
def test_bad_input_is_named(edit, message: str) -> None:
    inputs = PROBLEM.materialize(
        Case(problem="rope_cache_write", config=TINY, q_lens=(4,), kv_lens=(4,)), CPU
    )
    with pytest.raises(ValueError, match=message):
        rope_cache_write(*inputs._replace(**edit(inputs)))
