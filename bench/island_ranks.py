"""The processes of one gloo world, on loopback or each in a network namespace of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bench.namespaces import INTERFACE, enter

Result = TypeVar("Result")

COLLECTIVE_SECONDS: Final = 120.0  # until a collective without progress fails
ANSWER_SECONDS: Final = 900.0  # until the bench gives up; only a hang reaches it
LOOPBACK: Final = "lo" if sys.platform.startswith("linux") else "lo0"
PATIENCE: Final = 2.0  # for the other ranks, once one has failed
PRELOAD: Final = ["bench.island_work"]


@dataclass(frozen=True)
class Member:
    """What the work of a rank learns of where it runs: ``interface`` is the one that its bytes leave by."""

    rank: int
    ranks: int
    group: dist.ProcessGroup
    mesh: DeviceMesh
    interface: str

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(self.group)


class World:
    """Processes that wait for work; see :func:`world`."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def run(self, work: Callable[..., Result], ranks: int, *arguments: object) -> list[Result]:
        """Call ``work(member, *arguments)`` on ranks 0 … ranks - 1; their answers in that order.

        Raises:
            RuntimeError: if one raises, dies or does not answer; the text holds its traceback.
        """
        for pipe in self._pipes[:ranks]:
            pipe.send((work, ranks, arguments))
        pending: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes[:ranks])}
        answers: list[Any] = [None] * ranks
        failures: dict[int, str] = {}
        end = time.monotonic() + ANSWER_SECONDS
        while pending:
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for end_of_pipe in ready:
                rank = pending.pop(end_of_pipe)
                try:
                    succeeded, answer = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    succeeded, answer = False, "the process died"
                if succeeded:
                    answers[rank] = answer
                else:
                    failures[rank] = answer
                    end = min(end, time.monotonic() + PATIENCE)
        if failures:
            rank, text = next(iter(failures.items()))
            raise RuntimeError(f"bench island: {work.__name__} failed on rank {rank} of {ranks}: {text}")
        if pending:
            raise RuntimeError(
                f"bench island: {work.__name__} got no answer of ranks {sorted(pending.values())} in"
                f" {ANSWER_SECONDS:g} s"
            )
        return answers


@contextlib.contextmanager
def world(size: int, namespaces: Sequence[str] | None = None) -> Iterator[World]:
    """``size`` processes with one torch thread each; ended with the context.

    Args:
        size: of the world; work may run on fewer ranks.
        namespaces: for each rank the one it enters (:func:`bench.namespaces.linked`); None: loopback.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(PRELOAD)  # torch is imported once for all ranks
    pipes: list[Connection] = []
    processes: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                space = None if namespaces is None else namespaces[rank]
                arguments = (theirs, rank, size, str(Path(folder) / "store"), space)
                process: Any = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            yield World(pipes)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(10)
            for pipe in pipes:
                pipe.close()


def _serve(pipe: Connection, rank: int, size: int, store: str, namespace: str | None) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    interface = LOOPBACK
    if namespace is not None:
        enter(namespace)
        interface = INTERFACE
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    assert dist.group.WORLD is not None
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, size)}
    groups[size] = dist.group.WORLD
    while True:
        try:
            work, ranks, arguments = pipe.recv()
        except EOFError:
            return
        try:
            mesh = DeviceMesh.from_group(groups[ranks], "cpu")
            pipe.send((True, work(Member(rank, ranks, groups[ranks], mesh, interface), *arguments)))
        except BaseException:  # whatever it is, the bench must hear of it
            pipe.send((False, traceback.format_exc()))
