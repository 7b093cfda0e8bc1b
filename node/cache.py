"""The folder for files that can be made again: unpacked corpora, tokenised texts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/atoll``, or ``~/.cache/atoll`` where that is not set to an absolute path.

    (XDG Base Directory Specification 0.8: relative values are to be ignored.)
    """
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "atoll"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes ``path`` in one step when the block ends, and vanishes if it raises.

    Readers never see half of it; of two writers the later wins. The folder is created. Raises ``OSError``
    where the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with part.open("xb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
