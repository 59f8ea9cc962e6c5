"""Run directories: whatever becomes of process or disk, no verdict is lost, and none is counted twice."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mla_ref.case import Case
from mla_ref.presets import PRESETS
from oracles import run_directory
from oracles.run_directory import (
    FAILURES,
    LOCK,
    MANIFEST,
    VERDICTS,
    Failure,
    RunDirectory,
    manifest_of,
    open_run,
    record_of,
    source_digest,
)
from oracles.verdict import FAIL, PASS, Verdict, Worst

CASE = Case(problem="rope", config=PRESETS["a.x-k2"], q_lens=(1,), kv_lens=(1,))
WORST = Worst(
    tensor="out", index=(0, 1), got=float("nan"), want=0.1, bound=5e-324, ratio=float("inf"), place="head 1"
)
VERDICT = Verdict(
    status=FAIL,
    backend="a:B",
    variant="default",
    oracle="value",
    case=CASE,
    device="cpu",
    detail='"ö\n\x00',
    worst=WORST,
)


def manifest(**changes):
    return manifest_of({"seed": 0, "backends": ["a:B"], **changes}, {"jobs": 2}, "cpu")


def write(path, numbers, **changes):
    with open_run(path, manifest(**changes)) as journal:
        for number in numbers:
            journal.append(record_of(number, CASE, [VERDICT, VERDICT]))


def numbers(path):
    return [record.number for record in RunDirectory(path).records()]


def test_what_is_read_is_what_was_written(tmp_path):
    write(tmp_path / "run", range(3))
    found = list(RunDirectory(tmp_path / "run").verdicts())
    assert len(found) == 6
    for verdict in found:
        assert verdict.to_json() == VERDICT.to_json()
        assert repr(verdict) == repr(VERDICT)


def test_the_manifest_says_what_was_run_on_what(tmp_path):
    write(tmp_path, [])
    found = RunDirectory(tmp_path).manifest
    assert found["run"]["seed"] == 0
    assert found["run"]["device"] == "cpu"
    assert found["run"]["device_name"]
    assert set(found["versions"]) == {"mla-verify", "source", "python", "torch", "triton", "numpy", "driver"}
    assert found["versions"]["source"] == source_digest()
    assert found["partition"] == {"jobs": 2}
    assert found["command"] == sys.argv[1:]


def test_the_source_is_every_modules_name_and_text(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "__file__", str(tmp_path / "oracles" / "run_directory.py"))
    (tmp_path / "oracles" / "rules").mkdir(parents=True)
    (tmp_path / "tests").mkdir()

    def digest(**texts):
        for file in tmp_path.rglob("*.py"):
            file.unlink()
        for name, text in texts.items():
            (tmp_path / f"{name.replace('__', '/')}.py").write_text(text)
        return source_digest()

    first = digest(oracles__a="x", oracles__b="y")
    others = [
        digest(oracles__a="x", oracles__c="y"),
        digest(oracles__a="xy", oracles__b=""),
        digest(oracles__a="x", oracles__b="z"),
        digest(oracles__a="x", oracles__rules__b="y"),
    ]
    assert len({first, *others}) == 1 + len(others)
    assert digest(oracles__a="x", oracles__b="y", tests__c="z") == first


def test_a_run_goes_on(tmp_path):
    write(tmp_path, range(3))
    with open_run(tmp_path, manifest()) as journal:
        assert [record.number for record in journal.records()] == [0, 1, 2]
        journal.append(record_of(7, CASE, []))
    assert numbers(tmp_path) == [0, 1, 2, 7]


@pytest.mark.parametrize("lost", [1, 2, 50, 400])
def test_a_line_that_was_cut_is_no_line(lost, tmp_path):
    """Cut at any place, its end included: the number is not there, and is written again, once."""
    write(tmp_path, range(3))
    file = tmp_path / VERDICTS
    whole = file.read_bytes()
    os.truncate(file, len(whole) - lost)
    assert numbers(tmp_path) == [0, 1]
    write(tmp_path, [2])
    assert file.read_bytes() == whole


def test_the_first_line_may_be_cut_too(tmp_path):
    write(tmp_path, [0])
    os.truncate(tmp_path / VERDICTS, 10)
    write(tmp_path, [0])
    assert numbers(tmp_path) == [0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda line: line[:40], "Invalid control character"),
        (lambda line: b"", "Expecting value"),
        (lambda line: b"[]", "is no object of number, case, verdicts"),
        (lambda line: line.replace(b'"number":1', b'"number":"1"'), "number is str, must be int"),
        (lambda line: line.replace(b'"number":1', b'"number":true'), "number is bool, must be int"),
        (lambda line: line.replace(b'"number"', b'"numbers"'), "is no object of"),
        (lambda line: b"\x00" * len(line), "Expecting value|decode"),
        (lambda line: b"\xff\xfe" + line, "Expecting value"),
    ],
)
def test_a_line_in_the_middle_that_cannot_be_read_is_named(damage, message, tmp_path):
    write(tmp_path, range(3))
    file = tmp_path / VERDICTS
    lines = file.read_bytes().splitlines()
    lines[1] = damage(lines[1])
    file.write_bytes(b"\n".join(lines) + b"\n")
    for read in (lambda: numbers(tmp_path), lambda: list(RunDirectory(tmp_path).verdicts())):
        with pytest.raises(ValueError, match=re.escape(f"{file}, line 2: ")) as raised:
            read()
        assert re.search(message, str(raised.value)), raised.value
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"fail"', b'"fine"', "status 'fine' is not one of pass"),
        (b'"rope"', b'"ropes","also":1', "unknown field"),
        (b'"worst":{', b'"worst":{"also":1,', "also"),
        (b'"oracle"', b'"oracles"', "oracles"),
    ],
)
def test_a_verdict_that_is_none_is_named(old, new, message, tmp_path):
    write(tmp_path, range(2))
    file = tmp_path / VERDICTS
    first, second = file.read_bytes().splitlines()
    file.write_bytes(first + b"\n" + second.replace(old, new, 1) + b"\n")
    with pytest.raises(ValueError, match=rf"{re.escape(str(file))}, line 2: .*{message}"):
        list(RunDirectory(tmp_path).verdicts())


def test_a_number_that_is_there_twice_is_named(tmp_path):
    write(tmp_path, [0, 5])
    file = tmp_path / VERDICTS
    file.write_bytes(file.read_bytes() + file.read_bytes().splitlines(keepends=True)[1])
    with (
        open_run(tmp_path, manifest()) as journal,
        pytest.raises(ValueError, match=r"line 3: number 5 is in line 2 too"),
    ):
        list(journal.records())


def test_two_runs_in_one_directory_are_one_line(tmp_path):
    with (
        open_run(tmp_path, manifest()),
        pytest.raises(
            ValueError, match=rf"^{re.escape(str(tmp_path))}: process {os.getpid()} is writing here$"
        ),
        open_run(tmp_path, manifest()),
    ):
        pass
    write(tmp_path, [0])
    assert numbers(tmp_path) == [0]


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from oracles.run_directory import *\n"
        f"with open_run(Path({str(tmp_path)!r}), json.loads(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code, json.dumps(manifest())], check=False)
    assert ended.returncode == -9
    assert (tmp_path / LOCK).exists()
    write(tmp_path, [0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 4}, r"its seed is 0, not 4: not the same run"),
        ({"backends": ["a:B", "c"]}, r'its backends is \["a:B"\], not \["a:B", "c"\]: not the same run'),
        ({"full": True}, r"its full is null, not true: not the same run"),
    ],
)
def test_another_run_is_refused_with_both_values(changes, message, tmp_path):
    write(tmp_path, [0])
    with pytest.raises(ValueError, match=message):
        write(tmp_path, [1], **changes)
    assert numbers(tmp_path) == [0]


def test_other_versions_are_another_run(tmp_path):
    write(tmp_path, [0])
    old = json.loads((tmp_path / MANIFEST).read_text())
    old["versions"]["torch"] = "1.0"
    (tmp_path / MANIFEST).write_text(json.dumps(old))
    with pytest.raises(ValueError, match=r'its torch is "1\.0", not "'):
        write(tmp_path, [1])


def test_how_the_work_is_dealt_may_change(tmp_path):
    write(tmp_path, [0])
    with open_run(tmp_path, {**manifest(), "partition": {"jobs": 99}, "command": ["other"]}) as journal:
        assert len(list(journal.records())) == 1
    assert RunDirectory(tmp_path).manifest["partition"] == {"jobs": 2}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run":1,"versions":{}}'])
def test_a_manifest_that_is_none_is_named(text, tmp_path):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / MANIFEST))):
        write(tmp_path, [0])


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty, and holds no manifest\.json"):
        write(tmp_path, [0])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ValueError, match=r"holds no manifest\.json"):
        _ = RunDirectory(tmp_path).manifest


def test_a_run_killed_while_it_wrote_its_manifest_begins_again(tmp_path):
    (tmp_path / LOCK).touch()
    (tmp_path / "manifest.json.draft").write_text('{"run')
    write(tmp_path, [0])
    assert numbers(tmp_path) == [0]


def test_a_full_disk_leaves_whole_lines(tmp_path):
    """The limit on a file's size stands for the disk's: it, too, lets a part of a line through."""
    write(tmp_path, range(3))
    file = tmp_path / VERDICTS
    whole = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_run(tmp_path, manifest()) as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 100, limits[1]))
        try:
            with pytest.raises(OSError, match=re.escape(str(file))) as raised:
                journal.append(record_of(3, CASE, [VERDICT]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert raised.value.errno in (errno.EFBIG, errno.ENOSPC)
        assert file.read_bytes() == whole
        journal.append(record_of(3, CASE, [VERDICT]))
    assert numbers(tmp_path) == [0, 1, 2, 3]


def test_a_disk_that_is_full_from_the_start_is_an_error(tmp_path):
    (tmp_path / "manifest.json.draft").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write(tmp_path, [])
    assert not (tmp_path / MANIFEST).exists()


def test_failures_that_were_made_small(tmp_path):
    with open_run(tmp_path, manifest()) as journal:
        journal.append_failure(Failure(("a", "b"), VERDICT))
    [found] = RunDirectory(tmp_path).kinds()
    assert found.kind == ("a", "b")
    assert [v.to_json() for v in RunDirectory(tmp_path).failures()] == [VERDICT.to_json()]
    (tmp_path / FAILURES).write_text("{}\n")
    with pytest.raises(ValueError, match=r"failures\.jsonl, line 1: "):
        RunDirectory(tmp_path).failures()


def test_a_passing_verdict_is_told_from_a_failing_one(tmp_path):
    with open_run(tmp_path, manifest()) as journal:
        journal.append(record_of(0, CASE, [Verdict.from_json(VERDICT.to_json().replace(FAIL, PASS, 1))]))
    assert [verdict.status for verdict in RunDirectory(Path(tmp_path)).verdicts()] == [PASS]
