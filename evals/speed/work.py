"""How much a case needs at least: floating-point operations, and bytes that pass through memory once.

A product of an element counts two operations; softmax counts none, being below one in a hundred of them.
Every live byte of an input is read once and every element of an output written once; block tables, offsets
and lengths, some four bytes in a thousand entries, are left out. Both are floors of the problem and not of
one way to compute it, so nobody's detour makes it look busier.

A query s of q_len new tokens sees max(0, kv_len - q_len + s + 1) keys. Their sum over a request is the number
of its *pairs*.

problem           operations, with Σ pairs                    bytes
latent_attention  2 h (2c + r) a pair                         entries; t h (c + r) queries; t h c out, lse
attention         the cheaper of two forms:                   entries; t h (p + r) queries; h (p + v) c
                  expanded: 2 h (p + r + v) a pair, and       weights; t h v out, lse
                  2 h c (p + v) a token that is seen;
                  absorbed: as above, and 2 h c (p + v) a query
cache_write       0                                           t (c + r) channels and 8 of slot; entries
rope_cache_write  0                                           as cache_write; t h r queries and 8 of position;
                                                              t h r queries
cache_gather      0                                           entries; t (c + r) channels
merge_states      0                                           s t h (v channels, lse); t h (v channels, lse)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from mla_ref.case import Case
from mla_ref.formats import cache_format

LSE_BYTES, SLOT_BYTES, POSITION_BYTES = 4, 8, 8


class Work(NamedTuple):
    """Operations, and bytes of inputs and of outputs."""

    flop: int
    bytes_read: int
    bytes_written: int

    @property
    def num_bytes(self) -> int:
        """Both ways."""
        return self.bytes_read + self.bytes_written


def pairs(q_len: int, kv_len: int) -> int:
    """(query, key) pairs of a request under the causal mask: kv - q + 1, …, kv, without negative ones."""
    first = max(kv_len - q_len + 1, 1)
    return (first + kv_len) * (kv_len - first + 1) // 2


def _size(case: Case) -> int:
    dtype: torch.dtype = getattr(torch, case.dtype)
    return dtype.itemsize


def _entry(case: Case) -> int:
    fmt = cache_format(case.cache_format)
    return fmt.entry_bytes(case.config.kv_lora_rank, case.config.qk_rope_head_dim)


def _seen(case: Case) -> tuple[int, int, int]:
    """(new tokens, cached tokens that a query sees, pairs)."""
    both = list(zip(case.q_lens, case.kv_lens, strict=True))
    return sum(case.q_lens), sum(kv for q, kv in both if q), sum(pairs(q, kv) for q, kv in both)


def _latent_attention(case: Case) -> Work:
    config, (t, seen, total) = case.config, _seen(case)
    h, c, r = config.num_heads, config.kv_lora_rank, config.qk_rope_head_dim
    read = seen * _entry(case) + t * h * (c + r) * _size(case)
    return Work(2 * h * (2 * c + r) * total, read, t * h * (c * _size(case) + LSE_BYTES))


def _attention(case: Case) -> Work:
    config, (t, seen, total) = case.config, _seen(case)
    h, c, r = config.num_heads, config.kv_lora_rank, config.qk_rope_head_dim
    p, v = config.qk_nope_head_dim, config.v_head_dim
    projection = 2 * h * c * (p + v)
    expanded = 2 * h * (p + r + v) * total + projection * seen
    absorbed = 2 * h * (2 * c + r) * total + projection * t
    read = seen * _entry(case) + (t * h * (p + r) + h * (p + v) * c) * _size(case)
    return Work(min(expanded, absorbed), read, t * h * (v * _size(case) + LSE_BYTES))


def _cache_write(case: Case) -> Work:
    t = sum(min(q, kv) for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    return Work(0, t * (case.config.entry_width * _size(case) + SLOT_BYTES), t * _entry(case))


def _rope_cache_write(case: Case) -> Work:
    write = _cache_write(case)
    t = sum(min(q, kv) for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    queries = t * case.config.num_heads * case.config.qk_rope_head_dim * _size(case)
    return Work(0, write.bytes_read + queries + t * POSITION_BYTES, write.bytes_written + queries)


def _cache_gather(case: Case) -> Work:
    t = sum(min(q, kv) for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    return Work(0, t * _entry(case), t * case.config.entry_width * _size(case))


def _merge_states(case: Case) -> Work:
    rows = sum(case.q_lens) * case.config.num_heads
    state = rows * (case.config.v_head_dim * _size(case) + LSE_BYTES)
    return Work(0, len(case.kv_lens) * state, state)


WORK: dict[str, Callable[[Case], Work]] = {
    "latent_attention": _latent_attention,
    "attention": _attention,
    "cache_write": _cache_write,
    "rope_cache_write": _rope_cache_write,
    "cache_gather": _cache_gather,
    "merge_states": _merge_states,
}


def work(case: Case) -> Work:
    """What the case needs. Raises: ValueError that lists the problems that are counted."""
    if case.problem not in WORK:
        raise ValueError(f"problem {case.problem!r} is not timed; these are: {', '.join(WORK)}")
    return WORK[case.problem](case)
