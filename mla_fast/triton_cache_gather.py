"""Ranges of cached tokens into contiguous rows, dequantised, in plain Triton: how a prefill chunk begins.

Contract: every cache format and result type, any strides, gaps and offsets of the pool, any block size;
aligned scales where each tile has its own. Starts need no alignment. Offsets, starts and table stay on the
device, so the launch can be captured in a CUDA graph.

``gather_into`` writes into memory that the caller keeps, such as the workspace of chunked prefill.
"""

from collections.abc import Callable

import torch

from mla_fast._split_keys import launching, requires
from mla_fast._stored_entries import SCALINGS, channels, converts_e4m3, entries, supports
from mla_ref.backend import Backend
from mla_ref.formats import CacheFormat
from mla_ref.numerics import Numerics
from mla_ref.problem import implements
from mla_ref.problems.cache_gather import PROBLEM, CacheGatherOutput

# Latent channels of one program, and the warps that share them: the fastest of twelve on an H200.
ELEMENTS, WARPS = 2048, 2
INTERPRETED_ELEMENTS = 2**16  # the interpreter's time goes by operations, not by elements


def gather_into(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_starts: torch.Tensor,
    cache_format: CacheFormat,
    kv_scale: torch.Tensor,
    *,
    native: bool | None = None,
) -> None:
    """Row cu_seqlens[i] + j of kv_c [t c] and k_pe [t r] becomes token seq_starts[i] + j of request i.

    t is cu_seqlens[b], and rows may have any stride; both are of one type. The rest is as in
    ``CacheGatherInputs``. native: use instructions for e4m3; None: where there are any.

    Raises: ValueError for what ``supports`` declines. Ranges and block ids are the caller's promise.
    """
    from mla_fast._triton_copy_kernels import _cache_gather_kernel

    (num_tokens, c), r = kv_c.shape, k_pe.shape[1]
    parts = entries(kv_cache, cache_format, c, r)
    if num_tokens == 0:
        return
    scaling = SCALINGS[cache_format.name].kind
    widths = channels(c, r, scaling)
    rows = _rows(kv_c.device, widths.TILES * widths.TILE)
    num_requests = block_table.shape[0]
    with launching(kv_c.device):
        _cache_gather_kernel[(-(-num_tokens // rows),)](
            parts.latent,
            parts.rope,
            parts.scales,
            kv_scale,
            block_table,
            cu_seqlens.contiguous(),
            seq_starts.contiguous(),
            kv_c,
            k_pe,
            num_tokens,
            num_requests,
            (num_requests - 1).bit_length(),
            parts.block_bytes,
            parts.slot_bytes,
            *block_table.stride(),
            kv_c.stride(0),
            k_pe.stride(0),
            **widths._asdict(),
            BLOCK_SIZE=kv_cache.shape[1],
            SCALING=scaling,
            NATIVE=converts_e4m3(kv_c.device) if native is None else native,
            ROWS=rows,
            num_warps=WARPS,
        )


def _rows(device: torch.device, width: int) -> int:
    """Rows of one program."""
    return max(1, (ELEMENTS if device.type == "cuda" else INTERPRETED_ELEMENTS) // width)


def _implementation(native: bool | None) -> Callable[..., CacheGatherOutput]:
    """native: use instructions for e4m3; None: where there are any."""

    @implements(PROBLEM, values=False)
    def triton_cache_gather(
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

        Raises: ValueError for what ``supports`` declines. Ranges and block ids are the caller's promise.
        Error: none beyond what ``decode`` defines.
        Source: the contract alone; vLLM's ``gather_and_maybe_dequant_cache`` does the same on aligned starts.
        """
        kv_c = torch.empty(num_tokens, kv_lora_rank, dtype=dtype, device=kv_cache.device)
        k_pe = torch.empty(num_tokens, qk_rope_head_dim, dtype=dtype, device=kv_cache.device)
        gather_into(
            kv_c, k_pe, kv_cache, block_table, cu_seqlens, seq_starts, cache_format, kv_scale, native=native
        )
        return CacheGatherOutput(kv_c, k_pe)

    return triton_cache_gather


triton_cache_gather = _implementation(None)

BACKEND = Backend(
    "mla_fast.triton_cache_gather",
    "cache_gather",
    triton_cache_gather,
    Numerics(),
    requires=requires,
    supports=supports,
    variants={"by_bits": _implementation(False)},
)
