"""A case is a recipe: JSON loses nothing, and the same seed gives the same bits, today and on any machine."""

import hashlib
import json
import math
from dataclasses import replace

import pytest
import torch

from mla_ref import values
from mla_ref.case import Case
from mla_ref.layout import CacheLayout
from mla_ref.problem import problem, problems
from mla_ref.values import REGIMES
from oracles import mutants
from oracles.fused_mutants import FUSED
from oracles.mutants import YARN_ROPE
from oracles.oracle import storage_bytes
from oracles.verdict import Verdict
from oracles.verify import backends, judge

CASES = {
    name: getattr(mutants, name)
    for name in ("LATENT", "PER_TENSOR", "TILED", "PAGED", "MERGE", "ROPE_YARN", "WRITE", "READ", "LAYER")
} | {
    "EXPANDED": replace(
        mutants.LATENT, problem="attention", dtype="float16", layout=CacheLayout(entry_align=256)
    ),
    "FUSED": FUSED,
}

# sha256 of every number, and of every tensor's dtype, shape, strides and memory, gaps included. Where one of
# these changes, so does every case that was ever recorded.
GOLDEN = {
    "LATENT": "f6c8f057dfe3affd",
    "PER_TENSOR": "c571c0ca2f5f85c9",
    "TILED": "8e0c20cf08df053c",
    "PAGED": "77c26f7d381e8776",
    "MERGE": "6875326c1b8957fc",
    "ROPE_YARN": "e428676a27f4993b",
    "WRITE": "f65bc2c7d564741d",
    "READ": "d6aaf89cbd7ca0a9",
    "LAYER": "082005dc8098aad6",
    "EXPANDED": "d83d7c240168f005",
    "FUSED": "5764f252c5132bd0",
}


def digest(case: Case) -> str:
    found = hashlib.sha256()
    inputs = problem(case.problem).materialize(case, torch.device("cpu"))

    def take(name, value):
        if isinstance(value, dict):
            for key in sorted(value):
                take(f"{name}/{key}", value[key])
        elif isinstance(value, torch.Tensor):
            found.update(f"{name} {value.dtype} {list(value.shape)} {value.stride()}".encode())
            memory = value if "cache" in name else value.contiguous().clone()
            found.update(storage_bytes(memory).numpy().tobytes())
        elif isinstance(value, int | float):
            found.update(f"{name} {value!r}".encode())

    for name, value in inputs._asdict().items():
        take(name, value)
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", CASES)
def test_the_same_seed_gives_the_same_bits(name):
    assert digest(CASES[name]) == GOLDEN[name]
    assert digest(replace(CASES[name], seed=CASES[name].seed + 1)) != GOLDEN[name]


@pytest.mark.parametrize("name", CASES)
def test_json_loses_nothing(name):
    case = replace(CASES[name], kv_scale=0.1 + 0.2, seed=2**31 - 1)
    assert Case.from_json(case.to_json()) == case
    assert Case.from_json(case.brief()) == case
    assert digest(Case.from_json(case.to_json())) == digest(case)


def test_json_loses_nothing_of_a_rope():
    config = replace(mutants.CONFIG, rope=replace(YARN_ROPE, attention_factor=0.1))
    case = replace(mutants.LATENT, config=config)
    assert Case.from_json(case.to_json()) == case
    assert Case.from_json(case.brief()) == case


def test_brief_json_holds_what_is_not_there_by_itself():
    case = replace(mutants.LATENT, kv_scale=-0.0, layout=replace(mutants.LATENT.layout, block_gap=8))
    said = json.loads(case.brief())
    assert said["layout"] == {"block_gap": 8}
    assert "num_kv_heads" not in said
    assert math.copysign(1.0, Case.from_json(case.brief()).kv_scale) == -1.0
    assert len(case.brief()) < len(case.to_json()) / 2


def test_brief_json_tells_zeros_apart():
    config = replace(mutants.CONFIG, rope=replace(YARN_ROPE, mscale_all_dim=-0.0))
    again = Case.from_json(replace(mutants.LATENT, config=config).brief())
    assert math.copysign(1.0, again.config.rope.mscale_all_dim) == -1.0


@pytest.mark.parametrize("regime", REGIMES)
def test_a_regime_gives_the_same_bits_twice(regime):
    case = replace(mutants.LATENT, regime=regime)
    assert digest(case) == digest(case)


def test_a_verdict_is_the_same_twice_but_for_its_time():
    case = mutants.LATENT
    first, second = (judge(backends()["mla_ref.latent"], case) for _ in range(2))
    assert [replace(v, seconds=0.0) for v in first] == [replace(v, seconds=0.0) for v in second]
    for verdict in first:
        assert Verdict.from_json(verdict.to_json()) == verdict


def test_every_problem_that_has_inputs_is_covered():
    assert {case.problem for case in CASES.values()} == set(problems()) - {"cache_capacity"}


def test_bits_that_are_drawn_in_pieces_are_one_stream(monkeypatch):
    """More than 2^28 bytes cannot be drawn at once, and whoever draws less draws the same."""
    whole = values.bell(3, "x", 70), values.integers(3, "y", 1000, 9)
    monkeypatch.setattr(values, "PIECE", 16)
    assert torch.equal(values.bell(3, "x", 70), whole[0])
    assert torch.equal(values.integers(3, "y", 1000, 9), whole[1])


@pytest.mark.parametrize("size", [values.MANY - 1, values.MANY, values.PIECE, 2 * values.PIECE + 1])
def test_torchs_twister_draws_the_bits_of_pythons(monkeypatch, size):
    drawn = values.bell(5, "x", size), values.integers(5, "y", 15, size), values.integers(5, "z", 8, size)
    assert values._torch_draws_the_same()
    monkeypatch.setattr(values, "_torch_draws_the_same", lambda: False)
    alone = values.bell(5, "x", size), values.integers(5, "y", 15, size), values.integers(5, "z", 8, size)
    assert all(map(torch.equal, drawn, alone))


def test_a_torch_of_another_stream_is_not_used(monkeypatch):
    """Be it the words, the layout of a state, or that there is none."""

    def refused(stream):
        raise RuntimeError("RNG state is wrong size")

    for other in (lambda stream: torch.Generator().manual_seed(1), refused):
        monkeypatch.setattr(values, "_torch_stream", other)
        assert not values._torch_draws_the_same.__wrapped__()


@pytest.mark.parametrize("high", [1, 2, 3, 15, 1000, 2**16, 2**31 - 1, 2**31, 2**31 + 11, 2**40])
def test_remainders_are_those_of_integers(high):
    number = torch.cat([torch.arange(100), torch.arange(2**31 - 100, 2**31)]).to(torch.int32)
    assert values._remainder(number, high).tolist() == [x % high for x in number.tolist()]
