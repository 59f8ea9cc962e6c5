"""Workers: however a task ends its process, the outcome says so, nothing is left, and the next one runs."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oracles.worker import (
    CRASHED,
    DONE,
    ITEM,
    MAX_PROCESSES,
    MAX_STARTS,
    RAISED,
    REPLACED,
    TIMED_OUT,
    Limits,
    Pool,
    Task,
    WorkersError,
    share_of_memory,
)

MIB = 1 << 20
READY = Task("faults:nothing")
LIMITS = Limits(seconds=2.0, memory=256 * MIB)


def outcomes(tasks, limits=LIMITS, size=1, refuse=True):
    """The outcome of each task, in the order in which they were given."""
    left = [Task(f"faults:{name}", argument, key) for key, (name, argument) in enumerate(tasks)]
    with Pool(size, limits, READY, refuse) as pool:
        found = [outcome for outcome in pool.outcomes(lambda _: left.pop(0) if left else None) if outcome]
    return sorted(found, key=lambda outcome: outcome.task.key)


told = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the system does not say who waits for a core"
)


def said(outcome):
    return [body for kind, body in outcome.messages if kind == ITEM]


def alive(pid):
    """Running, and not merely waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


FAULTS = [
    ("segfault", None, CRASHED, r"the process died of SIGSEGV in segfault, faults\.py:\d+"),
    (
        "abort",
        None,
        CRASHED,
        r"the process died of SIGABRT in abort, faults\.py:\d+; .* \"free\(\): invalid pointer\"",
    ),
    ("exit_7", None, CRASHED, r"the process exited with 7"),
    ("sys_exit", None, RAISED, r"SystemExit: 0"),
    ("interrupted", None, RAISED, r"KeyboardInterrupt: "),
    ("raising", None, RAISED, r"LookupError: lost"),
    ("no_such_handler", None, RAISED, r"AttributeError: module 'faults' has no attribute 'no_such_handler'"),
    ("replace", None, REPLACED, r"spoilt"),
    ("allocate", None, RAISED, r"MemoryError: "),
    ("forge", "certainly", CRASHED, r"wrote on the judge's own connection"),
    ("forge", "7", CRASHED, r"wrote on the judge's own connection"),
    ("forge", '["held", ""]', CRASHED, r"wrote on the judge's own connection"),
    ("forge", '[[], ""]', CRASHED, r"wrote on the judge's own connection"),
    ("forge", '["done", 7]', CRASHED, r"wrote on the judge's own connection"),
    ("real_time_signal", None, CRASHED, r"the process died of signal 35"),
]


def test_every_end_is_told_and_the_next_task_runs_in_a_fresh_process():
    tasks = [task for name, argument, _, _ in FAULTS for task in ((name, argument), ("echo", name))]
    found = outcomes(tasks)
    assert len(found) == len(tasks)
    pids = set()
    for (name, _, end, why), fault, after in zip(FAULTS, found[::2], found[1::2], strict=True):
        assert fault.end == end, fault
        assert re.fullmatch(why, fault.why), fault
        assert (after.end, said(after)[0][0]) == (DONE, name)
        pids.add(said(after)[0][1])
    assert len(pids) == len(FAULTS), "a process was used again"
    assert said(found[14]) == ["said before"]


@pytest.mark.parametrize("name", ["hang", "hang_in_c", "lie_and_hang", "deaf_hang", "spin"])
def test_a_hang_is_ended_in_time(name):
    hung, after = outcomes([(name, None), ("echo", 1)], LIMITS._replace(seconds=0.4))
    assert hung.end == TIMED_OUT
    where = "" if name == "deaf_hang" else rf" in {name}, faults\.py:\d+"
    assert re.fullmatch(rf"took longer than 0\.4 s{where}", hung.why)
    assert after.end == DONE


def test_time_is_that_of_a_step():
    [outcome] = outcomes([("steps", 0.3)], LIMITS._replace(seconds=0.8))
    assert (outcome.end, said(outcome)) == (DONE, ["in time"])


def test_a_step_is_given_the_time_that_it_asks_for():
    patient, hung = outcomes([("patient", 0.9), ("hang", None)], LIMITS._replace(seconds=0.4))
    assert (patient.end, said(patient)) == (DONE, ["in time"])
    assert hung.end == TIMED_OUT


@told
def test_waiting_for_a_core_is_not_counted():
    starved, after = outcomes([("starve", 0.3), ("echo", 1)], LIMITS._replace(seconds=0.6))
    assert (starved.end, said(starved)) == (DONE, ["in time"])
    assert after.end == DONE


@told
def test_waiting_for_a_core_is_not_for_ever(monkeypatch):
    monkeypatch.setattr("oracles.worker.STRETCH", 1)
    [starved] = outcomes([("starve", 0.3)], LIMITS._replace(seconds=0.6))
    assert starved.end == TIMED_OUT
    assert starved.why.startswith("took longer than 0.6 s, most of which it waited for a core in starve")


def test_what_is_printed_is_no_message():
    garbage, much, after = outcomes([("print_garbage", 1), ("print_much", 2), ("echo", 3)])
    assert (garbage.end, said(garbage)) == (DONE, [1])
    assert (much.end, said(much)) == (DONE, [2])
    assert said(after)[0][0] == 3


def test_the_end_of_what_was_printed_is_in_the_message():
    """Of a line that never ended, too, and without what a terminal would obey."""
    garbage, crash = outcomes([("print_garbage", 1), ("exit_7", None)])
    assert garbage.end == DONE
    assert crash.why.startswith('the process exited with 7; it last printed "')
    assert crash.why.endswith('a line that does not end"')
    assert "\x00" not in crash.why


def test_a_worker_that_hangs_up_is_replaced(monkeypatch):
    monkeypatch.setattr("oracles.worker.DYING", 0.2)
    hung, after = outcomes([("close_everything", None), ("echo", 1)], LIMITS._replace(seconds=60.0))
    assert (hung.end, hung.why) == (CRASHED, "closed the judge's connection")
    assert after.end == DONE


def test_a_forked_copy_of_a_worker_says_nothing():
    forked, after = outcomes([("fork_back", "once"), ("echo", 1)])
    [[argument, pid]] = said(forked)
    assert argument == "once"
    assert (after.end, said(after)) == (DONE, [[1, pid]]), "another process answers in its place"


def test_memory_of_a_worker_and_its_children_is_watched_where_it_is_not_refused():
    """As on a GPU, where a limit on addresses cannot be."""
    limits = Limits(seconds=30.0, memory=192 * MIB)
    faults = ["allocate", "allocate_in_children", "allocate_elsewhere"]
    *found, after = outcomes([*((name, 90 * MIB) for name in faults), ("echo", 1)], limits, refuse=False)
    for outcome in found:
        assert outcome.end == CRASHED
        assert re.fullmatch(r"used [\d.]+ GiB of memory; the limit is 0.1875 GiB", outcome.why)
    assert after.end == DONE


def test_a_worker_that_has_grown_is_replaced_between_tasks():
    """So that no case is blamed for what those before it have kept."""
    found = outcomes([("leak", 48 * MIB)] * 5)
    assert [outcome.end for outcome in found] == [DONE] * 5
    assert len({said(outcome)[0] for outcome in found}) >= 2


def test_children_die_with_their_worker(tmp_path):
    file = str(tmp_path / "daemon")
    left, crash = outcomes([("leave_children", file), ("exit_7", None)])
    assert left.end == DONE
    assert crash.end == CRASHED
    [pids] = said(left)
    assert len(set(pids)) == 4
    assert not any(alive(pid) for pid in pids)


def test_children_without_end_are_a_crash():
    bomb, after = outcomes([("fork_bomb", MAX_PROCESSES + 8), ("echo", 1)], LIMITS._replace(seconds=60.0))
    assert bomb.end == CRASHED
    assert re.fullmatch(rf"started \d+ processes; the limit is {MAX_PROCESSES}", bomb.why)
    assert after.end == DONE


def test_a_task_is_not_blamed_for_the_one_before_it():
    """Where the process dies before a task begins, it is given again; once it has begun, that is told."""
    first, begun = outcomes([("die_later", 1), ("steps", 0.2)])
    assert (first.end, said(first), begun.end) == (DONE, [1], CRASHED)
    first, not_begun = outcomes([("die_later", 1), ("slow_start", 2)])
    assert (first.end, not_begun.end, said(not_begun)) == (DONE, DONE, [2])


def test_a_task_that_cannot_begin_is_given_once_more_only():
    [outcome] = outcomes([("exit_at_once", None)])
    assert (outcome.end, outcome.messages) == (CRASHED, [])


def test_several_workers_share_the_tasks():
    tasks = [("steps", 0.05), ("segfault", None), ("exit_7", None), *[("echo", n) for n in range(20)]]
    found = outcomes(tasks, size=2)
    assert [outcome.end for outcome in found] == [DONE, CRASHED, CRASHED] + [DONE] * 20
    assert [said(outcome)[0][0] for outcome in found[3:]] == list(range(20))


def test_workers_that_cannot_start_are_an_error_with_its_message():
    with (
        Pool(1, LIMITS, Task("faults:never_ready")) as pool,
        pytest.raises(WorkersError, match=r"workers do not start: .* exited with 3; .* .no such library."),
    ):
        list(pool.outcomes(lambda _: Task("faults:echo")))


@pytest.mark.parametrize("deaths", [MAX_STARTS - 1, MAX_STARTS])
def test_a_worker_is_started_so_many_times_and_no_more(deaths, tmp_path):
    """One that does not start at last is a defect of the judge's, not of the task's."""
    file = tmp_path / "deaths"
    file.write_text("one\n" * deaths)
    tasks = [Task("faults:echo", 7)]
    with Pool(1, LIMITS, Task("faults:ready_at_last", str(file))) as pool:
        found = filter(None, pool.outcomes(lambda _: tasks.pop() if tasks else None))
        if deaths < MAX_STARTS:
            [outcome] = found
            assert (outcome.end, said(outcome)[0][0]) == (DONE, 7)
        else:
            with pytest.raises(WorkersError, match="workers do not start: the process exited with 3"):
                list(found)
    assert file.read_text() == ""


def test_processes_that_the_system_refuses_are_an_error_with_its_message(monkeypatch):
    monkeypatch.setattr("oracles.worker.sys.executable", "/no/such/python")
    with pytest.raises(WorkersError, match=r"workers do not start: .*No such file.*/no/such/python"):
        outcomes([("echo", 1)])


def test_a_process_that_cannot_be_killed_is_left_behind_and_told(monkeypatch):
    """As one that waits in the kernel for a GPU which does not answer."""
    monkeypatch.setattr("oracles.worker._kill_all", lambda *_: None)
    monkeypatch.setattr("oracles.worker.DYING", 0.1)
    left = [Task("faults:hang"), Task("faults:echo", 7)]
    pool = Pool(1, LIMITS._replace(seconds=0.3), READY)
    try:
        with pool:
            hung, next_one = filter(None, pool.outcomes(lambda _: left.pop(0) if left else None))
        assert hung.end == TIMED_OUT
        assert hung.why.endswith(f"; process {pool._undying[0].pid} does not die when it is killed")
        assert said(next_one)[0][0] == 7
    finally:
        for process in pool._undying:
            process.kill()
            process.wait()


def test_workers_die_with_their_parent(tmp_path):
    """Killed in whatever way, in the middle of a hang."""
    code = (
        "from oracles.worker import *\n"
        "pool = Pool(1, Limits(600.0), Task('faults:nothing'))\n"
        "tasks = [Task('faults:hang')]\n"
        "for _ in pool.outcomes(lambda _: tasks.pop() if tasks else None):\n"
        "    print(pool._workers[0].process.pid, flush=True)\n"
    )
    folders = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": folders}
    )
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    assert alive(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10.0
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(worker)


def test_nothing_is_pickled():
    for name in ("worker", "pool", "run_directory"):
        source = (Path(__file__).parent.parent / "oracles" / f"{name}.py").read_text(encoding="utf-8")
        assert not re.search(
            r"^\s*(import|from) (pickle|multiprocessing|concurrent|shelve|marshal)", source, re.M
        )


def test_the_share_of_a_worker_leaves_one_for_the_parent(monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.get)
    assert [share_of_memory(workers) for workers in (1, 3)] == [2_048_000, 1_024_000]
