"""Files that are written whole or not at all, whenever the process or the machine stops."""

import os
from pathlib import Path


def draft_of(path: Path) -> Path:
    """Where a text stands until all of it is on the disk. A process that is killed may leave it."""
    return path.with_name(f"{path.name}.draft")


def write_whole(path: Path, text: str) -> None:
    """All of ``text`` under the file's name, or what was there before. One process at a time writes it.

    A link, or what is no plain file, such as /dev/stdout or a pipe, is written to where it leads, in place.

    Raises: OSError if it cannot be written; no draft is left then.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    draft = draft_of(path)
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
