"""What a stranger's backend is made of: every file that decides what it does, and no other."""

import sys
from importlib import import_module

import pytest

from oracles.sources import digest_of

FILES = {
    "nearby_kernel.py": "import nearby_part\nimport json\nfrom nearby.deep import thing\n",
    "nearby_part.py": "def late():\n    import nearby_late\n",
    "nearby_late.py": "this is no Python",
    "nearby_other.py": "x = 1",
    "nearby/__init__.py": "",
    "nearby/deep.py": "from . import shallow\nthing = 1",
    "nearby/shallow.py": "def late():\n    from .later import y\n    from ......too_far import z\n",
    "nearby/later.py": "y = 1",
    "nearby/unused.py": "y = 1",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("nearby")]:
        del sys.modules[name]


def edits(folder, spec):
    """The files whose edit changes the digest."""
    import_module(spec.partition(":")[0])
    before, found = digest_of(spec), set()
    for name, text in FILES.items():
        (folder / name).write_text(text + "\n#")
        if digest_of(spec) != before:
            found.add(name)
        (folder / name).write_text(text)
    assert digest_of(spec) == before
    return found


def test_of_a_module_in_no_package_its_folder_counts_as_far_as_it_is_imported(folder):
    assert edits(folder, "nearby_kernel:X") == set(FILES) - {"nearby_other.py", "nearby/unused.py"}


def test_of_a_package_its_own_modules_count(folder):
    import_module("nearby_kernel")
    inside = {"nearby/__init__.py", "nearby/deep.py", "nearby/shallow.py", "nearby/later.py"}
    assert edits(folder, "nearby.deep:thing") == inside


def test_of_what_is_installed_its_own_package_counts():
    import_module("pytest")
    digest = digest_of("_pytest.mark:MARK_GEN")
    assert digest
    assert digest_of("pytest:mark") != digest


def test_what_else_was_imported_makes_no_difference(folder):
    """Backends are asked one after the other in one process, in an order that is nobody's."""
    for spec, other in (("nearby_kernel:X", "nearby_other"), ("nearby.deep:thing", "nearby.unused")):
        import_module(spec.partition(":")[0])
        alone = digest_of(spec)
        import_module(other)
        assert digest_of(spec) == alone


def test_what_has_no_file_has_no_digest():
    assert digest_of("sys:path") == ""


def test_where_a_folder_is_makes_no_difference(tmp_path, monkeypatch):
    found = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "nearby_moved.py").write_text("x = 1")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / place)
            import_module("nearby_moved")
            found.append(digest_of("nearby_moved"))
            del sys.modules["nearby_moved"]
    assert found[0] == found[1]


def test_a_link_is_what_it_leads_to(tmp_path, monkeypatch):
    (tmp_path / "real.py").write_text("x = 1")
    (tmp_path / "nearby_link.py").symlink_to("real.py")
    monkeypatch.syspath_prepend(tmp_path)
    import_module("nearby_link")
    before = digest_of("nearby_link:X")
    (tmp_path / "real.py").write_text("x = 2")
    assert digest_of("nearby_link:X") != before
    del sys.modules["nearby_link"]
