"""Work on many things at a time, each in a process that nothing else has touched."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

Found = TypeVar("Found")


def spawned(jobs: int, find: Callable[..., Found], *arguments: Iterable[Any]) -> Iterator[Found]:
    """What ``find`` makes of each, in their order. jobs: processes, of one thread each; 1: this one."""
    if jobs == 1:
        yield from map(find, *arguments)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(find, *arguments)
