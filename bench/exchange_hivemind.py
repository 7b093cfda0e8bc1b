"""hivemind's own averager for ``python -m bench exchange``: a process for each peer, led by lines of text.

It forks, and hangs or leaves processes behind when it fails, so it lives in processes of its own, each with a
group and deadlines. A peer finds its group before the clock starts: only the all-reduce is timed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.exchange_work import Call

ROOT: Final = Path(__file__).resolve().parents[1]
START_SECONDS: Final = 120.0
STEP_SECONDS: Final = 120.0
MATCHING_SECONDS: Final = 5.0  # its default; a group that is complete does not wait for them
POLL_SECONDS: Final = 0.005


class AveragerFailed(RuntimeError):
    """A peer did not do what it was told; the text says what, with the end of its log."""


@dataclass(frozen=True)
class Seat:
    """What a peer is started with.

    Attributes:
        peers: of the group.
        elements: that are averaged, fp32, sent as fp16.
        host: address to listen at.
        interface: whose bytes are counted.
        namespace: path of its network namespace, or empty.
    """

    peers: int
    elements: int
    host: str
    interface: str
    namespace: str


class Averagers:
    """Processes that average with each other."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], logs: Sequence[Path]) -> None:
        self._processes, self._logs = processes, logs

    def average(self) -> list[Call]:
        """Once; what each peer saw of it.

        Raises:
            AveragerFailed: it did not come about.
        """
        for words in ("match", "average"):
            answers = self._ask(words, STEP_SECONDS)
        return [Call(answer["start"], answer["end"], answer["sent"]) for answer in answers]

    def meet(self) -> None:
        """Make the peers known to each other: the first one is where the others begin.

        Raises:
            AveragerFailed: one did not start.
        """
        addresses: list[str] = []
        for index in range(len(self._processes)):
            self._tell(index, json.dumps(addresses))
            answer = self._answer(index, "its start", START_SECONDS)
            addresses = addresses or answer["addresses"]

    def _ask(self, words: str, seconds: float) -> list[Any]:
        for index in range(len(self._processes)):
            self._tell(index, words)
        return [self._answer(index, words, seconds) for index in range(len(self._processes))]

    def _tell(self, index: int, line: str) -> None:
        pipe = self._processes[index].stdin
        assert pipe is not None
        try:
            pipe.write(line + "\n")
            pipe.flush()
        except OSError as error:
            raise self._failed(index, line) from error

    def _answer(self, index: int, what: str, seconds: float) -> Any:
        pipe = self._processes[index].stdout
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            line = pipe.readline() if selector.select(seconds) else ""
        if not line:
            raise self._failed(index, what)
        return json.loads(line)

    def _failed(self, index: int, what: str) -> AveragerFailed:
        tail = self._logs[index].read_text(errors="replace")[-2000:]
        return AveragerFailed(f"hivemind's peer {index} failed at {what!r}: {tail}")


@contextlib.contextmanager
def averagers(seats: Sequence[Seat], folder: Path) -> Iterator[Averagers]:
    """Start a peer for each seat; they and what they have started end with the context.

    Raises:
        AveragerFailed: one did not start.
    """
    from deploy.processes import PARENT_KEY

    logs = [folder / f"hivemind-{index}.log" for index in range(len(seats))]
    processes: list[subprocess.Popen[str]] = []
    environment = {
        **os.environ,
        PARENT_KEY: str(os.getpid()),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    try:
        for seat, log in zip(seats, logs, strict=True):
            with log.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "bench.exchange_hivemind", json.dumps(asdict(seat))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    env=environment,
                )
            processes.append(process)
        group = Averagers(processes, logs)
        group.meet()
        yield group
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not have got as far as to lead a group
        for process in processes:
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


# ------------------------------------------------------------------------------------------------ a peer


def _peer(seat: Seat) -> None:
    from bench.namespaces import enter
    from deploy.processes import PARENT_KEY, follow_parent

    os.setpgrp()  # no session: one would have another share of the machine's time than the other contenders
    follow_parent()
    # A child of its own, forked from it, shall not outlive it either.
    os.register_at_fork(after_in_child=lambda: follow_parent({PARENT_KEY: str(os.getppid())}))
    if seat.namespace:
        enter(seat.namespace)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log

    warnings.simplefilter("ignore")
    import hivemind
    import torch
    from hivemind.averaging.control import AveragingStage
    from hivemind.compression import Float16Compression
    from hivemind.utils import get_dht_time

    from bench.namespaces import bytes_sent

    logging.getLogger("hivemind").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    known = json.loads(sys.stdin.readline())
    table = hivemind.DHT(
        host_maddrs=[f"/ip4/{seat.host}/tcp/0"], initial_peers=known, start=True, nat_port_map=False
    )
    averager = hivemind.DecentralizedAverager(
        [torch.randn(seat.elements)],
        table,
        start=True,
        prefix="bench",
        target_group_size=seat.peers,
        min_group_size=seat.peers,
        min_matchmaking_time=MATCHING_SECONDS,
        compression=Float16Compression(),
    )
    _say(out, {"addresses": [str(address) for address in table.get_visible_maddrs()]})
    step: Any = None
    for line in sys.stdin:
        if line.strip() == "match":
            step = averager.step(
                scheduled_time=get_dht_time() + MATCHING_SECONDS,
                timeout=STEP_SECONDS,
                require_trigger=True,
                wait=False,
            )
            _until(lambda step=step: step.stage is AveragingStage.AWAITING_TRIGGER or step.done())  # type: ignore[misc]
            _say(out, {})
            continue
        sent, start = bytes_sent(seat.interface), time.monotonic()
        step.allow_allreduce()
        group = step.result(STEP_SECONDS)
        end = time.monotonic()
        if group is None or len(group) != seat.peers:
            raise AveragerFailed(f"{group} has averaged, not a group of {seat.peers}")
        _say(out, {"start": start, "end": end, "sent": bytes_sent(seat.interface) - sent})


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + STEP_SECONDS
    while not holds():
        if time.monotonic() > end:
            raise AveragerFailed("no group was found")
        time.sleep(POLL_SECONDS)


def _say(out: Any, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


if __name__ == "__main__":
    _peer(Seat(**json.loads(sys.argv[1])))
