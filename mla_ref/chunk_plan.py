"""How the cached context of a batch is cut into chunks that fit a workspace of so many rows.

A chunk is gathered, up-projected and attended to as one, so its rows bound the memory of a prefill. Both
rules cover every context token exactly once and cut a request at block boundaries only.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from mla_ref.pages import num_blocks_of

# The most rows that vLLM gives the workspace: since 2026, and from 0.8 to 0.10.
CAP = 64 * 1024
EARLIER_CAP = 128 * 1024


class Span(NamedTuple):
    """Context tokens start … stop-1 of one request of the batch."""

    request: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Rows of the workspace that it fills."""
        return self.stop - self.start


Chunk = tuple[Span, ...]


def places(chunk: Chunk) -> list[slice]:
    """Rows of the workspace that each span fills: one after another, from row 0."""
    ends = accumulate(span.num_tokens for span in chunk)
    return [slice(end - span.num_tokens, end) for span, end in zip(chunk, ends, strict=True)]


def workspace_rows(max_model_len: int, max_num_seqs: int, block_size: int, cap: int = CAP) -> int:
    """min(max(8 · max_model_len, 4 · max_num_seqs · block_size), cap), and a block for every request in it.

    Raises: ValueError if the cap leaves less than that.
    Source: vLLM, ``MLACommonMetadataBuilder``; 0.8.0 with ``EARLIER_CAP``.
    """
    rows = min(max(8 * max_model_len, 4 * max_num_seqs * block_size), cap)
    _check_rows(rows, max_num_seqs, block_size)
    return rows


def equal_share(context_lens: Sequence[int], workspace_rows: int, block_size: int) -> list[Chunk]:
    """Every request has the same share of every chunk: chunk i holds its tokens i·share … (i+1)·share - 1.

    The share is a whole number of blocks. The longest context sets the number of chunks, so the spans of
    shorter ones, and all spans of requests without context, are empty in the later chunks.

    Raises: ValueError if the workspace has no block for each request that has context.
    Source: vLLM 0.8.0, attention/backends/mla/common.py.
    """
    with_context = sum(length > 0 for length in context_lens)
    if not with_context:
        return []
    _check_rows(workspace_rows, with_context, block_size)
    share = workspace_rows // with_context // block_size * block_size
    return [
        tuple(Span(i, min(start, end), min(start + share, end)) for i, end in enumerate(context_lens))
        for start in range(0, max(context_lens), share)
    ]


def packed(context_lens: Sequence[int], workspace_rows: int, block_size: int) -> list[Chunk]:
    """Requests fill each chunk in order; one that no longer fits goes on in the next, from a block boundary.

    No span is empty, and only the first of a chunk can continue a request.

    Raises: ValueError if the workspace has no room for one block.
    Source: the rule that vLLM's documentation of its MLA backend states since 2026.
    """
    if any(context_lens):
        _check_rows(workspace_rows, 1, block_size)
    chunks: list[list[Span]] = []
    free = 0
    for request, end in enumerate(context_lens):
        start = 0
        while start < end:
            stop = end if end - start <= free else start + free // block_size * block_size
            if stop == start:
                chunks.append([])
                free = workspace_rows
                continue
            chunks[-1].append(Span(request, start, stop))
            free -= stop - start
            start = stop
    return [tuple(chunk) for chunk in chunks]


def whole_blocks(num_tokens: int, block_size: int) -> int:
    """Rows of the whole blocks that ``num_tokens`` need."""
    return num_blocks_of(num_tokens, block_size) * block_size


def _check_rows(rows: int, num_requests: int, block_size: int) -> None:
    if rows < num_requests * block_size:
        raise ValueError(
            f"workspace_rows: is {rows}, but {num_requests} requests need a block of {block_size} rows each"
        )
