"""Ranges of cached tokens, dequantised, one after another."""

import torch

from mla_ref.backend import Backend
from mla_ref.formats import CacheFormat
from mla_ref.numerics import Numerics
from mla_ref.pages import gather
from mla_ref.problem import implements
from mla_ref.problems.cache_gather import PROBLEM, CacheGatherOutput


@implements(PROBLEM)
def cache_gather(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor,
    num_tokens: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    dtype: torch.dtype,
    cache_format: CacheFormat,
    kv_scale: torch.Tensor,
) -> CacheGatherOutput:
    """Row cu_seqlens[i] + j is token seq_starts[i] + j of request i.

    (kv_c, k_pe)[row] = decode(kv_cache[block_table[i, token // k], token % k])

    Error: none beyond what ``decode`` defines.
    Source: ``gather_and_maybe_dequant_cache`` of vLLM, without its demand for aligned starts.
    """
    offsets, starts = cu_seqlens.tolist(), seq_starts.tolist()
    kv_c = torch.empty(num_tokens, kv_lora_rank, dtype=dtype, device=kv_cache.device)
    k_pe = torch.empty(num_tokens, qk_rope_head_dim, dtype=dtype, device=kv_cache.device)
    for i, start in enumerate(starts):
        rows = slice(offsets[i], offsets[i + 1])
        entries = gather(kv_cache, block_table[i], start, start + rows.stop - rows.start)
        kv_c[rows], k_pe[rows] = cache_format.decode(entries, kv_lora_rank, qk_rope_head_dim, kv_scale, dtype)
    return CacheGatherOutput(kv_c, k_pe)


BACKEND = Backend("mla_ref.cache_gather", "cache_gather", cache_gather, Numerics())
