"""Where a running test bed is known to other processes, and what one that was killed has left there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from deploy.errors import UserError

MARK: Final = "ATOLL_TESTBED"  # in the environment of all processes of a bed
SECONDS: Final = 10.0  # for what was killed to be gone
_POLL_SECONDS: Final = 0.05


def base() -> Path:
    """The folder of all beds of this user."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given:
        return Path(given) / "atoll"
    if os.geteuid() == 0 and Path("/run").is_dir():
        return Path("/run/atoll")
    return Path(tempfile.gettempdir()) / f"atoll-{os.geteuid()}"


class Home:
    """The folder of one bed, locked as long as its process lives. A context manager that removes it.

    Attributes:
        mark: what the environment of its processes has under :data:`MARK`.
        left: sentences about beds that were killed, whose leavings are gone now.
    """

    def __init__(self, out: Path) -> None:
        """Clean up after beds that were killed, and make a folder.

        Raises:
            UserError: it cannot be made.
        """
        self.mark = secrets.token_hex(8)
        self.path = base() / f"testbed-{os.getpid()}"
        try:
            base().mkdir(mode=0o700, parents=True, exist_ok=True)
            self.left = list(clean())
            self.path.mkdir(mode=0o700)
            self._lock = (self.path / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            facts = {"pid": os.getpid(), "mark": self.mark, "out": str(out), "began": time.time()}
            (self.path / "bed.json").write_text(json.dumps(facts))
        except OSError as error:
            raise UserError(f"no place for the test bed: {error.filename}: {error.strerror}") from error

    @property
    def socket(self) -> Path:
        """Where it takes requests."""
        return self.path / "control"

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Home:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def running() -> list[dict[str, Any]]:
    """What the beds that run now say of themselves: ``pid``, ``out``, ``began``, and ``socket``."""
    return [{**facts, "socket": str(folder / "control")} for folder, facts, alive in _beds() if alive]


def find(out: Path | None) -> Path:
    """The socket of the bed that runs, or of the one that writes to ``out``.

    Raises:
        UserError: there is none, or more than one to choose from.
    """
    beds = running()
    if out is not None:
        beds = [bed for bed in beds if Path(str(bed.get("out"))) == out.resolve()]
    if not beds:
        where = "" if out is None else f" with --out {out}"
        raise UserError(f"no test bed runs here{where}; 'atoll testbed' starts one")
    if len(beds) > 1:
        outs = ", ".join(str(bed.get("out")) for bed in beds)
        raise UserError(f"{len(beds)} test beds run: say with --out which one is meant ({outs})")
    return Path(beds[0]["socket"])


def clean() -> Iterator[str]:
    """Take away what beds have left that were killed; yields a sentence about each."""
    for folder, facts, alive in list(_beds()):
        if alive:
            continue
        ended = end_marked(str(facts.get("mark", "")))
        with contextlib.suppress(OSError):  # the token of its run
            (Path(str(facts.get("out", folder))) / "invite").unlink()
        shutil.rmtree(folder, ignore_errors=True)
        processes = f"ended {ended} of its processes, " if ended else "its processes and links were gone, "
        yield f"a test bed (process {facts.get('pid', '?')}) was killed: {processes}removed {folder}"


def _beds() -> Iterator[tuple[Path, dict[str, Any], bool]]:
    """Folders of beds, what they say, and whether the process lives."""
    for folder in sorted(base().glob("testbed-*")):
        try:
            with (folder / "lock").open("r") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    alive = False
                except BlockingIOError:
                    alive = True
        except OSError:
            alive = _young(folder)  # about to be locked
        try:
            facts = json.loads((folder / "bed.json").read_text())
        except (OSError, ValueError):
            facts = {}
        if isinstance(facts, dict):
            yield folder, facts, alive


def _young(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime < SECONDS
    except OSError:
        return True  # it has gone meanwhile


def marked(mark: str) -> list[int]:
    """Processes that bear a mark, on Linux."""
    if not mark:
        return []
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end_marked(mark: str) -> int:
    """Kill processes that bear a mark, and wait for their end; returns how many there were."""
    found = marked(mark)
    for pid in found:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + SECONDS
    while found and marked(mark) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    return len(found)
