"""Implementations that are wrong on purpose, each by one small edit, with a case on which it shows.

An oracle names the mutants that it kills; one that kills none has never been seen to fail. The edits are
those that people made: wrong scales, masks, pages, units and conventions, lost roundings, memory that is not
theirs.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from mla_ref.backend import Backend, Prepared, supports_all
from mla_ref.cache_gather import cache_gather
from mla_ref.cache_write import cache_write
from mla_ref.capacity import cache_capacity
from mla_ref.case import Case
from mla_ref.config import DEFAULT, YARN, MLAConfig, RopeConfig
from mla_ref.formats import cache_format
from mla_ref.frequencies import inv_freq
from mla_ref.layer import latents, layer_around
from mla_ref.layout import CacheLayout
from mla_ref.merge_states import merge_states
from mla_ref.naive import naive
from mla_ref.numerics import EXACT, INPUT, Numerics
from mla_ref.paged_attention import paged_attention
from mla_ref.pages import gather
from mla_ref.problem import AttentionOutput, problem
from mla_ref.problems.cache_capacity import CacheCapacityOutput
from mla_ref.problems.cache_gather import CacheGatherOutput
from mla_ref.problems.cache_write import CacheWriteOutput
from mla_ref.problems.layer import LayerOutput
from mla_ref.problems.rope import RopeOutput
from mla_ref.rope import rotate
from mla_ref.rows import Request, causal_mask, compute_dtype, requests
from oracles.oracle import storage_bytes

LOG2_E = math.log2(math.e)
TILE = 16

Run = Callable[[Any], Any]  # inputs -> output
Steps = Mapping[str, Callable[..., Any]]  # where ``attend`` departs from what is right: (value, request)


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation of a case's problem, and a case on which it differs from a right one.

    prepare, supports: as a backend's. Where there is one, it is what is wrong, and ``run`` is right.
    """

    name: str
    case: Case
    run: Run
    numerics: Numerics = Numerics()
    prepare: Callable[[Any], Prepared] | None = None
    supports: Callable[[Case], str | None] = supports_all

    @property
    def backend(self) -> Backend:
        """The mutant as the judge takes it."""
        contract = problem(self.case.problem)

        def fn(*args: Any) -> Any:
            return self.run(contract.inputs(*args))

        return Backend(
            f"mutant.{self.name}",
            contract.name,
            fn,
            self.numerics,
            prepare=self.prepare,
            supports=self.supports,
        )


CONFIG = MLAConfig(
    name="mutant",
    hidden_size=64,
    num_heads=4,
    q_lora_rank=48,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    attention_bias=True,
    q_lora_scale=1.5,
    kv_lora_scale=1.25,
    llama4_beta=0.1,
    llama4_max_position=16,
)

# The two magnitudes differ, so that both the tables and the softmax scale show.
YARN_ROPE = RopeConfig(
    scaling=YARN, factor=40.0, original_max_position=512, mscale=1.0, mscale_all_dim=0.7, beta_fast=16.0
)

LATENT = Case(
    problem="latent_attention",
    config=CONFIG,
    q_lens=(1, 3, 2, 0),
    kv_lens=(37, 5, 70, 9),
    block_size=16,
    seed=1,
)
EMPTY = replace(LATENT, q_lens=(1, 3, 2), kv_lens=(0, 1, 33))
PER_TENSOR = replace(LATENT, cache_format="fp8_e4m3", kv_scale=0.037)
TILED = replace(LATENT, config=replace(CONFIG, kv_lora_rank=256), cache_format="fp8_ds_mla", regime="tiles")
PAGED = replace(LATENT, problem="paged_attention", num_kv_heads=2, cache_format="fp8_e4m3", kv_scale=0.04)
MERGE = replace(LATENT, problem="merge_states", q_lens=(9,) * 4, kv_lens=(5, 0, 70, 33))
ROPE = replace(LATENT, problem="rope", q_lens=(40,), kv_lens=(40,))
ROPE_YARN = replace(ROPE, config=replace(CONFIG, rope=YARN_ROPE))
WRITE = replace(LATENT, problem="cache_write", q_lens=(9, 5, 20, 0))
WRITE_PER_TENSOR = replace(WRITE, cache_format="fp8_e4m3", kv_scale=0.004)
WRITE_TILED = replace(WRITE, cache_format="fp8_ds_mla", regime="tiles")
READ = replace(LATENT, problem="cache_gather", q_lens=(20, 5, 33, 0))
LAYER = replace(LATENT, problem="layer", config=replace(CONFIG, rope=YARN_ROPE))
CAPACITY = replace(
    LATENT,
    problem="cache_capacity",
    config=replace(CONFIG, num_layers=3, kv_lora_rank=512, qk_rope_head_dim=64),
    cache_format="fp8_e4m3",
    layout=CacheLayout(entry_align=256),
)


def attend(inputs: Any, steps: Steps) -> AttentionOutput:
    """``latent_attention`` or ``attention`` as a kernel does it: two splits of small tiles, merged at the
    end.

    Any step may differ: it is given what is right, and the request.
    """
    query, wide, expand = inputs[0], compute_dtype(inputs[0]), hasattr(inputs, "w_uk")
    c = inputs.w_uk.shape[2] if expand else query.shape[2]
    out = query.new_zeros(*query.shape[:2], inputs.w_uv.shape[1] if expand else c)
    lse = torch.zeros(query.shape[:2], dtype=torch.float32, device=query.device)
    for request in requests(inputs.block_table, inputs.cu_seqlens_q, inputs.cache_seqlens):

        def step(name: str, value: Any, request: Request = request) -> Any:
            return steps[name](value, request) if name in steps else value

        read = step("request", request)
        entries = step("entries", gather(inputs.kv_cache, read.table_row, 0, read.kv_len))
        kv_c, k_pe = inputs.cache_format.decode(entries, c, inputs.q_pe.shape[2], inputs.kv_scale, wide)
        kv_c, k_pe = step("keys", (kv_c, k_pe))
        key, value = kv_c[None], step("value", kv_c)[None]
        if expand:
            key = torch.einsum("jc,hpc->hjp", kv_c, inputs.w_uk.to(wide))
            value = torch.einsum("jc,hvc->hjv", value[0], inputs.w_uv.to(wide))
        q, q_pe = (x[request.rows].to(wide).transpose(0, 1) for x in inputs[:2])
        dots: Callable[..., torch.Tensor] = steps.get("dots", _dots)
        scores = step("scores", dots(q, key, q_pe, k_pe) * inputs.softmax_scale)
        mask = step("mask", causal_mask(request, 0, len(kv_c), query.device))
        scores = scores.masked_fill(~mask, -torch.inf)
        half = len(kv_c) // 2
        splits = slice(half), slice(half, None)
        parts = [_online(scores[..., split], value[:, split], step) for split in splits]
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        merge: Callable[..., Any] = steps.get("merge", merged_at_once)
        row, row_lse = merge(outs, lses)
        out[request.rows] = step("round", row.transpose(0, 1)).to(out.dtype)
        lse[request.rows] = row_lse.T.to(torch.float32)
    return AttentionOutput(out, lse)


def _dots(q: torch.Tensor, key: torch.Tensor, q_pe: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    return q @ key.transpose(1, 2) + q_pe @ k_pe.T


def _online(
    scores: torch.Tensor, value: torch.Tensor, step: Callable[..., Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    top = step("top", scores.new_full(scores.shape[:2], -torch.inf))
    total, acc = torch.zeros_like(top), scores.new_zeros(*scores.shape[:2], value.shape[-1])
    for start in range(0, scores.shape[-1], TILE):
        part = scores[..., start : start + TILE]
        new = torch.maximum(top, part.amax(-1))
        shift = new.masked_fill(new.isneginf(), 0.0)
        rescale = torch.exp(top - shift)
        p = step("exp", torch.exp(part - shift[..., None]))
        total = step("total", total * step("rescale_total", rescale) + p.sum(-1))
        acc = acc * step("rescale_out", rescale)[..., None] + step("p", p) @ value[:, start : start + TILE]
        acc, top = step("acc", acc), new
    return acc / total.masked_fill(total == 0, 1.0)[..., None], torch.log(total) + top


def merged_at_once(
    outs: torch.Tensor, lses: torch.Tensor, exp: Callable[..., Any] = torch.exp
) -> tuple[torch.Tensor, torch.Tensor]:
    """The right merge of states, if ``exp`` is right."""
    top = lses.amax(0)
    shift = top.masked_fill(top.isneginf(), 0.0)
    weights = exp(lses - shift)
    total = weights.sum(0)
    parts = (weights[..., None] * outs).masked_fill((weights == 0)[..., None], 0.0)
    return parts.sum(0) / total.masked_fill(total == 0, 1.0)[..., None], torch.log(total) + top


def departing(**steps: Callable[..., Any]) -> Run:
    """``attend`` with these steps in place of its own."""
    return lambda inputs: attend(inputs, steps)


def given(**changes: Callable[[Any], Any]) -> Run:
    """``attend`` on inputs of which some fields are computed anew."""
    return lambda inputs: attend(with_fields(inputs, changes), {})


def with_fields(inputs: Any, changes: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Inputs with fields computed from them."""
    return inputs._replace(**{name: change(inputs) for name, change in changes.items()})


def returning(change: Callable[[Any, AttentionOutput], Any]) -> Run:
    """What ``change`` makes of the inputs and of the right output."""
    return lambda inputs: change(inputs, attend(inputs, {}))


def changed(fn: Callable[..., Any], **changes: Callable[[Any], Any]) -> Run:
    """A reference on inputs of which some fields are computed anew, its checks left out."""
    unchecked: Callable[..., Any] = inspect.unwrap(fn)
    return lambda inputs: unchecked(*with_fields(inputs, changes))


def narrowed(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """A step whose result is rounded to ``dtype``."""
    return lambda x, _: x.to(dtype).to(x.dtype)


def without_middle(mask: torch.Tensor, request: Request) -> torch.Tensor:
    """The key at the edge of the splits is seen by no row."""
    mask = mask.clone()
    mask[:, request.kv_len // 2] = False
    return mask


def _middle_twice(
    keys: tuple[torch.Tensor, torch.Tensor], request: Request
) -> tuple[torch.Tensor, torch.Tensor]:
    """The key at the edge of the splits is in both."""
    index = torch.arange(request.kv_len).clamp(min=0)
    index = torch.cat([index[: request.kv_len // 2], index[request.kv_len // 2 - 1 : -1]])
    return keys[0][index], keys[1][index]


def _shifted(by: int) -> Callable[[torch.Tensor, Request], torch.Tensor]:
    def mask(right: torch.Tensor, request: Request) -> torch.Tensor:
        return causal_mask(request._replace(kv_len=request.kv_len + by), 0, right.shape[1], right.device)

    return mask


def _top_left(mask: torch.Tensor, request: Request) -> torch.Tensor:
    return causal_mask(request._replace(kv_len=request.q_len), 0, mask.shape[1], mask.device)


def _whole_blocks(read: Request, request: Request) -> Request:
    return request._replace(kv_len=-(-request.kv_len // LATENT.block_size) * LATENT.block_size)


def _zero_tail(entries: torch.Tensor, request: Request) -> torch.Tensor:
    entries = entries.clone()
    entries[request.kv_len :] = 0
    return entries


def _seen_tail(mask: torch.Tensor, request: Request) -> torch.Tensor:
    mask = mask.clone()
    mask[:, request.kv_len :] = True
    return mask


def _one_row_late(value: torch.Tensor, request: Request) -> torch.Tensor:
    return torch.cat([value[:TILE], value[TILE:].roll(1, 0)])


def _next_tiles_scale(entries: torch.Tensor, request: Request) -> torch.Tensor:
    start = TILED.config.kv_lora_rank
    scales = slice(start, start + 8)
    entries = entries.clone()
    entries[:, scales] = entries[:, scales].roll(4, 1)
    return entries


def _foreign_block(inputs: Any) -> torch.Tensor:
    table: torch.Tensor = inputs.block_table.clone()
    table[2, 1] = table[0, 0]
    return table


def _swapped_blocks(inputs: Any) -> torch.Tensor:
    """The first and the last block of request 2 in each other's place."""
    table: torch.Tensor = inputs.block_table.clone()
    last = (int(inputs.cache_seqlens[2]) - 1) // LATENT.block_size
    table[2, [0, last]] = table[2, [last, 0]]
    return table


def _naive_merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """No maximum is subtracted: exp overflows from 89 on."""
    weights = torch.exp(lses)
    total = weights.sum(0)
    return (weights[..., None] * outs).sum(0) / total[..., None], torch.log(total)


def _average(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outs.mean(0), merged_at_once(outs, lses)[1]


def _swapped_heads(inputs: Any, output: AttentionOutput) -> AttentionOutput:
    order = [1, 0, *range(2, output.out.shape[1])]
    return output._replace(out=output.out[:, order])


def _scaled_in_place(inputs: Any) -> AttentionOutput:
    inputs[0].mul_(inputs.softmax_scale)
    return attend(inputs._replace(softmax_scale=1.0, q_pe=inputs.q_pe * inputs.softmax_scale), {})


def _into_padding(inputs: Any) -> AttentionOutput:
    """A store past the end of the rows, into memory that the cache's view skips."""
    output = attend(inputs, {})
    storage_bytes(inputs.kv_cache)[-1] = 0
    return output


def _remembering() -> Run:
    """The output of the first call with inputs of this shape, for ever."""
    memory: dict[torch.Size, AttentionOutput] = {}

    def run(inputs: Any) -> AttentionOutput:
        return memory.setdefault(inputs.kv_cache.shape, attend(inputs, {}))

    return run


def _empty_rows(out: float, lse: float) -> Run:
    def change(inputs: Any, output: AttentionOutput) -> AttentionOutput:
        empty = output.lse.isneginf()
        return AttentionOutput(
            output.out.masked_fill(empty[..., None], out), output.lse.masked_fill(empty, lse)
        )

    return returning(change)


def _untouched_end(inputs: Any, output: AttentionOutput) -> AttentionOutput:
    """The last eight channels of the last head are never stored."""
    output.out[:, -1, -8:] = 0.0
    return output


def _unwritten(inputs: Any, output: AttentionOutput) -> AttentionOutput:
    """The last request's rows are whatever the memory held."""
    out = torch.empty_like(output.out)
    start = int(inputs.cu_seqlens_q[2])
    out[:start] = output.out[:start]
    return output._replace(out=out)


def truncated(x: torch.Tensor, request: Request) -> torch.Tensor:
    """float32 cut off where bfloat16 ends."""
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32)


def _assuming(tensor: torch.Tensor, strides: tuple[int, ...], offset: int) -> torch.Tensor:
    """The memory under a tensor, read with strides of one's own; beyond its end it begins again."""
    flat = torch.tensor([], dtype=tensor.dtype).set_(tensor.untyped_storage())
    index = torch.tensor(offset)
    for size, stride in zip(tensor.shape, strides, strict=True):
        index = index[..., None] + torch.arange(size) * stride
    return flat[index % flat.numel()]


def _block_stride_assumed(cache: torch.Tensor) -> torch.Tensor:
    strides = cache.stride()
    return _assuming(cache, (cache.shape[1] * strides[1], *strides[1:]), int(cache.storage_offset()))


def _entry_stride_assumed(cache: torch.Tensor) -> torch.Tensor:
    strides = (cache.stride(0), cache.shape[2], 1)
    return _assuming(cache, strides, int(cache.storage_offset()))


def _attention_mutants(case: Case, per_tensor: Case, tiled: Case, empty: Case) -> dict[str, tuple[Case, Run]]:
    """The edits that ``latent_attention`` and ``attention`` have in common."""
    huge, yarn = replace(case, regime="huge"), replace(case, config=replace(CONFIG, rope=YARN_ROPE))
    padded = replace(case, layout=replace(case.layout, entry_align=512))
    return {
        "scale_one_percent": (case, given(softmax_scale=lambda x: x.softmax_scale * 1.01)),
        "scale_of_latent_width": (case, given(softmax_scale=lambda _: CONFIG.entry_width**-0.5)),
        "scale_without_mscale": (yarn, given(softmax_scale=lambda _: CONFIG.qk_head_dim**-0.5)),
        "exp2_of_natural_scores": (case, departing(scores=lambda scores, _: scores / LOG2_E)),
        "key_dropped": (case, departing(mask=without_middle)),
        "key_twice": (case, departing(keys=_middle_twice)),
        "causal_one_more": (case, departing(mask=_shifted(1))),
        "causal_one_less": (case, departing(mask=_shifted(-1))),
        "not_causal": (case, departing(mask=lambda mask, _: torch.ones_like(mask))),
        "causal_top_left": (case, departing(mask=_top_left)),
        "lse_base_2": (case, returning(lambda _, o: o._replace(lse=o.lse * LOG2_E))),
        "lse_of_unscaled_maximum": (
            case,
            departing(merge=lambda outs, lses: (merged_at_once(outs, lses)[0], lses.amax(0))),
        ),
        "fp8_scale_ignored": (per_tensor, given(kv_scale=lambda x: torch.ones_like(x.kv_scale))),
        "fp8_scale_twice": (per_tensor, given(kv_scale=lambda x: x.kv_scale.square())),
        "tile_scale_of_neighbour": (tiled, departing(entries=_next_tiles_scale)),
        "page_of_another_request": (case, given(block_table=_foreign_block)),
        "pages_swapped": (case, given(block_table=_swapped_blocks)),
        "tail_unmasked": (case, departing(request=_whole_blocks, mask=_seen_tail)),
        "tail_of_zeros": (
            case,
            departing(request=_whole_blocks, entries=_zero_tail, mask=_seen_tail),
        ),
        "nan_times_zero": (case, departing(request=_whole_blocks)),
        "rope_part_dropped": (case, given(q_pe=lambda x: torch.zeros_like(x.q_pe))),
        "value_one_row_late": (case, departing(value=_one_row_late)),
        "heads_swapped": (case, returning(_swapped_heads)),
        "rows_one_late": (
            case,
            returning(lambda _, o: AttentionOutput(o.out.roll(1, 0), o.lse.roll(1, 0))),
        ),
        "end_not_stored": (case, returning(_untouched_end)),
        "rows_not_written": (case, returning(_unwritten)),
        "sum_not_rescaled": (
            case,
            departing(rescale_total=lambda x, _: torch.ones_like(x).where(x > 0, x)),
        ),
        "out_not_rescaled": (
            case,
            departing(rescale_out=lambda x, _: torch.ones_like(x).where(x > 0, x)),
        ),
        "merge_base_2": (case, departing(merge=lambda outs, lses: merged_at_once(outs, lses, torch.exp2))),
        "merge_average": (case, departing(merge=_average)),
        "merge_overflow": (huge, departing(merge=_naive_merge)),
        "maximum_begins_at_minus_1e4": (
            replace(case, seed=3),
            departing(top=lambda top, _: torch.full_like(top, -1e4)),
        ),
        "weights_in_fp8": (case, departing(p=narrowed(torch.float8_e4m3fn))),
        "weights_in_bf16_undeclared": (case, departing(p=narrowed(torch.bfloat16))),
        "scores_in_bf16": (case, departing(scores=narrowed(torch.bfloat16))),
        "sum_in_bf16": (case, departing(total=narrowed(torch.bfloat16))),
        "accumulator_in_bf16": (case, departing(acc=narrowed(torch.bfloat16))),
        "output_truncated": (case, departing(round=truncated)),
        "lse_in_query_dtype": (case, returning(lambda _, o: o._replace(lse=o.lse.to(o.out.dtype)))),
        "lse_heads_first": (case, returning(lambda _, o: o._replace(lse=o.lse.T.contiguous()))),
        "lse_missing": (case, returning(lambda _, o: o.out)),
        "query_scaled_in_place": (case, _scaled_in_place),
        "store_past_the_end": (padded, _into_padding),
        "first_output_remembered": (replace(case, seed=2), _remembering()),
        "empty_row_plus_inf": (empty, _empty_rows(0.0, math.inf)),
        "empty_row_nan": (empty, _empty_rows(math.nan, -math.inf)),
        "empty_row_lse_zero": (empty, _empty_rows(0.0, 0.0)),
        "empty_row_stale": (empty, _empty_rows(0.5, -math.inf)),
        "layout_block_stride_assumed": (case, given(kv_cache=lambda x: _block_stride_assumed(x.kv_cache))),
        "layout_entry_stride_assumed": (case, given(kv_cache=lambda x: _entry_stride_assumed(x.kv_cache))),
        "layout_offset_assumed": (
            case,
            given(kv_cache=lambda x: _assuming(x.kv_cache, x.kv_cache.stride(), 0)),
        ),
    }


def _paged_mutants() -> dict[str, tuple[Case, Run]]:
    # Two layouts: one pool for keys and values, and one head of keys for all.
    single = replace(PAGED, num_kv_heads=1, cache_format="bf16")

    def wrong_heads(inputs: Any) -> AttentionOutput:
        """Head i reads key-value head i % g instead of i // (h / g)."""
        h, g = inputs.query.shape[1], inputs.key_cache.shape[2]
        order = torch.arange(h).reshape(g, h // g).T.flatten()
        output = paged_attention(*inputs._replace(query=inputs.query[:, order]))
        back = order.argsort()
        return AttentionOutput(output.out[:, back], output.lse[:, back])

    return {
        "paged_scale_one_percent": (
            single,
            changed(paged_attention, softmax_scale=lambda x: x.softmax_scale * 1.01),
        ),
        "paged_key_dropped": (
            single,
            changed(paged_attention, cache_seqlens=lambda x: (x.cache_seqlens - 1).clamp(min=0)),
        ),
        "paged_heads_interleaved": (PAGED, wrong_heads),
        "paged_value_scale_of_keys": (PAGED, changed(paged_attention, v_scale=lambda x: x.k_scale)),
        "paged_scales_ignored": (
            PAGED,
            changed(
                paged_attention,
                k_scale=lambda x: torch.ones_like(x.k_scale),
                v_scale=lambda x: torch.ones_like(x.v_scale),
            ),
        ),
        "paged_values_from_keys": (
            single,
            changed(paged_attention, value_cache=lambda x: x.key_cache[..., : x.value_cache.shape[-1]]),
        ),
        "paged_tail_unmasked": (single, changed(paged_attention, cache_seqlens=_rounded_up)),
        **_layout_mutants(replace(PAGED, cache_format="bf16")),
    }


def _layout_mutants(case: Case) -> dict[str, tuple[Case, Run]]:
    """Each is right for the layout of its own case, and knows no other."""

    def pages(x: Any) -> tuple[int, int]:
        """Elements of a block's keys, and of its values."""
        return math.prod(x.key_cache.shape[1:]), math.prod(x.value_cache.shape[1:])

    def behind(elements: Callable[[Any], int]) -> Callable[[Any], torch.Tensor]:
        return lambda x: _assuming(
            x.value_cache, x.value_cache.stride(), x.key_cache.storage_offset() + elements(x)
        )

    def blocks_apart(name: str) -> Callable[[Any], torch.Tensor]:
        """Keys and values of a block are neighbours, and so are blocks."""

        def read(x: Any) -> torch.Tensor:
            cache, (keys, values) = getattr(x, name), pages(x)
            offset = x.key_cache.storage_offset() + (keys if name == "value_cache" else 0)
            return _assuming(cache, (keys + values, *cache.stride()[1:]), offset)

        return read

    def slots_first(name: str) -> Callable[[Any], torch.Tensor]:
        def read(x: Any) -> torch.Tensor:
            cache = getattr(x, name)
            row = min(cache.stride()[1:3])
            strides = (cache.stride(0), row * cache.shape[2], row, 1)
            return _assuming(cache, strides, cache.storage_offset())

        return read

    def both(read: Callable[[str], Callable[[Any], torch.Tensor]]) -> Run:
        return changed(paged_attention, **{name: read(name) for name in ("key_cache", "value_cache")})

    blocks_first = replace(case, kv_layout="ln2kgx")
    return {
        "layout_values_half_a_pool_behind": (
            case,
            changed(paged_attention, value_cache=behind(lambda x: x.key_cache.shape[0] * pages(x)[0])),
        ),
        "layout_unbound_along_the_other_axis": (blocks_first, both(blocks_apart)),
        "layout_slots_before_heads_assumed": (case, both(slots_first)),
        "layout_block_stride_assumed": (
            case,
            both(lambda name: lambda x: _block_stride_assumed(getattr(x, name))),
        ),
    }


def _rounded_up(inputs: Any) -> torch.Tensor:
    k, lengths = inputs.key_cache.shape[1], inputs.cache_seqlens
    whole: torch.Tensor = (lengths + k - 1) // k * k
    return whole


def _merge_mutants() -> dict[str, tuple[Case, Run]]:
    def merged_by(merge: Callable[..., Any]) -> Run:
        def run(inputs: Any) -> AttentionOutput:
            outs = inputs.outs.float().masked_fill(inputs.lses.isneginf()[..., None], 0.0)
            out, lse = merge(outs, inputs.lses)
            return AttentionOutput(out.to(inputs.outs.dtype), lse)

        return run

    def multiplied(outs: torch.Tensor, lses: torch.Tensor) -> AttentionOutput:
        """An empty state's output times its weight of 0."""
        top = lses.amax(0)
        weights = torch.exp(lses - top.masked_fill(top.isneginf(), 0.0))
        total = weights.sum(0)
        out = (weights[..., None] * outs.float()).sum(0) / total.clamp(min=1.0)[..., None]
        return AttentionOutput(out.to(outs.dtype), torch.log(total) + top)

    def not_empty(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return merged_at_once(outs, lses.masked_fill(lses.isneginf(), 0.0))

    def unshifted(inputs: Any) -> AttentionOutput:
        """What -inf - -inf gives where every state is empty."""
        output = merge_states(*inputs)
        empty = output.lse.isneginf()
        return AttentionOutput(
            output.out.masked_fill(empty[..., None], math.nan), output.lse.masked_fill(empty, math.nan)
        )

    return {
        "states_merged_in_base_2": (
            MERGE,
            merged_by(lambda outs, lses: merged_at_once(outs, lses, torch.exp2)),
        ),
        "states_averaged": (MERGE, merged_by(_average)),
        "states_merged_without_maximum": (MERGE, merged_by(_naive_merge)),
        "states_keep_the_largest_lse": (
            MERGE,
            merged_by(lambda outs, lses: (merged_at_once(outs, lses)[0], lses.amax(0))),
        ),
        "states_first_ignored": (MERGE, merged_by(lambda outs, lses: merged_at_once(outs[1:], lses[1:]))),
        "states_empty_times_zero": (MERGE, lambda inputs: multiplied(*inputs)),
        "states_empty_counted": (MERGE, merged_by(not_empty)),
        "states_all_empty_nan": (MERGE, unshifted),
    }


Tables = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def by_angle(narrow: Tables) -> Run:
    """Interleaved rotation by tables made in another way: (positions, frequencies) -> cos, sin."""

    def run(inputs: Any) -> RopeOutput:
        cos, sin = narrow(inputs.positions, inv_freq(inputs.rope, inputs.x.shape[-1]))
        cos, sin = (x[:, None].float() * inputs.rope.table_scale for x in (cos, sin))
        a, b = inputs.x.float()[..., 0::2], inputs.x.float()[..., 1::2]
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        return RopeOutput(out.to(inputs.x.dtype))

    return run


def _cos_sin(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return angle.cos(), angle.sin()


def bf16_table(t: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the right angles, rounded."""
    cos, sin = _cos_sin(t[:, None] * f)
    return cos.bfloat16(), sin.bfloat16()


def _bf16_frequencies(t: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _cos_sin(t[:, None] * f.bfloat16().double())


def _rope_mutants() -> dict[str, tuple[Case, Run]]:
    def config(**changes: Any) -> Run:
        return changed(rotate, rope=lambda x: replace(x.rope, **changes))

    exact = replace(ROPE, dtype="float32")
    return {
        "rope_half_split": (ROPE, config(interleaved=False)),
        "rope_theta": (ROPE, config(theta=10500.0)),
        "rope_not_rotated": (ROPE, config(rotate=False)),
        "rope_position_late": (ROPE, changed(rotate, positions=lambda x: x.positions + 1)),
        "rope_turned_back": (ROPE, changed(rotate, positions=lambda x: -x.positions)),
        "rope_yarn_ignored": (ROPE_YARN, config(scaling=DEFAULT, attention_factor=YARN_ROPE.table_scale)),
        "rope_yarn_without_ramp": (ROPE_YARN, config(beta_fast=81.0, beta_slow=81.0)),
        "rope_yarn_without_magnitude": (ROPE_YARN, config(attention_factor=1.0)),
        "rope_table_in_bf16": (ROPE, by_angle(bf16_table)),
        "rope_frequencies_in_bf16": (ROPE, by_angle(_bf16_frequencies)),
        "rope_positions_in_bf16": (ROPE, by_angle(lambda t, f: _cos_sin(t.bfloat16().double()[:, None] * f))),
        "rope_angle_in_float32": (exact, by_angle(lambda t, f: _cos_sin(t.float()[:, None] * f.float()))),
    }


def _write_mutants() -> dict[str, tuple[Case, Run]]:
    def encoded(change: Callable[[Any], torch.Tensor]) -> Run:
        """The right slots, other entries."""

        def run(inputs: Any) -> CacheWriteOutput:
            live, k = inputs.slot_mapping >= 0, inputs.kv_cache.shape[1]
            slot = inputs.slot_mapping[live]
            inputs.kv_cache[slot // k, slot % k] = change(inputs)[live]
            return CacheWriteOutput(inputs.kv_cache)

        return run

    def encode(inputs: Any, **changes: Any) -> torch.Tensor:
        x = inputs._replace(**changes)
        entries: torch.Tensor = x.cache_format.encode(x.kv_c, x.k_pe, x.kv_scale)
        return entries

    def wrapped(inputs: Any) -> CacheWriteOutput:
        """A negative slot taken as an index from the end."""
        k = inputs.kv_cache.shape[1]
        slot = inputs.slot_mapping % (inputs.kv_cache.shape[0] * k)
        inputs.kv_cache[slot // k, slot % k] = encode(inputs)
        return CacheWriteOutput(inputs.kv_cache)

    def in_32_bits(inputs: Any) -> torch.Tensor:
        slot_mapping: torch.Tensor = inputs.slot_mapping
        return slot_mapping.to(torch.int32).to(torch.int64)

    def unsaturated(inputs: Any) -> torch.Tensor:
        """A cast that has no infinity gives NaN."""
        x: torch.Tensor = torch.cat([inputs.kv_c, inputs.k_pe], dim=-1).float() / inputs.kv_scale
        return x.masked_fill(x.abs() > 448.0, math.nan).to(torch.float8_e4m3fn)

    def truncated(inputs: Any) -> torch.Tensor:
        """The code next to zero instead of the nearest one."""
        x: torch.Tensor = torch.cat([inputs.kv_c, inputs.k_pe], dim=-1).float() / inputs.kv_scale
        codes = encode(inputs)
        return (codes.view(torch.uint8) - (codes.float().abs() > x.abs()).to(torch.uint8)).view(codes.dtype)

    def by_another_rule(inputs: Any) -> torch.Tensor:
        """Scales that are powers of two: every reader decodes them, to less precise values."""
        return cache_format("fp8_ds_mla_pow2").encode(inputs.kv_c, inputs.k_pe, inputs.kv_scale)

    def rope_first(inputs: Any) -> torch.Tensor:
        return torch.cat([inputs.k_pe, inputs.kv_c], dim=-1).to(inputs.kv_cache.dtype)

    def elsewhere(inputs: Any) -> CacheWriteOutput:
        return cache_write(*inputs._replace(kv_cache=inputs.kv_cache.clone()))

    def with_padding(inputs: Any) -> CacheWriteOutput:
        """Whole aligned entries are stored, padding included."""
        cache_write(*inputs)
        slot = int(inputs.slot_mapping[inputs.slot_mapping >= 0][0])
        k, width = inputs.kv_cache.shape[1:]
        start = inputs.kv_cache[slot // k, slot % k].storage_offset() * inputs.kv_cache.element_size()
        storage_bytes(inputs.kv_cache)[start + width * inputs.kv_cache.element_size()] = 0
        return CacheWriteOutput(inputs.kv_cache)

    padded = replace(WRITE, layout=replace(WRITE.layout, entry_align=512))
    return {
        "write_next_slot": (WRITE, changed(cache_write, slot_mapping=lambda x: x.slot_mapping.roll(1))),
        "write_negative_slot": (WRITE, wrapped),
        "write_slot_in_32_bits": (WRITE, changed(cache_write, slot_mapping=in_32_bits)),
        "write_unsaturated": (WRITE_PER_TENSOR, encoded(unsaturated)),
        "write_truncated": (replace(WRITE_PER_TENSOR, kv_scale=0.5), encoded(truncated)),
        "write_multiplies_by_scale": (
            WRITE_PER_TENSOR,
            encoded(lambda x: encode(x, kv_scale=1.0 / x.kv_scale)),
        ),
        "write_by_another_rule": (WRITE_TILED, encoded(by_another_rule)),
        "write_rope_first": (WRITE, encoded(rope_first)),
        "write_in_a_copy": (WRITE, elsewhere),
        "write_into_padding": (padded, with_padding),
    }


def _read_mutants() -> dict[str, tuple[Case, Run]]:
    per_tensor = replace(READ, cache_format="fp8_e4m3", kv_scale=0.037)

    def block_start(inputs: Any) -> torch.Tensor:
        k = inputs.kv_cache.shape[1]
        starts: torch.Tensor = inputs.seq_starts // k * k
        return starts

    def rows_late(inputs: Any) -> CacheGatherOutput:
        return CacheGatherOutput(*(x.roll(1, 0) for x in cache_gather(*inputs)))

    return {
        "read_from_a_blocks_start": (READ, changed(cache_gather, seq_starts=block_start)),
        "read_rows_late": (READ, rows_late),
        "read_scale_ignored": (
            per_tensor,
            changed(cache_gather, kv_scale=lambda x: torch.ones_like(x.kv_scale)),
        ),
        "read_scale_in_bf16": (
            replace(per_tensor, dtype="float32"),
            changed(cache_gather, kv_scale=lambda x: x.kv_scale.bfloat16().float()),
        ),
        "read_in_float32": (READ, changed(cache_gather, dtype=lambda _: torch.float32)),
        "read_unused_scale": (
            READ,
            lambda inputs: CacheGatherOutput(
                *(
                    x * torch.where(inputs.kv_scale == 2.0, 2.0, 1.0).to(x.dtype)
                    for x in cache_gather(*inputs)
                )
            ),
        ),
    }


def _layer_mutants() -> dict[str, tuple[Case, Run]]:
    right = layer_around(naive)

    def config(**changes: Any) -> Run:
        return changed(right, config=lambda x: replace(x.config, **changes))

    def rope(**changes: Any) -> Run:
        return changed(right, config=lambda x: replace(x.config, rope=replace(x.config.rope, **changes)))

    def weight(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Run:
        return changed(right, weights=lambda x: {**x.weights, name: change(x.weights[name])})

    def caching(change: Callable[[Any], Any]) -> Run:
        """The right output, but what is cached is of other inputs."""

        def run(inputs: Any) -> LayerOutput:
            output, other = right(*inputs), change(inputs)
            kv_c, k_pe = latents(other.hidden_states, other.positions, other.weights, other.config)
            cache_write(
                kv_c, k_pe, inputs.kv_cache, inputs.slot_mapping, inputs.cache_format, inputs.kv_scale
            )
            return LayerOutput(output.out, inputs.kv_cache)

        return run

    def unrotated(inputs: Any) -> Any:
        return inputs._replace(config=replace(inputs.config, rope=replace(inputs.config.rope, rotate=False)))

    def caching_rotated(narrow: Tables) -> Run:
        """The right output, but cached keys are rotated by tables made in another way."""

        def run(inputs: Any) -> LayerOutput:
            output, plain = right(*inputs), unrotated(inputs)
            kv_c, k_pe = latents(plain.hidden_states, plain.positions, plain.weights, plain.config)
            rope = problem("rope").inputs(k_pe[:, None], inputs.positions, inputs.config.rope)
            cache_write(
                kv_c,
                by_angle(narrow)(rope).x[:, 0],
                inputs.kv_cache,
                inputs.slot_mapping,
                inputs.cache_format,
                inputs.kv_scale,
            )
            return LayerOutput(output.out, inputs.kv_cache)

        return run

    def from_zero(inputs: Any) -> torch.Tensor:
        """Positions counted from the first new token."""
        offsets = inputs.cu_seqlens_q.tolist()
        return torch.cat([torch.arange(b - a) for a, b in pairwise(offsets)]).to(inputs.positions)

    def values_first(x: torch.Tensor) -> torch.Tensor:
        p, per_head = CONFIG.qk_nope_head_dim, x.reshape(CONFIG.num_heads, -1, x.shape[1])
        return torch.cat([per_head[:, p:], per_head[:, :p]], dim=1).reshape(x.shape)

    return {
        "layer_theta": (LAYER, rope(theta=500000.0)),
        "layer_softmax_scale_without_mscale": (
            LAYER,
            rope(mscale=0.0, mscale_all_dim=0.0, attention_factor=YARN_ROPE.table_scale),
        ),
        "layer_query_gain_forgotten": (LAYER, config(q_lora_scale=1.0)),
        "layer_latent_gain_forgotten": (LAYER, config(kv_lora_scale=1.0)),
        "layer_growth_forgotten": (LAYER, config(llama4_beta=0.0)),
        "layer_bias_forgotten": (LAYER, weight("o_proj.bias", torch.zeros_like)),
        "layer_norm_weight_forgotten": (LAYER, weight("q_a_layernorm.weight", torch.ones_like)),
        "layer_values_first": (LAYER, weight("kv_b_proj.weight", values_first)),
        "layer_positions_from_zero": (LAYER, changed(right, positions=from_zero)),
        "layer_caches_unrotated": (LAYER, caching(unrotated)),
        "layer_rotates_by_a_table_in_bf16": (LAYER, caching_rotated(bf16_table)),
        "layer_rotates_by_frequencies_in_bf16": (LAYER, caching_rotated(_bf16_frequencies)),
        "layer_caches_next_position": (LAYER, caching(lambda x: x._replace(positions=x.positions + 1))),
    }


def _capacity_mutants() -> dict[str, tuple[Case, Run]]:
    def planning(change: Callable[[Any, int], int], more: int = 0) -> Run:
        """Another size of a block, or of the budget in blocks."""

        def run(inputs: Any) -> CacheCapacityOutput:
            entry = inputs.entry_width * inputs.cache_dtype.itemsize
            right = inputs.num_layers * inputs.layout.block_stride(entry, inputs.block_size)
            block_bytes = change(inputs, right)
            counts = block_bytes, (inputs.budget + more * block_bytes) // block_bytes
            return CacheCapacityOutput(*(torch.tensor(count) for count in counts))

        return run

    def by_model_dtype(inputs: Any, right: int) -> int:
        """Elements are rounded up by the size of a model's element, then counted in the cache's."""
        step = inputs.layout.entry_align // inputs.model_dtype.itemsize
        elements = -(-inputs.entry_width // step) * step
        return int(inputs.num_layers * inputs.block_size * elements * inputs.cache_dtype.itemsize)

    def packed(inputs: Any, right: int) -> int:
        entry = inputs.entry_width * inputs.cache_dtype.itemsize
        return int(inputs.num_layers * inputs.block_size * entry)

    def without_gap(inputs: Any, right: int) -> int:
        return int(right - inputs.num_layers * inputs.layout.block_gap)

    gapped = replace(CAPACITY, layout=CacheLayout(block_gap=512))
    return {
        "capacity_aligned_by_model_dtype": (CAPACITY, planning(by_model_dtype)),
        "capacity_padding_forgotten": (CAPACITY, planning(packed)),
        "capacity_gap_forgotten": (gapped, planning(without_gap)),
        "capacity_keys_and_values": (CAPACITY, planning(lambda _, right: 2 * right)),
        "capacity_blocks_rounded_up": (CAPACITY, planning(lambda _, right: right, more=1)),
    }


def right(case: Case) -> tuple[Run, Numerics]:
    """What the mutants of this case were before their edit, and what it declares."""
    from oracles import fused_mutants, precision_mutants

    references: dict[str, Callable[..., Any]] = {
        "paged_attention": paged_attention,
        "merge_states": merge_states,
        "rope": rotate,
        "cache_write": cache_write,
        "cache_gather": cache_gather,
        "layer": layer_around(naive),
        "cache_capacity": cache_capacity,
    }
    numerics = next(mutant.numerics for mutant in mutants() if mutant.case == case)
    if numerics.p != EXACT:
        return precision_mutants.kernel(), numerics
    if case.problem == "rope_cache_write":
        return fused_mutants.fused(), numerics
    fn = references.get(case.problem)
    return (departing() if fn is None else changed(fn)), numerics


def _families() -> Iterator[tuple[Numerics, dict[str, tuple[Case, Run]]]]:
    # edits of what is defined here
    from oracles import engine_mutants, fused_mutants, precision_mutants, probe_mutants

    expanded = [replace(case, problem="attention") for case in (LATENT, PER_TENSOR, TILED, EMPTY)]
    yield Numerics(), _attention_mutants(LATENT, PER_TENSOR, TILED, EMPTY)
    yield Numerics(form="expanded"), _attention_mutants(*expanded)
    yield Numerics(), probe_mutants.attention_mutants(LATENT, PER_TENSOR)
    yield Numerics(form="expanded"), probe_mutants.attention_mutants(*expanded[:2])
    yield Numerics(form="expanded"), probe_mutants.weight_mutants(expanded[0])
    yield precision_mutants.NUMERICS, precision_mutants.precision_mutants()
    yield Numerics(), engine_mutants.attention_mutants(LATENT)
    yield Numerics(form="expanded"), engine_mutants.attention_mutants(expanded[0])
    yield Numerics(form="expanded"), engine_mutants.weight_mutants(expanded[0])
    yield precision_mutants.NUMERICS, engine_mutants.precision_mutants()
    for family in (
        _paged_mutants,
        _merge_mutants,
        _rope_mutants,
        _write_mutants,
        _read_mutants,
        _capacity_mutants,
        probe_mutants.paged_mutants,
        probe_mutants.merge_mutants,
        probe_mutants.rope_mutants,
        probe_mutants.cache_mutants,
        engine_mutants.paged_mutants,
        engine_mutants.merge_mutants,
        engine_mutants.rope_mutants,
        engine_mutants.cache_mutants,
        engine_mutants.capacity_mutants,
        fused_mutants.fused_mutants,
    ):
        yield Numerics(), family()
    for family in (_layer_mutants, probe_mutants.layer_mutants, engine_mutants.layer_mutants):
        yield Numerics(form="expanded", stage=INPUT), family()


def mutants() -> list[Mutant]:
    """Every mutant. Those of ``latent_attention`` and of ``attention`` share their names."""
    from oracles.engine_mutants import asked_mutants, prepared_mutants  # edits of what is defined here

    found = [
        Mutant(name, case, run, numerics)
        for numerics, family in _families()
        for name, (case, run) in family.items()
    ]
    return found + prepared_mutants(LATENT) + asked_mutants(LATENT)
