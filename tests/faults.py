"""Everything that a stranger's code may do to the process that it runs in; a handler for each."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from oracles.worker import ITEM, STEP, Replace

FOREVER = 1000.0


def nothing(argument):
    yield from ()


def echo(argument):
    yield STEP, {}
    yield ITEM, [argument, os.getpid()]


def segfault(argument):
    yield STEP, {}
    ctypes.string_at(0)


def abort(argument):
    yield STEP, {}
    os.write(2, b"free(): invalid pointer\n")
    os.abort()


def hang(argument):
    yield STEP, {}
    time.sleep(FOREVER)


def hang_in_c(argument):
    """With the interpreter's lock held, where no thread of Python runs."""
    yield STEP, {}
    ctypes.PyDLL(None).sleep(int(FOREVER))


def deaf_hang(argument):
    """Nothing but SIGKILL ends it."""
    yield STEP, {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(FOREVER)


def exit_7(argument):
    yield STEP, {}
    os._exit(7)


def sys_exit(argument):
    yield STEP, {}
    sys.exit(0)


def interrupted(argument):
    yield STEP, {}
    raise KeyboardInterrupt


def raising(argument):
    yield STEP, {}
    raise LookupError("lost\nand more")


def replace(argument):
    yield STEP, {}
    yield ITEM, "said before"
    raise Replace("spoilt")


def allocate(argument):
    """More and more, every page of it touched."""
    yield STEP, {}
    kept = []
    while True:
        kept.append(bytearray(b"x") * (1 << 24))


def allocate_in_children(argument):
    """Each below the limit, all of them above."""
    yield STEP, {}
    for _ in range(3):
        if os.fork() == 0:
            kept = bytearray(b"x") * int(argument)
            time.sleep(FOREVER + len(kept))
    time.sleep(FOREVER)


def print_garbage(argument):
    yield STEP, {}
    sys.stdout.write('["done", ""]\n["item", 1]\n')
    sys.stdout.flush()
    os.write(1, b'\xff\xfe\x00["item", "forged"]')
    os.write(2, b"a line that does not end")
    yield ITEM, argument


def print_much(argument):
    yield STEP, {}
    for _ in range(200):
        os.write(1, b"y" * 65536)
    yield ITEM, argument


def close_everything(argument):
    yield STEP, {}
    os.closerange(3, 256)
    time.sleep(FOREVER)


def forge(argument):
    """Write on every descriptor there is."""
    yield STEP, {}
    for descriptor in range(3, 256):
        try:
            os.write(descriptor, b"certainly\n")
        except OSError:
            continue
    time.sleep(FOREVER)


def fork_back(argument):
    """The child returns into the judge's loop, as if it were the worker."""
    yield STEP, {}
    os.fork()
    yield ITEM, argument


def leave_children(argument):
    """In our session and out of it; each keeps the connection and the output open."""
    yield STEP, {}
    children = []
    for new_session in (False, True):
        child = subprocess.Popen(["sleep", str(FOREVER)], start_new_session=new_session, close_fds=False)
        children.append(child.pid)
    if not (daemon := os.fork()):
        os.setsid()
        if not os.fork():
            Path(argument).write_text(str(os.getpid()), encoding="ascii")
            time.sleep(FOREVER)
        os._exit(0)
    os.waitpid(daemon, 0)
    while not Path(argument).exists() or not Path(argument).read_text(encoding="ascii"):
        time.sleep(0.01)
    yield ITEM, [*children, int(Path(argument).read_text(encoding="ascii"))]


def fork_bomb(argument):
    """Children without end; more than any sane task has."""
    yield STEP, {}
    for _ in range(int(argument)):
        if not os.fork():
            time.sleep(FOREVER)
    time.sleep(FOREVER)


def die_later(argument):
    """Its task ends well; what it left running kills the process a little later."""
    yield STEP, {}

    def kill():
        time.sleep(0.2)
        os._exit(9)

    threading.Thread(target=kill).start()
    yield ITEM, argument


def slow_start(argument):
    time.sleep(0.5)
    yield STEP, {}
    yield ITEM, argument


def exit_at_once(argument):
    os._exit(5)
    yield from ()


def steps(argument):
    """Longer than the time of a step in all, each step shorter."""
    for _ in range(4):
        yield STEP, {}
        time.sleep(argument)
    yield ITEM, "in time"


def leak(argument):
    yield STEP, {}
    globals().setdefault("_kept", []).append(mmap.mmap(-1, int(argument)))
    globals()["_kept"][-1].write(b"x" * int(argument))
    yield ITEM, os.getpid()


def never_ready(argument):
    sys.stderr.write("no such library\n")
    sys.stderr.flush()
    os._exit(3)
    yield from ()
