"""Adapter to FlashMLA's dense decode kernel, ``flash_mla.flash_mla_with_kvcache``.

Version: deepseek-ai/FlashMLA 9241ae3 (2026-04); the PyPI wheel tokenspeed-flashmla 1.0.0.post20251110 has
the same module and signature. Called so that its first generation (2025-02), whose metadata is planned before
the call, takes it too; that one has not been judged.
Conversions: the two parts of the query are concatenated, a copy, and reshaped to [b s h 576]; ``lse`` comes
as [b h s], and +inf where a row sees no key; it leaves as [t h], and -inf. Scheduler metadata is made anew
in every call, since it is valid for one set of lengths only.
Not supported: ragged queries, blocks other than 64, widths other than 512 + 64, caches of another type than
the query's, GPUs other than Hopper. A NaN among visible keys is dropped by the kernel, which divides by 1
there.
"""

import torch

from mla_fast._installed import calling, why_not
from mla_ref.backend import Backend, Prepared
from mla_ref.case import Case
from mla_ref.formats import CacheFormat, cache_format
from mla_ref.numerics import FLOAT32, INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.latent_attention import PROBLEM, LatentAttentionInputs

LATENT, ROPE, BLOCK = 512, 64, 64
FORMATS = {"bf16": "bfloat16", "fp16": "float16"}
ALIGNMENT = 16  # bytes, of what the copy engine addresses


def requires(device: str) -> str | None:
    """The module, and a Hopper GPU."""
    if device != "cuda" or not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "FlashMLA's dense decode is built for compute capability 9.0 alone"
    return why_not("flash_mla", "flash_mla_with_kvcache", "get_mla_metadata")


def supports(case: Case) -> str | None:
    """One query length, blocks of 64, 512 + 64 channels of the query's own type, aligned."""
    config, fmt = case.config, cache_format(case.cache_format)
    if len(set(case.q_lens)) != 1 or not case.q_lens[0]:
        return f"q_lens are {case.q_lens}; FlashMLA takes one positive length for the whole batch"
    if (config.kv_lora_rank, config.qk_rope_head_dim) != (LATENT, ROPE):
        return f"c={config.kv_lora_rank}, r={config.qk_rope_head_dim}; FlashMLA is built for 512 and 64"
    if case.block_size != BLOCK:
        return f"block_size is {case.block_size}; FlashMLA takes {BLOCK}"
    if FORMATS.get(fmt.name) != case.dtype:
        return f"{case.dtype} queries over a {fmt.name} cache; FlashMLA takes bf16 or fp16 throughout"
    return case.layout.why_not_aligned(fmt.entry_bytes(LATENT, ROPE), case.block_size, ALIGNMENT)


@implements(PROBLEM, values=False)
def flash_mla(
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
    """Multi-query attention over the latent cache by FlashMLA.

    Raises: ValueError for ragged queries; RuntimeError from FlashMLA for whatever else it declines.
    Error: float32 scores and sums; weights rounded to the query's type, by each of two warpgroups for itself.
    Source: deepseek-ai/FlashMLA, csrc/sm90/decode/dense/splitkv_mla.cuh and csrc/smxx/decode/combine.
    """
    inputs = LatentAttentionInputs(
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
    )
    prepared = prepare(inputs)
    return prepared.finish(prepared.run())  # type: ignore[no-any-return]


def prepare(inputs: LatentAttentionInputs) -> Prepared:
    """The query concatenated, and scheduler metadata that FlashMLA fills in its first run."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    (t, h, c), b, q_len = inputs.ql_nope.shape, inputs.block_table.shape[0], inputs.max_seqlen_q
    if t != b * q_len:
        raise ValueError(f"ql_nope: t={t}, but {b} requests of max_seqlen_q={q_len} tokens have another")
    # The first generation plans here, for these lengths; later ones only when they run, and ignore these.
    kv_lens = inputs.cache_seqlens.contiguous()
    with calling(kv_lens.device):
        metadata, splits = get_mla_metadata(kv_lens, q_len * h, 1)
    query = torch.cat([inputs.ql_nope, inputs.q_pe], dim=-1).reshape(b, q_len, h, -1)
    arguments = query, inputs.kv_cache.unsqueeze(2), inputs.block_table.contiguous(), kv_lens

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with calling(query.device):
            out, lse = flash_mla_with_kvcache(
                *arguments, c, metadata, splits, softmax_scale=inputs.softmax_scale, causal=True
            )
        return out, lse

    def finish(result: tuple[torch.Tensor, torch.Tensor]) -> AttentionOutput:
        out, lse = result
        lse = lse.transpose(1, 2).reshape(t, h)
        return AttentionOutput(out.reshape(t, h, c), lse.masked_fill(lse == torch.inf, -torch.inf))

    return Prepared(run, finish)


BACKEND = Backend(
    "mla_fast.flash_mla",
    "latent_attention",
    flash_mla,
    # 160 splits are the most that its merge kernel is built for.
    Numerics(p=INPUT, shared_p=False, sum_rounded_p=False, partial=FLOAT32, max_splits=160, min_tile=BLOCK),
    requires=requires,
    supports=supports,
    prepare=prepare,
)
