"""What a stranger's backend is made of: one digest of its module and of all that it imports from beside it.

Beside it is what has the same top-level package, or, for a module that is in none, lies in its folder. What
is read otherwise (sources of compiled extensions, configuration, names that are put together) is not known;
nor are modules that stand elsewhere than their names say.
"""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import resolve_name
from pathlib import Path

# Where the house's own backends live; reached by name, so that the judge imports none of them.
BACKEND_PACKAGES = ("mla_ref", "mla_fast")


def digest_of(spec: str) -> str:
    """Of the files that a backend's module, imported before, and what it imports from beside it came from."""
    name = spec.partition(":")[0]
    file = getattr(sys.modules[name], "__file__", None)
    if file is None:
        return ""
    own = Path(file).resolve()
    root, digest = _root(name, own), hashlib.sha256()
    for path, text in sorted(_closure(name, own, root).items()):
        digest.update(f"{path.relative_to(root)}\0".encode() + text + b"\0")
    return digest.hexdigest()[:12]


def _root(name: str, file: Path) -> Path:
    """The folder in which the top-level package or module lies."""
    depth = name.count(".") + (file.stem == "__init__")
    return file.parents[depth]


def _closure(name: str, own: Path, root: Path) -> dict[Path, bytes]:
    """Each file and what is in it: of a module and what its text imports, however late, and theirs.

    What else the process has imported by now makes no difference: another backend's may be among it.
    """
    top = name.partition(".")[0]
    todo, found = [*_with_packages(name)], dict[Path, bytes]()
    seen = set(todo)
    while todo:
        module = todo.pop()
        for path in [own] if module == name else _files(module, root):
            if path != own and not _beside(path, root, top, alone=top == name):
                continue
            found[path] = path.read_bytes()
            package = module if path.stem == "__init__" else module.rpartition(".")[0]
            texts = _imports(found[path], package) if path.suffix == ".py" else ()
            new = {whole for text in texts for whole in _with_packages(text)} - seen
            seen |= new
            todo += new
    return found


def _with_packages(module: str) -> Iterator[str]:
    """A module, and the packages that it is in, which are imported with it."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _files(module: str, root: Path) -> Iterator[Path]:
    """Where a module of this name would be read from: its text, its package's, or what it was compiled to."""
    place = root.joinpath(*module.split("."))
    names = (f"{place.name}{suffix}" for suffix in (".py", *EXTENSION_SUFFIXES))
    return (path for path in (place / "__init__.py", *map(place.with_name, names)) if path.is_file())


def _beside(path: Path, root: Path, top: str, alone: bool) -> bool:
    """Whether a file is a stranger's own. alone: of a module in no package, so that its folder counts."""
    if root not in path.parents:
        return False
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")}
    if root not in installed and not installed.isdisjoint(path.parents):
        return False
    first = path.relative_to(root).parts[0]
    return first in (top, f"{top}{path.suffix}") or (alone and root not in installed)


def _imports(text: bytes, package: str) -> Iterator[str]:
    """Names of modules, or of what is in one, that a text of Python imports anywhere."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            try:
                base = resolve_name(relative, package) if node.level else relative
            except ImportError:
                continue
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
