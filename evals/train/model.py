"""The two models: their configurations, and a fast forward pass over transformers' own modules."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LENGTH = 2048  # tokens of a training row

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 1,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": True,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 1536,
}

# DeepSeek-V2-Lite's query (one projection), small: solves its problems on two CPU cores in seconds.
MINI: dict[str, Any] = _COMMON | {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": LENGTH,
    "rope_scaling": None,
}

# DeepSeek-V3's attention geometry and YaRN, so that every GPU kernel takes its cache.
GEOM: dict[str, Any] = _COMMON | {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4 * LENGTH,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": LENGTH,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

CONFIGS = {"mini": MINI, "geom": GEOM}


def write_config(config: dict[str, Any], folder: Path) -> None:
    """config.json in the form in which DeepSeek publishes its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")


def build(folder: Path, seed: int) -> nn.Module:
    """transformers' DeepseekV3ForCausalLM for the config in ``folder``, freshly initialised, float32.

    Weights keep unit variance (deviation fan_in ** -0.5), those that write to the residual stream less by
    the square root of how many do.
    """
    from transformers import AutoConfig, DeepseekV3ForCausalLM

    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    model: nn.Module = DeepseekV3ForCausalLM(config).float()  # type: ignore[no-untyped-call]
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        if "embed_tokens" in name:
            nn.init.normal_(weight, std=config.hidden_size**-0.5)
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        gain = 1.0 / math.sqrt(2 * config.num_hidden_layers) if residual else 1.0
        nn.init.normal_(weight, std=gain * weight.shape[1] ** -0.5)
    return model


def load(folder: Path) -> nn.Module:
    """The checkpoint in ``folder`` as transformers loads it, widened to float32."""
    from transformers import DeepseekV3ForCausalLM

    model: nn.Module = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def rotary_tables(model: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [length r/2] float32 of positions 0 … length-1, from the model's own rotary module."""
    rotary = model.model.rotary_emb
    device = model.lm_head.weight.device
    cos, sin = rotary(torch.zeros(1, device=device), torch.arange(length, device=device)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].float(), sin[0, :, :half].float()


def logits(model: Any, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Next-token logits [b s vocab] of right-padded rows [b s].

    They are what the model's own forward gives, without its masks, caches and experts: one graph to compile.
    """
    x = F.embedding(tokens, model.model.embed_tokens.weight)
    for layer in model.model.layers:
        x = x + _attention(layer.self_attn, _norm(layer.input_layernorm, x), cos, sin)
        y = _norm(layer.post_attention_layernorm, x)
        x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
    return F.linear(_norm(model.model.norm, x), model.lm_head.weight)


def _attention(attention: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    b, s, _ = x.shape
    p, r, v = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
    if attention.q_lora_rank is None:
        q = attention.q_proj(x)
    else:
        q = attention.q_b_proj(_norm(attention.q_a_layernorm, attention.q_a_proj(x)))
    q_nope, q_pe = q.view(b, s, -1, p + r).transpose(1, 2).split([p, r], -1)
    kv_c, k_pe = attention.kv_a_proj_with_mqa(x).split([attention.kv_lora_rank, r], -1)
    kv = attention.kv_b_proj(_norm(attention.kv_a_layernorm, kv_c)).view(b, s, -1, p + v).transpose(1, 2)
    k_nope, value = kv.split([p, v], -1)
    k_pe = _rotate(k_pe[:, None], cos, sin).expand(-1, q_nope.shape[1], -1, -1)
    query = torch.cat([q_nope, _rotate(q_pe, cos, sin).to(q_nope.dtype)], -1)
    key = torch.cat([k_nope, k_pe.to(k_nope.dtype)], -1)
    # One head size for all three is what the fast kernels take; the padding is cut off again.
    out = F.scaled_dot_product_attention(
        query, key, F.pad(value, (0, p + r - v)), is_causal=True, scale=attention.scaling
    )
    return attention.o_proj(out[..., :v].transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-untyped-call]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.variance_epsilon).to(x.dtype)
