"""Rank processes that stay alive between tests: starting one takes seconds, a function in it does not.

``pool().run(work, ranks, *arguments)`` calls ``work(member, *arguments)`` in the first ``ranks`` of four
processes joined by gloo and returns what each answered. ``work`` must be a function of an importable module;
an exception in one of them fails the test with that rank's traceback, and the pool starts anew for the next.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

SIZE = 4
DEADLINE = 240.0  # seconds for one function; only a hang reaches it


@dataclass(frozen=True)
class Member:
    """What a function learns of the process that runs it: its rank, the number of ranks, and their group."""

    rank: int
    ranks: int
    group: dist.ProcessGroup
    mesh: DeviceMesh
    grid: DeviceMesh | None  # 2 × 2 (replicate, shard), where all four ranks take part


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time; the text holds its traceback."""


class Ranks:
    """``size`` processes of one gloo world. ``timeout`` (seconds) is the process group's."""

    def __init__(self, size: int = SIZE, timeout: float = 120.0) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="island-")
        store = str(Path(self._folder.name) / "store")
        self.pipes: list[Connection] = []
        self.processes = []
        kept = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
        os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, rank, size, store, timeout), daemon=True
                )
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        finally:
            for name, value in kept.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value

    def run(self, work: Callable[..., Any], ranks: int = SIZE, *arguments: Any) -> list[Any]:
        """Call ``work(member, *arguments)`` on ranks 0 … ranks - 1; their answers in the order of ranks."""
        answers = self.answers_of(work, ranks, *arguments, patience=2.0)
        return [self._value(rank, answer) for rank, answer in enumerate(answers)]

    def answers_of(
        self, work: Callable[..., Any], ranks: int, *arguments: Any, patience: float = DEADLINE
    ) -> list[tuple[bool, Any]]:
        """The same, but per rank whether it succeeded, and its answer or the text of its failure.

        After the first failure the others have ``patience`` more seconds.
        """
        for pipe in self.pipes[:ranks]:
            pipe.send((work, ranks, arguments))
        pending = {pipe: rank for rank, pipe in enumerate(self.pipes[:ranks])}
        answers: list[tuple[bool, Any]] = [(False, "did not answer")] * ranks
        end = time.monotonic() + DEADLINE
        while pending:
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, "the process died")
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + patience)
        return answers

    def _value(self, rank: int, answer: tuple[bool, Any]) -> Any:
        if not answer[0]:
            self.close()
            raise RankFailed(f"rank {rank}: {answer[1]}")
        return answer[1]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    @property
    def alive(self) -> bool:
        """Whether all processes run."""
        return all(process.is_alive() for process in self.processes)


def _serve(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size)}
    assert dist.group.WORLD is not None
    groups[size] = dist.group.WORLD
    pairs = [dist.new_group(p) for p in ([0, 1], [2, 3], [0, 2], [1, 3])] if size == 4 else []
    while True:
        try:
            work, ranks, arguments = pipe.recv()
        except EOFError:
            return
        try:
            mesh = DeviceMesh.from_group(groups[ranks], "cpu")
            grid = None
            if ranks == 4:
                grid = DeviceMesh.from_group(
                    [pairs[2 + rank % 2], pairs[rank // 2]],
                    "cpu",
                    mesh=[[0, 1], [2, 3]],
                    mesh_dim_names=("replicate", "shard"),
                )
            member = Member(rank, ranks, groups[ranks], mesh, grid)
            pipe.send((True, work(member, *arguments)))
        except BaseException:  # whatever it is, the test must see it
            pipe.send((False, traceback.format_exc()))


_pool: Ranks | None = None


def pool() -> Ranks:
    """The four processes that all tests share; started when first asked for, and after a failure."""
    global _pool
    if _pool is None or not _pool.alive:
        if _pool is None:
            atexit.register(_close)
        else:
            _pool.close()
        _pool = Ranks()
    return _pool


def _close() -> None:
    if _pool is not None:
        _pool.close()
