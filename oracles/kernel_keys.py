"""Triton finds a kernel that was compiled before by a key, which is here the same in every process.

The key holds the constants that a kernel's helpers read. Triton takes them from a helper before it has
analysed it, so that they are missing unless another kernel has used that helper before: which key a kernel
gets depends on what the process did until then. Workers that share a cache on disk each launch kernels in an
order of their own, and would compile for seconds what is there under another key.
"""

import importlib.util
import os
from typing import Any


def settle() -> None:
    """From now on a kernel's key in this process depends on sources and constants alone."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
    if interpreted or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import jit

    finder: Any = getattr(jit, "DependenciesFinder", None)
    plain: Any = getattr(finder, "_update_hash", None)
    if plain is None or getattr(plain, "settled", False):
        return

    def update_hash(self: Any, helper: Any) -> None:
        _ = helper.cache_key  # analyses it; its constants are known from here on
        plain(self, helper)

    update_hash.settled = True  # type: ignore[attr-defined]
    finder._update_hash = update_hash
