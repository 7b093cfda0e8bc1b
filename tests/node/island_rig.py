"""Islands of rank processes that take part in one run after another, and single nodes beside them."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from node.events import Event, Joined, RoundDone
from node.launch import Options, join
from protos.invite import Invite
from protos.runfile import RunFile
from tests.waiting import DEADLINE

ROOT = Path(__file__).parents[2]


def small_run(method: str, *, nodes: int, rounds: int, **settings: Any) -> RunFile:
    return RunFile.model_validate(
        {
            "run": {"rounds": rounds, "nodes": nodes, "evaluate_every": 2, "validation_windows": 70},
            "model": {"d_model": 16, "layers": 2, "heads": 2, "context": 8},
            "data": {"batch": 8},
            "method": {"name": method, "warmup": 1, **settings},
        }
    )


class RankProcess:
    """One rank; what it tells comes line by line."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.node.island_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            text=True,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put({"ended": True})

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def until(self, key: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The next line with ``key``, and those before it."""
        before: list[dict[str, Any]] = []
        while True:
            line = self._lines.get(timeout=DEADLINE)
            if key in line:
                return line, before
            assert not line.keys() & {"ended", "failed", "done"}, f"{key} did not come: {line}"
            before.append(line)


class Island:
    """The ranks of one node."""

    def __init__(self, size: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.ranks = [RankProcess(rank, size, port) for rank in range(size)]
        self._runs = 0

    @property
    def size(self) -> int:
        return len(self.ranks)

    def join(self, invite: Invite, **options: Any) -> str:
        """Take part from now on; returns the node's name."""
        for rank in self.ranks:
            rank.order(number=self._runs, invite=str(invite), options={"wait": 60.0, **options})
        self._runs += 1
        name: str = self.ranks[0].until("joined")[0]["joined"]
        return name

    def close(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()


class Single:
    """A node of one process, in a thread of the test."""

    def __init__(self, invite: Invite, **options: Any) -> None:
        self.rounds: list[RoundDone] = []
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
            self.rounds.append(event)

    def wait(self) -> None:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
