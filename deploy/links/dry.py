"""Shaping without doing it: the commands are told, and only those that read are run."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from typing import Any

from deploy.links.commands import CommandError, Run
from deploy.links.delays import Delays, Hold, Lines
from deploy.links.interface import Interface
from deploy.links.kernel import Kernel, probe_apart

_READING = ("show", "-S")


class Dry:
    """Passes the commands that would change something to ``tell``, as a shell takes them."""

    def __init__(self, tell: Callable[[str], None], run: Run, delays: Delays) -> None:
        self._tell, self._run, self._delays = tell, run, delays

    def means(self, kernel: Kernel | None = None) -> dict[str, Any]:
        """Arguments for :func:`deploy.links.shaping.shape`; without rights we take the kernel to have all."""
        if kernel is None:
            kernel = Kernel()
            with contextlib.suppress(CommandError):
                kernel = probe_apart()
        return {"run": self.run, "kernel": kernel, "delays": self}

    def run(self, *words: str) -> str:
        """Run a command that reads; tell of one that changes something."""
        if any(word in words for word in _READING):
            return self._run(*words)
        self._tell(shlex.join(words))
        return ""

    def start(self, interface: Interface, lines: Lines, owned: bool) -> str:
        """Tell that the process would be started."""
        self._tell(
            f"# a process takes the packets of the queues {', '.join(map(str, lines))} and delays them"
        )
        return "a priority that is found out then"

    def ask(self, interface: Interface, lines: Lines | None = None, end: bool = False) -> Lines | None:
        """What a process that is there does; nothing is said to it."""
        there = self._delays.ask(interface)
        if there is not None and end:
            self._tell("# the process that delays packets is ended")
        return None if lines else there

    def hold(self, interface: Interface) -> Hold:
        """Not held."""
        return _Nothing()

    def holder(self, interface: Interface) -> int | None:
        """The process that holds an interface."""
        return self._delays.holder(interface)


class _Nothing:
    def close(self) -> None:
        """Nothing is held."""
