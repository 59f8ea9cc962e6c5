"""One request at a time: its keys out of the cache, and softmax attention over a set of keys."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from mla_ref.formats import CacheFormat
from mla_ref.pages import gather


class Request(NamedTuple):
    """Which query rows belong to a request, how many tokens it has cached, and its row of the block table."""

    rows: slice
    kv_len: int
    table_row: torch.Tensor

    @property
    def q_len(self) -> int:
        """New tokens of this request."""
        return int(self.rows.stop - self.rows.start)

    @property
    def context_len(self) -> int:
        """Cached tokens older than every new one; 0 where there are more queries than keys."""
        return max(self.kv_len - self.q_len, 0)


def requests(
    block_table: torch.Tensor, cu_seqlens_q: torch.Tensor, cache_seqlens: torch.Tensor
) -> Iterator[Request]:
    """The requests of a packed batch, in order."""
    offsets = cu_seqlens_q.tolist()
    for i, kv_len in enumerate(cache_seqlens.tolist()):
        yield Request(slice(offsets[i], offsets[i + 1]), kv_len, block_table[i])


def compute_dtype(query: torch.Tensor) -> torch.dtype:
    """float64 for float64 queries, float32 for every other: the references round only there."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def keys(
    kv_cache: torch.Tensor,
    request: Request,
    start: int,
    stop: int,
    dims: tuple[int, int],
    cache_format: CacheFormat,
    kv_scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantised latent [j c] and rope part [j r] of tokens start … stop-1."""
    entries = gather(kv_cache, request.table_row, start, stop)
    return cache_format.decode(entries, *dims, kv_scale, dtype)


def causal_mask(request: Request, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """[s j], True where query s sees key start + j: bottom-right aligned, key ≤ kv_len - q_len + s."""
    query = torch.arange(request.q_len, device=device) + (request.kv_len - request.q_len)
    key = torch.arange(start, stop, device=device)
    return key[None, :] <= query[:, None]


def softmax_values(
    scores: torch.Tensor, mask: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of scaled scores [h s j] over values [h j x] or [1 j x], masked by [s j].

    Returns: out [s h x], lse [s h]; 0 and -inf on a row that sees no key.
    """
    scores = scores.masked_fill(~mask, -torch.inf)
    if scores.shape[-1] == 0:
        empty = scores.new_zeros(scores.shape[1], scores.shape[0], values.shape[-1])
        return empty, empty.new_full(empty.shape[:2], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    out = weights @ values
    return out.transpose(0, 1), lse.transpose(0, 1)
