"""Memory that a call may take, and whether an error says that there was none."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

WORDS = "out of memory", "not enough memory", "Cannot allocate memory", "can't allocate memory"


def ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out; of that of the host, torch says so in words alone."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)
    )


@contextmanager
def refused_beyond(num_bytes: int) -> Iterator[None]:
    """Allocations on the host raise where they need more addresses than now and so many more.

    A limit that is lower stays. Where the system tells no size of a process nothing is refused.
    """
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(sizes.read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for limit in before if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([now + num_bytes, *limits]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
