"""Adapter to FlashAttention-3 with a latent query, ``flash_attn_with_kvcache(qv=…)``.

Version: ``flash_attn_interface`` of Dao-AILab/flash-attention 0251105 (2026-08, hopper/), which reads
pages; where it is missing, ``fa3_fwd_interface`` of the PyPI wheel fa3-fwd 0.0.3, which is built without
pages and without float16: this adapter then copies every request's live entries into one contiguous, zeroed
cache first, and waits for the lengths to do so. The copy is part of what is judged and timed.
Conversions: q_pe is FlashAttention's q, ql_nope its qv; rope and latent parts of the cache its k and v;
``lse`` comes as [h t]. Rows without a key already give 0 and -inf.
Not supported: widths other than 256 … 512 latent and 8 … 64 rope channels in multiples of 8, caches of
another type than the query's, GPUs other than Hopper.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from mla_fast._installed import calling, found, why_not
from mla_ref.backend import Backend, Prepared
from mla_ref.case import Case
from mla_ref.formats import CacheFormat, cache_format
from mla_ref.numerics import FLOAT32, INPUT, Numerics
from mla_ref.pages import gather
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.latent_attention import PROBLEM, LatentAttentionInputs

PAGED, CONTIGUOUS = "flash_attn_interface", "fa3_fwd_interface"
FORMATS = {"bf16": "bfloat16", "fp16": "float16"}
ALIGNMENT = 16  # bytes, of every address and stride that the copy engine sees


def installed() -> str | None:
    """The module that will be called."""
    return next((name for name in (PAGED, CONTIGUOUS) if found(name)), None)


def requires(device: str) -> str | None:
    """Either module, and a Hopper GPU."""
    if device != "cuda" or not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "FlashAttention-3 takes qv on compute capability 9.0 alone"
    if (name := installed()) is None:
        return f"neither {PAGED} nor {CONTIGUOUS} is installed"
    return why_not(name, "flash_attn_with_kvcache", "flash_attn_varlen_func")


def supports(case: Case) -> str | None:
    """Widths that its kernels have, in the query's own type, and for pages aligned."""
    c, r, fmt = case.config.kv_lora_rank, case.config.qk_rope_head_dim, cache_format(case.cache_format)
    if c % 8 or r % 8 or not 256 <= c <= 512 or not 8 <= r <= 64:
        return f"c={c}, r={r}; FlashAttention-3 takes 256 … 512 and 8 … 64, multiples of 8"
    if FORMATS.get(fmt.name) != case.dtype:
        return f"{case.dtype} queries over a {fmt.name} cache; FlashAttention-3 takes bf16 or fp16 throughout"
    if installed() == PAGED:
        return case.layout.why_not_aligned(fmt.entry_bytes(c, r), case.block_size, ALIGNMENT)
    return f"{CONTIGUOUS} is built without float16" if case.dtype == "float16" else None


def with_splits(num_splits: int) -> Callable[..., AttentionOutput]:
    """The implementation with so many splits; 0 leaves it to FlashAttention."""

    @implements(PROBLEM, values=False)
    def flash_attn_3(
        ql_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cache_seqlens: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        cache_format: CacheFormat,
        kv_scale: torch.Tensor,
    ) -> AttentionOutput:
        """Multi-query attention over the latent cache by FlashAttention-3.

        Error: float32 scores, sums and partial results; weights rounded to the query's type.
        Source: Dao-AILab/flash-attention, hopper/flash_api.cpp and hopper/softmax.h.
        """
        return _over(
            cache_of(kv_cache, block_table, cache_seqlens),
            LatentAttentionInputs(
                ql_nope,
                q_pe,
                kv_cache,
                block_table,
                cu_seqlens_q,
                cache_seqlens,
                max_seqlen_q,
                softmax_scale,
                cache_format,
                kv_scale,
            ),
            num_splits,
        )

    return flash_attn_3


def cache_of(kv_cache: torch.Tensor, block_table: torch.Tensor, cache_seqlens: torch.Tensor) -> torch.Tensor:
    """Pages as they are, or one contiguous cache for each request where pages are not taken."""
    return contiguous(kv_cache, block_table, cache_seqlens) if installed() == CONTIGUOUS else kv_cache


def _over(cache: torch.Tensor, inputs: LatentAttentionInputs, num_splits: int) -> AttentionOutput:
    c = inputs.ql_nope.shape[2]
    return attend(
        inputs.q_pe,
        cache[..., None, c:],
        cache[..., None, :c],
        inputs.block_table,
        inputs.cu_seqlens_q,
        inputs.cache_seqlens,
        max_seqlen_q=inputs.max_seqlen_q,
        softmax_scale=inputs.softmax_scale,
        num_splits=num_splits,
        qv=inputs.ql_nope,
    )


def prepare(inputs: LatentAttentionInputs) -> Prepared:
    """The copy made, where FlashAttention takes no pages."""
    cache = cache_of(inputs.kv_cache, inputs.block_table, inputs.cache_seqlens)
    return Prepared(lambda: _over(cache, inputs, 0), lambda output: output)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    **options: Any,
) -> AttentionOutput:
    """FlashAttention-3's answer over pages, or over what ``contiguous`` made of them where it takes none."""
    name = installed()
    if name is None:
        raise ValueError(f"neither {PAGED} nor {CONTIGUOUS} is installed")
    if len(cache_seqlens) == 0:
        nothing = query.new_empty(*query.shape[:2], value.shape[-1])
        return AttentionOutput(nothing, nothing.new_empty(query.shape[:2], dtype=torch.float32))
    with calling(query.device):
        out, lse, *_ = importlib.import_module(name).flash_attn_with_kvcache(
            query,
            key,
            value,
            cache_seqlens=cache_seqlens.contiguous(),
            page_table=block_table.contiguous() if name == PAGED else None,
            cu_seqlens_q=cu_seqlens_q.contiguous(),
            causal=True,
            return_softmax_lse=True,
            **options,
        )
    return AttentionOutput(out, lse.transpose(0, 1))


def contiguous(pages: torch.Tensor, block_table: torch.Tensor, cache_seqlens: torch.Tensor) -> torch.Tensor:
    """[b j …] from pages [n k …]: live entries, and zeros behind them, which masked weights may multiply."""
    lengths = cache_seqlens.tolist()
    cache = pages.new_zeros(len(lengths), max([1, *lengths]), *pages.shape[2:])
    for i, length in enumerate(lengths):
        cache[i, :length] = gather(pages, block_table[i], 0, length)
    return cache


flash_attn_3 = with_splits(0)

NUMERICS = Numerics(p=INPUT, sum_rounded_p=False, partial=FLOAT32, max_splits=128, min_tile=64)

BACKEND = Backend(
    "mla_fast.flash_attn_3",
    "latent_attention",
    flash_attn_3,
    NUMERICS,
    requires=requires,
    supports=supports,
    variants={"splits_1": with_splits(1), "splits_5": with_splits(5)},
    prepare=prepare,
)
