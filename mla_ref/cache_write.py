"""New tokens into the cache: encode each, and store it in its slot."""

import torch

from mla_ref.backend import Backend
from mla_ref.formats import CacheFormat
from mla_ref.numerics import Numerics
from mla_ref.pages import scatter
from mla_ref.problem import implements
from mla_ref.problems.cache_write import PROBLEM, CacheWriteOutput


@implements(PROBLEM)
def cache_write(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_format: CacheFormat,
    kv_scale: torch.Tensor,
) -> CacheWriteOutput:
    """Every token with a slot is stored there as its format says, bit for bit; all other memory stays.

    kv_cache[slot // k, slot % k] = encode(kv_c, k_pe)

    Error: the format's, which is part of the result.
    Source: ``concat_and_cache_mla`` of vLLM.
    """
    scatter(kv_cache, slot_mapping, cache_format.encode(kv_c, k_pe, kv_scale))
    return CacheWriteOutput(kv_cache)


BACKEND = Backend("mla_ref.cache_write", "cache_write", cache_write, Numerics())
