"""Gluon kernels under the emulator: their cases, their launchers without a GPU, and what the judge says."""

from types import ModuleType
from typing import Any

import pytest
from gluon_emulator import HANGS, Emulated, discarded

from mla_fast import _gluon_merge_kernel, _split_schedule, gluon_decode
from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.layout import CacheLayout
from oracles.verdict import FAIL, PASS
from oracles.verify import judge

NUM_SMS = 6
MERGE_ASM = {"_discard": discarded}
LAYOUT = ("entry_align", "block_gap", "offset")


def config(num_heads: int, c: int = 512, p: int = 128, r: int = 64, v: int = 128) -> MLAConfig:
    return MLAConfig(
        name="wide", hidden_size=64, num_heads=num_heads, q_lora_rank=None, kv_lora_rank=c,
        qk_nope_head_dim=p, qk_rope_head_dim=r, v_head_dim=v,
    )  # fmt: skip


def case_of(
    seed: int,
    problem: str,
    config: MLAConfig,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    **others: Any,
) -> Case:
    """others: fields of a case, and of its layout."""
    layout = CacheLayout(**{name: value for name, value in others.items() if name in LAYOUT})
    fields = {name: value for name, value in others.items() if name not in LAYOUT}
    return Case(
        problem=problem, config=config, q_lens=q_lens, kv_lens=kv_lens, layout=layout, seed=seed, **fields
    )


def decode_case(
    seed: int,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    num_heads: int,
    block_size: int,
    cache_format: str = "bf16",
    **others: Any,
) -> Case:
    others |= {"block_size": block_size, "cache_format": cache_format}
    return case_of(seed, "latent_attention", config(num_heads), q_lens, kv_lens, **others)


def emulate_decode(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, asm: dict[str, Any], source: ModuleType
) -> None:
    """Let ``module``'s kernel be the one of ``source``, and what is launched around it, run here.

    The schedule is one for a few multiprocessors and short pieces, so that small cases have several.
    """
    monkeypatch.setattr(module, name, Emulated(source, name, asm))
    for around in ("schedule_kernel", "fixed_schedule_kernel", "merge_kernel"):
        monkeypatch.setattr(_split_schedule, around, Emulated(_split_schedule, around))
    merging = Emulated(_gluon_merge_kernel, "merge_rows_kernel", MERGE_ASM)
    monkeypatch.setattr(_gluon_merge_kernel, "merge_rows_kernel", merging)
    monkeypatch.setattr(gluon_decode, "MERGE_PROGRAMS", 3)
    monkeypatch.setattr(gluon_decode, "plan", lambda *a, **k: gluon_decode.plan_for(NUM_SMS, *a, **k))
    monkeypatch.setattr(gluon_decode, "CHUNK_PAIRS", 2)


def assert_holds(
    backend: Backend, case: Case, variants: set[str], oracles: tuple[str, ...] | None = None
) -> None:
    """Every claim, or those of ``oracles``, of every one of these variants."""
    verdicts = judge(backend, case, oracles=oracles)
    assert {verdict.variant for verdict in verdicts} == variants
    for verdict in verdicts:
        assert verdict.status == PASS, f"{verdict.variant} {verdict.oracle}: {verdict.detail} {verdict.worst}"


def assert_shows(backend: Backend, case: Case, oracles: tuple[str, ...]) -> None:
    """What was planted is noticed: the kernel ends and a claim does not hold, or it hangs, as a GPU would.

    Which of the two a race is may differ from run to run; that a kernel raised proves nothing.
    """
    verdicts = judge(backend, case, oracles=oracles)
    found = {"hangs" if HANGS in verdict.detail else verdict.status for verdict in verdicts}
    assert found <= {PASS, FAIL, "hangs"}, [v.detail for v in verdicts]
    assert found & {FAIL, "hangs"}
