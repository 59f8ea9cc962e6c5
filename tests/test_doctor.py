"""The doctor: what it says of right, missing and broken parts, none of which may break it."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from oracles import doctor_cli
from oracles.command import main
from oracles.doctor_cli import (
    BROKEN,
    MISSING,
    OK,
    advice,
    backends,
    extras,
    libraries,
    machine,
    numbers,
    report,
)
from oracles.verify import backends as all_backends

BROKEN_LIBRARIES = {
    "raises": (
        "raise ImportError('libsomething.so.12: cannot open shared object file')",
        "libsomething.so.12",
    ),
    "exits": ("import sys; sys.exit(3)", "its import ends the process, exit code 3"),
    "aborts": ("import os; os.abort()", "its import ends the process, signal 6"),
    "hangs": ("import time; time.sleep(60)", "did not end within 2 s"),
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Libraries that cannot be imported, each in its own way, and one that can."""
    for name, (source, _) in BROKEN_LIBRARIES.items():
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    (tmp_path / "sound.py").write_text("", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    wanted = [*BROKEN_LIBRARIES, "sound", "nowhere_to_be_found", "nowhere.to.be.found"]
    monkeypatch.setattr(doctor_cli, "LIBRARIES", dict.fromkeys(wanted, "a test"))


def test_a_library_that_breaks_on_import_is_a_line(broken):
    found = {line.name: line for line in libraries(2.0)}
    for name, (_, reason) in BROKEN_LIBRARIES.items():
        assert found[name].state == BROKEN
        assert reason in found[name].note
    assert found["sound"].state == OK
    assert found["nowhere_to_be_found"].state == found["nowhere.to.be.found"].state == MISSING
    assert not {"raises", "exits", "aborts", "hangs"} & set(sys.modules)


def test_every_backend_is_named_and_says_why(monkeypatch):
    found = {line.name: line for line in backends("cpu", 120.0)}
    assert set(found) == set(all_backends())
    for name, backend in all_backends().items():
        reason = backend.requires("cpu")
        assert found[name].note == (reason or backend.problem)
        assert found[name].state == (MISSING if reason else OK)


def test_a_module_that_does_not_import_hides_no_other(tmp_path, monkeypatch):
    package = tmp_path / "sick_package"
    package.mkdir()
    sources = {
        "__init__": "",
        "sound": "from mla_ref.latent import BACKEND",
        "sick": "import no_such_module",
        "odd": "from types import SimpleNamespace as N\nBACKEND = N(requires=lambda device: 1 / 0)",
        "other": "",
        "_private": "1 / 0",
    }
    for name, source in sources.items():
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert report("cpu", ["sick_package"]) == {
        "sick_package.odd": [BROKEN, "ZeroDivisionError: division by zero"],
        "sick_package.sick": [BROKEN, "ModuleNotFoundError: No module named 'no_such_module'"],
        "sick_package.sound": [OK, "latent_attention"],
    }


def test_a_torch_that_does_not_import_is_a_line():
    lines, said = machine(5.0, lambda command, seconds: (1, "Traceback\nImportError: libcudart.so.13"))
    assert said == {}
    (torch,) = [line for line in lines if line.name == "torch"]
    assert (torch.state, torch.note) == (BROKEN, "ImportError: libcudart.so.13")
    (none,) = backends("cpu", 5.0, lambda command, seconds: (-11, ""))
    assert (none.state, none.note) == (BROKEN, "its import ends the process, signal 11")


def test_a_gpu_is_described():
    said = {
        "torch": "2.11.0+cu130", "cuda": "13.0", "threads": 1, "available": True, "cudnn": 91900,
        "gpus": [{"name": "NVIDIA H200", "capability": "9.0", "memory": 150 << 30, "multiprocessors": 132}],
    }  # fmt: skip
    lines, found = machine(5.0, lambda command, seconds: (0, f"a warning\n{json.dumps(said)}"))
    assert found == said
    (gpu,) = [line for line in lines if line.name == "cuda:0"]
    assert gpu.value == "NVIDIA H200"
    assert gpu.note == "compute capability 9.0, 150.0 GiB, 132 multiprocessors"


def test_extras_name_what_they_lack(monkeypatch):
    wanted = [
        "torch>=2.11",
        "pytest>=1.0; extra == 'whole'",
        "no-such-package>=1; extra == 'half'",
        "pytest>=999.1; extra == 'half'",
    ]
    monkeypatch.setattr(doctor_cli.importlib.metadata, "requires", lambda name: wanted)
    found = {line.name: line for line in extras()}
    assert set(found) == {"whole", "half"}
    assert found["whole"].state == OK
    assert found["half"].value.startswith("lacks no-such-package, pytest ")
    assert found["half"].value.endswith(" is not >=999.1")
    assert found["half"].note == "pip install 'mla-verify[half]'"


def test_what_an_extra_wants_elsewhere_is_not_lacking_here(monkeypatch):
    wanted = [
        "no-such-package==1; sys_platform == 'plan9' and extra == 'far'",
        "no-such-package==1; python_version < '3' and extra == 'near'",
        f"no-such-package==1; sys_platform == {sys.platform!r} and extra == 'near'",
        "pytest!=1.0,<999; extra == 'far'",
        "pytest==1.0; extra == 'old'",
    ]
    monkeypatch.setattr(doctor_cli.importlib.metadata, "requires", lambda name: wanted)
    found = {line.name: line for line in extras()}
    assert found["far"].state == OK
    assert found["near"].value == "lacks no-such-package"
    assert found["old"].value == f"lacks pytest {pytest.__version__} is not ==1.0"


def test_known_traps_are_told():
    cpu, gpu = {"cuda": None, "available": False}, {"cuda": "13.0", "available": True}
    trap = {"triton": "3.6.0", "numpy": "2.4.1"}
    assert "numpy 2.4.1: install 'numpy<2.4'" in advice(trap, gpu, {}, True)[0]
    assert advice({"triton": "3.6.0", "numpy": "2.3.5"}, gpu, {}, True) == []
    assert advice({"triton": "3.7.1", "numpy": "2.4.1"}, gpu, {}, True) == []
    assert "unset it" in advice({"triton": "3.7"}, gpu, {"TRITON_INTERPRET": "1"}, True)[0]
    assert "raw bits of bfloat16" in advice({"triton": "3.7"}, cpu, {"TRITON_INTERPRET": "1"}, False)[0]
    assert "triton is not installed" in advice({}, gpu, {}, True)[0]
    assert "built without CUDA, and the machine has a GPU" in advice({"triton": "3.7"}, cpu, {}, True)[-1]


def test_versions_are_compared_by_numbers():
    assert numbers("2.13.0+cpu") == (2, 13, 0) > numbers("2.9.9")
    assert numbers("4.0.0b36") == (4, 0, 0)
    assert numbers("unknown") == ()


def test_the_command_ends_well_whatever_is_broken(broken, capsys, monkeypatch):
    monkeypatch.setattr(doctor_cli, "backends", lambda device, seconds: report_lines(device))
    assert main(["doctor", "--seconds", "2"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in BROKEN_LIBRARIES)
    assert main(["doctor", "--json", "--seconds", "2"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) >= {"machine", "libraries", "backends on cpu", "extras", "advice"}
    assert {line["name"]: line["state"] for line in data["libraries"]}["raises"] == BROKEN
    assert Path(data["machine"][0]["note"]).name.startswith("python")


def report_lines(device):
    return [doctor_cli.Line(name, state, device, why) for name, (state, why) in report(device).items()]
