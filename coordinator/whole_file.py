"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from coordinator.segments import sync, sync_folder


def write_whole(path: Path, text: str, mode: int) -> None:
    """Write ``text`` to ``path``, which has the mode from the beginning; what was there is replaced."""
    scratch = path.with_name(f"{path.name}.partial")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sync(file.fileno())
    scratch.replace(path)
    sync_folder(path.parent)
