"""Atoll's command line in processes that need not import torch: they are forked from one that has.

A user's process takes two seconds of CPU time until it trains. Where processes die and come back all the time
that would be most of what is measured.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import faults, namespaces
from deploy import cli
from deploy.processes import PARENT_KEY, Child, Children, ProcessError, follow_parent

_FORKS: Final[Any] = multiprocessing.get_context("forkserver")
# What a coordinator and a node need is imported once, by the server that they are forked from.
_FORKS.set_forkserver_preload(
    [
        "bench.fork_server",
        "bench.forked",
        "coordinator.service",
        "deploy.serving",
        "node.launch",
        "node.model",
        "optim.methods",
        "optim.bits.fast",
    ]
)


@dataclass(frozen=True)
class Order:
    """What a process is to do.

    Attributes:
        arguments: of the command ``atoll``.
        log: where its stdout and stderr go.
        environment: added to that of the parent.
        fault: where it is to stop itself.
        namespace: of the network, a path for :func:`bench.namespaces.enter`.
    """

    arguments: Sequence[str]
    log: str
    environment: Mapping[str, str]
    fault: faults.Fault
    namespace: str


class Forked:
    """One such process; see :class:`deploy.processes.Process`."""

    def __init__(self, order: Order) -> None:
        self._process = _FORKS.Process(target=_work, args=(order,), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """Process id, which is also its group's."""
        pid: int = self._process.pid
        return pid

    def poll(self) -> int | None:
        """Exit code, ``None`` while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self._process.name), timeout)
        return code


class ForkedChildren(Children):
    """Children that are forked; their command is the arguments of ``atoll``."""

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        fault: faults.Fault = faults.NONE,
        namespace: str = "",
    ) -> Child:
        """See :meth:`deploy.processes.Children.start`.

        Raises:
            ProcessError: the process cannot be forked.
        """
        try:
            forked = Forked(Order(list(command), str(log), dict(environment or {}), fault, namespace))
        except OSError as error:
            raise ProcessError(f"cannot start {name}: {error}") from error
        child = Child(name, forked, log)
        self.children.append(child)
        return child


def _work(order: Order) -> None:
    with contextlib.suppress(PermissionError):  # it leads its group already
        os.setsid()
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update({**order.environment, PARENT_KEY: str(os.getppid())})
    tempfile.tempdir = None  # what the fork server has found may not be this environment's TMPDIR
    follow_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order.namespace:
        namespaces.enter(order.namespace)
    faults.arm(order.fault)
    sys.argv = ["atoll", *order.arguments]
    cli.main()
