"""Network namespaces of Linux: entering one, and doing something in one from outside."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

NAMES: Final = Path("/run/netns")
CLONE_NEWNET: Final = 0x40000000
_T = TypeVar("_T")


def why_not() -> str | None:
    """Why namespaces cannot be made by this process, or ``None`` if nothing speaks against it."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} (iproute2) not found" if missing else None


def path_of(netns: str) -> str:
    """The file of a namespace that is given by its name or by its path."""
    return netns if "/" in netns else str(NAMES / netns)


def enter(netns: str) -> None:
    """Move this thread, and the threads and processes that it will start, into a namespace.

    Raises ``OSError`` if there is none of that name, or the system refuses.
    """
    path = path_of(netns)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", f"enter the network namespace {path}", file, CLONE_NEWNET)
    finally:
        os.close(file)


def leave() -> None:
    """Move this thread into a new namespace of its own, in which there is nothing but ``lo``.

    Raises ``OSError`` if the system refuses.
    """
    _call("unshare", "make a network namespace", CLONE_NEWNET)


def inside(netns: str | None, work: Callable[[], _T]) -> _T:
    """What ``work`` returns, done within a namespace; its exceptions are raised here.

    Sockets stay in the namespace in which they were made, and may be used anywhere afterwards. ``None``
    means the namespace of the caller. Raises ``OSError`` if the namespace cannot be entered.
    """
    return work() if netns is None else _apart(lambda: enter(netns), work)


def inside_new(work: Callable[[], _T]) -> _T:
    """The same within a new namespace, which ends with what ``work`` has started there."""
    return _apart(leave, work)


def _apart(move: Callable[[], None], work: Callable[[], _T]) -> _T:
    results: list[_T] = []
    problems: list[BaseException] = []

    def go() -> None:
        try:
            move()
            results.append(work())
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=go, name="atoll-namespace")  # it alone moves
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return results[0]


def _call(name: str, what: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns and os.unshare came with Python 3.12
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")
