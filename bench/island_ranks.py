"""Processes of one world that stay alive between pieces of work: gloo on CPUs, or NCCL with a GPU a rank.

Starting a process takes seconds, a function in it does not: ``Ranks(4).run(work, ranks, *arguments)`` calls
``work(member, *arguments)`` on the first ``ranks`` of four processes and returns what each answered. ``work``
must be a function of an importable module. The benches and the island's tests share this.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from bench.namespaces import INTERFACE, LOOPBACK, enter

Result = TypeVar("Result")

COLLECTIVE_SECONDS: Final = 120.0  # until a collective without progress fails
ANSWER_SECONDS: Final = 900.0  # until a run gives up; only a hang reaches it
PATIENCE: Final = 3.0  # for the other ranks, once one has failed
PRELOAD: Final = ["bench.island_work"]
OLD_NAMES: Final = r"`torch\.distributed\..* is deprecated"  # torch's words for collectives it has renamed


class Transport(NamedTuple):
    """Backend of a world, how many ranks it can have, and why."""

    backend: Literal["gloo", "nccl"]
    ranks: int
    reason: str

    @property
    def device(self) -> torch.device:
        """Where a rank's tensors are; on ``cuda`` every rank has set its own GPU as the current one."""
        return torch.device("cuda" if self.backend == "nccl" else "cpu")


def choose_transport(wanted: str, gpus: int, ranks: int) -> Transport:
    """NCCL where there is a GPU, with one GPU a rank and no more ranks than GPUs; else gloo.

    Args:
        wanted: ``gloo`` or ``nccl`` to force it, or empty.
        gpus: that this process sees.
        ranks: that are asked for.

    Raises:
        ValueError: for another name, and for NCCL without a GPU.
    """
    if wanted not in ("", "gloo", "nccl"):
        raise ValueError(f"{wanted!r} is no backend of a world: gloo, nccl, or nothing to choose by the GPUs")
    if wanted == "nccl" and gpus == 0:
        raise ValueError("nccl needs a GPU for each rank, and this process sees none: use gloo")
    if wanted == "gloo" or gpus == 0:
        return Transport("gloo", ranks, "gloo was asked for" if wanted else "no GPU is seen")
    few = f": {ranks} ranks need as many (force gloo to run them on CPUs)" if gpus < ranks else ""
    return Transport("nccl", min(ranks, gpus), f"nccl with one rank on each of {gpus} GPUs{few}")


@dataclass(frozen=True)
class Member:
    """What a rank's work learns of where it runs.

    Attributes:
        rank: of this process.
        ranks: that take part.
        group: of them.
        mesh: of them, with one dimension.
        grid: 2 × 2 (replicate, shard), where all of four ranks take part.
        device: of this rank's tensors.
        interface: that its bytes leave by.
    """

    rank: int
    ranks: int
    group: dist.ProcessGroup
    mesh: DeviceMesh
    grid: DeviceMesh | None
    device: torch.device
    interface: str

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(self.group)


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer in time; the text holds its traceback."""


@dataclass(frozen=True)
class _Seat:
    """What a process is started with."""

    rank: int
    size: int
    store: str
    backend: str
    timeout: float
    namespace: str | None
    strict: bool


class Ranks:
    """Processes with one torch thread each that wait for work, until :meth:`close`.

    Args:
        size: of the world; work may run on fewer ranks.
        namespaces: for each rank the network namespace that it enters (:func:`bench.namespaces.linked`);
            None: loopback.
        timeout: of the process groups, seconds.
        transport: with no fewer ranks than ``size``; None: gloo.
        strict: make errors of torch's warnings that a collective's name is old.
    """

    def __init__(
        self,
        size: int,
        namespaces: Sequence[str] | None = None,
        *,
        timeout: float = COLLECTIVE_SECONDS,
        transport: Transport | None = None,
        strict: bool = False,
    ) -> None:
        self.size, self.transport = size, transport or choose_transport("gloo", 0, size)
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        store = str(Path(self._folder.name) / "store")
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload(PRELOAD)  # torch is imported once for all ranks
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                space = None if namespaces is None else namespaces[rank]
                seat = _Seat(rank, size, store, self.transport.backend, timeout, space, strict)
                process = context.Process(target=_serve, args=(theirs, seat), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        except BaseException:
            self.close()
            raise

    def run(self, work: Callable[..., Result], ranks: int, *arguments: object) -> list[Result]:
        """Call ``work(member, *arguments)`` on ranks 0 … ranks - 1; their answers in that order.

        Raises:
            RankFailed: if one raises, dies or does not answer.
        """
        answers = self.answers_of(work, ranks, *arguments)
        failures = [(rank, text) for rank, (succeeded, text) in enumerate(answers) if not succeeded]
        if failures:
            self.close()  # the others may be stuck in a collective
            first = next((f for f in failures if f[1] != _SILENT), failures[0])
            raise RankFailed(f"{work.__name__} failed on rank {first[0]} of {ranks}: {first[1]}")
        return [cast(Result, answer) for _, answer in answers]

    def answers_of(
        self, work: Callable[..., Any], ranks: int, *arguments: object, patience: float = PATIENCE
    ) -> list[tuple[bool, Any]]:
        """The same, but per rank whether it succeeded, and its answer or the text of its failure.

        After the first failure the others have ``patience`` more seconds.
        """
        for pipe in self._pipes[:ranks]:
            pipe.send((work, ranks, arguments))
        pending: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes[:ranks])}
        answers: list[tuple[bool, Any]] = [(False, _SILENT)] * ranks
        end = time.monotonic() + ANSWER_SECONDS
        while pending:
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for end_of_pipe in ready:
                rank = pending.pop(end_of_pipe)
                try:
                    answers[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    answers[rank] = (False, "the process died")
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + patience)
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    @property
    def alive(self) -> bool:
        """Whether all processes run."""
        return all(process.is_alive() for process in self._processes)


_SILENT: Final = "it did not answer in time"


@contextlib.contextmanager
def world(size: int, namespaces: Sequence[str] | None = None) -> Iterator[Ranks]:
    """:class:`Ranks` on gloo that end with the context."""
    ranks = Ranks(size, namespaces)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(pipe: Connection, seat: _Seat) -> None:
    if seat.strict:
        warnings.filterwarnings("error", OLD_NAMES, FutureWarning)
    interface = LOOPBACK
    if seat.namespace is not None:
        enter(seat.namespace)
        interface = INTERFACE
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if seat.backend == "nccl":
        device = torch.device("cuda", seat.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        seat.backend,
        init_method=f"file://{seat.store}",
        rank=seat.rank,
        world_size=seat.size,
        timeout=timedelta(seconds=seat.timeout),
    )
    assert dist.group.WORLD is not None
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, seat.size)}
    groups[seat.size] = dist.group.WORLD
    pairs = [dist.new_group(p) for p in ([0, 1], [2, 3], [0, 2], [1, 3])] if seat.size == 4 else []
    while True:
        try:
            work, ranks, arguments = pipe.recv()
        except EOFError:
            return
        try:
            mesh = DeviceMesh.from_group(groups[ranks], device.type)
            grid = None
            if ranks == 4 and pairs:
                grid = DeviceMesh.from_group(
                    [pairs[2 + seat.rank % 2], pairs[seat.rank // 2]],
                    device.type,
                    mesh=[[0, 1], [2, 3]],
                    mesh_dim_names=("replicate", "shard"),
                )
            member = Member(seat.rank, ranks, groups[ranks], mesh, grid, device, interface)
            # a GPU's memory is not shared with the process that asked
            answer = tree_map_only(torch.Tensor, torch.Tensor.cpu, work(member, *arguments))
            pipe.send((True, answer))
        except BaseException:  # whatever it is, the one who asked must hear of it
            pipe.send((False, traceback.format_exc()))
