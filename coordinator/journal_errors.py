"""What went wrong with a journal's folder, in words that say what to do."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from pathlib import Path
from typing import Final

from coordinator.journal import JournalError
from protos.units import format_bytes

OTHER_FOLDER: Final = "give another folder with --journal"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def explained(folder: Path, error: Exception) -> JournalError:
    """The error of a disk or of SQLite in a journal's folder."""
    if _is_full(error):
        return JournalError(
            f"the journal in {folder} cannot be written, the disk is full: {_free(folder)}. Free some space "
            "and start the coordinator again with the same command: what it announced is in the journal, and "
            "the nodes send the round in flight again"
        )
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return damaged(folder, str(error))
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    where = getattr(error, "filename", None) or folder
    return JournalError(
        f"the journal in {folder} cannot be used: {where}: {reason}. When that is put right, start the "
        "coordinator again with the same command: what it announced is in the journal"
    )


def damaged(folder: Path, problem: str) -> JournalError:
    """The database is damaged."""
    return JournalError(
        f"{folder / 'journal.sqlite'} is damaged: {problem}. Put a copy of the folder back if there is one; "
        f"else move it away, or {OTHER_FOLDER}: the run then goes on with the state that its nodes hold"
    )


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL or "No space left" in str(error)
    return "disk is full" in str(error)


def _free(folder: Path) -> str:
    try:
        return f"{format_bytes(shutil.disk_usage(folder).free)} are free there"
    except OSError:
        return "how much is free there cannot be told"
