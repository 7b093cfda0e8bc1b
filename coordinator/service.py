"""The coordinator as a process: hub, server and metrics from start to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from coordinator.hub import Hub
from coordinator.metrics import Metrics, MetricsServer
from coordinator.plan import RunPlan
from coordinator.pool import ThreadPool
from coordinator.run import ENDED
from coordinator.server import serve
from coordinator.timer import LoopTimer
from optim.bits import tally
from protos.address import Address
from protos.allocator import keep_freed_memory
from protos.buckets import TableSchedule

if TYPE_CHECKING:
    from protos.runfile import RunFile

log = logging.getLogger(__name__)

STOP_SECONDS: Final = 5.0  # for nodes to leave after they were told to
_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``phase`` (``"done"`` or ``"failed"``), the reason in words, rounds committed."""

    phase: str
    reason: str
    round: int


@dataclass(frozen=True)
class Started:
    """Where a coordinator listens; ``metrics`` is ``None`` where none are served."""

    address: Address
    metrics: Address | None


def run_coordinator(
    run_file: RunFile,
    tables: TableSchedule,
    token: str,
    *,
    listen: Address | None = None,
    metrics_listen: Address | None = None,
    on_started: Callable[[Started], None] | None = None,
    stop_event: threading.Event | None = None,
    stay: bool = False,
    nodes: int | None = None,
    dtype: str = "float32",
) -> Outcome:
    """Coordinate a run until it has ended and every node has left; blocks.

    SIGINT, SIGTERM and ``stop_event`` end it early: nodes are told why, then the port closes. With ``stay``
    it goes on answering status requests after the end, until it is stopped.

    Args:
        run_file: the run.
        tables: its bucket tables.
        token: what nodes must show.
        listen: where; the run file's ``[coordinator] listen`` by default.
        metrics_listen: where ``/metrics`` is served; ``None`` serves none.
        on_started: called once it listens, with the real ports.
        stop_event: set it, from any thread, to stop.
        stay: keep answering after the run.
        nodes: how many to wait for before the first round; ``None``: as the run file says. A run that goes on
            with fewer nodes than it had still is the same run.
        dtype: of the shared parameters.

    Raises:
        ListenError, MetricsError: an address cannot be used.
    """
    keep_freed_memory()
    plan = RunPlan.of(run_file, nodes=nodes, dtype=dtype)
    where = listen or run_file.coordinator.address
    main = _coordinate(plan, tables, token, where, metrics_listen, on_started, stop_event, stay)
    try:
        import uvloop
    except ImportError:  # not on every platform; the standard loop does the same, a little slower
        return asyncio.run(main)
    return uvloop.run(main)


async def _coordinate(
    plan: RunPlan,
    tables: TableSchedule,
    token: str,
    listen: Address,
    metrics_listen: Address | None,
    on_started: Callable[[Started], None] | None,
    stop_event: threading.Event | None,
    stay: bool,
) -> Outcome:
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[str] = loop.create_future()

    def stop(reason: str) -> None:
        if not stopping.done():
            stopping.set_result(reason)

    pool = ThreadPool(loop)
    hub = Hub(plan, tables, timer=LoopTimer(loop), pool=pool, tally=tally)
    metrics: MetricsServer | None = None
    try:
        pool.submit(_warm_up, lambda frames, error: None)
        if metrics_listen is not None:
            metrics = MetricsServer(Metrics(hub), metrics_listen)
        server = await serve(hub, listen, token)
        try:
            with _signals(loop, stop):
                if on_started is not None:
                    on_started(Started(server.address, metrics.address if metrics is not None else None))
                await _until_over(hub, stopping, stop_event, stay)
        finally:
            await server.stop()
    finally:
        if metrics is not None:
            await loop.run_in_executor(None, metrics.close)
        hub.close()
        pool.close()
        await loop.shutdown_default_executor()
    return Outcome(hub.run.phase, hub.run.reason, hub.run.round)


async def _until_over(
    hub: Hub, stopping: asyncio.Future[str], stop_event: threading.Event | None, stay: bool
) -> None:
    """Wait for the end of the run and of its nodes, or for a reason to stop."""
    finished = asyncio.ensure_future(hub.run.finished.wait())
    polling = asyncio.ensure_future(_poll(stop_event)) if stop_event is not None else None
    waits = {stopping, polling} if polling is not None else {stopping}
    try:
        await asyncio.wait({finished, *waits} if not stay else waits, return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            reason = stopping.result() if stopping.done() else "it was asked to stop"
            if hub.run.phase not in ENDED:
                log.info("stopping: %s", reason)
            hub.stop(f"the coordinator was stopped ({reason})")
            await asyncio.wait({finished}, timeout=STOP_SECONDS)
    finally:
        for task in (finished, polling):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in (finished, polling) if task), return_exceptions=True)


async def _poll(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: Callable[[str], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call ``stop`` with the signal's name; on the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop, number.name)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _warm_up() -> list[bytes]:
    """Compile the majority kernels before the first round needs them."""
    votes = [np.zeros(64, np.uint8) for _ in range(3)]
    tally(votes, casting=0)
    tally(votes, [1, 2, 3], casting=0)
    return []
