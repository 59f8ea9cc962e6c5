"""What the problems over a paged latent cache share: checks, and caches made from cases."""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from mla_ref.case import RECORDED, Case
from mla_ref.formats import CacheFormat, cache_format
from mla_ref.layout import allocate
from mla_ref.pages import block_table, num_blocks_of, scatter, slots
from mla_ref.recording import recorded_tensor
from mla_ref.values import REGIMES, Raw, bell

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Paged(NamedTuple):
    """The half of a case's inputs that does not depend on the form of its queries."""

    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    max_seqlen_q: int
    cache_format: CacheFormat
    kv_scale: torch.Tensor


def raw_values(case: Case, nope: int, latent: int | None = None) -> Raw:
    """Queries [t h nope], [t h r] and keys [n latent], [n r] in the case's regime, float64 on the CPU.

    latent: the model's c where None.
    """
    if case.regime == RECORDED:
        return _recorded_values(case, nope)
    if case.regime not in REGIMES:
        raise ValueError(f"case: regime {case.regime!r} is not one of {', '.join(REGIMES)}")
    config, t, n, seed = case.config, sum(case.q_lens), sum(case.kv_lens), case.seed
    position, length = _positions(case)
    raw = Raw(
        q_nope=bell(seed, "q_nope", t, config.num_heads, nope),
        q_pe=bell(seed, "q_pe", t, config.num_heads, config.qk_rope_head_dim),
        kv_c=bell(seed, "kv_c", n, config.kv_lora_rank if latent is None else latent),
        k_pe=bell(seed, "k_pe", n, config.qk_rope_head_dim),
        position=position,
        length=length,
    )
    return REGIMES[case.regime](seed, raw)


def _recorded_values(case: Case, nope: int) -> Raw:
    """The same from a recording; queries without channels where a problem takes none."""
    query = "q_nope" if case.problem == "attention" else "ql_nope"
    return Raw(
        *(recorded_tensor(case, query)[..., :nope], recorded_tensor(case, "q_pe")),
        *(recorded_tensor(case, "kv_c"), recorded_tensor(case, "k_pe")),
        *_positions(case),
    )


def _positions(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n], the position of each key in its request, and the length of that request."""
    empty = [torch.empty(0, dtype=torch.int64)]
    positions = [torch.arange(length) for length in case.kv_lens]
    lengths = [torch.full((length,), length) for length in case.kv_lens]
    return torch.cat(empty + positions), torch.cat(empty + lengths)


def kv_scale(case: Case, fmt: CacheFormat, device: torch.device) -> torch.Tensor:
    """The per-tensor scale [] float32; NaN where the format has none, so that reading it shows."""
    value = case.kv_scale if fmt.per_tensor_scale else float("nan")
    return torch.tensor(value, dtype=torch.float32, device=device)


def live_slots(case: Case, table: torch.Tensor) -> torch.Tensor:
    """Flat slots of every cached token, request by request, int64."""
    lengths = enumerate(case.kv_lens)
    found = [slots(table[i], 0, length, case.block_size) for i, length in lengths]
    return torch.cat([torch.empty(0, dtype=torch.int64), *found])


def paged(case: Case, raw: Raw, device: torch.device) -> Paged:
    """Encode the keys, scatter them over shuffled blocks, and leave every other byte NaN."""
    fmt, config = cache_format(case.cache_format), case.config
    table, num_blocks = block_table(case.kv_lens, case.block_size, case.layout, case.seed)
    kv_cache = allocate(
        case.layout,
        num_blocks=num_blocks,
        block_size=case.block_size,
        entry_width=fmt.entry_width(config.kv_lora_rank, config.qk_rope_head_dim),
        dtype=fmt.dtype,
        device=device,
    )
    dtype = torch.float64 if case.dtype == "float64" else torch.float32
    scale = kv_scale(case, fmt, torch.device("cpu"))
    entries = fmt.encode(raw.kv_c.to(dtype), raw.k_pe.to(dtype), scale)
    scatter(kv_cache, live_slots(case, table).to(device), entries.to(device))
    return Paged(
        kv_cache=kv_cache,
        block_table=table.to(device),
        cu_seqlens_q=torch.tensor([0, *case.q_lens]).cumsum(0).to(torch.int32).to(device),
        cache_seqlens=torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        max_seqlen_q=max(case.q_lens, default=0),
        cache_format=fmt,
        kv_scale=kv_scale(case, fmt, device),
    )


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raises: ValueError naming the tensor, its dtype and the allowed ones."""
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"{name}: dtype is {str(tensor.dtype).removeprefix('torch.')}, must be {wanted}")


def check_device(inputs: Any) -> None:
    """Raises: ValueError naming the first tensor that is on another device than the first one."""
    tensors = [(name, x) for name, x in inputs._asdict().items() if isinstance(x, torch.Tensor)]
    first, home = tensors[0][0], tensors[0][1].device
    for name, tensor in tensors:
        if tensor.device != home:
            raise ValueError(f"{name}: on {tensor.device}, but {first} is on {home}")


def check_cache(kv_cache: torch.Tensor, fmt: CacheFormat, c: int, r: int) -> None:
    """Raises: ValueError if the format cannot hold (c, r), or the cache is not one of its."""
    if reason := fmt.why_not_dims(c, r):
        raise ValueError(f"kv_cache: {reason}")
    check_dtype("kv_cache", kv_cache, fmt.dtype)
    width = fmt.entry_width(c, r)
    if kv_cache.shape[2] != width:
        raise ValueError(f"kv_cache: e={kv_cache.shape[2]}, but {fmt.name} stores c={c}, r={r} in {width}")


def check_scale(fmt: CacheFormat, kv_scale: torch.Tensor) -> None:
    """Raises: ValueError on a per-tensor scale that no writer can divide by."""
    if fmt.per_tensor_scale and not 0.0 < float(kv_scale) < math.inf:
        raise ValueError(f"kv_scale: is {float(kv_scale)}, must be finite and positive for {fmt.name}")


def check_paged(inputs: Any, *queries: str) -> None:
    """Types and devices of the queries named, of the cache, and of the tables."""
    first = getattr(inputs, queries[0])
    check_dtype(queries[0], first, *QUERY_DTYPES)
    for name in queries[1:]:
        check_dtype(name, getattr(inputs, name), first.dtype)
    for name in ("block_table", "cu_seqlens_q", "cache_seqlens"):
        check_dtype(name, getattr(inputs, name), torch.int32)
    check_dtype("kv_scale", inputs.kv_scale, torch.float32)
    check_device(inputs)


def check_lengths(inputs: Any, num_tokens: int, pages: torch.Tensor | None = None) -> None:
    """Offsets that partition the queries, lengths that the table covers, live blocks inside the pool.

    pages: [n k …], where they are not ``kv_cache``.
    """
    offsets = inputs.cu_seqlens_q.tolist()
    lengths = inputs.cache_seqlens.tolist()
    check_offsets("cu_seqlens_q", offsets, num_tokens)
    longest = max((b - a for a, b in pairwise(offsets)), default=0)
    if inputs.max_seqlen_q < longest:
        raise ValueError(f"max_seqlen_q: {inputs.max_seqlen_q}, but the longest query has {longest} tokens")
    check_table(inputs.block_table, lengths, inputs.kv_cache if pages is None else pages)


def check_offsets(name: str, offsets: list[int], total: int) -> None:
    """Raises: ValueError unless ``offsets`` rises from 0 to ``total``."""
    if not offsets or offsets[0] != 0:
        raise ValueError(f"{name}[0]: is {offsets[0] if offsets else 'missing'}, must be 0")
    for i, (a, b) in enumerate(pairwise(offsets)):
        if b < a:
            raise ValueError(f"{name}[{i + 1}]: is {b}, must not be below {name}[{i}]={a}")
    if offsets[-1] != total:
        raise ValueError(f"{name}[{len(offsets) - 1}]: is {offsets[-1]}, but there are {total} tokens")


def check_table(table: torch.Tensor, lengths: list[int], pages: torch.Tensor) -> None:
    """Raises: ValueError on a negative length, too few columns, or a live block outside the pool."""
    num_blocks, block_size = pages.shape[:2]
    rows = table.tolist()
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"cache_seqlens[{i}]: is {length}, must not be negative")
        needed = num_blocks_of(length, block_size)
        if needed > len(rows[i]):
            raise ValueError(
                f"block_table: has {len(rows[i])} columns, but cache_seqlens[{i}]={length} needs {needed}"
            )
        check_blocks(rows[i], i, range(needed), num_blocks)


def check_blocks(row: list[int], i: int, columns: range, num_blocks: int) -> None:
    """Raises: ValueError if one of the ``columns`` of row i of the block table is outside the pool."""
    for j in columns:
        if not 0 <= row[j] < num_blocks:
            raise ValueError(f"block_table[{i}, {j}]: is {row[j]}, but the cache has {num_blocks} blocks")
