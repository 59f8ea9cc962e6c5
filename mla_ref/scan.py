"""A folder is a registry: every public module of a package that defines a given constant."""

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def scan(package: str | ModuleType, constant: str) -> dict[str, Any]:
    """``constant`` of each module in ``package``, by module name, in alphabetical order.

    Modules whose name starts with an underscore are private. Errors on import propagate: a broken
    module must never look like a missing one.
    """
    root = importlib.import_module(package) if isinstance(package, str) else package
    names = sorted(m.name for m in pkgutil.iter_modules(root.__path__) if not m.name.startswith("_"))
    modules = {name: importlib.import_module(f"{root.__name__}.{name}") for name in names}
    return {name: getattr(m, constant) for name, m in modules.items() if hasattr(m, constant)}
