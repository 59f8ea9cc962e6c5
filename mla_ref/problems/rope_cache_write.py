"""Queries and new keys rotated, and the new tokens into the cache, in one call: ``rope`` and ``cache_write``.

What ``concat_and_cache_mla_rope_fused`` of vLLM, ``fused_qk_rope_cat_and_cache_mla`` of AITER and the fused
rotations of FlashInfer and SGLang do before decode. vLLM rotates queries in place, the others return them,
and so does this contract: no input but the cache changes. A kernel that works in place is adapted by one
copy, and one that does so unasked is seen. The rotated key is in the cache alone, where attention reads it.
Engines hand over a table of cosines and sines; here the model's ``RopeConfig`` says what it holds, as in
``rope``, and whoever reads a table declares its type.

Engines differ in what happens to a key between its rotation and its encoding: vLLM rounds it to the model's
type, others encode what they have in float32. Neither is wrong, and a code may differ: ``Numerics.stage``
says which.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.config import RopeConfig
from mla_ref.formats import CacheFormat
from mla_ref.problem import Problem, bind_shapes
from mla_ref.problems import cache_write, rope
from mla_ref.problems._paged import QUERY_DTYPES, check_cache, check_device, check_dtype, check_scale


class RopeCacheWriteInputs(NamedTuple):
    """What every implementation of ``rope_cache_write`` is called with, in this order.

    q_pe: [t h r]. The channels of queries to rotate; any strides.
    kv_c: [t c]. Normalised latents, same dtype; any row stride. Rows whose slot is negative may hold
        anything, NaN included.
    k_pe: [t r]. Rope parts that are not rotated yet, likewise.
    positions: [t] int64. Position of each token, not negative, whether it has a slot or not.
    rope: frequencies, pairing and scaling.
    kv_cache: [n k e]. Changed in place, in the slots named and nowhere else; any strides but the last, which
        is 1.
    slot_mapping: [t] int64. Where each token goes, block · k + offset, no two to the same slot; a token with
        a negative slot is not written.
    cache_format: how entries are stored.
    kv_scale: [] float32. Read only by formats with a per-tensor scale.
    """

    q_pe: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    positions: torch.Tensor
    rope: RopeConfig
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    cache_format: CacheFormat
    kv_scale: torch.Tensor


class RopeCacheWriteOutput(NamedTuple):
    """q_pe: [t h r] in the input's dtype, rotated; of every token, since another rank may store its key.

    kv_cache: [n k e]. The very tensor that was given, written in place.
    """

    q_pe: torch.Tensor
    kv_cache: torch.Tensor


SHAPES = {
    "q_pe": "t h r",
    "kv_c": "t c",
    "k_pe": "t r",
    "positions": "t",
    "kv_cache": "n k e",
    "slot_mapping": "t",
    "kv_scale": "",
}


def check(inputs: RopeCacheWriteInputs) -> None:
    """Raises: ValueError on a shape, dtype or device that breaks the contract."""
    sizes = bind_shapes(SHAPES, inputs._asdict())
    if sizes["r"] % 2:
        raise ValueError(f"q_pe: r={sizes['r']}, must be even")
    check_dtype("q_pe", inputs.q_pe, *QUERY_DTYPES)
    check_dtype("kv_c", inputs.kv_c, inputs.q_pe.dtype)
    check_dtype("k_pe", inputs.k_pe, inputs.q_pe.dtype)
    check_dtype("positions", inputs.positions, torch.int64)
    check_cache(inputs.kv_cache, inputs.cache_format, sizes["c"], sizes["r"])
    check_dtype("slot_mapping", inputs.slot_mapping, torch.int64)
    check_dtype("kv_scale", inputs.kv_scale, torch.float32)
    check_device(inputs)


def check_values(inputs: RopeCacheWriteInputs) -> None:
    """Raises: ValueError on a negative position, and on what ``cache_write`` refuses."""
    rope.check_positions(inputs.positions)
    cache_write.check_slots(inputs.slot_mapping, inputs.kv_cache)
    check_scale(inputs.cache_format, inputs.kv_scale)


def materialize(case: Case, device: torch.device) -> RopeCacheWriteInputs:
    """The tensors of a case: tokens as in ``cache_write``, positions as in ``rope``.

    Positions have nothing to do with slots and lengths, so that none is taken for another.
    """
    written = cache_write.materialize(case, device)
    turned = rope.materialize(replace(case, problem="rope"), device)
    return RopeCacheWriteInputs(
        q_pe=turned.x,
        kv_c=written.kv_c,
        k_pe=written.k_pe,
        positions=turned.positions,
        rope=turned.rope,
        kv_cache=written.kv_cache,
        slot_mapping=written.slot_mapping,
        cache_format=written.cache_format,
        kv_scale=written.kv_scale,
    )


PROBLEM = Problem(
    name="rope_cache_write",
    inputs=RopeCacheWriteInputs,
    output=RopeCacheWriteOutput,
    shapes=SHAPES,
    output_shapes={"q_pe": "t h r", "kv_cache": "n k e"},
    check=check,
    check_values=check_values,
    materialize=materialize,
    writes=("kv_cache",),
)
