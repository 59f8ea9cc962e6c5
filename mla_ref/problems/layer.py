"""The whole attention layer, hidden states in and out, with its cache: prefill, chunk and decode alike."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.config import MLAConfig
from mla_ref.formats import CacheFormat
from mla_ref.layout import poison
from mla_ref.pages import scatter, slots
from mla_ref.problem import Problem, bind_shapes
from mla_ref.problems._paged import check_cache, check_dtype, check_lengths, check_paged, paged, raw_values
from mla_ref.values import bell


class LayerInputs(NamedTuple):
    """What every implementation of ``layer`` is called with, in this order.

    hidden_states: [t d]. New tokens of all requests, packed, already normalised; any row stride.
    positions: [t] int64. Position of each new token in its request.
    weights: the layer's, by their names in a checkpoint ("q_a_proj.weight", a Linear's [out, in]), in the
        hidden states' dtype; exactly those of ``weight_shapes(config)``. "kv_b_proj.weight" viewed as
        [h, p+v, c] has ``w_uk`` in its first p rows of each head and ``w_uv`` in its last v.
    kv_cache: [n k e]. Changed in place, in the slots named and nowhere else; any strides but the last, which
        is 1. Slots past ``cache_seqlens`` and those about to be written may hold anything, NaN included.
    block_table: [b m] int32, any row stride. Logical block → page; entries past a request's last block are
        never followed.
    cu_seqlens_q: [b+1] int32. Request i owns tokens cu_seqlens_q[i] … cu_seqlens_q[i+1]-1.
    cache_seqlens: [b] int32. Cached tokens of each request, its new ones included.
    slot_mapping: [t] int64. Where each new token is cached, block · k + offset, no two in the same slot;
        negative where it is not, as for a token of padding.
    max_seqlen_q: the longest query, known to the host.
    config: dimensions, rotation and scales.
    cache_format: how entries are stored.
    kv_scale: [] float32. Read only by formats with a per-tensor scale.
    """

    hidden_states: torch.Tensor
    positions: torch.Tensor
    weights: Mapping[str, torch.Tensor]
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    slot_mapping: torch.Tensor
    max_seqlen_q: int
    config: MLAConfig
    cache_format: CacheFormat
    kv_scale: torch.Tensor


class LayerOutput(NamedTuple):
    """out: [t d] in the hidden states' dtype; what ``o_proj`` makes of 0 where a token sees no key.

    kv_cache: [n k e]. The very tensor that was given, with the new tokens in it.
    """

    out: torch.Tensor
    kv_cache: torch.Tensor


SHAPES = {
    "hidden_states": "t d",
    "positions": "t",
    "kv_cache": "n k e",
    "block_table": "b m",
    "cu_seqlens_q": "b+1",
    "cache_seqlens": "b",
    "slot_mapping": "t",
    "kv_scale": "",
}


def weight_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """The weights that a layer of this model has, and their shapes."""
    d, h, c, q = config.hidden_size, config.num_heads, config.kv_lora_rank, config.q_lora_rank
    query = h * config.qk_head_dim
    modules: dict[str, tuple[int, ...]] = {"q_proj": (query, d)}
    if q is not None:
        modules = {"q_a_proj": (q, d), "q_a_layernorm": (q,), "q_b_proj": (query, q)}
    modules |= {
        "kv_a_proj_with_mqa": (config.entry_width, d),
        "kv_a_layernorm": (c,),
        "kv_b_proj": (h * (config.qk_nope_head_dim + config.v_head_dim), c),
        "o_proj": (d, h * config.v_head_dim),
    }
    shapes = {f"{name}.weight": shape for name, shape in modules.items()}
    if config.attention_bias:
        biased = [name for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if name in modules]
        shapes |= {f"{name}.bias": modules[name][:1] for name in biased}
    return shapes


def check(inputs: LayerInputs) -> None:
    """Raises: ValueError on a shape, dtype or device that breaks the contract."""
    config = inputs.config
    sizes = bind_shapes(SHAPES, inputs._asdict())
    if sizes["d"] != config.hidden_size:
        raise ValueError(f"hidden_states: d={sizes['d']}, but {config.name} has {config.hidden_size}")
    check_paged(inputs, "hidden_states")
    for name in ("positions", "slot_mapping"):
        check_dtype(name, getattr(inputs, name), torch.int64)
    check_cache(inputs.kv_cache, inputs.cache_format, config.kv_lora_rank, config.qk_rope_head_dim)
    _check_weights(inputs)


def _check_weights(inputs: LayerInputs) -> None:
    hidden, shapes = inputs.hidden_states, weight_shapes(inputs.config)
    if missing := sorted(set(shapes) - set(inputs.weights)):
        raise ValueError(f"weights: {missing[0]} is missing; {inputs.config.name} has {', '.join(shapes)}")
    for name, weight in inputs.weights.items():
        if name not in shapes:
            raise ValueError(f"weights: {name} is unknown; {inputs.config.name} has {', '.join(shapes)}")
        if weight.shape != shapes[name]:
            raise ValueError(f"{name}: shape is {list(weight.shape)}, must be {list(shapes[name])}")
        check_dtype(name, weight, hidden.dtype)
        if weight.device != hidden.device:
            raise ValueError(f"{name}: on {weight.device}, but hidden_states is on {hidden.device}")


def check_values(inputs: LayerInputs) -> None:
    """Raises: ValueError on lengths, offsets, positions or live block ids out of range.

    Slots are checked where they are written, by ``cache_write``.
    """
    check_lengths(inputs, inputs.hidden_states.shape[0])
    for i, position in enumerate(inputs.positions.tolist()):
        if position < 0:
            raise ValueError(f"positions[{i}]: is {position}, must not be negative")


def materialize(case: Case, device: torch.device) -> LayerInputs:
    """The tensors of a case: the last q_lens[i] of the kv_lens[i] tokens of request i are new.

    Its older tokens are in the cache, in the case's regime; every other slot is NaN. Hidden states are shaped
    like queries. Weights give every projection unit variance. A request with more new tokens than tokens
    starts with padding, which is not cached.
    """
    config, dtype = case.config, getattr(torch, case.dtype)
    one_head = replace(case, config=replace(config, num_heads=1))
    raw = raw_values(one_head, config.hidden_size)
    cache = paged(case, raw, device)
    place = [
        _new_tokens(cache.block_table[i], q_len, kv_len, case.block_size)
        for i, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True))
    ]
    empty = torch.empty(2, 0, dtype=torch.int64, device=device)
    positions, slot_mapping = torch.cat([empty, *place], dim=1)
    scatter(cache.kv_cache, slot_mapping, poison(slot_mapping.shape[0], cache.kv_cache))
    weights = {name: _weight(case.seed, name, shape) for name, shape in weight_shapes(config).items()}
    return LayerInputs(
        hidden_states=raw.q_nope[:, 0].to(dtype).to(device),
        positions=positions.clamp(min=0),
        weights={name: weight.to(dtype).to(device) for name, weight in weights.items()},
        kv_cache=cache.kv_cache,
        block_table=cache.block_table,
        cu_seqlens_q=cache.cu_seqlens_q,
        cache_seqlens=cache.cache_seqlens,
        slot_mapping=slot_mapping,
        max_seqlen_q=cache.max_seqlen_q,
        config=config,
        cache_format=cache.cache_format,
        kv_scale=cache.kv_scale,
    )


def _new_tokens(table_row: torch.Tensor, q_len: int, kv_len: int, block_size: int) -> torch.Tensor:
    """Position and slot [2 q_len] of a request's last tokens; both negative where there are fewer."""
    position = torch.arange(kv_len - q_len, kv_len, device=table_row.device)
    padding = position[position < 0]
    slot = slots(table_row, max(kv_len - q_len, 0), kv_len, block_size)
    return torch.stack([position, torch.cat([padding, slot])])


def _weight(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Norms near 1, biases a quarter, matrices that keep unit variance."""
    values = bell(seed, name, *shape)
    if name.endswith("layernorm.weight"):
        return 1.0 + 0.125 * values
    return values * (0.25 if name.endswith("bias") else 1.0 / math.sqrt(shape[1]))


PROBLEM = Problem(
    name="layer",
    inputs=LayerInputs,
    output=LayerOutput,
    shapes=SHAPES,
    output_shapes={"out": "t d", "kv_cache": "n k e"},
    check=check,
    check_values=check_values,
    materialize=materialize,
    writes=("kv_cache",),
)
