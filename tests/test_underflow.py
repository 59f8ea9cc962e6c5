"""Claims of exact scaling near the smallest numbers: right kernels hold them, and wrong ones do not."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.problem import AttentionOutput, problem
from mla_ref.recording import CASE_KEY, KIND, SOURCE_KEY, read, served, shapes_of
from mla_ref.values import bell
from oracles.oracle import Trial
from oracles.scaling import kept_by_scores, kept_by_values, why_not_scaled
from oracles.verdict import FAIL, PASS
from oracles.verify import backends, judge

CONFIG = MLAConfig(
    name="small", hidden_size=64, num_heads=2, q_lora_rank=None, kv_lora_rank=32,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
)  # fmt: skip

# Powers of two of queries, cached channels and weights.
MAGNITUDES = {
    "all of it": (-130, -130, -130),
    "products of small ones": (-70, -62, 0),
    "queries against large keys": (-135, 100, -10),
    "absorbed queries against large keys": (-90, 100, -45),
    "large queries against keys": (100, -135, -10),
    "weights": (0, 0, -131),
    "weights against large keys": (3, 120, -131),
    "values": (0, -128, 2),
    "values a little larger": (0, -101, 0),
    "nearly": (-20, -20, -90),
    "halves of it": (-2, -125, -2),
}
RIGHT = {
    "latent_attention": ("mla_ref.latent",),
    "attention": ("mla_ref.naive", "mla_ref.absorbed", "mla_ref.split"),
}
INTERPRETED = ("mla_fast.triton_decode",)  # where a log-sum-exp was off by one bit
RULES = {
    "latent_attention": ("query_scale", "value_scale"),
    "attention": ("query_scale", "value_scale", "weight_reload"),
}


def recording(path: Path, powers: tuple[int, int, int], seed: int) -> Case:
    """A recording of these magnitudes, with lengths of which one is a single key."""
    case = Case(
        problem="attention", config=CONFIG, q_lens=(1, 2, 1), kv_lens=(1, 20, 5), cache_format="fp32",
        dtype="float32", block_size=16,
    )  # fmt: skip
    header: dict[str, Any] = {
        "__metadata__": {"kind": KIND, CASE_KEY: case.to_json(), SOURCE_KEY: json.dumps({"model": "none"})}
    }
    data, power = b"", dict(zip(("q", "k", "w"), powers, strict=True)) | {"l": powers[0]}
    for name, shape in shapes_of(case).items():
        values = bell(seed, name, *shape).double() * 2.0 ** power[name[0]]
        if name == "ql_nope":
            values = values * 2.0 ** power["w"]
        part = values.numpy().tobytes()
        header[name] = {
            "dtype": "F64",
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return read(path).case


def cases_of(recorded: Case, name: str) -> Iterator[Case]:
    for dtype, fmt in (("bfloat16", "bf16"), ("float32", "fp32")):
        yield replace(served(recorded, name), dtype=dtype, cache_format=fmt)


@pytest.fixture(params=[False, True], ids=["gradual", "flushed"])
def flushing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways of a processor with denormal numbers."""
    if request.param and not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushing")
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_hold_what_is_claimed_near_the_smallest_numbers(name, magnitude, tmp_path, seed):
    recorded = recording(tmp_path / "tiny.safetensors", MAGNITUDES[magnitude], seed)
    interpreted = INTERPRETED if (name, magnitude) == ("latent_attention", "products of small ones") else ()
    for case, backend in itertools.product(cases_of(recorded, name), (*RIGHT[name], *interpreted)):
        for verdict in judge(backends()[backend], case, oracles=RULES[name]):
            assert verdict.status in (PASS, "unsupported"), (
                backend,
                case.dtype,
                verdict.oracle,
                verdict.detail,
            )


def trial_of(case: Case, backend: Backend) -> Trial:
    inputs = problem(case.problem).materialize(case, torch.device("cpu"))
    return Trial(
        run=lambda given: backend.fn(*given), call=lambda given: backend.fn(*given), inputs=inputs, case=case,
        backend=backend, problem=problem(case.problem), left=lambda: None, expected=dict,
    )  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("regime", ["plain", "peaky", "small", "tiny", "denormal", "uneven", "cancelling"])
def test_ordinary_values_keep_their_bits(name, regime):
    """Otherwise the rules would claim less than they can, and nobody would see it."""
    case = Case(
        problem=name, config=CONFIG, q_lens=(1, 3), kv_lens=(1, 300), dtype="bfloat16", regime=regime, seed=3
    )  # fmt: skip
    trial = trial_of(case, backends()[RIGHT[name][0]])
    assert why_not_scaled(trial) == ""
    kept = kept_by_scores(trial)
    assert kept["out"] == 0.0
    assert kept["lse"] < 2.0**-30
    assert kept_by_values(trial)["out"] < 2.0**-30


def last_bit_with(condition):
    """Right, but for the last bit of one number where the inputs say so."""

    def wrap(fn):
        def kernel(*given):
            out, lse = fn(*given)
            if condition(given):
                lse = lse.clone()
                lse.view(torch.int32)[-1, -1] += 1
            return AttentionOutput(out, lse)

        return kernel

    return wrap


def test_one_bit_is_seen_where_bits_are_claimed():
    case = Case(problem="attention", config=CONFIG, q_lens=(1, 3), kv_lens=(1, 30), dtype="bfloat16")
    right = backends()["mla_ref.naive"]
    weight = problem("attention").materialize(case, torch.device("cpu")).w_uk
    for rule, condition in (
        ("query_scale", lambda given: given[-3] != CONFIG.softmax_scale),
        ("weight_reload", lambda given: not torch.equal(given[6], weight)),
    ):
        for fn, status in ((right.fn, PASS), (last_bit_with(condition)(right.fn), FAIL)):
            (verdict,) = judge(replace(right, fn=fn), case, oracles=[rule])
            assert verdict.status == status, verdict.detail


@pytest.mark.parametrize("magnitude", ["nearly", "absorbed queries against large keys"])
def test_weights_that_are_kept_are_seen_there_too(magnitude, tmp_path, seed):
    case = served(recording(tmp_path / "tiny.safetensors", MAGNITUDES[magnitude], seed), "attention")
    right, loaded = backends()["mla_ref.naive"], {}

    def remembering(*given):
        w_uk, w_uv = loaded.setdefault("weights", given[6:8])
        return right.fn(*given[:6], w_uk, w_uv, *given[8:])

    (verdict,) = judge(replace(right, fn=remembering), case, oracles=["weight_reload"])
    assert verdict.status == FAIL


def test_what_would_be_infinite_is_not_claimed():
    case = Case(problem="latent_attention", config=CONFIG, q_lens=(1,), kv_lens=(3,), dtype="bfloat16")
    trial = trial_of(case, backends()["mla_ref.latent"])
    huge = trial.inputs._replace(q_pe=trial.inputs.q_pe * 2.0**124)
    assert "near the largest numbers" in why_not_scaled(replace(trial, inputs=huge))
