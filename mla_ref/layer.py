"""The attention layer: projections, norms, rotation and cache around any implementation of ``attention``."""

from collections.abc import Callable, Mapping

import torch

from mla_ref.backend import Backend
from mla_ref.cache_write import cache_write
from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.formats import CacheFormat
from mla_ref.naive import naive
from mla_ref.numerics import INPUT, Numerics
from mla_ref.problem import AttentionOutput, implements
from mla_ref.problems.attention import AttentionInputs
from mla_ref.problems.layer import PROBLEM, LayerOutput, weight_shapes
from mla_ref.rope import rotate
from mla_ref.rows import compute_dtype

Attention = Callable[..., AttentionOutput]
Weights = Mapping[str, torch.Tensor]


def project(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """x weightᵀ + bias, summed in float32 or better and rounded once to x's dtype."""
    wide = compute_dtype(x)
    out = x.to(wide) @ weights[f"{name}.weight"].to(wide).T
    if f"{name}.bias" in weights:
        out = out + weights[f"{name}.bias"].to(wide)
    return out.to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, gain: float) -> torch.Tensor:
    """gain · weight · x / sqrt(mean x² + eps), rounded once to x's dtype."""
    wide = x.to(compute_dtype(x))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def queries(
    hidden_states: torch.Tensor, positions: torch.Tensor, weights: Weights, config: MLAConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """q_nope [t h p] and the rotated q_pe [t h r], llama-4's growth with the position included."""
    if config.q_lora_rank is None:
        q = project(hidden_states, weights, "q_proj")
    else:
        q_latent = project(hidden_states, weights, "q_a_proj")
        norm = weights["q_a_layernorm.weight"]
        q = project(rms_norm(q_latent, norm, config.rms_norm_eps, config.q_lora_scale), weights, "q_b_proj")
    q = q.view(-1, config.num_heads, config.qk_head_dim)
    if config.llama4_beta:
        growth = torch.log1p((positions // config.llama4_max_position).to(compute_dtype(q)))
        q = (q * (1.0 + config.llama4_beta * growth)[:, None, None]).to(q.dtype)
    q_nope, q_pe = q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]
    return q_nope, rotate(q_pe, positions, config.rope).x


def latents(
    hidden_states: torch.Tensor, positions: torch.Tensor, weights: Weights, config: MLAConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is cached: the normalised latent kv_c [t c] and the rotated k_pe [t r]."""
    entry = project(hidden_states, weights, "kv_a_proj_with_mqa")
    kv_c, k_pe = entry[:, : config.kv_lora_rank], entry[:, None, config.kv_lora_rank :]
    norm = weights["kv_a_layernorm.weight"]
    kv_c = rms_norm(kv_c, norm, config.rms_norm_eps, config.kv_lora_scale)
    return kv_c, rotate(k_pe, positions, config.rope).x[:, 0]


def up_projections(kv_b_proj: torch.Tensor, config: MLAConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """w_uk [h p c] and w_uv [h v c], views of the one weight: nothing to refresh when it is reloaded."""
    per_head = kv_b_proj.view(config.num_heads, -1, config.kv_lora_rank)
    return per_head[:, : config.qk_nope_head_dim], per_head[:, config.qk_nope_head_dim :]


def layer_around(attention: Attention) -> Callable[..., LayerOutput]:
    """The layer that attends with this implementation of ``attention``."""

    @implements(PROBLEM)
    def layer(
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        weights: Weights,
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
        """The new tokens are cached, then attend to everything cached, themselves included.

        kv_c = norm(W_DKV x),   k_pe = rope(W_KR x),   q = W_UQ norm(W_DQ x)  or  W_Q x,   q_pe = rope(q[p:])
        out = W_O attention(q[:p], q_pe, cache)

        Error: each step in float32 (float64 for float64 hidden states), its result rounded to their dtype.
        Source: DeepSeek-V2, arXiv 2405.04434, appendix C.
        """
        q_nope, q_pe = queries(hidden_states, positions, weights, config)
        kv_c, k_pe = latents(hidden_states, positions, weights, config)
        cache_write(kv_c, k_pe, kv_cache, slot_mapping, cache_format, kv_scale)
        w_uk, w_uv = up_projections(weights["kv_b_proj.weight"], config)
        attended = attention(
            *AttentionInputs(
                q_nope=q_nope,
                q_pe=q_pe,
                kv_cache=kv_cache,
                block_table=block_table,
                cu_seqlens_q=cu_seqlens_q,
                cache_seqlens=cache_seqlens,
                w_uk=w_uk,
                w_uv=w_uv,
                max_seqlen_q=max_seqlen_q,
                softmax_scale=config.softmax_scale,
                cache_format=cache_format,
                kv_scale=kv_scale,
            )
        )
        out = project(attended.out.flatten(1), weights, "o_proj")
        return LayerOutput(out, kv_cache)

    return layer


class MLA(torch.nn.Module):
    """One attention layer; its state dict has a checkpoint's names (``q_a_proj.weight``, …).

    attention: any implementation of the ``attention`` problem, of this package or not.

    Raises: ValueError if the model's layer computes what this one does not.
    """

    def __init__(
        self,
        config: MLAConfig,
        attention: Attention = naive,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if reason := why_not_whole(config):
            raise ValueError(reason)
        self.config = config
        self.layer = layer_around(attention)
        shapes = weight_shapes(config)
        for key, shape in shapes.items():
            name, _, kind = key.rpartition(".")
            if kind == "weight" and len(shape) == 1:
                self.add_module(name, torch.nn.RMSNorm(shape, device=device, dtype=dtype))
            elif kind == "weight":
                bias = f"{name}.bias" in shapes
                linear = torch.nn.Linear(shape[1], shape[0], bias=bias, device=device, dtype=dtype)
                self.add_module(name, linear)

    def forward(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cache_seqlens: torch.Tensor,
        slot_mapping: torch.Tensor,
        max_seqlen_q: int,
        cache_format: CacheFormat,
        kv_scale: torch.Tensor,
    ) -> torch.Tensor:
        """The layer's output [t d]; ``kv_cache`` has the new tokens afterwards. No gradient flows."""
        return self.layer(
            hidden_states=hidden_states,
            positions=positions,
            weights={name: parameter.detach() for name, parameter in self.named_parameters()},
            kv_cache=kv_cache,
            block_table=block_table,
            cu_seqlens_q=cu_seqlens_q,
            cache_seqlens=cache_seqlens,
            slot_mapping=slot_mapping,
            max_seqlen_q=max_seqlen_q,
            config=self.config,
            cache_format=cache_format,
            kv_scale=kv_scale,
        ).out


def why_not_whole(config: MLAConfig) -> str | None:
    """What this layer lacks of the model's own, or None."""
    return f"{config.name}: the layer computes more than MLA: {config.beyond}" if config.beyond else None


def supports(case: Case) -> str | None:
    """Whole layers only."""
    return why_not_whole(case.config)


BACKEND = Backend(
    "mla_ref.layer", "layer", layer_around(naive), Numerics(form="expanded", stage=INPUT), supports=supports
)
