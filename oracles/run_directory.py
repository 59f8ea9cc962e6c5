"""A run directory: what was asked, and every verdict, so that a run that was killed goes on where it was.

    manifest.json   what decides the cases; versions, device, command; written whole or not at all
    verdicts.jsonl  one line for each number of the run: its case, and every verdict on it; appended
    failures.jsonl  one line for each kind of failure of a campaign: a verdict on its smallest case
    lock            held while a run writes here; the system lets go of it however the process ends

A number is the unit that is lost or kept: its line is there, whole, or the number is tried again. Only the
last line can be cut short, and then it is no line; any other that cannot be read is an error that names it.
"""

import fcntl
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_ref.case import Case
from oracles.verdict import Verdict
from oracles.whole_file import draft_of, write_whole

MANIFEST, VERDICTS, FAILURES, LOCK = "manifest.json", "verdicts.jsonl", "failures.jsonl", "lock"

# The parts of a manifest that a run which goes on must share; of the others, the first run's are kept.
FIXED = ("run", "versions")

Plain = Mapping[str, Any]


class Record(NamedTuple):
    """One number of a run as it is stored: ``verdicts`` are those of ``Verdict.without_case``."""

    number: int
    case: Plain
    verdicts: Sequence[Plain]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self._asdict(), separators=(",", ":"))

    def judged(self) -> list[Verdict]:
        """Its verdicts. Raises: ValueError naming the field that is wrong."""
        case = Case.from_json(json.dumps(self.case))
        return [Verdict.on(case, verdict) for verdict in self.verdicts]


class Failure(NamedTuple):
    """A kind of failure, and a verdict of that kind on a case as small as was found."""

    kind: tuple[str, ...]
    verdict: Verdict


@dataclass(frozen=True)
class RunDirectory:
    """What a run has written so far, whether it is over or not."""

    path: Path

    @property
    def manifest(self) -> dict[str, Any]:
        """Raises: ValueError if there is none, or it is no object; it names the file."""
        file = self.path / MANIFEST
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{self.path}: holds no {MANIFEST}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: {error}") from None
        if not isinstance(found, dict) or any(not isinstance(found.get(part), dict) for part in FIXED):
            raise ValueError(f"{file}: is no manifest of a run")
        return found

    def records(self) -> Iterator[Record]:
        """Every whole line. Raises: ValueError naming the file and the line that cannot be read."""
        for _, record in _lines(self.path / VERDICTS):
            yield record

    def verdicts(self) -> Iterator[Verdict]:
        """Every verdict, number by number as they came. Raises: ValueError naming the file and the line."""
        for line, record in _lines(self.path / VERDICTS):
            with _named(self.path / VERDICTS, line):
                judged = record.judged()
            yield from judged

    def failures(self) -> list[Verdict]:
        """One of each kind of failure of a campaign, on a small case. Raises: ValueError as ``verdicts``."""
        return [failure.verdict for failure in self.kinds()]

    def kinds(self) -> list[Failure]:
        """Likewise, with the kinds."""
        file, found = self.path / FAILURES, []
        for line, text in _whole_lines(file):
            with _named(file, line):
                data = json.loads(text)
                found.append(Failure(tuple(data["kind"]), Verdict.from_json(json.dumps(data["verdict"]))))
        return found


def is_run_directory(path: Path) -> bool:
    """Whether a run has begun here."""
    return (path / MANIFEST).is_file()


class Journal(NamedTuple):
    """A run directory, open for the one run that holds its lock."""

    path: Path
    file: int
    failures_file: int

    def records(self) -> Iterator[Record]:
        """What is there already, each number once. Raises: ValueError naming the file and the line."""
        found: dict[int, int] = {}
        for line, record in _lines(self.path / VERDICTS):
            before = found.setdefault(record.number, line)
            if before != line:
                where = f"{self.path / VERDICTS}, line {line}"
                raise ValueError(f"{where}: number {record.number} is in line {before} too")
            yield record

    def append(self, record: Record) -> None:
        """Raises: OSError on a full disk; what is in the file stays whole."""
        _append(self.path / VERDICTS, self.file, record.to_json())

    def append_failure(self, failure: Failure) -> None:
        """Likewise, for a new kind of failure."""
        line = f'{{"kind":{json.dumps(failure.kind)},"verdict":{failure.verdict.to_json()}}}'
        _append(self.path / FAILURES, self.failures_file, line)


@contextmanager
def open_run(path: Path, manifest: Mapping[str, Any]) -> Iterator[Journal]:
    """Begin a run, or go on with one.

    Raises: ValueError in one line if another run writes here, if the manifest here is of another run, or if a
    line cannot be read; OSError if the directory cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: is a file, must be a directory")
    path.mkdir(parents=True, exist_ok=True)
    begun = LOCK, draft_of(path / MANIFEST).name
    if not is_run_directory(path) and any(file.name not in begun for file in path.iterdir()):
        raise ValueError(f"{path}: is not empty, and holds no {MANIFEST}")
    with _locked(path):
        if is_run_directory(path):
            _must_fit(path, RunDirectory(path).manifest, manifest)
        else:
            write_whole(path / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        files = [os.open(path / name, flags, 0o644) for name in (VERDICTS, FAILURES)]
        try:
            for file in files:
                _cut_after_last_line(file)
            yield Journal(path, files[0], files[1])
        finally:
            for file in files:
                os.close(file)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held until the process ends or the run does. Raises: ValueError naming the process that holds it."""
    with (path / LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ValueError(f"{path}: process {lock.read().strip() or '?'} is writing here") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _must_fit(path: Path, here: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for part in FIXED:
        for name in dict.fromkeys([*here[part], *asked[part]]):
            old, new = here[part].get(name), asked[part].get(name)
            if old != new:
                raise ValueError(
                    f"{path}: its {name} is {json.dumps(old)}, not {json.dumps(new)}: not the same run"
                )


def _append(path: Path, file: int, line: str) -> None:
    size = os.fstat(file).st_size
    left = memoryview(f"{line}\n".encode())
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError as error:
        os.ftruncate(file, size)
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None


def _cut_after_last_line(file: int, step: int = 1 << 16) -> None:
    """Take away what a run that was killed wrote of its last line."""
    end = size = os.fstat(file).st_size
    while end:
        start = max(0, end - step)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(file, end)


def _lines(file: Path) -> Iterator[tuple[int, Record]]:
    for line, text in _whole_lines(file):
        with _named(file, line):
            record = _record(text)
        yield line, record


def _record(text: bytes) -> Record:
    data = json.loads(text)
    if not isinstance(data, dict) or set(data) != set(Record._fields):
        raise ValueError(f"is no object of {', '.join(Record._fields)}")
    record = Record(**data)
    shapes = {
        "number": (record.number, int),
        "case": (record.case, dict),
        "verdicts": (record.verdicts, list),
    }
    for name, (value, kind) in shapes.items():
        if type(value) is not kind:
            raise ValueError(f"{name} is {type(value).__name__}, must be {kind.__name__}")
    return record


def _whole_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that end, counted from 1; none where there is no file yet."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            if text.endswith(b"\n"):
                yield number, text


@contextmanager
def _named(file: Path, line: int) -> Iterator[None]:
    """Whatever is wrong with a line is said with its file and number."""
    try:
        yield
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file}, line {line}: {error}") from None


def record_of(number: int, case: Case, verdicts: Iterable[Verdict]) -> Record:
    """The line of one number."""
    return Record(number, json.loads(case.to_json()), [verdict.without_case() for verdict in verdicts])


def manifest_of(run: Mapping[str, Any], partition: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What a run says about itself.

    run: what decides its cases and verdicts, by name. partition: how the work is dealt; decides neither.
    """
    return {
        "command": sys.argv[1:],
        "run": {**run, "device": device, "device_name": device_name(device)},
        "versions": versions(),
        "partition": dict(partition),
    }


def versions() -> dict[str, str | None]:
    """Of the judge, the libraries whose numbers are judged, and the driver; None where there is none."""
    packages = {name: _version(name) for name in ("mla-verify", "torch", "triton", "numpy")}
    return {
        **packages,
        "source": source_digest(),
        "python": platform.python_version(),
        "driver": _driver(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The NVIDIA kernel driver's version."""
    file = Path("/sys/module/nvidia/version")
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def source_digest() -> str:
    """Of every module of the reference, the optimised paths and the judge: the same text, the same cases."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for package in ("mla_ref", "mla_fast", "oracles"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def device_name(device: str) -> str:
    """Of the GPU, or of the processor."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in names if line.startswith("model name")]
    return models[0] if models else platform.machine()
