"""The Hopper decode kernel without a GPU: its source under the emulator, judged like any backend."""

from dataclasses import replace

import pytest
from gluon_emulator import Emulated

from mla_fast import _gluon_decode_kernel, _split_schedule, gluon_decode
from mla_ref.backend import available
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.layout import CacheLayout
from oracles.verdict import PASS
from oracles.verify import judge

NUM_SMS = 6

CASES = {
    "two_parts": ((1, 1), (130, 129), 16, 64, {}),
    "ragged": ((1, 2, 0, 3), (700, 63, 64, 130), 20, 64, {}),
    "two_lanes": ((1, 1), (257, 128), 128, 64, {}),
    "lanes_and_groups": ((5, 1), (190, 500), 72, 64, {}),
    "empty": ((1, 1, 1), (0, 1, 0), 16, 64, {}),
    "more_queries_than_keys": ((3, 2), (2, 0), 24, 64, {}),
    "pages_of_16": ((1, 2), (333, 70), 32, 16, {}),
    "pages_of_32": ((2, 1), (65, 290), 16, 32, {}),
    "pages_of_128": ((1, 2), (257, 129), 16, 128, {}),
    "padded": ((1, 1), (200, 70), 16, 64, {"entry_align": 256, "block_gap": 4096 + 16, "offset": 32}),
    "negative": ((1, 1), (300, 64), 16, 64, {"regime": "negative"}),
    "peaky": ((1, 2), (640, 200), 16, 64, {"regime": "peaky"}),
    "half": ((1, 1), (150, 300), 16, 64, {"dtype": "float16", "cache_format": "fp16"}),
}


def config(num_heads: int) -> MLAConfig:
    return MLAConfig(
        name="wide", hidden_size=64, num_heads=num_heads, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip


def case(name: str, seed: int) -> Case:
    q_lens, kv_lens, heads, block_size, extra = CASES[name]
    layout = {k: v for k, v in extra.items() if k in ("entry_align", "block_gap", "offset")}
    fields = {k: v for k, v in extra.items() if k not in layout}
    return Case(
        problem="latent_attention", config=config(heads), q_lens=q_lens, kv_lens=kv_lens,
        block_size=block_size, layout=CacheLayout(**layout), seed=seed, **fields,
    )  # fmt: skip


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    asm = {"_opaque": lambda x: x, "_rescaled": lambda b_o, b_alpha: b_o * b_alpha[:, None]}
    kernel = Emulated(_gluon_decode_kernel, "mla_decode_kernel", asm)
    monkeypatch.setattr(_gluon_decode_kernel, "mla_decode_kernel", kernel)
    for name in ("schedule_kernel", "fixed_schedule_kernel", "merge_kernel"):
        monkeypatch.setattr(_split_schedule, name, Emulated(_split_schedule, name))
    monkeypatch.setattr(gluon_decode, "plan", lambda *a, **k: gluon_decode.plan_for(NUM_SMS, *a, **k))
    monkeypatch.setattr(gluon_decode, "CHUNK_PAIRS", 2)


@pytest.mark.parametrize("name", CASES)
def test_judged(name: str, seed: int, emulated: None) -> None:
    backend = replace(gluon_decode.BACKEND, requires=available)
    verdicts = judge(backend, case(name, seed))
    assert verdicts
    for verdict in verdicts:
        assert verdict.status == PASS, f"{verdict.variant} {verdict.oracle}: {verdict.detail} {verdict.worst}"
