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

from oracles.worker import ITEM, PATIENCE, SCAN, STEP, Replace

FOREVER = 1000.0


def nothing(argument, say):
    """Ready at once."""


def echo(argument, say):
    say(STEP, {})
    say(ITEM, [argument, os.getpid()])


def segfault(argument, say):
    say(STEP, {})
    ctypes.string_at(0)


def abort(argument, say):
    say(STEP, {})
    os.write(2, b"free(): invalid pointer\n")
    os.abort()


def real_time_signal(argument, say):
    """One without a name."""
    say(STEP, {})
    os.kill(os.getpid(), signal.SIGRTMIN + 1)


def hang(argument, say):
    say(STEP, {})
    time.sleep(FOREVER)


def lie_and_hang(argument, say):
    """It prints what looks like where it is."""
    say(STEP, {})
    os.write(2, b'Stack (most recent call first):\n  File "liar.py", line 1 in innocent\n')
    time.sleep(FOREVER)


def hang_in_c(argument, say):
    """With the interpreter's lock held, where no thread of Python runs."""
    say(STEP, {})
    ctypes.PyDLL(None).sleep(int(FOREVER))


def deaf_hang(argument, say):
    """Nothing but SIGKILL ends it."""
    say(STEP, {})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(FOREVER)


def exit_7(argument, say):
    say(STEP, {})
    os._exit(7)


def sys_exit(argument, say):
    say(STEP, {})
    sys.exit(0)


def interrupted(argument, say):
    say(STEP, {})
    raise KeyboardInterrupt


def raising(argument, say):
    say(STEP, {})
    raise LookupError("lost\nand more")


def replace(argument, say):
    say(STEP, {})
    say(ITEM, "said before")
    raise Replace("spoilt")


def allocate(argument, say):
    """More and more, every page of it touched."""
    say(STEP, {})
    kept = []
    while True:
        kept.append(bytearray(b"x") * (1 << 24))


def allocate_in_children(argument, say):
    """Each below the limit, all of them above."""
    say(STEP, {})
    for _ in range(3):
        if os.fork() == 0:
            kept = bytearray(b"x") * int(argument)
            time.sleep(FOREVER + len(kept))
    time.sleep(FOREVER)


def allocate_elsewhere(argument, say):
    """In children in sessions of their own: one with our environment, one without, and an orphan."""
    say(STEP, {})
    code = f"import time; kept = bytearray(b'x') * {int(argument)}; time.sleep({FOREVER})"
    environments = {"all": None, "nothing": {}, "orphan": None}
    for name, environment in environments.items():
        if name != "orphan" or not os.fork():
            subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env=environment)
            if name == "orphan":
                os._exit(0)
    time.sleep(FOREVER)


def print_garbage(argument, say):
    say(STEP, {})
    sys.stdout.write('["done", ""]\n["item", 1]\n')
    sys.stdout.flush()
    os.write(1, b'\xff\xfe\x00["item", "forged"]')
    os.write(2, b"a line that does not end")
    say(ITEM, argument)


def print_much(argument, say):
    say(STEP, {})
    for _ in range(200):
        os.write(1, b"y" * 65536)
    say(ITEM, argument)


def close_everything(argument, say):
    say(STEP, {})
    os.closerange(3, 256)
    time.sleep(FOREVER)


def forge(argument, say):
    """Write on every descriptor there is."""
    say(STEP, {})
    for descriptor in range(3, 256):
        try:
            os.write(descriptor, f"{argument}\n".encode())
        except OSError:
            continue
    time.sleep(FOREVER)


def fork_back(argument, say):
    """The child returns into the judge's loop, as if it were the worker, and before the worker does."""
    say(STEP, {})
    me = os.getpid()
    if child := os.fork():
        deadline = time.monotonic() + 2.0
        while not os.waitpid(child, os.WNOHANG)[0] and time.monotonic() < deadline:
            time.sleep(0.005)
    say(ITEM, [argument, me])


def leave_children(argument, say):
    """In our session and out of it; each keeps the connection and the output open."""
    say(STEP, {})
    children = []
    for new_session, environment in ((False, None), (True, None), (True, {"PATH": os.environ["PATH"]})):
        child = subprocess.Popen(
            ["sleep", str(FOREVER)], start_new_session=new_session, env=environment, close_fds=False
        )
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
    time.sleep(3 * SCAN)  # what has none of our environment is found by looking
    say(ITEM, [*children, int(Path(argument).read_text(encoding="ascii"))])


def fork_bomb(argument, say):
    """Children without end; more than any sane task has."""
    say(STEP, {})
    for _ in range(int(argument)):
        if not os.fork():
            time.sleep(FOREVER)
    time.sleep(FOREVER)


def die_later(argument, say):
    """Its task ends well; what it left running kills the process a little later."""
    say(STEP, {})

    def kill():
        time.sleep(0.2)
        os._exit(9)

    threading.Thread(target=kill).start()
    say(ITEM, argument)


def slow_start(argument, say):
    time.sleep(0.5)
    say(STEP, {})
    say(ITEM, argument)


def exit_at_once(argument, say):
    os._exit(5)


def steps(argument, say):
    """Longer than the time of a step in all, each step shorter."""
    for _ in range(4):
        say(STEP, {})
        time.sleep(argument)
    say(ITEM, "in time")


def starve(argument, say):
    """A little work on one core, with others who never rest; it would take no time alone."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for _ in range(3):
        if not os.fork():
            while True:
                pass
    say(STEP, {})
    start = time.thread_time()
    while time.thread_time() - start < argument:
        pass
    say(ITEM, "in time")


def spin(argument, say):
    """A hang that never rests."""
    say(STEP, {})
    while True:
        pass


def patient(argument, say):
    say(STEP, {PATIENCE: 60.0})
    time.sleep(argument)
    say(ITEM, "in time")


def leak(argument, say):
    say(STEP, {})
    globals().setdefault("_kept", []).append(mmap.mmap(-1, int(argument)))
    globals()["_kept"][-1].write(b"x" * int(argument))
    say(ITEM, os.getpid())


def ready_at_last(argument, say):
    """Once as many processes as the file has lines have died of it."""
    with Path(argument).open("r+", encoding="ascii") as file:
        left = file.readlines()
        if left:
            file.seek(0)
            file.truncate()
            file.writelines(left[1:])
            file.close()
            os._exit(3)


def never_ready(argument, say):
    sys.stderr.write("no such library\n")
    sys.stderr.flush()
    os._exit(3)
