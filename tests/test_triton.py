"""Decode in plain Triton, interpreted on the CPU and compiled on a GPU, under the judge."""

import contextlib
import gc
import weakref
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from mla_fast import _split_keys, triton_decode
from mla_fast.triton_decode import BACKEND, Schedule, choose_splits, choose_tile, scheduled
from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.layout import CacheLayout
from mla_ref.pages import DEAD_BLOCK
from mla_ref.problem import problem
from oracles.coverage import draw
from oracles.verdict import FAIL, PASS, UNSUPPORTED
from oracles.verify import judge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROBLEM = problem("latent_attention")
BOUNDED = ("value", "lse", "empty_rows")

# q_lens, kv_lens, (heads, c, r), block size, and what else differs from a bf16 case.
CASES = {
    "one_tile": ((1,), (17,), (16, 512, 64), 64, {}),
    "tile_edges": ((1, 1, 1), (127, 128, 129), (4, 128, 64), 64, {}),
    "ragged": ((1, 0, 3, 2), (140, 9, 66, 2), (5, 64, 16), 16, {}),
    "empty": ((1, 2, 1), (0, 1, 64), (3, 64, 16), 64, {}),
    "row_blocks": ((9,), (70,), (9, 64, 16), 32, {"regime": "recency"}),
    "odd_widths": ((2, 1), (33, 70), (20, 48, 24), 7, {"regime": "peaky"}),
    "no_rope": ((1, 1), (65, 5), (8, 96, 0), 3, {}),
    "blocks_of_one": ((1, 2), (40, 131), (2, 256, 32), 1, {"regime": "sink"}),
    "padded": ((1, 1), (70, 131), (4, 64, 16), 16, {"entry_align": 256, "block_gap": 1024, "offset": 34}),
    "negative": ((1, 1), (140, 64), (4, 64, 16), 64, {"regime": "negative"}),
    "half": ((1, 2), (140, 3), (4, 128, 32), 256, {"dtype": "float16", "cache_format": "fp16"}),
    "mixed_types": ((1,), (70,), (4, 64, 16), 64, {"dtype": "float16"}),
    "per_tensor": ((2, 1), (66, 130), (4, 64, 16), 64, {"cache_format": "fp8_e4m3", "kv_scale": 0.0173}),
    "tiles": ((1, 2), (70, 131), (4, 256, 32), 64, {"cache_format": "fp8_ds_mla", "regime": "tiles"}),
    "tiles_pow2": (
        (1,), (130,), (4, 128, 32), 16,
        {"cache_format": "fp8_ds_mla_pow2", "dtype": "float16", "block_gap": 8, "offset": 4},
    ),
}  # fmt: skip


def case(name: str, seed: int) -> Case:
    q_lens, kv_lens, (heads, c, r), block_size, extra = CASES[name]
    layout = {k: v for k, v in extra.items() if k in ("entry_align", "block_gap", "offset")}
    config = MLAConfig(
        name=name, hidden_size=64, num_heads=heads, q_lora_rank=None, kv_lora_rank=c,
        qk_nope_head_dim=32, qk_rope_head_dim=r, v_head_dim=32,
    )  # fmt: skip
    return Case(
        problem="latent_attention", config=config, q_lens=q_lens, kv_lens=kv_lens, block_size=block_size,
        layout=CacheLayout(**layout), seed=seed, **{k: v for k, v in extra.items() if k not in layout},
    )  # fmt: skip


def check(backend: Backend, judged: Case, oracles: tuple[str, ...] | None) -> None:
    verdicts = judge(backend, judged, device=DEVICE, oracles=oracles)
    assert {verdict.variant for verdict in verdicts} == {"default", *backend.variants}
    for verdict in verdicts:
        assert verdict.status == PASS, f"{verdict.variant} {verdict.oracle}: {verdict.detail} {verdict.worst}"


@pytest.mark.parametrize("name", CASES)
def test_judged(name: str, seed: int) -> None:
    check(replace(BACKEND, variants={}), case(name, seed), (*BOUNDED, "poison", "inputs_unchanged"))


@pytest.mark.parametrize("name", ["ragged", "per_tensor", "tiles"])
def test_every_schedule(name: str, seed: int) -> None:
    check(BACKEND, case(name, seed), BOUNDED)


def test_every_oracle(seed: int) -> None:
    check(replace(BACKEND, variants={}), replace(case("empty", seed), kv_lens=(0, 1, 21)), None)


def test_judged_on_random_cases(seed: int) -> None:
    for i in range(25):
        drawn = draw("latent_attention", seed, i, BACKEND.supports)
        for verdict in judge(replace(BACKEND, variants={}), drawn, device=DEVICE, oracles=("value", "lse")):
            assert verdict.status == PASS, f"{verdict.detail} {verdict.worst} {drawn.to_json()}"


def test_a_request_alone_gives_the_same_bits(seed: int) -> None:
    together = PROBLEM.materialize(case("ragged", seed), torch.device(DEVICE))
    invariant = BACKEND.variants["batch_invariant"]
    out, lse = invariant(*together)
    for i, (first, stop) in enumerate(pairwise(together.cu_seqlens_q.tolist())):
        alone = together._replace(
            ql_nope=together.ql_nope[first:stop],
            q_pe=together.q_pe[first:stop],
            block_table=together.block_table[i : i + 1],
            cu_seqlens_q=together.cu_seqlens_q[i : i + 2] - first,
            cache_seqlens=together.cache_seqlens[i : i + 1],
            max_seqlen_q=stop - first,
        )
        got = invariant(*alone)
        assert torch.equal(got.out, out[first:stop])
        assert torch.equal(got.lse, lse[first:stop])


def test_queries_of_any_strides(seed: int) -> None:
    inputs = PROBLEM.materialize(case("ragged", seed), torch.device(DEVICE))
    want = BACKEND.fn(*inputs)
    fused = torch.cat([inputs.ql_nope, inputs.q_pe], dim=-1)
    c = inputs.ql_nope.shape[2]
    swapped = inputs.ql_nope.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for ql_nope, q_pe in ((fused[..., :c], fused[..., c:]), (swapped, inputs.q_pe)):
        got = BACKEND.fn(*inputs._replace(ql_nope=ql_nope, q_pe=q_pe))
        assert torch.equal(got.out, want.out)
        assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("name", ["one_tile", "tiles"])
def test_no_tensor_outlives_its_call(name: str, seed: int) -> None:
    """A view that is kept keeps the whole cache."""
    inputs = PROBLEM.materialize(case(name, seed), torch.device(DEVICE))
    BACKEND.fn(*inputs)
    given = [weakref.ref(x) for x in inputs if isinstance(x, torch.Tensor)]
    del inputs
    gc.collect()
    assert [x() for x in given] == [None] * len(given)


def test_a_visible_nan_is_not_hidden(seed: int) -> None:
    inputs = PROBLEM.materialize(case("tile_edges", seed), torch.device(DEVICE))
    inputs.kv_cache[inputs.block_table[0, 1], 5] = torch.nan
    for fn in (BACKEND.fn, *BACKEND.variants.values()):
        out, lse = fn(*inputs)
        assert out[0].isnan().all()
        assert lse[0].isnan().all()
        assert out[1:].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "queries are float32"),
        ({"cache_format": "fp32"}, "cache format fp32"),
        ({"c": 1024}, "c=1024 and r=64"),
        ({"cache_format": "fp8_ds_mla", "layout": CacheLayout(offset=2)}, "offset of 2 bytes"),
    ],
)
def test_unsupported_says_why(change: dict, message: str, seed: int) -> None:
    base = case("one_tile", seed)
    config = replace(base.config, kv_lora_rank=change.get("c", 512))
    asked = replace(base, config=config, **{k: v for k, v in change.items() if k != "c"})
    assert {verdict.status for verdict in judge(BACKEND, asked, device=DEVICE)} == {UNSUPPORTED}
    assert message in BACKEND.supports(asked)
    with pytest.raises(ValueError, match=message.replace("offset of 2", r"address is \d+")):
        BACKEND.fn(*PROBLEM.materialize(asked, torch.device(DEVICE)))


def test_weights_are_declared_truthfully(seed: int) -> None:
    """The same kernel fails where it claims to keep its weights in float32."""
    exact = replace(BACKEND, numerics=replace(BACKEND.numerics, p="exact"), variants={})
    flat = replace(case("tile_edges", seed), regime="flat")
    (verdict,) = judge(exact, flat, device=DEVICE, oracles=["value"])
    assert verdict.status == FAIL


def test_schedules_fill_the_device() -> None:
    assert choose_splits(256, 64, 132) == 1
    assert 100 < choose_splits(1, 2048, 132) <= 128
    assert choose_splits(1, 3, 132) == 1
    assert choose_splits(16, 64, 132) == 8
    waves = 140 * choose_splits(140, 64, 132) / 132
    assert waves / -(-waves // 1) > 0.85  # where one split would leave the second wave all but empty
    hopper = triton_decode.HOPPER.plain
    assert [choose_tile(hopper, rows, 64).rows for rows in (1, 16, 17, 33, 4096)] == [16, 16, 32, 64, 64]
    assert choose_tile(hopper, 64, 16).keys == 32


def test_splits_without_keys_change_nothing(seed: int) -> None:
    inputs = PROBLEM.materialize(case("one_tile", seed), torch.device(DEVICE))
    two, many = (scheduled(Schedule(num_splits=n))(*inputs) for n in (2, 16))
    assert torch.equal(two.out, many.out)
    assert torch.equal(two.lse, many.lse)


@pytest.mark.skipif(DEVICE != "cpu", reason="compiled here")
def test_the_interpreter_does_no_idle_work(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    core = pytest.importorskip("triton.language.core")
    described = Counter[str]()
    describe = core._type_for_tuple_values
    patch, patched = interpreter._patch_lang, []
    semantic = interpreter.interpreter_semantic
    check, summed = type(semantic).device_assert, []

    def counted(fn: Any) -> Any:
        patched.append(fn.__globals__["__name__"])
        return patch(fn)

    def asked(self: Any, *arguments: Any) -> Any:
        summed.append(arguments)
        return check(self, *arguments)

    def shape(values: Any, fields: Any = None) -> Any:
        described[str([str(x) for x in values])] += 1
        return describe(values, fields)

    monkeypatch.setattr(core, "_type_for_tuple_values", shape)
    monkeypatch.setattr(interpreter, "_patch_lang", counted)
    monkeypatch.setattr(type(semantic), "device_assert", asked)
    inputs = PROBLEM.materialize(case("ragged", seed), torch.device(DEVICE))
    first = scheduled(Schedule(num_splits=3))(*inputs)
    launches = patched.count("mla_fast._triton_decode_kernel")
    assert launches == 2  # the splits, and their merge
    assert set(Counter(patched).values()) <= {1, 2}
    assert not summed
    assert max(described.values()) == 1
    assert (interpreter._patch_lang, core._type_for_tuple_values) == (counted, shape)
    assert interpreter.interpreter_builder.options.sanitize_overflow

    monkeypatch.setattr(_split_keys, "_no_idle_work", contextlib.nullcontext)
    again = scheduled(Schedule(num_splits=3))(*inputs)
    assert patched.count("mla_fast._triton_decode_kernel") > 20
    assert summed
    assert max(described.values()) > 100
    assert torch.equal(first.out, again.out)
    assert torch.equal(first.lse, again.lse)


@pytest.mark.parametrize("columns", [0, 2000])
def test_a_batch_invariant_call_keeps_no_partial_results_however_wide_the_table(seed, monkeypatch, columns):
    """What a server's longest request could need is not reserved for every batch."""
    inputs = PROBLEM.materialize(case("ragged", seed), torch.device(DEVICE))
    tail = inputs.block_table.new_full((len(inputs.block_table), columns), DEAD_BLOCK)
    wide = inputs._replace(block_table=torch.cat([inputs.block_table, tail], dim=1))
    reserved = []

    def recorded(*args):
        reserved.append(_split_keys.partial_results(*args))
        return reserved[-1]

    monkeypatch.setattr(triton_decode, "partial_results", recorded)
    narrow, other = BACKEND.variants["batch_invariant"](*inputs), BACKEND.variants["batch_invariant"](*wide)
    assert all(torch.equal(x, y) for x, y in zip(narrow, other, strict=True))
    assert [x.numel() for partial in reserved for x in partial] == [0] * 6
