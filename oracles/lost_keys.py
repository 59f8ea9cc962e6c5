"""Which keys a kernel did not find, in the words of a cache: request, page, slot.

Of attention an output names rows, heads and channels. Where a probe has each row look for one key, what the
wrong ones have in common is the keys: those of a page, those from a split on, the last of each block.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

# So many keys are named one by one; of more, where they begin.
NAMED = 3


class Key(NamedTuple):
    """A token of a request that has ``kv_len`` of them, cached in blocks of ``block_size``."""

    request: int
    token: int
    kv_len: int
    block_size: int

    @property
    def page(self) -> int:
        """Its column in the request's block table."""
        return self.token // self.block_size

    @property
    def slot(self) -> int:
        """Its place in the page."""
        return self.token % self.block_size


def lost_keys(picked: torch.Tensor, bad: torch.Tensor, kv_lens: Sequence[int], block_size: int) -> str:
    """Which of the keys that were looked for nobody found, and what they have in common; empty if none.

    picked [t h]: the key that each row and head looks for, numbered through all requests; -1: none.
    bad [t h]: where the output is not that key's value.
    """
    looked_for = set(picked[picked >= 0].tolist())
    found = set(picked[(picked >= 0) & ~bad].tolist())
    ends = [0]
    for kv_len in kv_lens:
        ends.append(ends[-1] + kv_len)
    keys = {
        first + token: Key(i, token, end - first, block_size)
        for i, (first, end) in enumerate(pairwise(ends))
        for token in range(end - first)
        if first + token in looked_for
    }
    lost = [key for number, key in sorted(keys.items()) if number not in found]
    if not lost:
        return ""
    if len(lost) == len(keys):
        return "no key is found"
    some = ", ".join(map(_name, lost[:NAMED]))
    more = f" and {len(lost) - NAMED} more of {len(keys)}" if len(lost) > NAMED else f" of {len(keys)}"
    same = (what for what, having in _conditions(list(keys.values()), lost) if having == lost)
    exactly = f": exactly those {what}" if (what := next(same, "")) else ""
    return f"not found: {some}{more} keys{exactly}"


def _name(key: Key) -> str:
    return f"key {key.token} of request {key.request} (page {key.page}, slot {key.slot})"


def _conditions(keys: list[Key], lost: list[Key]) -> Iterator[tuple[str, list[Key]]]:
    """What may be special about keys, those that it says most of first, and the keys of which it is true."""
    first, pages = lost[0], {(key.request, key.page) for key in lost}
    several = len({key.request for key in keys}) > 1
    if len(pages) == 1 and len(lost) > 1:
        same = [key for key in keys if (key.request, key.page) == (first.request, first.page)]
        yield f"of page {first.page} of request {first.request}", same
    if several:
        yield f"of request {first.request}", [key for key in keys if key.request == first.request]
    if len(lost) == 1:
        return
    yield "of a request's first page", [key for key in keys if key.page == 0]
    yield "of a last page that is not full", [key for key in keys if key.page == key.kv_len // key.block_size]
    yield "that are their request's newest", [key for key in keys if key.token == key.kv_len - 1]
    yield "that are their request's first", [key for key in keys if key.token == 0]
    for slot, words in ((0, "first"), (first.block_size - 1, "last")):
        if first.block_size > 1:
            yield f"in the {words} slot of a page", [key for key in keys if key.slot == slot]
    least, most = min(key.token for key in lost), max(key.token for key in lost)
    yield f"from key {least} of a request on", [key for key in keys if key.token >= least]
    yield f"up to key {most} of a request", [key for key in keys if key.token <= most]
    yield f"from key {least} to {most} of a request", [key for key in keys if least <= key.token <= most]
