"""Adapter to Hugging Face transformers' DeepSeek-V3 attention layer, ``DeepseekV3Attention``.

Version: transformers 5.24, eager attention. Conversions: the layer is built without memory of its own and
takes the weights given; each request is one call, with its older tokens put into a ``DynamicCache``, which
holds the latent, and its new ones read out of it into the pages. transformers rotates interleaved pairs into
half-split order, and the cache is reordered both ways. The mask is given explicitly, aligned bottom-right.
Tokens of padding, which see no key, get what ``o_proj`` makes of 0.
Not supported: anything but float32 in a float32 cache (transformers rounds scores and norms of narrower types
once more than a layer's numerics can say), llama-4 scaling, latent scales, NoPE, other epsilons.
"""

import functools
import importlib
import re
from collections.abc import Mapping
from typing import Any

import torch

from mla_fast._installed import calling, why_not
from mla_ref.backend import Backend
from mla_ref.case import Case
from mla_ref.config import YARN, MLAConfig
from mla_ref.formats import CacheFormat
from mla_ref.numerics import FLOAT32, INPUT, Numerics
from mla_ref.pages import gather, scatter
from mla_ref.problem import implements
from mla_ref.problems.layer import PROBLEM, LayerOutput
from mla_ref.rows import causal_mask, requests

MODULE = "transformers.models.deepseek_v3.modeling_deepseek_v3"
EPSILON = 1e-6  # of its norms, whatever the model's configuration says


def requires(device: str) -> str | None:
    """The package, with layers that cache the latent."""
    if reason := why_not("transformers", "__version__"):
        return reason
    import transformers

    found = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    if not found or tuple(map(int, found.groups())) < (5, 24):
        return f"transformers {transformers.__version__} is not 5.24 or newer"
    return why_not("transformers", "DynamicCache", "DeepseekV3Config") or why_not(
        MODULE, "DeepseekV3Attention", "DeepseekV3RotaryEmbedding"
    )


def supports(case: Case) -> str | None:
    """The dimensions and scales of a DeepSeek-V3, in float32."""
    config, rope = case.config, case.config.rope
    if config.beyond:
        return f"{config.name}: the layer computes more than MLA: {config.beyond}"
    if (case.dtype, case.cache_format) != ("float32", "fp32"):
        return f"{case.dtype} over a {case.cache_format} cache; float32 throughout can be judged"
    if config.llama4_beta or (config.q_lora_scale, config.kv_lora_scale) != (1.0, 1.0):
        return f"{config.name}: DeepseekV3Attention has no scales of its latents or positions"
    if (
        not rope.rotate
        or not config.qk_rope_head_dim
        or rope.attention_factor is not None
        or not rope.truncate
    ):
        return f"{config.name}: DeepseekV3Attention rotates by DeepSeek's own tables"
    if config.rms_norm_eps != EPSILON:
        return f"{config.name}: rms_norm_eps is {config.rms_norm_eps}; DeepseekV3Attention has {EPSILON}"
    return None


@functools.lru_cache(maxsize=8)
def modules(config: MLAConfig) -> tuple[Any, Any]:
    """Their layer, without memory for its weights, and their rotary tables."""
    from transformers import DeepseekV3Config

    theirs = importlib.import_module(MODULE)
    rope: dict[str, Any] = {"rope_type": config.rope.scaling, "rope_theta": config.rope.theta}
    if config.rope.scaling == YARN:
        names = ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
        rope |= {name: getattr(config.rope, name) for name in names}
        rope["original_max_position_embeddings"] = config.rope.original_max_position
    same = (
        "hidden_size",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    )
    described = DeepseekV3Config(
        **{name: getattr(config, name) for name in same},
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.max_position,
        attention_bias=config.attention_bias,
        rope_parameters=rope,
        rope_interleave=config.rope.interleaved,
    )
    described._attn_implementation = "eager"
    with torch.device("meta"):
        layer = theirs.DeepseekV3Attention(described, 0)
    return layer.eval(), theirs.DeepseekV3RotaryEmbedding(described)


def reordered(k_pe: torch.Tensor, to_theirs: bool, interleaved: bool) -> torch.Tensor:
    """Rotated channels in half-split order (theirs) or in pairs (ours); as they are where both are split."""
    if not interleaved:
        return k_pe
    half = k_pe.shape[-1] // 2
    sizes = (half, 2) if to_theirs else (2, half)
    return k_pe.reshape(*k_pe.shape[:-1], *sizes).transpose(-1, -2).flatten(-2)


@implements(PROBLEM, values=False)
def transformers_layer(
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    slot_mapping: torch.Tensor,
    max_seqlen_q: int,
    config: MLAConfig,
    cache_format: CacheFormat,
    kv_scale: torch.Tensor,
) -> LayerOutput:
    """transformers' layer over our pages.

    Error: float32 throughout, the rotary angles included.
    Source: huggingface/transformers, src/transformers/models/deepseek_v3/modeling_deepseek_v3.py.
    """
    from transformers import DynamicCache

    layer, tables = modules(config)
    layer.load_state_dict(weights, assign=True)
    dims, dtype = (config.kv_lora_rank, config.qk_rope_head_dim), hidden_states.dtype
    out = hidden_states.new_zeros(hidden_states.shape)
    if config.attention_bias:
        out += weights["o_proj.bias"]
    for request in requests(block_table, cu_seqlens_q, cache_seqlens):
        unseeing = max(request.q_len - request.kv_len, 0)
        rows = slice(request.rows.start + unseeing, request.rows.stop)
        if rows.start == rows.stop:
            continue
        cache: Any = DynamicCache()
        old = gather(kv_cache, request.table_row, 0, request.context_len)
        kv_c, k_pe = cache_format.decode(old, *dims, kv_scale, dtype)
        cache.update(kv_c[None, None], reordered(k_pe, True, config.rope.interleaved)[None, None], 0)
        seen = causal_mask(request, 0, request.kv_len, out.device)[unseeing:]
        mask = torch.zeros(seen.shape, dtype=dtype, device=out.device).masked_fill(~seen, -torch.inf)
        hidden, position = hidden_states[None, rows], positions[None, rows]
        with torch.no_grad(), calling(out.device):
            out[rows] = layer(
                hidden_states=hidden,
                position_embeddings=tables(hidden, position),
                attention_mask=mask[None, None],
                cache=cache,
            )[0][0]
        new_c, new_pe = (
            x[0, 0, request.context_len :] for x in (cache.layers[0].keys, cache.layers[0].values)
        )
        entries = cache_format.encode(new_c, reordered(new_pe, False, config.rope.interleaved), kv_scale)
        scatter(kv_cache, slot_mapping[rows], entries)
    return LayerOutput(out, kv_cache)


BACKEND = Backend(
    "mla_fast.transformers_layer",
    "layer",
    transformers_layer,
    Numerics(form="expanded", stage=INPUT, angle=FLOAT32),
    requires=requires,
    supports=supports,
)
