"""Worker processes: whatever a task does to its process, how it ended is known, and the next task runs.

A worker is a fresh interpreter in a session of its own. Tasks and answers are lines of JSON on a socket that
only the worker's loop knows; what a task prints goes elsewhere, and its end is kept for the message. A task
names a function, "module:name", which is called with the task's argument and with a way to say something.

- Time is limited between two steps that a task announces. What the worker's main thread waited for a core
  that others had does not count, up to ``STRETCH``: a busy machine is no fault of a kernel's.
- Memory: on the CPU the system refuses addresses beyond the limit (RLIMIT_AS), so that an allocation raises
  where it is made. A CUDA context reserves hundreds of gigabytes of addresses, so there the parent watches
  resident memory instead; it does so everywhere for the sum over a worker and its children.
- A worker's children, and theirs, count with it and are killed with it, in whatever session they are: they
  are known by a cookie in their environment, or else by their parent or session.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import math
import os
import re
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from oracles.exits import WorkersError, first_line

# The first word of a message: a step restarts the clock, an item is just said. A step that says how many
# seconds it needs, under this name, is given as many even where the limit is lower.
STEP, ITEM = "step", "item"
PATIENCE = "patience"

# How a task ended: by itself, by an exception, by asking for a fresh process, with its process, out of time.
DONE, RAISED, REPLACED, CRASHED, TIMED_OUT = "done", "raised", "replaced", "crashed", "timed out"

# What a worker says of itself; the other ends are seen from outside.
KINDS = (STEP, ITEM, DONE, RAISED, REPLACED)

START_SECONDS, MAX_STARTS = 300.0, 3
MAX_PROCESSES = 128
TICK, SCAN, LAST_WORDS, DYING = 0.05, 0.5, 0.3, 5.0
TAIL = 1 << 14
GIB = 1 << 30

# How many times its limit a step may take if it waits for a core meanwhile.
STRETCH = 10

# In the environment of a worker and of all that it starts.
COOKIE = "MLA_VERIFY_WORKER"

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from oracles.worker import serve; serve(int(sys.argv.pop(1)), int(sys.argv.pop(1)))"
)

Message = tuple[str, Any]
Say = Callable[[str, Any], None]
Handler = Callable[[Any, Say], None]


class Task(NamedTuple):
    """handler: "module:name" of a ``Handler``. argument: what JSON can hold. key: the parent's own."""

    handler: str
    argument: Any = None
    key: int = 0


class Outcome(NamedTuple):
    """What a task said, in order; how it ended; and why, if not by itself."""

    task: Task
    messages: list[Message]
    end: str
    why: str = ""


class Engine(Protocol):
    """Where tasks run: a ``Pool``, or a cluster. size: how many slots it has."""

    size: int

    def outcomes(self, source: Callable[[int], Task | None]) -> Iterator[Outcome | None]:
        """As ``Pool.outcomes``."""


class Limits(NamedTuple):
    """seconds: between two steps. memory: bytes of a worker and all its children; None: no limit."""

    seconds: float
    memory: int | None = None


class Replace(Exception):
    """Raised by a handler whose process must not be used again; what it said stands."""


def serve(descriptor: int, parent: int) -> None:
    """The loop of a worker, until its parent hangs up or dies."""
    _die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    link = socket.socket(fileno=descriptor)
    me = os.getpid()

    def say(kind: str, body: Any) -> None:
        if os.getpid() != me:
            os._exit(0)  # a task forked, and this is the child, back in our loop
        link.sendall(json.dumps([kind, body]).encode() + b"\n")

    for line in link.makefile("rb"):
        name, argument, memory = json.loads(line)
        try:
            _handler(name)(argument, say)
            if memory is not None:
                _refuse_beyond(memory)
            say(DONE, "")
        except Replace as error:
            say(REPLACED, first_line(error))
            break
        except BaseException as error:
            say(RAISED, f"{type(error).__name__}: {first_line(error)}")
            break


def _handler(name: str) -> Handler:
    module, _, attribute = name.partition(":")
    handler: Handler = getattr(importlib.import_module(module), attribute)
    return handler


def _die_with(parent: int) -> None:
    """Be killed when the parent is, even in the middle of a hang; elsewhere than on Linux, when next idle."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _refuse_beyond(memory: int) -> None:
    """No more addresses than now and ``memory`` more."""
    limit = _sizes("self")[0] + memory
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


@dataclass
class _Worker:
    """One process as its parent sees it.

    since: when its step began. waited: for a core until then. patience: what the step asked for. hung_up:
    when it closed its end. ready: its preparation is over. again: its task was given before, to one that died
    before the task began.
    """

    process: subprocess.Popen[bytes]
    link: socket.socket
    cookie: str
    task: Task | None
    since: float
    waited: float = 0.0
    patience: float = 0.0
    hung_up: float = math.inf
    ready: bool = False
    again: bool = False
    messages: list[Message] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)


class Pool:
    """So many workers, each replaced when a task has spoilt it.

    prepare: run once in every new worker, before its memory is limited and outside of any task's time.
    refuse: whether the system refuses memory beyond the limit; else it is only watched.
    defaults: what a worker finds in its environment where ours says nothing.
    """

    def __init__(
        self,
        size: int,
        limits: Limits,
        prepare: Task,
        refuse: bool = True,
        defaults: Mapping[str, str] | None = None,
    ) -> None:
        self.size, self._limits, self._prepare, self._defaults = size, limits, prepare, defaults or {}
        self._refused = limits.memory if refuse and sys.platform == "linux" else None
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Worker] = {}
        self._undying: list[subprocess.Popen[bytes]] = []
        self._again: list[Task] = []
        self._failed_starts = 0
        self._scanned = self._looked = time.monotonic()
        self._owners: dict[_Process, str] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        for slot in list(self._workers):
            self._end(slot)
        self._selector.close()

    def outcomes(self, source: Callable[[int], Task | None]) -> Iterator[Outcome | None]:
        """Outcomes as they come, and None now and then when none has.

        source: the next task for a slot, 0 … size-1, or None if there is none now. The end is when nothing
            runs and there is none.
        Raises: WorkersError if workers do not start.
        """
        while True:
            for slot in range(self.size):
                worker = self._workers.get(slot)
                if worker is None or worker.task is None:
                    again = bool(self._again)
                    task = self._again.pop() if again else source(slot)
                    if task is not None:
                        self._give(slot, task, again)
            if all(worker.task is None for worker in self._workers.values()):
                return
            yield from self._watch() or (None,)

    def _give(self, slot: int, task: Task, again: bool) -> None:
        worker = self._workers.get(slot) or self._start(slot)
        worker.task, worker.again, worker.messages = task, again, []
        if worker.ready:
            self._send(worker, task)

    def _start(self, slot: int) -> _Worker:
        ours, theirs = socket.socketpair()
        cookie = secrets.token_hex(8)
        outer = os.environ.get(COOKIE, "")
        words = [START, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**self._defaults, **os.environ, COOKIE: f"{outer} {cookie}".strip()},
            )
        except OSError as error:
            ours.close()
            raise WorkersError(f"workers do not start: {error}") from None
        finally:
            theirs.close()
        worker = _Worker(process, ours, cookie, None, time.monotonic())
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(ours, selectors.EVENT_READ, slot)
        self._selector.register(process.stdout, selectors.EVENT_READ, slot)
        self._workers[slot] = worker
        self._send(worker, self._prepare, self._refused)
        return worker

    def _send(self, worker: _Worker, task: Task, memory: int | None = None) -> None:
        _begin_step(worker, 0.0)
        with contextlib.suppress(OSError):  # if it has died, that is noticed elsewhere
            worker.link.sendall(json.dumps([task.handler, task.argument, memory]).encode() + b"\n")

    def _watch(self) -> list[Outcome]:
        """Wait a little, read what was said, and see who has ended, or from time to time who must end."""
        heard = {}
        for key, _ in self._selector.select(TICK):
            worker = heard[key.data] = self._workers[key.data]
            if not (_receive if key.fileobj is worker.link else _drain)(worker):
                self._selector.unregister(key.fileobj)
        look = time.monotonic() - self._looked >= TICK
        if look:
            self._looked = time.monotonic()
        crowds = self._crowds() if look else {}
        ended = []
        for slot, worker in list((self._workers if look else heard).items()):
            if (end := _said(worker) or (self._end_of(worker, crowds) if look else None)) is not None:
                outcome = self._finish(slot, worker, *end)
                ended += [outcome] if outcome is not None else []
        return ended

    def _crowds(self) -> dict[str, list[Path]]:
        """The processes of each worker, by its cookie, now and then."""
        if time.monotonic() - self._scanned < SCAN:
            return {}
        self._scanned = time.monotonic()
        self._owners = _owners(self._owners)
        crowds: dict[str, list[Path]] = {}
        for process, owner in self._owners.items():
            crowds.setdefault(owner.rpartition(" ")[2], []).append(process.path)
        return crowds

    def _end_of(self, worker: _Worker, crowds: dict[str, list[Path]]) -> tuple[str, str] | None:
        """How a silent worker's task, preparation or idle time has ended, and why; None if it has not."""
        if _exited(worker.process.pid):
            _receive(worker)  # what it said before it died
            return _said(worker) or (CRASHED, _why_dead(worker))
        if time.monotonic() - worker.hung_up > DYING:
            return CRASHED, "closed the judge's connection"
        busy = worker.task is not None or not worker.ready
        seconds = max(self._limits.seconds, worker.patience) if worker.ready else START_SECONDS
        if busy and (why := _overdue(worker, seconds)):
            return TIMED_OUT, f"{why}{_where_it_is(worker)}"
        crowd = crowds.get(worker.cookie, [])
        if len(crowd) > MAX_PROCESSES:
            return CRASHED, f"started {len(crowd)} processes; the limit is {MAX_PROCESSES}"
        limit, used = self._limits.memory, 0
        if len(crowd) > 1:
            used = sum(map(_own_bytes, crowd))
        elif self._refused is None:
            used = _sizes(str(worker.process.pid))[1]
        if limit is not None and used > limit:
            return CRASHED, f"used {used / GIB:.2f} GiB of memory; the limit is {limit / GIB:g} GiB"
        return None

    def _finish(self, slot: int, worker: _Worker, end: str, why: str) -> Outcome | None:
        """What the end means: ready, an outcome, a task to be given again, or nothing."""
        task = worker.task
        if not worker.ready:
            self._started(slot, worker, end, why)
            return None
        if end != DONE or _sizes(str(worker.process.pid))[1] > (self._limits.memory or sys.maxsize) / 2:
            why += self._end(slot)
        worker.task = None
        if task is None:
            return None
        if end == CRASHED and not worker.messages and not worker.again:
            # It died before it began: of what the task before it left running, perhaps.
            self._again.append(task)
            return None
        return Outcome(task, worker.messages, end, why)

    def _started(self, slot: int, worker: _Worker, end: str, why: str) -> None:
        if end == DONE:
            worker.ready, self._failed_starts = True, 0
            if worker.task is not None:
                self._send(worker, worker.task)
            return
        self._end(slot)
        self._failed_starts += 1
        if self._failed_starts == MAX_STARTS:
            raise WorkersError(f"workers do not start: {why}")
        if worker.task is not None:
            self._give(slot, worker.task, worker.again)

    def _end(self, slot: int) -> str:
        """Kill a worker with all that it started. What is to be added to why, should it not die of that."""
        worker = self._workers.pop(slot)
        assert worker.process.stdout is not None
        for file in (worker.link, worker.process.stdout):
            if file in self._selector.get_map():
                self._selector.unregister(file)
        worker.link.close()
        _kill_all(worker.process.pid, worker.cookie, self._owners)
        worker.process.stdout.close()
        try:
            worker.process.wait(DYING)
        except subprocess.TimeoutExpired:  # in the kernel, which waits for a device or a disk
            self._undying.append(worker.process)
            return f"; process {worker.process.pid} does not die when it is killed"
        return ""


def _receive(worker: _Worker) -> bool:
    """Read what was said. False when it has hung up."""
    try:
        while chunk := worker.link.recv(1 << 16, socket.MSG_DONTWAIT):
            worker.received += chunk
    except BlockingIOError:
        return True
    except OSError:
        pass
    worker.hung_up = time.monotonic()
    return False


def _drain(worker: _Worker) -> bool:
    """Keep the end of what was printed. False when nobody can print any more."""
    assert worker.process.stdout is not None
    try:
        while chunk := os.read(worker.process.stdout.fileno(), 1 << 16):
            worker.printed += chunk
            del worker.printed[:-TAIL]
    except BlockingIOError:
        return True
    return False


def _said(worker: _Worker) -> tuple[str, str] | None:
    """Take messages in, up to one that ends the task."""
    while (newline := worker.received.find(b"\n")) >= 0:
        line = bytes(worker.received[:newline])
        del worker.received[: newline + 1]
        try:
            kind, body = json.loads(line)
            if kind not in KINDS or not (kind in (STEP, ITEM) or isinstance(body, str)):
                raise ValueError(kind)
        except (TypeError, ValueError):
            return CRASHED, "wrote on the judge's own connection"
        if kind not in (STEP, ITEM):
            return kind, body
        worker.messages.append((kind, body))
        if kind == STEP:
            _begin_step(worker, body.get(PATIENCE, 0.0) if isinstance(body, dict) else 0.0)
    return None


def _begin_step(worker: _Worker, patience: float) -> None:
    """Its clocks start anew."""
    worker.since, worker.waited = time.monotonic(), _waited(worker.process.pid)
    worker.patience = patience


def _overdue(worker: _Worker, seconds: float) -> str:
    """Why a step has had its time; empty if it has not."""
    took = time.monotonic() - worker.since
    if took <= seconds:
        return ""
    if took - (_waited(worker.process.pid) - worker.waited) > seconds:
        return f"took longer than {seconds:g} s"
    longest = STRETCH * seconds
    return f"took longer than {longest:g} s, most of which it waited for a core" if took > longest else ""


def _exited(pid: int) -> bool:
    """Whether our child is dead; its number stays its own until it is waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _why_dead(worker: _Worker) -> str:
    """Its signal or exit code, the line of Python that it was in, and the last it printed."""
    _drain(worker)
    found = os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    assert found is not None
    code = found.si_status
    killed = found.si_code != os.CLD_EXITED
    why = f"the process died of {_signal(code)}" if killed else f"the process exited with {code}"
    printed = worker.printed.decode(errors="replace")
    words, _, trace = printed.partition("Fatal Python error: ")
    return f"{why}{_place(trace)}{_last_words(words)}"


def _signal(number: int) -> str:
    """Its name; most real-time signals have none."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _last_words(text: str) -> str:
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in text.splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    return f'; it last printed "{last[:200]}"' if last else ""


def _where_it_is(worker: _Worker) -> str:
    """The line of Python that a worker is in now."""
    del worker.printed[:]
    try:
        worker.process.send_signal(signal.SIGUSR1)
    except OSError:
        return ""
    deadline = time.monotonic() + LAST_WORDS
    while b"most recent call first" not in worker.printed and time.monotonic() < deadline:
        time.sleep(TICK / 10)
        _drain(worker)
    return _place(worker.printed.decode(errors="replace"))


def _place(trace: str) -> str:
    """The innermost frame that is of no installed package, or else the innermost."""
    frames = re.findall(r'^  File "([^"]+)", line (\d+) in (\S+)', trace, re.MULTILINE)
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not frame[0].startswith(installed)]
    for file, line, function in (own or frames)[:1]:
        return f" in {function}, {Path(file).name}:{line}"
    return ""


def _sizes(process: str) -> tuple[int, int]:
    """Bytes of addresses and of resident memory; 0 where the system does not say, or nobody is there."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0, 0
    size = resource.getpagesize()
    return int(pages[0]) * size, int(pages[1]) * size


def _waited(pid: int) -> float:
    """Seconds that a process's main thread waited for a core; 0 where the system does not say."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0


class _Process(NamedTuple):
    """One that lives. Its number may be given again, but not with the same start."""

    pid: int
    start: int

    @property
    def path(self) -> Path:
        """Where the system tells of it."""
        return Path(f"/proc/{self.pid}")


def _processes() -> dict[_Process, tuple[int, int]]:
    """The parent and the session of every process that lives, where the system lists them."""
    proc, found = Path("/proc"), {}
    for path in proc.iterdir() if proc.is_dir() else ():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if stat[0] not in ("Z", "X"):
                    found[_Process(int(path.name), int(stat[19]))] = int(stat[1]), int(stat[3])
    return found


def _owners(known: Mapping[_Process, str]) -> dict[_Process, str]:
    """The cookies of every process of some worker; "" for those of none. known: what was found before.

    A process without cookies is its parent's, or else its session's. Whose it once was it stays.
    """
    family = _processes()
    by_pid = {process.pid: process for process in family}
    found = {
        process: known[process] if process in known else _cookies(process)
        for process in sorted(family, key=lambda process: process.start)
    }
    more = True
    while more:
        more = False
        for process, owner in found.items():
            near = (by_pid[pid] for pid in family[process] if pid in by_pid)
            if not owner and (inherited := next(filter(None, map(found.__getitem__, near)), "")):
                found[process], more = inherited, True
    return found


def _cookies(process: _Process) -> str:
    """What stands under ``COOKIE`` in the environment with which it was started."""
    with contextlib.suppress(OSError):
        for entry in (process.path / "environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == COOKIE.encode():
                return value.decode(errors="replace")
    return ""


def _own_bytes(path: Path) -> int:
    """Resident memory of a process, of pages that it shares with forks of itself only its part."""
    with contextlib.suppress(OSError):
        for line in (path / "smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def share_of_memory(workers: int) -> int:
    """Bytes for each of so many workers and for their parent: this machine's memory, or this container's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(name).read_text(encoding="ascii")))
    return total // (workers + 1)


def _kill_all(leader: int, cookie: str, known: Mapping[_Process, str]) -> None:
    """Kill a process group, then all that belong to the cookie, until nobody does."""
    owners = _owners(known)
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
    for _ in range(MAX_PROCESSES):
        left = [process for process, owner in owners.items() if cookie in owner.split()]
        if not left:
            return
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        owners = _owners(owners)
