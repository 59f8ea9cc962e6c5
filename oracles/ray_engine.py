"""A Ray cluster as an engine: every slot is an actor, anywhere, that judges in a worker of its own.

Tasks and outcomes are those of ``worker.Pool``, as text. An actor that dies, of its node, say, is made again
where there is room, and its task given once more to whoever is free; dying twice is the task's outcome. What
an actor raises is no fault of the task's: workers do not start where it is, and the task is given to another.
The code has to be on every node, under the same path or installed.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from oracles.exits import WorkersError, first_line
from oracles.pool import judges
from oracles.worker import CRASHED, MAX_STARTS, START_SECONDS, Limits, Outcome, Task

WAIT = 0.1


class Judge:
    """An actor: one worker, and what it says of each task."""

    def __init__(self, device: str, limits: list[Any]) -> None:
        self._pool = judges(1, device, Limits(*limits), threads=1)

    def ready(self) -> None:
        """Returns once the actor lives."""

    def run(self, handler: str, argument: str) -> str:
        """The outcome of a task, as JSON."""
        tasks = [Task(handler, json.loads(argument))]
        outcomes = self._pool.outcomes(lambda slot: tasks.pop() if tasks and slot == 0 else None)
        [outcome] = [outcome for outcome in outcomes if outcome is not None]
        return json.dumps([outcome.messages, outcome.end, outcome.why])


@dataclass
class RayEngine:
    """``worker.Pool`` on a cluster.

    actors, starting, running: by slot; of what runs, its task, and whether an actor died of it before. again:
    tasks to be given once more, likewise. failures: of actors, since one was last of use.
    """

    ray: Any
    size: int
    device: str
    limits: Limits
    actors: dict[int, Any] = field(default_factory=dict)
    starting: dict[int, Any] = field(default_factory=dict)
    running: dict[int, tuple[Any, Task, bool]] = field(default_factory=dict)
    again: list[tuple[Task, bool]] = field(default_factory=list)
    failures: int = 0

    def outcomes(self, source: Callable[[int], Task | None]) -> Iterator[Outcome | None]:
        """As ``Pool.outcomes``. Raises: WorkersError if no actor starts, or no worker in one."""
        alive = time.monotonic()
        while True:
            for slot in range(self.size):
                if slot not in self.actors:
                    self._start(slot)
            idle = [slot for slot in self.actors if slot not in self.starting and slot not in self.running]
            given = [self._give(slot, source) for slot in idle]
            if idle and not any(given) and not self.running:
                return
            if idle or self.running:
                alive = time.monotonic()
            elif time.monotonic() - alive > START_SECONDS:
                raise WorkersError(f"no Ray actor has started for {START_SECONDS:g} s; is there a free CPU?")
            yield from self._ended() or (None,)

    def _start(self, slot: int) -> None:
        gpus = self.ray.cluster_resources().get("GPU", 0)
        share = min(1.0, gpus / self.size) if torch.device(self.device).type == "cuda" else 0
        actor = self.ray.remote(num_cpus=1, num_gpus=share, max_restarts=0)(Judge)
        self.actors[slot] = actor.remote(self.device, list(self.limits))
        self.starting[slot] = self.actors[slot].ready.remote()

    def _give(self, slot: int, source: Callable[[int], Task | None]) -> bool:
        task, died = self.again.pop() if self.again else (source(slot), False)
        if task is None:
            return False
        reference = self.actors[slot].run.remote(task.handler, json.dumps(task.argument))
        self.running[slot] = reference, task, died
        return True

    def _ended(self) -> list[Outcome]:
        references = [*self.starting.values(), *(reference for reference, _, _ in self.running.values())]
        ready, _ = self.ray.wait(references, num_returns=1, timeout=WAIT)
        for slot in [slot for slot, reference in self.starting.items() if reference in ready]:
            reference = self.starting.pop(slot)
            try:
                self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                self._failed(slot, error)
        found = []
        for slot in [slot for slot, (reference, _, _) in self.running.items() if reference in ready]:
            reference, task, died = self.running.pop(slot)
            try:
                messages, end, why = json.loads(self.ray.get(reference))
                found.append(Outcome(task, [(kind, body) for kind, body in messages], end, why))
                self.failures = 0
            except self.ray.exceptions.RayTaskError as error:
                self.again.append((task, died))
                self._failed(slot, error.cause)
            except self.ray.exceptions.RayError as error:
                del self.actors[slot]
                if died:
                    found.append(Outcome(task, [], CRASHED, f"its Ray actor died twice: {first_line(error)}"))
                else:
                    self.again.append((task, True))
        return found

    def _failed(self, slot: int, error: Exception) -> None:
        """Make the actor anew. Raises: WorkersError if none has been of use for long."""
        del self.actors[slot]
        self.failures += 1
        if self.failures >= MAX_STARTS * self.size:
            raise WorkersError(f"Ray actors do not work: {first_line(error)}")


@contextmanager
def ray_engine(size: int, device: str, limits: Limits) -> Iterator[RayEngine]:
    """On the cluster of RAY_ADDRESS, or that of this machine; one is started where there is none.

    Raises: ValueError without Ray.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"--engine ray: needs pip install 'mla-verify[ray]' ({error})") from None
    if not ray.is_initialized():
        path = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
        ray.init(runtime_env=path, log_to_driver=False, logging_level="error")
    engine = RayEngine(ray, size, device, limits)
    try:
        yield engine
    finally:
        for actor in engine.actors.values():
            ray.kill(actor)
