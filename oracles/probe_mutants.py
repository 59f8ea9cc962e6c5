"""Mutants that are right on their own case's first run: pages in order, one page size, one call, one address.

The claims that compare a second run with the first were made for them; the truth alone does not see most.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mla_ref.cache_gather import cache_gather
from mla_ref.cache_write import cache_write
from mla_ref.case import Case
from mla_ref.layer import latents, layer_around
from mla_ref.layout import CacheLayout
from mla_ref.merge_states import merge, merge_states
from mla_ref.naive import naive
from mla_ref.paged_attention import paged_attention
from mla_ref.problem import AttentionOutput
from mla_ref.problems.cache_gather import CacheGatherOutput
from mla_ref.problems.cache_write import CacheWriteOutput
from mla_ref.problems.layer import LayerOutput
from mla_ref.problems.rope import RopeOutput
from mla_ref.rope import rotate
from mla_ref.rows import Request
from oracles.mutants import (
    CONFIG,
    LATENT,
    LAYER,
    MERGE,
    PAGED,
    READ,
    ROPE,
    WRITE,
    WRITE_PER_TENSOR,
    Run,
    attend,
    changed,
    departing,
    given,
)
from oracles.oracle import storage_bytes

IN_ORDER = CacheLayout(shuffled=False, spare_blocks=0)

# Where numbers of 32 bits end.
SIGNED, UNSIGNED = 2**31, 2**32


def attention_mutants(case: Case, per_tensor: Case) -> dict[str, tuple[Case, Run]]:
    """The edits that ``latent_attention`` and ``attention`` have in common."""
    return {
        "page_table_taken_for_rising": (replace(case, layout=IN_ORDER), given(block_table=_rising)),
        "page_size_built_in": (case, given(kv_cache=_in_pages_of_sixteen, block_table=_for_more_pages)),
        "page_size_taken_for_a_power_of_two": (case, _shifting),
        "cache_cast_to_float16": (case, departing(keys=lambda keys, _: tuple(x.half().to(x) for x in keys))),
        "dead_slots_known_by_nan": (case, _knowing_nan),
        "read_in_32_bits": (case, given(kv_cache=lambda x: _wrapped(x.kv_cache))),
        "read_in_unsigned_32_bits": (case, given(kv_cache=lambda x: _wrapped(x.kv_cache, UNSIGNED))),
        "read_before_the_queries": (case, _reading_before_the_queries),
        "store_before_the_queries": (case, _storing_before_the_queries),
        "lengths_remembered": (case, _remembering_lengths()),
        "semaphore_not_reset": (case, _adding_up()),
        "table_indexed_by_row": (case, given(block_table=_by_row)),
        "context_skipped": (case, departing(mask=_new_tokens_only)),
        "new_tokens_ignored": (case, departing(mask=_context_only)),
        "rope_lanes_in_values": (case, _with_rope_lanes),
        "value_scale_dropped": (per_tensor, _values_without_scale),
        "empty_split_counted": (case, departing(merge=_counting_empty)),
        "scale_built_in": (case, given(softmax_scale=lambda _: CONFIG.softmax_scale)),
    }


def _counting_empty(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A split without a key has the log-sum-exp that its workspace held: 0."""
    return merge(outs, lses.masked_fill(lses.isneginf() & ~lses.isneginf().all(0), 0.0))


def weight_mutants(case: Case) -> dict[str, tuple[Case, Run]]:
    """The edits of ``attention`` alone."""
    loaded: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}

    def remembering(inputs: Any) -> AttentionOutput:
        """Weights are prepared at the first call."""
        w_uk, w_uv = loaded.setdefault(inputs.w_uk.shape, (inputs.w_uk.clone(), inputs.w_uv.clone()))
        return attend(inputs._replace(w_uk=w_uk, w_uv=w_uv), {})

    return {"weights_remembered": (case, remembering)}


def _values_without_scale(inputs: Any) -> AttentionOutput:
    return attend(inputs, {"value": lambda kv_c, _: kv_c / inputs.kv_scale})


def _rising(inputs: Any) -> torch.Tensor:
    """The pages that follow a request's first one."""
    last = inputs.kv_cache.shape[0] - 1
    step = torch.arange(inputs.block_table.shape[1], dtype=torch.int32)
    pages: torch.Tensor = (inputs.block_table[:, :1].clamp(max=last) + step).clamp(max=last)
    return pages


def _in_pages_of_sixteen(inputs: Any) -> torch.Tensor:
    cache, size = inputs.kv_cache, LATENT.block_size
    pages: torch.Tensor = cache.unflatten(1, (-1, size)).flatten(0, 1) if cache.shape[1] > size else cache
    return pages


def _for_more_pages(inputs: Any) -> torch.Tensor:
    """The table as it is, for as many columns as smaller pages are looked up in."""
    table, times = inputs.block_table, max(inputs.kv_cache.shape[1] // LATENT.block_size, 1)
    repeated: torch.Tensor = table.repeat(1, times)
    return repeated if times == 1 else repeated.clamp(max=inputs.kv_cache.shape[0] - 1)


def _shifting(inputs: Any) -> AttentionOutput:
    """A token's column and slot are found by a shift and a mask."""
    cache = inputs.kv_cache
    size = 1 << (cache.shape[1].bit_length() - 1)

    def entries(right: torch.Tensor, request: Request) -> torch.Tensor:
        token = torch.arange(len(right))
        page = request.table_row[(token // size).clamp(max=len(request.table_row) - 1)].long()
        found: torch.Tensor = cache[page.clamp(max=len(cache) - 1), token % size]
        return found

    return attend(inputs, {"entries": entries} if size < cache.shape[1] else {})


def _knowing_nan(inputs: Any) -> AttentionOutput:
    """Whole pages are read, and a maximum that passes over NaN is all that masks their dead slots."""
    alive: list[torch.Tensor] = []

    def request(read: Request, right: Request) -> Request:
        size = inputs.kv_cache.shape[1]
        return right._replace(kv_len=-(-right.kv_len // size) * size)

    def keys(read: tuple[torch.Tensor, torch.Tensor], right: Request) -> tuple[torch.Tensor, torch.Tensor]:
        alive[:] = [~torch.cat(read, dim=1).isnan().any(1)]
        return read[0].nan_to_num(nan=0.0), read[1].nan_to_num(nan=0.0)

    def mask(causal: torch.Tensor, right: Request) -> torch.Tensor:
        return (causal | (torch.arange(causal.shape[1]) >= right.kv_len)) & alive[0]

    return attend(inputs, {"request": request, "keys": keys, "mask": mask})


def _wrapped(cache: torch.Tensor, end: int = SIGNED) -> torch.Tensor:
    """Element offsets are kept in 32 bits: a pool that is larger is read at its beginning."""
    large = (cache.shape[0] - 1) * cache.stride(0) >= end
    return cache[:1].expand_as(cache) if large else cache


def _before(tensor: torch.Tensor) -> torch.Tensor:
    """The element in front of a tensor, as bytes; empty where its storage begins with it."""
    at = tensor.storage_offset() * tensor.element_size()
    return storage_bytes(tensor)[max(at - tensor.element_size(), 0) : at]


def _reading_before_the_queries(inputs: Any) -> AttentionOutput:
    """A vector load that starts early; its first lane is multiplied by 0."""
    output, lane = attend(inputs, {}), _before(inputs[0]).clone()
    if not len(lane):
        return output
    return AttentionOutput(output.out + 0.0 * lane.view(inputs[0].dtype), output.lse)


def _storing_before_the_queries(inputs: Any) -> AttentionOutput:
    output = attend(inputs, {})
    _before(inputs[0]).zero_()
    return output


def _remembering_lengths() -> Run:
    """A plan made at the first call with as many requests: later ones read no further."""
    plans: dict[int, torch.Tensor] = {}

    def run(inputs: Any) -> AttentionOutput:
        plan = plans.setdefault(len(inputs.cache_seqlens), inputs.cache_seqlens.clone())
        return attend(inputs._replace(cache_seqlens=torch.minimum(plan, inputs.cache_seqlens)), {})

    return run


def _adding_up() -> Run:
    """A second call adds to what the first one left in a workspace."""
    left: dict[torch.Size, torch.Tensor] = {}

    def run(inputs: Any) -> AttentionOutput:
        output = attend(inputs, {})
        before = left.get(output.out.shape)
        left[output.out.shape] = output.out.clone()
        return output if before is None else AttentionOutput(output.out + before, output.lse)

    return run


def _by_row(inputs: Any) -> torch.Tensor:
    """The first query row of a request taken for its row of the table."""
    table, last = inputs.block_table, len(inputs.block_table) - 1
    rows: torch.Tensor = table[inputs.cu_seqlens_q[:-1].long().clamp(max=last)]
    return rows.where(rows < inputs.kv_cache.shape[0], 0)


def _new_tokens_only(mask: torch.Tensor, request: Request) -> torch.Tensor:
    return mask & (torch.arange(mask.shape[1]) >= request.kv_len - request.q_len)


def _context_only(mask: torch.Tensor, request: Request) -> torch.Tensor:
    return mask & (torch.arange(mask.shape[1]) < request.kv_len - request.q_len)


def _with_rope_lanes(inputs: Any) -> AttentionOutput:
    """Values begin in the middle of an entry and end in its rope part."""
    rope: list[torch.Tensor] = []

    def keys(right: tuple[torch.Tensor, torch.Tensor], request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        rope[:] = right[1:]
        return right

    def value(kv_c: torch.Tensor, request: Request) -> torch.Tensor:
        return torch.cat([kv_c, rope[0]], dim=1)[:, rope[0].shape[1] :]

    return attend(inputs, {"keys": keys, "value": value})


def paged_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``paged_attention``."""
    case = replace(PAGED, cache_format="bf16")

    def wrapped(inputs: Any, end: int) -> AttentionOutput:
        caches = {name: _wrapped(getattr(inputs, name), end) for name in ("key_cache", "value_cache")}
        output: AttentionOutput = _unchecked(paged_attention)(*inputs._replace(**caches))
        return output

    return {
        "paged_read_in_32_bits": (case, partial(wrapped, end=SIGNED)),
        "paged_read_in_unsigned_32_bits": (case, partial(wrapped, end=UNSIGNED)),
    }


def merge_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``merge_states``."""
    three = replace(MERGE, q_lens=(9,) * 3, kv_lens=(5, 0, 70))
    one = replace(MERGE, q_lens=(9,), kv_lens=(5,))

    def single_normalised(inputs: Any) -> AttentionOutput:
        """A lone state passes through half precision on its way."""
        output = merge_states(*inputs)
        if inputs.outs.shape[0] > 1:
            return output
        return output._replace(lse=output.lse.bfloat16().float())

    def first_two(inputs: Any) -> AttentionOutput:
        """Only neighbours are told apart: a third state is taken for as heavy as the second."""
        lses = inputs.lses.clone()
        lses[2:] = lses[1:-1].clone()
        return merge_states(inputs.outs.nan_to_num(nan=0.0), lses)

    return {
        "states_beyond_three_dropped": (
            three,
            changed(merge_states, outs=_three("outs"), lses=_three("lses")),
        ),
        "states_single_rounded": (one, single_normalised),
        "states_third_weighed_as_second": (three, first_two),
    }


def _three(name: str) -> Callable[[Any], torch.Tensor]:
    def first(inputs: Any) -> torch.Tensor:
        states: torch.Tensor = getattr(inputs, name)[:3]
        return states

    return first


def layer_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``layer``."""
    right = layer_around(naive)

    def rotated_twice(inputs: Any) -> LayerOutput:
        """What is cached was rotated by the caller and once more by the writer."""
        output = right(*inputs)
        kv_c, k_pe = latents(inputs.hidden_states, inputs.positions, inputs.weights, inputs.config)
        twice = rotate(k_pe[:, None], inputs.positions, inputs.config.rope).x[:, 0]
        cache_write(kv_c, twice, inputs.kv_cache, inputs.slot_mapping, inputs.cache_format, inputs.kv_scale)
        return LayerOutput(output.out, inputs.kv_cache)

    def narrow(inputs: Any) -> Any:
        """The query's first projection has the width of a smaller model."""
        name = "q_a_proj.weight" if "q_a_proj.weight" in inputs.weights else "q_proj.weight"
        weight = inputs.weights[name].clone()
        weight[:, 3 * weight.shape[1] // 4 :] = 0.0
        return {**inputs.weights, name: weight}

    return {
        "layer_caches_rotated_twice": (LAYER, rotated_twice),
        "layer_channels_not_read": (LAYER, changed(right, weights=narrow)),
    }


def rope_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``rope``."""
    one, short = (replace(ROPE, q_lens=(n,), kv_lens=(n,)) for n in (1, 2))

    def unless_alone(inputs: Any) -> RopeOutput:
        """A token of its own is taken for the first."""
        return RopeOutput(inputs.x) if len(inputs.x) == 1 else rotate(*inputs)

    def from_one(inputs: Any) -> RopeOutput:
        """Positions are numbers of tokens seen, but for the very first."""
        late = inputs.positions + (torch.arange(len(inputs.positions)) > 0).to(inputs.positions)
        output: RopeOutput = _unchecked(rotate)(*inputs._replace(positions=late))
        return output

    return {
        "rope_second_token_late": (short, from_one),
        "rope_single_token_not_rotated": (one, unless_alone),
    }


def cache_mutants() -> dict[str, tuple[Case, Run]]:
    """The edits of ``cache_write`` and ``cache_gather``."""

    def wrapped_write(inputs: Any, end: int) -> CacheWriteOutput:
        if _wrapped(inputs.kv_cache, end) is inputs.kv_cache:
            return cache_write(*inputs)
        slot = inputs.slot_mapping
        wrapped = torch.where(slot >= 0, slot % inputs.kv_cache.shape[1], slot)
        output: CacheWriteOutput = _unchecked(cache_write)(*inputs._replace(slot_mapping=wrapped))
        return output

    def without_scales(inputs: Any) -> CacheGatherOutput:
        """Entries of tiles are read as codes, their scales left where they are."""
        output = cache_gather(*inputs)
        ones = inputs.kv_cache.clone()
        c = inputs.kv_lora_rank
        scales = torch.ones(c // 128, dtype=torch.float32).view(torch.uint8)
        ones[..., c : c + len(scales)] = scales
        return output._replace(kv_c=cache_gather(*inputs._replace(kv_cache=ones)).kv_c)

    tiled = replace(READ, cache_format="fp8_ds_mla", regime="tiles")
    return {
        "gather_without_tile_scales": (tiled, without_scales),
        "write_in_32_bits": (WRITE, partial(wrapped_write, end=SIGNED)),
        "write_in_unsigned_32_bits": (WRITE, partial(wrapped_write, end=UNSIGNED)),
        "write_scale_in_bf16": (WRITE_PER_TENSOR, changed(cache_write, kv_scale=_coarse)),
        "gather_in_32_bits": (READ, changed(cache_gather, kv_cache=lambda x: _wrapped(x.kv_cache))),
    }


def _coarse(inputs: Any) -> torch.Tensor:
    scale: torch.Tensor = inputs.kv_scale.bfloat16().float()
    return scale


def _unchecked(fn: Callable[..., Any]) -> Callable[..., Any]:
    unchecked: Callable[..., Any] = inspect.unwrap(fn)
    return unchecked
