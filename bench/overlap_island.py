"""Which collectives a round of an island costs beyond the passes over its model: none that move tensors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bench.island_ranks import Member, world
from protos.runfile import RunFile

if TYPE_CHECKING:
    from coordinator.service import Started
    from node.exchange.base import RoundOrder
    from node.worker import Worker

RANKS: Final = 2
TOKEN: Final = "bench"
SECONDS: Final = 120.0


@dataclass(frozen=True)
class Counts:
    """Collectives of one rank.

    Attributes:
        passes: that move weights and gradients, of one forward and backward pass.
        rounds: that move tensors in the model's own process group, of every round.
        control: in the group in which ranks agree and report, of every round.
        control_bytes: that this rank gave to those, of every round.
    """

    passes: int
    rounds: list[int]
    control: list[int]
    control_bytes: list[int]

    @property
    def extra(self) -> int:
        """The largest difference between a round and a forward and backward pass."""
        return max(abs(count - self.passes) for count in self.rounds)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what reaches the process groups."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        """Count from zero."""
        self.data = self.control = self.control_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(args)
        return func(*args, **(kwargs or {}))

    def _count(self, args: Any) -> None:
        if dist.group.WORLD is None or dist.group.WORLD.group_name in _groups(args):
            self.data += 1
            return
        self.control += 1
        tensors = [leaf for leaf in tree_iter(args[1]) if torch.is_tensor(leaf)]
        self.control_bytes += sum(tensor.nbytes for tensor in tensors)


def _groups(args: Any) -> set[str]:
    """Names of the process groups among the arguments of an operation."""
    found: set[str] = set()
    for leaf in args:
        if isinstance(leaf, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # a reduction is such an object as well
                found.add(dist.ProcessGroup.unbox(leaf).group_name)
    return found


def count(method: str, *, rounds: int) -> list[Counts]:
    """Let an island of two ranks take part in a run, streaming, and count; by rank.

    Raises:
        RankFailed: a rank failed.
    """
    run = RunFile.model_validate(
        {
            "run": {"name": "bench-gathers", "nodes": 1, "rounds": rounds, "evaluate_every": 0},
            "model": {"d_model": 64, "layers": 3, "heads": 2, "context": 32},
            "data": {"batch": 4},
            "method": {"name": method, "warmup": 0},
        }
    )
    with _coordinator(run) as port, world(RANKS) as ranks:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return ranks.run(take_part, RANKS, port, store.port)


@contextlib.contextmanager
def _coordinator(run: RunFile) -> Iterator[int]:
    """A coordinator in a thread; yields its port."""
    from coordinator.service import run_coordinator
    from node.model import model_on_meta
    from optim.methods import build_method
    from protos.address import Address

    started: Future[Started] = Future()
    stop = threading.Event()
    tables = build_method(run.method, model_on_meta(run.model)).tables

    def coordinate() -> None:
        try:
            where = Address("127.0.0.1", 0)
            run_coordinator(run, tables, TOKEN, listen=where, on_started=started.set_result, stop_event=stop)
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    thread = threading.Thread(target=coordinate, name="bench-coordinator", daemon=True)
    thread.start()
    try:
        yield started.result(SECONDS).address.port
    finally:
        stop.set()
        thread.join(SECONDS)


def take_part(member: Member, port: int, store: int) -> Counts:
    """The work of a rank: join as torchrun's processes do, and count."""
    from node.launch import Options, join
    from node.worker import Worker
    from protos.invite import Invite

    os.environ.update(
        RANK=str(member.rank),
        LOCAL_RANK=str(member.rank),
        WORLD_SIZE=str(member.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store),
    )
    counted = Counts(0, [], [], [])
    seen = Collectives()
    through = Worker._round

    def watched(worker: Worker, order: RoundOrder) -> None:
        nonlocal counted
        if order.evaluate:  # passes over the validation text, after the round
            through(worker, order)
            return
        if not counted.rounds:
            counted = Counts(_passes(worker, seen), [], [], [])
        seen.clear()
        with seen:
            through(worker, order)
        counted.rounds.append(seen.data)
        counted.control.append(seen.control)
        counted.control_bytes.append(seen.control_bytes)

    Worker._round = watched  # type: ignore[method-assign, assignment]
    try:
        join(Invite(TOKEN, "127.0.0.1", port), Options(device="cpu", threads=1, wait=60.0))
    finally:
        Worker._round = through  # type: ignore[method-assign]
    return counted


def _passes(worker: Worker, seen: Collectives) -> int:
    """Collectives of a forward and backward pass; not of the first one, in which buffers are made."""
    model, optimizer = worker._training._model, worker._optimizer
    tokens = worker._training._data.batch(0, 1, 0)
    for _ in range(2):
        seen.clear()
        with seen:
            model.loss(tokens).backward()
        optimizer.zero_grad(set_to_none=True)
    return seen.data
