"""Network namespaces without names: they live by open files of this process, and are gone with it however it
ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Final, TypeVar

from deploy.errors import UserError
from deploy.links import namespace
from deploy.links.namespace import enter, inside, inside_new

Result = TypeVar("Result")

COMMAND_SECONDS: Final = 20.0
_OWN: Final = "/proc/thread-self/ns/net"


class NamespaceError(UserError):
    """A namespace, or something in one, could not be made; the text has the command and its answer."""


def why_not() -> str | None:
    """Why this process cannot make namespaces with links, or None if nothing speaks against it."""
    reason = namespace.why_not()
    if reason is not None:
        return reason
    if shutil.which("nsenter") is None:
        return "nsenter (util-linux) not found"
    try:
        Namespace().close()
    except NamespaceError as error:
        return str(error)
    return None


class Namespace:
    """One network namespace, its loopback up. A context manager that lets go of it.

    Raises:
        NamespaceError: the system makes none.
    """

    def __init__(self) -> None:
        try:
            self._file = inside_new(own)
        except OSError as error:
            raise NamespaceError(str(error.strerror)) from error
        try:
            self.run("ip", "link", "set", "dev", "lo", "up")
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """What ``nsenter --net=`` takes, from any process as long as this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def command(self, *words: str) -> list[str]:
        """A command line that runs ``words`` in the namespace. Its process is the one that is started."""
        return ["nsenter", f"--net={self.path}", *words]

    def run(self, *words: str) -> str:
        """Run a command in the namespace and return its standard output.

        Raises:
            NamespaceError: it fails, or takes longer than :data:`COMMAND_SECONDS`.
        """
        text = " ".join(words)
        try:
            done = subprocess.run(
                self.command(*words), capture_output=True, text=True, timeout=COMMAND_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise NamespaceError(f"{text}: no answer in {COMMAND_SECONDS:g} s") from None
        except OSError as error:
            raise NamespaceError(f"{text}: {error.strerror or error}") from error
        if done.returncode:
            raise NamespaceError(f"{text}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def call(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns or raises in the namespace; sockets that it makes stay there.

        Raises ``OSError`` if the system refuses.
        """
        return inside(self.path, work)

    def enter(self) -> None:
        """Move the calling thread, and the threads and processes that it will start, into the namespace.

        Raises ``OSError`` if the system refuses.
        """
        enter(self.path)

    def close(self) -> None:
        """Let go: the namespace ends with the last process in it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def own() -> int:
    """An open file of the calling thread's namespace; the caller closes it."""
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def move(file: int) -> None:
    """Move the calling thread into the namespace of an open file.

    Raises ``OSError`` if the system refuses.
    """
    enter(f"/proc/{os.getpid()}/fd/{file}")
