"""A whole layer at the width of a model: what is claimed of it, and a fault that nothing else sees."""

from dataclasses import replace

import pytest
import torch

from mla_ref.case import Case
from mla_ref.layer import BACKEND
from mla_ref.presets import preset
from mla_ref.problem import problem
from oracles.bounds import layer
from oracles.oracle import private_copy
from oracles.rules.few_terms import TERMS, few, sparse
from oracles.verdict import FAIL, PASS
from oracles.verify import judge

V3 = preset("deepseek-v3")
NARROW = 4096  # channels that the fault reads


def case_of(dtype: str, heads: int = 1) -> Case:
    fmt = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    config = V3.shard(V3.num_heads // heads)
    return Case(problem="layer", config=config, q_lens=(2,), kv_lens=(9,), dtype=dtype, cache_format=fmt)


def narrow(hidden_states, positions, weights, *rest):
    """No channel of the hidden states beyond the width of another model reaches a query."""
    weight = weights["q_a_proj.weight"].clone()
    weight[:, NARROW:] = 0.0
    return BACKEND.fn(hidden_states, positions, {**weights, "q_a_proj.weight": weight}, *rest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_at_full_width_is_seen_by_few_terms_alone(dtype):
    case = case_of(dtype)
    oracles = ("value", "few_terms")
    right = {v.oracle: v.status for v in judge(BACKEND, case, oracles=oracles)}
    wrong = {v.oracle: v.status for v in judge(replace(BACKEND, fn=narrow), case, oracles=oracles)}
    assert right == {"value": PASS, "few_terms": PASS}
    assert wrong == {"value": PASS, "few_terms": FAIL}


def test_the_bound_of_few_terms_excludes_nearly_everything():
    case = case_of("float32")
    dense = problem("layer").materialize(case, torch.device("cpu"))
    assert width_of_bound(sparse(case, "cpu")) < 2.0**-6
    assert width_of_bound(dense) > 1.0


def width_of_bound(inputs) -> float:
    """The median radius over the root mean square of the output."""
    cached = BACKEND.fn(*private_copy(inputs)).kv_cache
    out = layer(inputs._replace(kv_cache=cached), BACKEND.numerics)["out"]
    return float(out.radius.median()) / float(out.mid.square().mean().sqrt())


@pytest.mark.parametrize(("rows", "columns"), [(7, 3), (1, 1), (64, 64), (104, 328), (1536, 7168)])
def test_every_column_is_read_and_no_row_has_more(rows, columns):
    kept = few(torch.ones(rows, columns)) != 0.0
    assert bool((kept.sum(1) == min(TERMS, columns)).all())
    assert int(kept.any(0).sum()) == min(columns, rows * TERMS)
    assert int(kept.sum(0).max()) <= -(-rows * min(TERMS, columns) // columns)
