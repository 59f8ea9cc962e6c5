"""Memory that a call may take, and whether an error says that there was none."""

import gc
import mmap
import os
import resource
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# Linux's MAP_NORESERVE, which older Pythons do not name: memory that is never touched counts for nothing.
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0

# Memory of ``untouched`` that is there, and by how much the limit was raised for each, and for all so far.
_UNTOUCHED: "weakref.WeakKeyDictionary[mmap.mmap, int]" = weakref.WeakKeyDictionary()
_RAISED = [0]

WORDS = "out of memory", "not enough memory", "Cannot allocate memory", "can't allocate memory"


def ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out; of that of the host, torch says so in words alone."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)
    )


def untouched(num_bytes: int) -> mmap.mmap:
    """Memory that nobody has touched yet, so that it takes addresses alone, which no limit counts.

    Raises: OSError if the system has none.
    """
    raised = _raise_limit(num_bytes)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except OSError:
        _raise_limit(-raised)
        raise
    _UNTOUCHED[memory] = raised
    _RAISED[0] += raised
    return memory


def counted_again() -> None:
    """The limit of addresses is what it would be without the untouched memory that is gone by now."""
    if _UNTOUCHED:
        gc.collect()  # a kernel's interpreter leaves its arguments behind in a cycle
    gone = _RAISED[0] - sum(_UNTOUCHED.values())
    _RAISED[0] -= gone
    _raise_limit(-gone)


def _raise_limit(num_bytes: int) -> int:
    """By how much the limit of addresses is higher now; not at all where there is none."""
    limit, most = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return 0
    raised = limit + num_bytes if most == resource.RLIM_INFINITY else min(limit + num_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (raised, most))
    return raised - limit


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
