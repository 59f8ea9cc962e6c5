"""Rotation, and then the new tokens into the cache."""

import torch

from mla_ref.backend import Backend
from mla_ref.cache_write import cache_write
from mla_ref.config import RopeConfig
from mla_ref.formats import CacheFormat
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import implements
from mla_ref.problems.rope_cache_write import PROBLEM, RopeCacheWriteOutput
from mla_ref.rope import rotate


@implements(PROBLEM)
def rope_cache_write(
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    rope: RopeConfig,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_format: CacheFormat,
    kv_scale: torch.Tensor,
) -> RopeCacheWriteOutput:
    """Every query is rotated, and every token with a slot is stored there with its key rotated.

    kv_cache[slot // k, slot % k] = encode(kv_c, rotate(k_pe))

    Error: the rotation's, each key rounded to the input's type before it is encoded; then the format's, which
        is part of the result. A fused kernel may encode what it rotated in float32 as it is, and declares
        ``Numerics(stage="exact")``.
    Source: ``concat_and_cache_mla_rope_fused`` of vLLM.
    """
    turned = rotate(k_pe[:, None], positions, rope).x[:, 0]
    cache_write(kv_c, turned, kv_cache, slot_mapping, cache_format, kv_scale)
    return RopeCacheWriteOutput(rotate(q_pe, positions, rope).x, kv_cache)


BACKEND = Backend("mla_ref.rope_cache_write", "rope_cache_write", rope_cache_write, Numerics(stage=INPUT))
