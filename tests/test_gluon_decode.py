"""The Hopper decode kernel without a GPU: its source under the emulator, judged like any backend."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from emulated_kernels import assert_holds, assert_shows, decode_case, emulate_decode
from gluon_emulator import edited

from mla_fast import _gluon_decode_kernel, _split_schedule, gluon_decode
from mla_ref.backend import available
from mla_ref.case import Case
from mla_ref.problem import problem
from oracles.verify import OF_THE_OUTPUT

CASES = {
    "two_parts": ((1, 1), (130, 129), 16, 64, {}),
    "split": ((1,), (700,), 16, 64, {}),
    "ragged": ((1, 2, 0, 3), (300, 63, 64, 130), 20, 64, {}),
    "two_lanes": ((1, 1), (130, 128), 128, 64, {}),
    "lanes_and_groups": ((3, 1), (190, 129), 72, 64, {}),
    "empty": ((1, 1, 1), (0, 1, 0), 16, 64, {}),
    "more_queries_than_keys": ((3, 2), (2, 0), 24, 64, {}),
    "pages_of_16": ((1, 2), (333, 70), 32, 16, {}),
    "pages_of_32": ((2, 1), (65, 290), 16, 32, {}),
    "pages_of_128": ((1, 2), (200, 129), 16, 128, {}),
    "padded": ((1, 1), (200, 70), 16, 64, {"entry_align": 256, "block_gap": 4096 + 16, "offset": 32}),
    "negative": ((1, 1), (300, 64), 16, 64, {"regime": "negative"}),
    "peaky": ((1, 2), (450, 200), 16, 64, {"regime": "peaky"}),
    "half": ((1, 1), (150, 300), 16, 64, {"dtype": "float16", "cache_format": "fp16"}),
}


def case(name: str, seed: int) -> Case:
    *row, others = CASES[name]
    return decode_case(seed, *row, **others)


# Edits of the kernel's source, and the case whose verdict must notice.
PLANTED = {
    "weights_not_handed_over": ("s_p0.store(b_p_own)", "pass", "two_parts"),
    "weights_in_another_frame": (
        "_rescaled(b_o, gl.exp2(b_m - b_m0))", "_rescaled(b_o, gl.exp2(b_m - b_m))", "peaky",
    ),
    "sums_in_another_frame": (
        "_rescaled(b_o, gl.exp2(b_m0 - b_m1))", "_rescaled(b_o, gl.exp2(b_m1 - b_m1))", "peaky",
    ),
    "maximum_not_handed_over": ("s_m1.store(b_m1)", "s_m1.store(b_m0)", "peaky"),
    "keys_read_before_they_land": (
        "mbarrier.wait(bar_r.index(0), phase)", "mbarrier.wait(bar_r.index(0), phase, pred=False)",
        "two_parts",
    ),
    "buffer_filled_while_in_use": (
        "2 * i + 1, 0, bar_l.index(1), s_left.index(1)", "2 * i + 1, 0, bar_l.index(1), s_left.index(0)",
        "peaky",
    ),
    "denominator_in_the_old_frame": ("b_l = b_l * b_beta", "b_l = b_l * 1.0", "peaky"),
    "accumulator_in_the_old_frame": ("b_o = _rescaled(b_o, b_beta)", "b_o = b_o * 1.0", "peaky"),
    "dead_values_multiplied": ("if num_live < BLOCK:", "if num_live < 0:", "ragged"),
    "mask_one_key_late": ("< b_limit[:, None]", "<= b_limit[:, None]", "ragged"),
    "wrong_page": ("table + o_token // PAGE", "table + o_token // (2 * PAGE)", "pages_of_16"),
}  # fmt: skip


ASM = {"_opaque": lambda x: x, "_rescaled": lambda b_o, b_alpha: b_o * b_alpha[:, None]}


def emulate(monkeypatch: pytest.MonkeyPatch, source: ModuleType = _gluon_decode_kernel) -> None:
    emulate_decode(monkeypatch, _gluon_decode_kernel, "mla_decode_kernel", ASM, source)


# Judged by every oracle only.
LONG = {"lanes_and_groups", "negative"}

BACKEND = replace(gluon_decode.BACKEND, requires=available)
VARIANTS = {"default", "batch_invariant"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in LONG])
def test_values(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    assert_holds(BACKEND, case(name, seed), VARIANTS, OF_THE_OUTPUT)


def test_any_strides_of_queries_and_tables(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    inputs = problem("latent_attention").materialize(case("ragged", seed), torch.device("cpu"))

    def every_other(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, torch.full_like(x, 10**6)], dim=-1)[..., 0]

    def unaligned(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    queries = {name: unaligned(getattr(inputs, name)) for name in ("ql_nope", "q_pe")}
    names = ("block_table", "cu_seqlens_q", "cache_seqlens")
    tables = {name: every_other(getattr(inputs, name)) for name in names}
    got = gluon_decode.gluon_decode(*inputs._replace(**queries, **tables))
    for one, other in zip(got, gluon_decode.gluon_decode(*inputs), strict=True):
        assert torch.equal(one, other)


def test_a_prepared_call_gives_the_same_and_refuses_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    inputs = problem("latent_attention").materialize(case("ragged", seed), torch.device("cpu"))
    prepared = gluon_decode.prepare(inputs)
    for _ in range(2):
        got = prepared.finish(prepared.run())
        for one, other in zip(got, gluon_decode.gluon_decode(*inputs), strict=True):
            assert torch.equal(one, other)
    for call in (gluon_decode.prepare, lambda wrong: gluon_decode.gluon_decode(*wrong)):
        with pytest.raises(ValueError, match=r"softmax_scale: is 0\.0, must be positive"):
            call(inputs._replace(softmax_scale=0.0))


def test_a_batch_on_no_gpu_is_refused(seed: int) -> None:
    inputs = problem("latent_attention").materialize(case("ragged", seed), torch.device("cpu"))
    with pytest.raises(ValueError, match="cu_seqlens_q: on cpu, must be on a CUDA device"):
        gluon_decode.gluon_decode(*inputs)


QUERY = torch.arange(6 * 4 * 32, dtype=torch.float32).bfloat16().view(6, 4, 32)
WIDER = torch.arange(6 * 4 * 40, dtype=torch.float32).bfloat16().view(6, 4, 40)
# Queries [t h d], and whether the copy engine reads them where they are.
QUERIES = {
    "packed": (QUERY, True),
    "padded_rows": (WIDER[..., :32], True),
    "one_token_of_any_stride": (QUERY[:1].as_strided((1, 4, 32), (7, 32, 1)), True),
    "gaps_between_tokens": (QUERY[::2], False),
    "heads_first": (QUERY.transpose(0, 1), False),
    "channels_apart": (QUERY[..., ::2], False),
    "rows_of_80_bytes": (WIDER.view(-1)[: 6 * 4 * 36].view(6, 4, 36)[..., :32], False),
    "unaligned": (WIDER.view(-1)[1 : 1 + 6 * 4 * 32].view(6, 4, 32), False),
}


@pytest.mark.parametrize("name", QUERIES)
def test_queries_are_copied_only_where_they_must_be(name: str) -> None:
    query, there = QUERIES[name]
    rows = gluon_decode._rows(query)
    assert torch.equal(rows, query.reshape(-1, query.shape[2]))
    assert rows.stride(1) == 1
    assert rows.stride(0) * rows.itemsize % 16 == rows.data_ptr() % 16 == 0
    assert (rows.data_ptr() == query.data_ptr()) is there


POOL = torch.zeros(2 * 64 * 640, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("strides", "offset", "told"),
    [
        ((64 * 640, 640, 1), 0, None),
        ((64 * 576 + 4, 576, 1), 0, "block stride is 73736 bytes, must be a multiple of 16"),
        ((64 * 580, 580, 1), 0, "entry stride is 1160 bytes, must be a multiple of 16"),
        ((64 * 576, 576, 1), 4, "must be a multiple of 16"),
        ((8 * 576, 8, 64), 0, "channel stride is 64, must be 1"),
    ],
)
def test_caches_that_the_copy_engine_does_not_address(
    strides: tuple[int, ...], offset: int, told: str | None
) -> None:
    assert POOL.data_ptr() % 16 == 0
    blocks = 1 if strides[2] > 1 else 2
    reason = gluon_decode.why_not_strides(POOL.as_strided((blocks, 8, 576), strides, offset))
    assert (reason or "").endswith(told or "")
    assert (reason is None) == (told is None)
    assert offset == 0 or (reason or "").startswith("kv_cache: address is")


def test_a_batch_without_queries_needs_no_plan(seed: int) -> None:
    idle = replace(case("ragged", seed), q_lens=(0,) * 4)
    for fn in (gluon_decode.gluon_decode, gluon_decode.batch_invariant):
        out, lse = fn(*problem("latent_attention").materialize(idle, torch.device("cpu")))
        assert (out.shape, out.dtype, lse.shape) == ((0, 20, 512), torch.bfloat16, (0, 20))


def test_a_fixed_cut_is_merged_by_one_kernel_whatever_the_batch(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(_split_schedule, "merge_kernel", None)  # of few rows, and so of few requests
    one = decode_case(seed, (1,), (300,), 16, 64)
    inputs = problem("latent_attention").materialize(one, torch.device("cpu"))
    gluon_decode.batch_invariant(*inputs)
    with pytest.raises(TypeError):
        gluon_decode.gluon_decode(*inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_oracle(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    assert_holds(BACKEND, case(name, seed), VARIANTS)


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_show(bug: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good, bad, name = PLANTED[bug]
    emulate(monkeypatch, edited(_gluon_decode_kernel, good, bad, tmp_path))
    backend = replace(BACKEND, variants={})
    assert_shows(backend, case(name, seed), OF_THE_OUTPUT)
