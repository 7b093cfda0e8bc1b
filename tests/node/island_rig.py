"""Islands of rank processes that take part in one run after another, and single nodes beside them."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.processes import PARENT_KEY
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
    """A process that is one rank of an island; what it tells comes line by line."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            PARENT_KEY: str(os.getpid()),
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
    """The ranks of one node: ``size`` new processes, or some that were ranks of others before."""

    def __init__(self, size: int, processes: Sequence[RankProcess] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.ranks = list(processes) or [RankProcess() for _ in range(size)]
        self._runs = 0

    @property
    def size(self) -> int:
        return len(self.ranks)

    def join(self, invite: Invite, **options: Any) -> str:
        """Take part from now on; returns the node's name."""
        for number, rank in enumerate(self.ranks):
            environment = {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port),
                "TORCHELASTIC_RESTART_COUNT": str(self._runs),
            }
            rank.order(environment=environment, invite=str(invite), options={"wait": 60.0, **options})
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
