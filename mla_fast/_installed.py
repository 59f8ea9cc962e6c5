"""Whether a library can be called here, and how it is called.

Whether is found out by importing it, since one that is there may still not load. All are called
``with calling(…)``. On two GPUs each launched where its tensors are without that, too, but none promises it.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def calling(device: torch.device) -> Iterator[None]:
    """A library is called for tensors on ``device``: if that is a GPU it is the current one meanwhile."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


def found(name: str) -> bool:
    """Whether a module is there, be it broken: a package that raises where it is looked into is there."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        return error.name is None or not _is_or_holds(error.name, name)
    except (Exception, SystemExit):
        return True


def why_not(name: str, *members: str) -> str | None:
    """Why a module, or one of its members, cannot be called; or None.

    A library that does not load raises whatever its loader meets: OSError, AttributeError, an exit.
    """
    try:
        module = importlib.import_module(name)
        lacking = [member for member in members if not hasattr(module, member)]
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and _is_or_holds(error.name, name):
            return f"{name} is not installed"
        return does_not_load(name, error)
    return f"{name} has no {', '.join(lacking)}" if lacking else None


def does_not_load(name: str, error: BaseException) -> str:
    """The reason that an error is, in one line."""
    return f"{name} does not load: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _is_or_holds(package: str, name: str) -> bool:
    return f"{name}.".startswith(f"{package}.")
