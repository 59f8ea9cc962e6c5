"""Kernels that are wrong by one edited line: real sources, as they run, with a mistake that people made.

An edit names the text that it replaces, which stands exactly once in its module; if that text is gone, or
is there twice, the edit fails loudly instead of judging the right kernel. The edited source is imported from
a file of its own, since a jitted function reads its own source, and the launcher finds it in the module's
place for the time of one call. Kernels are reached by name, and run interpreted where there is no GPU.
"""

import atexit
import importlib
import importlib.util
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mla_ref.backend import missing
from mla_ref.case import Case
from oracles.mutants import CONFIG, LATENT, Mutant
from oracles.verify import find_backend

DECODE, PAGED = "mla_fast._triton_decode_kernel", "mla_fast._triton_paged_kernel"
LAUNCHERS = {DECODE: "mla_fast.triton_decode", PAGED: "mla_fast.triton_paged_attention"}

# Blocks of a whole step of keys, so that a step takes its only block by one address.
WHOLE = replace(LATENT, block_size=128, kv_lens=(137, 5, 270, 9))
TILED = replace(WHOLE, config=replace(CONFIG, kv_lora_rank=256), cache_format="fp8_ds_mla", regime="tiles")
EMPTY = replace(LATENT, q_lens=(1, 3, 2), kv_lens=(0, 1, 33))
# A key of two parts, and scales of keys and values that differ.
HEADS = replace(
    LATENT,
    problem="paged_attention",
    config=replace(CONFIG, qk_nope_head_dim=32, qk_rope_head_dim=16),
    num_kv_heads=2,
    cache_format="fp8_e4m3",
    kv_scale=0.04,
    v_scale=0.0625,
)


class SourceEdit(NamedTuple):
    """One mistake. edits: what is replaced by what. seen: where in public somebody met it.

    variant: of the launcher that meets it; "": its own function. killed_by: oracles that must kill it.
    """

    module: str
    edits: tuple[tuple[str, str], ...]
    seen: str
    case: Case
    killed_by: tuple[str, ...]
    variant: str = ""


EDITS = {
    # Wrapped, the offset stays in the pool: a negative one would end the judge's own process.
    "kernel_block_offset_in_31_bits": SourceEdit(
        DECODE,
        (
            (
                "(block * stride_latent_block + slot * stride_latent_slot)",
                "((block * stride_latent_block & 0x7FFFFFFF) + slot * stride_latent_slot)",
            ),
        ),
        "flashinfer-ai/flashinfer#3130",
        WHOLE,
        ("index_range",),
    ),
    "kernel_not_causal_within_a_step": SourceEdit(
        DECODE,
        (("m_seen = m_key[None, :] & (key[None, :] < num_seen[:, None])", "m_seen = m_key[None, :]"),),
        "lightseekorg/tokenspeed#469",
        LATENT,
        ("causal", "census", "row_prefix", "value"),
    ),
    "kernel_sees_one_more_key": SourceEdit(
        DECODE,
        (("num_seen = kv_len - q_len + 1 + i_query", "num_seen = kv_len - q_len + 2 + i_query"),),
        "ROCm/aiter#3046",
        LATENT,
        ("causal", "census", "value"),
    ),
    "kernel_dead_slots_loaded": SourceEdit(
        DECODE,
        (
            (
                "                m_key[:, None] & m_channel[None, :],\n                b_scale,",
                "                (key >= 0)[:, None] & m_channel[None, :],\n                b_scale,",
            ),
            (
                "block = tl.load(p_table + key // BLOCK_SIZE * stride_table_block, mask=m_key, other=0)",
                "block = tl.load(p_table + tl.minimum(key, stop - 1) // BLOCK_SIZE * stride_table_block)",
            ),
        ),
        "flashinfer-ai/flashinfer#941",
        LATENT,
        ("poison", "census", "value"),
    ),
    "kernel_splits_weighed_without_maximum": SourceEdit(
        DECODE,
        (
            (
                '    shift = tl.where(top == float("-inf"), 0.0, top)\n    weight',
                "    shift = tl.zeros_like(top)\n    weight",
            ),
            (
                "b_lse = tl.where(seen_any, (top + tl.log2(divisor))",
                "b_lse = tl.where(seen_any, (tl.log2(divisor))",
            ),
        ),
        "NVIDIA/cutlass#2274",
        replace(LATENT, regime="huge"),
        ("needle", "value"),
        "splits_3",
    ),
    "kernel_empty_split_counted": SourceEdit(
        DECODE,
        (
            (
                'tl.store(partial_max + first_row + i_row, float("-inf"), mask=m_row)',
                "tl.store(partial_max + first_row + i_row, 0.0, mask=m_row)",
            ),
            (
                "tl.store(partial_sum + first_row + i_row, 0.0, mask=m_row)",
                "tl.store(partial_sum + first_row + i_row, 1.0, mask=m_row)",
            ),
            ("mask=(m_split & (b_sum != 0.0))", "mask=(m_split & (b_max != 0.0))"),
        ),
        "ROCm/aiter#3641",
        LATENT,
        ("census", "single", "lse"),
        "splits_3",
    ),
    "kernel_lse_in_base_2": SourceEdit(
        DECODE,
        (
            (
                "b_lse = tl.where(seen_any, (b_max + tl.log2(divisor)) * LN_2",
                "b_lse = tl.where(seen_any, (b_max + tl.log2(divisor))",
            ),
        ),
        "sgl-project/sglang#35045",
        LATENT,
        ("lse", "census", "single", "union"),
        "batch_invariant",
    ),
    "kernel_divides_by_nothing": SourceEdit(
        DECODE,
        (("divisor = tl.where(seen_any, b_sum, 1.0)", "divisor = b_sum"),),
        "vllm-project/vllm#57017",
        EMPTY,
        ("empty_rows",),
        "batch_invariant",
    ),
    "kernel_empty_splits_subtracted": SourceEdit(
        DECODE,
        (
            (
                '    shift = tl.where(top == float("-inf"), 0.0, top)\n    weight',
                "    shift = top\n    weight",
            ),
        ),
        "vllm-project/vllm#27491",
        EMPTY,
        ("empty_rows",),
        "splits_3",
    ),
    "kernel_rows_without_keys_not_written": SourceEdit(
        DECODE,
        (
            (
                "    if i_block * ROWS >= q_len * num_heads:\n",
                "    if (i_block * ROWS >= q_len * num_heads) | (kv_len == 0):\n",
            ),
        ),
        "sgl-project/sglang#22688",
        EMPTY,
        ("empty_rows",),
        "batch_invariant",
    ),
    "kernel_tile_scales_left_out": SourceEdit(
        DECODE,
        (
            (
                "tiled = tl.reshape(value, [keys, tiles, channels // tiles]) * scale[:, :, None]",
                "tiled = tl.reshape(value, [keys, tiles, channels // tiles])",
            ),
        ),
        "vllm-project/vllm#27490",
        TILED,
        ("single", "needle", "value"),
    ),
    "kernel_tile_scales_in_bf16": SourceEdit(
        DECODE,
        (
            (
                "tiled = tl.reshape(value, [keys, tiles, channels // tiles]) * scale[:, :, None]",
                "tiled = tl.reshape(value, [keys, tiles, channels // tiles])"
                " * _widen(_round(scale, tl.bfloat16))[:, :, None]",
            ),
        ),
        "vllm-project/vllm#49435",
        TILED,
        ("value", "lse"),
    ),
    "kernel_logical_block_taken_for_physical": SourceEdit(
        DECODE,
        (
            (
                "block = tl.load(p_table + key // BLOCK_SIZE * stride_table_block, mask=m_key, other=0)",
                "block = tl.where(m_key, key // BLOCK_SIZE, 0)",
            ),
        ),
        "flashinfer-ai/flashinfer#3219",
        LATENT,
        ("page_order", "needle", "value"),
    ),
    "kernel_block_stride_taken_as_packed": SourceEdit(
        DECODE,
        (
            (
                "(block * stride_latent_block + slot * stride_latent_slot)",
                "(block * (BLOCK_SIZE * stride_latent_slot) + slot * stride_latent_slot)",
            ),
        ),
        "vllm-project/vllm#45111",
        LATENT,
        ("layout",),
    ),
    "kernel_context_left_out": SourceEdit(
        DECODE,
        (("m_key = key < stop", "m_key = (key < stop) & (key >= kv_len - q_len)"),),
        "NVIDIA/TensorRT-LLM#13428",
        LATENT,
        ("dependency", "census", "value"),
    ),
    "kernel_new_tokens_left_out": SourceEdit(
        DECODE,
        (("m_key = key < stop", "m_key = (key < stop) & (key < kv_len - q_len)"),),
        "sgl-project/sglang#26512",
        LATENT,
        ("dependency", "census", "value"),
    ),
    "kernel_values_scaled_like_keys": SourceEdit(
        PAGED,
        (("value_scale = tl.load(v_scale)", "value_scale = tl.load(k_scale)"),),
        "vllm-project/vllm#37054",
        HEADS,
        ("single", "value_scale", "value"),
    ),
    "kernel_heads_dealt_round": SourceEdit(
        PAGED,
        (
            (
                "head = i_head * GROUP + row % GROUP",
                "head = i_head + (row % GROUP) * (num_heads // GROUP)",
            ),
        ),
        "flagos-ai/FlagGems#3759",
        HEADS,
        ("needle", "value"),
    ),
    "kernel_wide_keys_cut": SourceEdit(
        PAGED,
        (
            (
                "b_score = tl.dot(b_rest, tl.trans(b_key_rest), acc=b_score)",
                "b_score += 0.0 * tl.dot(b_rest, tl.trans(b_key_rest))",
            ),
        ),
        "vllm-project/vllm#37475",
        replace(HEADS, cache_format="bf16"),
        ("lse", "single", "value"),
    ),
    "kernel_paged_not_causal": SourceEdit(
        PAGED,
        (("m_seen = m_key[None, :] & (key[None, :] < num_seen[:, None])", "m_seen = m_key[None, :]"),),
        "lablup/mlxcel#991",
        HEADS,
        ("causal", "census", "row_prefix", "value"),
    ),
}


def edited_source(edit: SourceEdit, name: str = "") -> str:
    """The module's source with the edit.

    Raises: ValueError if a text to be replaced is not there exactly once.
    """
    spec = importlib.util.find_spec(edit.module)
    if spec is None or spec.origin is None:
        raise ValueError(f"mutant {name}: there is no source of {edit.module}")
    source = Path(spec.origin).read_text(encoding="utf-8")
    for old, new in edit.edits:
        if (count := source.count(old)) != 1:
            raise ValueError(
                f"mutant {name}: {edit.module} has {count} times, and must have once: {old.strip()}"
            )
        source = source.replace(old, new)
    return source


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mla-verify-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def edited_module(name: str) -> ModuleType:
    """The module with the edit called ``name``."""
    path = _folder() / f"{name}.py"
    path.write_text(edited_source(EDITS[name], name), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"oracles.edited_{name}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"mutant {name}: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _in_place_of(name: str, module: ModuleType) -> Iterator[None]:
    """Whoever imports ``name`` meanwhile gets ``module``."""
    original = importlib.import_module(name)
    package, _, leaf = name.rpartition(".")
    holder = importlib.import_module(package)
    sys.modules[name] = module
    setattr(holder, leaf, module)
    try:
        yield
    finally:
        sys.modules[name] = original
        setattr(holder, leaf, original)


def why_not(device: str = "cpu") -> str | None:
    """Why edited kernels cannot run on a device, or None."""
    return missing(find_backend(LAUNCHERS[DECODE]), device)


def source_mutants() -> list[Mutant]:
    """Every edit as the judge takes it."""
    return [_mutant(name, edit) for name, edit in EDITS.items()]


def _mutant(name: str, edit: SourceEdit) -> Mutant:
    backend = find_backend(LAUNCHERS[edit.module])
    fn = backend.variants[edit.variant] if edit.variant else backend.fn

    def run(inputs: Any) -> Any:
        with _in_place_of(edit.module, edited_module(name)), warnings.catch_warnings():
            # The interpreter computes in numpy, which warns of what the mistake makes: 0 / 0, infinities.
            warnings.simplefilter("ignore", RuntimeWarning)
            return fn(*inputs)

    return Mutant(name, edit.case, run, backend.numerics)
