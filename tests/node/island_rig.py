"""Islands of rank processes that take part in one run after another, and single nodes beside them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import torch.distributed as dist

from node.events import Event, Joined, RoundDone
from node.launch import Options, join
from protos.invite import Invite
from protos.runfile import RunFile
from tests.node.island_driver import serve
from tests.waiting import DEADLINE

FORKS: Any = multiprocessing.get_context("forkserver")  # all ranks of all islands import torch once
FORKS.set_forkserver_preload(["tests.node.island_driver"])


def small_run(method: str, *, nodes: int, rounds: int, **settings: Any) -> RunFile:
    return RunFile.model_validate(
        {
            "run": {"rounds": rounds, "nodes": nodes, "evaluate_every": 2, "validation_windows": 70},
            "model": {"d_model": 16, "layers": 2, "heads": 2, "context": 8},
            "data": {"batch": 8},
            # Nobody is late on a busy machine.
            "round": {"deadline": 200.0, "start_timeout": 200.0, "adaptive": False},
            "method": {"name": method, "warmup": 1, **settings},
        }
    )


class RankProcess:
    """A process that is one rank of an island; what it tells comes line by line."""

    def __init__(self) -> None:
        ours, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._orders, heard = os.fdopen(os.dup(ours.fileno()), "w"), os.fdopen(os.dup(ours.fileno()))
        ours.close()
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, args=(heard,), daemon=True).start()

    def _read(self, heard: TextIO) -> None:
        with heard, contextlib.suppress(ConnectionResetError):
            for line in heard:
                self._lines.put(json.loads(line))
        self._lines.put({"ended": True})

    def order(self, **order: Any) -> None:
        self._orders.write(json.dumps(order) + "\n")
        self._orders.flush()

    def until(self, key: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The next line with ``key``, and those before it."""
        before: list[dict[str, Any]] = []
        while True:
            line = self._lines.get(timeout=DEADLINE)
            if key in line:
                return line, before
            assert not line.keys() & {"ended", "failed", "done"}, f"{key} did not come: {line}"
            before.append(line)

    def rest(self) -> list[dict[str, Any]]:
        """What it tells until it ends; its exit code may come later."""
        told = []
        while "ended" not in (line := self._lines.get(timeout=DEADLINE)):
            told.append(line)
        return told

    def code(self) -> int:
        """Its exit code, once it has ended."""
        self.process.join(DEADLINE)
        code: int = self.process.exitcode
        return code

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Its exit code, once it has ended, and what it has told until then."""
        told = self.rest()
        return self.code(), told


class Island:
    """The ranks of one node: ``size`` new processes, or some that were ranks of others before."""

    def __init__(self, size: int, processes: Sequence[RankProcess] = ()) -> None:
        # With torchrun it is not one of the ranks either that holds the store.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = list(processes) or [RankProcess() for _ in range(size)]
        self._runs = 0

    @property
    def size(self) -> int:
        return len(self.ranks)

    def join(
        self, invite: Invite, orders: Mapping[int, Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """Take part from now on, with more ``orders`` for some ranks; returns the node's name."""
        for number, rank in enumerate(self.ranks):
            environment = {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(self._runs),
            }
            rank.order(
                environment=environment,
                invite=str(invite),
                options={"wait": 60.0, **options},
                **(orders or {}).get(number, {}),
            )
        self._runs += 1
        name: str = self.ranks[0].until("joined")[0]["joined"]
        return name

    def close(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()


class Single:
    """A node of one process, in a thread of the test."""

    def __init__(self, invite: Invite, **options: Any) -> None:
        self.rounds: list[RoundDone] = []
        self._news = threading.Condition()
        self._joined = threading.Event()
        self._thread = threading.Thread(
            target=join, args=(invite, Options(device="cpu", **options), self._hear), daemon=True
        )
        self._thread.start()
        assert self._joined.wait(DEADLINE), "the node has not joined"

    def _hear(self, event: Event) -> None:
        if isinstance(event, Joined):
            self._joined.set()
        elif isinstance(event, RoundDone):
            with self._news:
                self.rounds.append(event)
                self._news.notify_all()

    def reach(self, round_index: int) -> None:
        """Wait until it has applied that round."""
        with self._news:
            assert self._news.wait_for(
                lambda: bool(self.rounds) and self.rounds[-1].round >= round_index, DEADLINE
            ), f"round {round_index + 1} does not come"

    def wait(self) -> None:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
