"""``mla-verify doctor``: what this machine has, which backends run on it, and why the others do not.

Nothing that is broken may break the doctor: whatever could crash or hang on import is imported in a process
of its own, and what went wrong there is a line of the answer.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from packaging.requirements import Requirement
from rich.table import Table

from oracles.exits import first_line
from oracles.sources import BACKEND_PACKAGES
from oracles.terminal import cell, to_stdout, write

PROJECT = "mla-verify"
OK, MISSING, BROKEN = "ok", "missing", "broken"

# Module -> what it is for.
LIBRARIES = {
    "torch": "everything",
    "numpy": "Triton's interpreter",
    "triton": "mla_fast's Triton kernels",
    "transformers": "layers of Hugging Face models",
    "flash_mla": "mla_fast.flash_mla",
    "flash_attn_interface": "FlashAttention-3, with pages",
    "fa3_fwd_interface": "FlashAttention-3, the wheel without pages",
    "flash_attn": "FlashAttention-2",
    "flash_attn.cute": "FlashAttention-4",
    "flashinfer": "FlashInfer",
}

# The first triton whose interpreter runs with this numpy and later.
TRITON_FOR_NUMPY = {(2, 4): (3, 7)}

Run = Callable[[Sequence[str], float], tuple[int, str]]


class Line(NamedTuple):
    """One thing that was looked at. note: what it lacks, or what it is for."""

    name: str
    state: str
    value: str
    note: str = ""


def run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit code and output of a command; -1 and the reason where it cannot be run or does not end."""
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return -1, f"did not end within {seconds:.0f} s"
    except OSError as error:
        return -1, str(error)
    return ran.returncode, (ran.stdout if ran.returncode == 0 else ran.stdout + ran.stderr).strip()


def numbers(version: str) -> tuple[int, ...]:
    """The release of a version, to compare: "2.13.0+cpu" is (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def version_of(module: str) -> str:
    """The version of what a module is installed from, or "" where nobody says."""
    root = module.partition(".")[0]
    try:
        names = importlib.metadata.packages_distributions().get(root, [])
        return ", ".join(f"{importlib.metadata.version(name)} ({name})" for name in dict.fromkeys(names))
    except Exception:  # broken metadata of whatever package is no concern of ours
        return ""


def libraries(seconds: float, run: Run = run) -> list[Line]:
    """Whether each library imports, in a process of its own."""

    def look(module: str) -> Line:
        use = LIBRARIES[module]
        try:
            missing = importlib.util.find_spec(module) is None
        except Exception:  # looking for a submodule imports its parent, which may be broken
            missing = importlib.util.find_spec(module.partition(".")[0]) is None
        if missing:
            return Line(module, MISSING, "not installed", use)
        code, output = run([sys.executable, "-c", f"import {module}"], seconds)
        if code == 0:
            return Line(module, OK, version_of(module) or "installed", use)
        return Line(module, BROKEN, version_of(module) or "installed", _last(output, code))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(look, LIBRARIES))


def _last(output: str, code: int) -> str:
    """Why a process failed: the last line of its traceback, or the way it ended."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if code < -1:
        return f"its import ends the process, signal {-code}"
    return lines[-1] if lines else f"its import ends the process, exit code {code}"


# Run where torch may not import, or its driver may crash.
LOOK_AT_TORCH = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
found["available"] = torch.cuda.is_available()
if found["available"]:
    found["cudnn"] = torch.backends.cudnn.version()
    found["gpus"] = [
        {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
print(json.dumps(found))
"""


def machine(seconds: float, run: Run = run) -> tuple[list[Line], dict[str, Any]]:
    """Python, torch, CUDA and the GPUs; and what torch said of itself."""
    lines = [
        Line("python", OK, platform.python_version(), sys.executable),
        Line("platform", OK, platform.platform(), f"{os.cpu_count()} cores"),
    ]
    code, output = run([sys.executable, "-c", LOOK_AT_TORCH], seconds)
    try:
        said: dict[str, Any] = json.loads(output.splitlines()[-1]) if code == 0 else {}
    except (IndexError, json.JSONDecodeError):
        said = {}
    if not said:
        lines.append(Line("torch", BROKEN, "", _last(output, code)))
    else:
        built = f"built for CUDA {said['cuda']}" if said["cuda"] else "built without CUDA"
        lines.append(Line("torch", OK, said["torch"], built))
        for i, gpu in enumerate(said.get("gpus", [])):
            memory = f"{gpu['memory'] / 2**30:.1f} GiB, {gpu['multiprocessors']} multiprocessors"
            lines.append(
                Line(f"cuda:{i}", OK, gpu["name"], f"compute capability {gpu['capability']}, {memory}")
            )
        if not said["available"]:
            lines.append(Line("cuda", MISSING, "no device", "torch sees no GPU"))
    nvcc = shutil.which("nvcc")
    use = "FlashInfer compiles its kernels with it"
    lines.append(Line("nvcc", OK if nvcc else MISSING, nvcc or "not on the PATH", use))
    return lines, said


def modules(packages: Sequence[str] = BACKEND_PACKAGES) -> Iterator[str]:
    """The public modules of the packages in which backends live."""
    for package in packages:
        found = importlib.util.find_spec(package)
        for place in pkgutil.iter_modules(found.submodule_search_locations if found else None):
            if not place.name.startswith("_"):
                yield f"{package}.{place.name}"


def report(device: str, packages: Sequence[str] = BACKEND_PACKAGES) -> dict[str, list[str]]:
    """Backend -> [state, problem or reason] on one kind of device; broken modules are there too."""
    found = {}
    for name in modules(packages):
        try:
            backend = getattr(importlib.import_module(name), "BACKEND", None)
            if backend is None:
                continue
            reason = backend.requires(device)
            found[name] = [MISSING, reason] if reason else [OK, backend.problem]
        except Exception as error:
            found[name] = [BROKEN, f"{type(error).__name__}: {first_line(error)}"]
    return found


def backends(device: str, seconds: float, run: Run = run) -> list[Line]:
    """Which backends run on a device, in a process of their own: on the CPU Triton is interpreted."""
    call = f"import json; from oracles.doctor_cli import report; print(json.dumps(report({device!r})))"
    settings = "import os, sys; sys.path[:] = " + repr(list(sys.path)) + "; "
    if device == "cpu":
        settings += "os.environ.setdefault('TRITON_INTERPRET', '1'); "
    code, output = run([sys.executable, "-c", settings + call], seconds)
    try:
        found = json.loads(output.splitlines()[-1]) if code == 0 else {}
    except (IndexError, json.JSONDecodeError):
        found = {}
    if not found:
        return [Line("backends", BROKEN, "none could be asked", _last(output, code))]
    return [Line(name, state, device, why) for name, (state, why) in found.items()]


def extras() -> list[Line]:
    """Which of the project's optional parts are complete, and what the others lack."""
    try:
        wanted = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        return [Line("extras", MISSING, "unknown", f"{PROJECT} is not installed, only on the path")]
    lacking: dict[str, list[str]] = {}
    for wants in map(Requirement, wanted):
        for extra in re.findall(r"extra == ['\"]([\w-]+)['\"]", str(wants.marker or "")):
            lacks = lacking.setdefault(extra, [])
            if wants.marker is None or not wants.marker.evaluate({"extra": extra}):
                continue  # for another system or another Python
            try:
                version = importlib.metadata.version(wants.name)
                if not wants.specifier.contains(version, prereleases=True):
                    lacks.append(f"{wants.name} {version} is not {wants.specifier}")
            except importlib.metadata.PackageNotFoundError:
                lacks.append(wants.name)
    return [
        Line(name, MISSING, f"lacks {', '.join(lacks)}", f"pip install '{PROJECT}[{name}]'")
        if lacks
        else Line(name, OK, "complete")
        for name, lacks in lacking.items()
    ]


def advice(
    versions: Mapping[str, str], said: Mapping[str, Any], environment: Mapping[str, str], driver: bool
) -> list[str]:
    """What is known to go wrong with what is here.

    versions: of numpy and triton, where installed. said: what torch said. environment: this process's.
    driver: whether the machine has one for NVIDIA GPUs, whatever torch thinks.
    """
    found = []
    triton, numpy = numbers(versions.get("triton", "")), numbers(versions.get("numpy", ""))
    for least_numpy, least_triton in TRITON_FOR_NUMPY.items():
        if triton and numpy >= least_numpy and triton < least_triton:
            wanted = ".".join(map(str, least_numpy))
            found.append(
                f"triton {versions['triton']}'s interpreter fails in loops over loaded bounds with numpy "
                f"{versions['numpy']}: install 'numpy<{wanted}' to run Triton kernels without a GPU"
            )
    interpreted = environment.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
    if interpreted and said.get("available"):
        found.append("TRITON_INTERPRET is set: on the GPU no Triton backend runs; unset it")
    if triton and not said.get("available"):
        found.append(
            "without a GPU Triton kernels run in its interpreter, which multiplies raw bits of bfloat16 and "
            "truncates: mla_fast's kernels round by hand there, a stranger's may be wrong for that alone"
        )
    if not triton:
        found.append(f"triton is not installed: pip install '{PROJECT}[triton]' for mla_fast's own kernels")
    if said and not said.get("cuda") and driver:
        found.append("this torch is built without CUDA, and the machine has a GPU: install another build")
    return found


def _has_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def _versions(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except Exception:
            continue
    return found


def _sections(host: list[Line], said: Mapping[str, Any], seconds: float) -> Iterator[tuple[str, list[Line]]]:
    """Each as soon as it is known: imports may take their time."""
    yield "machine", host
    yield "libraries", libraries(seconds)
    for device in ("cpu", *(["cuda"] if said.get("available") else [])):
        yield f"backends on {device}", backends(device, 2 * seconds)
    yield "extras", extras()


def _table(title: str, lines: Sequence[Line]) -> Table:
    table = Table(title, "", "", "", box=None, header_style="bold", pad_edge=False)
    for line in lines:
        table.add_row(*map(cell, line))
    return table


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seconds: Annotated[float, typer.Option(min=1, help="The longest that one import may take.")] = 60.0,
) -> int:
    """Explain this machine: Python, torch, Triton, GPUs, libraries, and which backends run here.

    Exit code 0, whatever is missing or broken.
    """
    console, data = to_stdout(), {}
    host, said = machine(seconds)
    for title, lines in _sections(host, said, seconds):
        data[title] = [line._asdict() for line in lines]
        if not as_json:
            console.print(_table(title, lines))
            console.print()
    hints = advice(_versions(("triton", "numpy")), said, os.environ, _has_driver())
    if as_json:
        typer.echo(json.dumps(data | {"advice": hints}))
        return 0
    for hint in hints:
        write(console, f"note: {hint}")
    return 0
