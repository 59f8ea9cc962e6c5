"""Inputs of large cases, made on the device that will read them.

``Problem.materialize`` draws every value on the CPU, which takes minutes at these sizes. Here some million
values a tensor are drawn there (``mla_ref.values``), and further rows are those again, turned by a number of
channels that no two repetitions share, and negated where a whole turn is over: no two rows are alike, so
reading the wrong page shows, and all of them are as random to the chip as any. Values are plain: unit
variance, weights scaled by the square root of the latent's width. Whatever is not live is NaN, as ever.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.formats import CacheFormat, cache_format
from mla_ref.layout import allocate
from mla_ref.pages import block_table, scatter
from mla_ref.problems._paged import kv_scale, live_slots
from mla_ref.problems.attention import AttentionInputs
from mla_ref.problems.cache_gather import CacheGatherInputs
from mla_ref.problems.cache_write import CacheWriteInputs
from mla_ref.problems.latent_attention import LatentAttentionInputs
from mla_ref.problems.merge_states import MergeStatesInputs
from mla_ref.problems.rope_cache_write import RopeCacheWriteInputs
from mla_ref.values import bell

DRAWN = 2**20  # values of a tensor that are drawn
TURN = 37  # channels that one repetition of them is turned by
CHUNK = 2**15  # rows that are made at a time


def rows_of(
    seed: int, name: str, rows: int, width: int, device: torch.device
) -> Iterator[tuple[slice, torch.Tensor]]:
    """float32 rows [… width] of a tensor [rows width], some at a time, with where they belong."""
    drawn = max(1, min(rows, DRAWN // max(width, 1)))
    base = bell(seed, name, drawn, width).to(torch.float32).to(device)
    for start in range(0, rows, CHUNK):
        row = torch.arange(start, min(start + CHUNK, rows), device=device)
        turn = row // drawn
        channel = (torch.arange(width, device=device) + TURN * turn[:, None]) % max(width, 1)
        sign = 1.0 - 2.0 * ((turn // max(width, 1)) % 2)
        yield slice(start, start + len(row)), base[row % drawn].gather(1, channel) * sign[:, None]


def filled(
    seed: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, gain: float = 1.0
) -> torch.Tensor:
    """A tensor of unit variance times ``gain``."""
    out = torch.empty(shape, dtype=dtype, device=device)
    flat = out.view(-1, shape[-1])
    for rows, values in rows_of(seed, name, flat.shape[0], shape[-1], device):
        flat[rows] = (values * gain).to(dtype)
    return out


class Cache(NamedTuple):
    """The cache of a case, and the fields that go with it."""

    kv_cache: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    cache_format: CacheFormat
    kv_scale: torch.Tensor


def cache_of(case: Case, device: torch.device, *, written: bool = True) -> Cache:
    """Every live slot encoded, or all of them still NaN."""
    fmt, (c, r) = cache_format(case.cache_format), _widths(case)
    table, num_blocks = block_table(case.kv_lens, case.block_size, case.layout, case.seed)
    kv_cache = allocate(
        case.layout,
        num_blocks=num_blocks,
        block_size=case.block_size,
        entry_width=fmt.entry_width(c, r),
        dtype=fmt.dtype,
        device=device,
    )
    where, scale = live_slots(case, table).to(device), kv_scale(case, fmt, device)
    if written:
        for rows, latent in rows_of(case.seed, "kv", len(where), c + r, device):
            scatter(kv_cache, where[rows], fmt.encode(latent[:, :c], latent[:, c:], scale))
    return Cache(kv_cache, table.to(device), where, fmt, scale)


def _widths(case: Case) -> tuple[int, int]:
    return case.config.kv_lora_rank, case.config.qk_rope_head_dim


def _offsets(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def _queries(case: Case, nope: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dtype = (sum(case.q_lens), case.config.num_heads), getattr(torch, case.dtype)
    return (
        filled(case.seed, "q_nope", (*shape, nope), dtype, device),
        filled(case.seed, "q_pe", (*shape, case.config.qk_rope_head_dim), dtype, device),
    )


def _latent_attention(case: Case, device: torch.device) -> LatentAttentionInputs:
    ql_nope, q_pe = _queries(case, case.config.kv_lora_rank, device)
    cache = cache_of(case, device)
    return LatentAttentionInputs(
        ql_nope=ql_nope,
        q_pe=q_pe,
        kv_cache=cache.kv_cache,
        block_table=cache.block_table,
        cu_seqlens_q=_offsets(case.q_lens, device),
        cache_seqlens=torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        max_seqlen_q=max(case.q_lens, default=0),
        softmax_scale=case.config.softmax_scale,
        cache_format=cache.cache_format,
        kv_scale=cache.kv_scale,
    )


def _attention(case: Case, device: torch.device) -> AttentionInputs:
    config, dtype = case.config, getattr(torch, case.dtype)
    q_nope, q_pe = _queries(case, config.qk_nope_head_dim, device)
    cache, gain = cache_of(case, device), 1.0 / math.sqrt(config.kv_lora_rank)
    w_uk, w_uv = (
        filled(case.seed, name, (config.num_heads, width, config.kv_lora_rank), dtype, device, gain)
        for name, width in (("w_uk", config.qk_nope_head_dim), ("w_uv", config.v_head_dim))
    )
    return AttentionInputs(
        q_nope=q_nope,
        q_pe=q_pe,
        kv_cache=cache.kv_cache,
        block_table=cache.block_table,
        cu_seqlens_q=_offsets(case.q_lens, device),
        cache_seqlens=torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        w_uk=w_uk,
        w_uv=w_uv,
        max_seqlen_q=max(case.q_lens, default=0),
        softmax_scale=config.softmax_scale,
        cache_format=cache.cache_format,
        kv_scale=cache.kv_scale,
    )


def _lengths(case: Case) -> tuple[int, ...]:
    return tuple(min(q, kv) for q, kv in zip(case.q_lens, case.kv_lens, strict=True))


def _cache_write(case: Case, device: torch.device) -> CacheWriteInputs:
    """The last q_lens[i] tokens of each request, in their order, as views of one projection's rows."""
    cache, (c, r), lengths = cache_of(case, device, written=False), _widths(case), _lengths(case)
    latent = filled(case.seed, "latent", (sum(lengths), c + r), getattr(torch, case.dtype), device)
    ends = torch.tensor(case.kv_lens).cumsum(0).tolist()
    new = [cache.slots[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    return CacheWriteInputs(
        kv_c=latent[:, :c],
        k_pe=latent[:, c:],
        kv_cache=cache.kv_cache,
        slot_mapping=torch.cat(new),
        cache_format=cache.cache_format,
        kv_scale=cache.kv_scale,
    )


def _rope_cache_write(case: Case, device: torch.device) -> RopeCacheWriteInputs:
    """The same, at the positions that these tokens have in their requests."""
    write, lengths = _cache_write(case, device), _lengths(case)
    positions = [torch.arange(kv - n, kv) for kv, n in zip(case.kv_lens, lengths, strict=True)]
    shape = sum(lengths), case.config.num_heads, case.config.qk_rope_head_dim
    return RopeCacheWriteInputs(
        q_pe=filled(case.seed, "q_pe", shape, write.k_pe.dtype, device),
        kv_c=write.kv_c,
        k_pe=write.k_pe,
        positions=torch.cat(positions).to(device),
        rope=case.config.rope,
        kv_cache=write.kv_cache,
        slot_mapping=write.slot_mapping,
        cache_format=write.cache_format,
        kv_scale=write.kv_scale,
    )


def _cache_gather(case: Case, device: torch.device) -> CacheGatherInputs:
    """The last q_lens[i] cached tokens of each request."""
    cache, (c, r), lengths = cache_of(case, device), _widths(case), _lengths(case)
    starts = [kv - n for kv, n in zip(case.kv_lens, lengths, strict=True)]
    return CacheGatherInputs(
        kv_cache=cache.kv_cache,
        block_table=cache.block_table,
        cu_seqlens=_offsets(lengths, device),
        seq_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        num_tokens=sum(lengths),
        kv_lora_rank=c,
        qk_rope_head_dim=r,
        dtype=getattr(torch, case.dtype),
        cache_format=cache.cache_format,
        kv_scale=cache.kv_scale,
    )


def _merge_states(case: Case, device: torch.device) -> MergeStatesInputs:
    """sum(q_lens) rows, and a state for each of the kv_lens, none of them empty."""
    config = case.config
    shape = len(case.kv_lens), sum(case.q_lens), config.num_heads
    return MergeStatesInputs(
        outs=filled(case.seed, "outs", (*shape, config.v_head_dim), getattr(torch, case.dtype), device),
        lses=filled(case.seed, "lses", shape, torch.float32, device),
    )


INPUTS: dict[str, Callable[[Case, torch.device], Any]] = {
    "latent_attention": _latent_attention,
    "attention": _attention,
    "cache_write": _cache_write,
    "rope_cache_write": _rope_cache_write,
    "cache_gather": _cache_gather,
    "merge_states": _merge_states,
}


def inputs_of(case: Case, device: torch.device) -> Any:
    """The tensors of a case that is timed. Raises: ValueError that lists the problems that are."""
    if case.problem not in INPUTS:
        raise ValueError(f"problem {case.problem!r} is not timed; these are: {', '.join(INPUTS)}")
    return INPUTS[case.problem](case, device)
