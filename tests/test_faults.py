"""Faults for real: what ends a backend's process, a campaign or a disk, and what is told and kept of it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from mla_ref.case import Case
from mla_ref.presets import PRESETS
from oracles.matrix import Job
from oracles.pool import judge_all
from oracles.run_directory import VERDICTS, RunDirectory
from oracles.verdict import CRASH, ERROR, PASS, TIMEOUT
from oracles.worker import GIB, Limits

ROOT = Path(__file__).parent.parent

STRANGER = '''
import ctypes, os, subprocess, sys, time
from mla_ref.backend import Backend
from mla_ref.rope import BACKEND as RIGHT

def segfault(*inputs):
    ctypes.string_at(0)

def hang(*inputs):
    time.sleep(1000)

def hang_in_c(*inputs):
    ctypes.PyDLL(None).sleep(1000)

def abort(*inputs):
    os.abort()

def exits(*inputs):
    os._exit(0)

def allocate(*inputs):
    kept = []
    while True:
        kept.append(bytearray(b"x") * (1 << 24))

def raises(*inputs):
    raise LookupError("lost")

def garbage(*inputs):
    for descriptor in (1, 2):
        os.write(descriptor, b'["done", ""]\\n["item", {"status": "fail"}]\\n\\xff\\xfe\\x00 no end')
    return RIGHT.fn(*inputs)

def forks(*inputs):
    """The child comes back, too, and answers in the worker's place if it can."""
    if child := os.fork():
        os.waitpid(child, 0)
    return RIGHT.fn(*inputs)

def leaves_children(*inputs):
    for _ in range(3):
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return RIGHT.fn(*inputs)

FAULTS = (segfault, hang, hang_in_c, abort, exits, allocate, raises, garbage, forks, leaves_children)
BACKEND = Backend("faulty", "rope", RIGHT.fn, RIGHT.numerics, variants={f.__name__: f for f in FAULTS})
'''

ENDS = {
    "default": (PASS, ".*"),
    "segfault": (CRASH, r"the process died of SIGSEGV in segfault, faulty\.py:\d+"),
    "hang": (TIMEOUT, r"took longer than 3 s in hang, faulty\.py:\d+"),
    "hang_in_c": (TIMEOUT, r"took longer than 3 s in hang_in_c, faulty\.py:\d+"),
    "abort": (CRASH, r"the process died of SIGABRT in abort, faulty\.py:\d+"),
    "exits": (CRASH, r"the process exited with 0"),
    "allocate": (ERROR, r"MemoryError, in allocate, faulty\.py:\d+"),
    "raises": (ERROR, r"LookupError: lost, in raises, faulty\.py:\d+"),
    "garbage": (PASS, ".*"),
    "forks": (PASS, ".*"),
    "leaves_children": (PASS, ".*"),
}


def test_whatever_a_backend_does_to_its_process_is_a_verdict_on_it_alone(tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(tmp_path)
    case = Case(problem="rope", config=PRESETS["a.x-k2"].shard(16), q_lens=(1,), kv_lens=(2,))
    job = Job(case, ("faulty",), ("value", "inputs_unchanged"), "cpu")
    [(_, verdicts)] = judge_all([job], 1, Limits(seconds=3.0, memory=GIB))
    met = Counter(verdict.variant for verdict in verdicts)
    for name, (status, detail) in ENDS.items():
        first = next(verdict for verdict in verdicts if verdict.variant == name)
        assert (first.status, first.oracle) == (status, "value"), first
        assert re.fullmatch(rf"{detail}(; .* last printed .*)?", first.detail), first
        # Where the process is gone the claim that it was about is told, and no other is tried.
        assert met[name] == (1 if status in (CRASH, TIMEOUT) else 2), name
    assert set(met) == set(ENDS)


CAMPAIGN = ("--backend", "mla_ref.rope", "--oracle", "value", "--jobs", "1", "--corpus", "corpus")
MAIN = "import sys; from oracles.command import main; sys.exit(main())"


@pytest.fixture
def settings(tmp_path):
    """How a campaign's process is run: with code that nobody edits while it runs."""
    for package in ("mla_ref", "mla_fast", "oracles"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / "code" / package, ignore=ignored)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "code"), "OMP_NUM_THREADS": "1"}
    return {"cwd": tmp_path, "env": env, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def fuzz(*words):
    return [sys.executable, "-c", MAIN, "fuzz", *CAMPAIGN, *words]


def numbers(path):
    return [record.number for record in RunDirectory(path).records()]


def test_of_two_campaigns_on_one_directory_the_second_is_told_and_the_first_goes_on(tmp_path, settings):
    words = fuzz("--budget", "300cases", "--out", "run")
    first = subprocess.Popen(words, **settings)
    file, deadline = tmp_path / "run" / VERDICTS, time.monotonic() + 120.0
    while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGSTOP)  # it writes no faster than we look
    try:
        second = subprocess.run(words, check=False, timeout=120, **settings)
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert second.returncode == 2
    assert re.fullmatch(rf"mla-verify: run: process {first.pid} is writing here\n", second.stderr)
    out, err = first.communicate(timeout=240)
    assert first.returncode == 0, err
    assert "300 cases, 300 claims held, 0 failed" in out
    assert sorted(numbers(tmp_path / "run")) == list(range(300))


def test_a_disk_that_is_full_ends_a_campaign_in_one_line_and_it_goes_on_elsewhere(tmp_path, settings):
    """A file system of 96 kB, in a name space of its own; what it holds is handed out before that is gone."""
    mount = "mount -t tmpfs -o size=96k none disk && "
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    (tmp_path / "disk").mkdir()
    try:
        subprocess.run([*unshare, mount + "true"], cwd=tmp_path, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no name space of our own: {error}")
    words = fuzz("--budget", "500cases", "--out", "disk/run")
    script = mount + '"$@"; code=$?; cp -r disk/run kept; exit $code'
    ended = subprocess.run([*unshare, script, "sh", *words], check=False, timeout=240, **settings)
    assert ended.returncode == 2, ended.stderr
    assert re.fullmatch(r"mla-verify: [^\n]*No space left on device[^\n]*\n", ended.stderr), ended.stderr
    written = numbers(tmp_path / "kept")
    assert 0 < len(written) < 500
    shutil.move(tmp_path / "kept", tmp_path / "run")
    more = fuzz("--budget", f"{len(written) + 20}cases", "--out", "run")
    again = subprocess.run(more, check=False, timeout=240, **settings)
    assert again.returncode == 0, again.stderr
    found = numbers(tmp_path / "run")
    assert found[: len(written)] == written
    assert sorted(found) == list(range(len(written) + 20))
    for line in (tmp_path / "run" / VERDICTS).read_text().splitlines():
        json.loads(line)
