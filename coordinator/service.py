"""The coordinator as a process: hub, server and metrics from start to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from coordinator.access import Access
from coordinator.chunk_store import ChunkStore, FileChunkStore
from coordinator.dashboard.recorder import Recorder
from coordinator.dashboard.server import DashboardServer
from coordinator.dialing import knock, reach
from coordinator.ending import ENDED
from coordinator.events import Event, Listener, ignore
from coordinator.hub import Hub
from coordinator.journal import Journal, Post
from coordinator.mesh import Dial
from coordinator.metrics import Metrics, MetricsServer
from coordinator.plan import RunPlan
from coordinator.pool import ThreadPool
from coordinator.run import Run
from coordinator.server import serve
from coordinator.timer import LoopTimer
from optim.bits import tally
from protos.address import Address
from protos.allocator import keep_freed_memory
from protos.buckets import TableSchedule
from protos.certificate import Credential

if TYPE_CHECKING:
    from protos.runfile import RunFile

log = logging.getLogger(__name__)

STOP_SECONDS: Final = 5.0  # for nodes to leave after they were told to
_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Outcome:
    """How a coordinator ended: ``phase`` (``"done"``, ``"failed"`` or ``"suspended"``), the reason in words,
    rounds committed."""

    phase: str
    reason: str
    round: int


@dataclass(frozen=True)
class Keeping:
    """What outlasts a coordinator, who is told what it does, and how it proves who it is."""

    journal: Callable[[Post], Journal] | None
    chunks: ChunkStore
    on_event: Listener
    watching: Watching | None = None
    credential: Credential | None = None
    swarm_secret: str = ""


@dataclass(frozen=True)
class Watching:
    """The dashboard that a coordinator serves.

    Attributes:
        listen: where.
        exact: whether another port will not do.
        sentence: puts events into words.
    """

    listen: Address
    exact: bool
    sentence: Callable[[Event], str]


@dataclass(frozen=True)
class Started:
    """Where a coordinator listens; ``metrics`` and ``dashboard`` are ``None`` where none are served."""

    address: Address
    metrics: Address | None
    dashboard: Address | None = None


def run_coordinator(
    run_file: RunFile,
    tables: TableSchedule,
    token: str | Access,
    *,
    listen: Address | None = None,
    metrics_listen: Address | None = None,
    on_started: Callable[[Started], None] | None = None,
    stop_event: threading.Event | None = None,
    stay: bool = False,
    nodes: int | None = None,
    dtype: str = "float32",
    journal: Callable[[Post], Journal] | None = None,
    snapshots: Path | None = None,
    snapshot_every: int = 0,
    on_event: Listener = ignore,
    watching: Watching | None = None,
    credential: Credential | None = None,
    swarm_secret: str = "",
) -> Outcome:
    """Coordinate a run until it has ended and every node has left; blocks.

    SIGINT and ``stop_event`` end it early: nodes are told why, then the port closes. SIGTERM, where there is
    a journal, only suspends it: nodes are told nothing and hold, and the next coordinator with the journal
    goes on. With ``stay`` it goes on answering status requests after the end, until it is stopped.

    Args:
        run_file: the run.
        tables: its bucket tables.
        token: what nodes must show, or who may do what.
        listen: where; the run file's ``[coordinator] listen`` by default.
        metrics_listen: where ``/metrics`` is served; ``None`` serves none.
        on_started: called once it listens, with the real ports.
        stop_event: set it, from any thread, to stop.
        stay: keep answering after the run.
        nodes: how many to wait for before the first round; ``None``: as the run file says. A run that goes on
            with fewer nodes than it had still is the same run.
        dtype: of the shared parameters.
        journal: opens the journal, given how to call back on the event loop; ``None``: nothing is remembered
            beyond this call.
        snapshots: folder of the snapshots; a temporary one if there is none.
        snapshot_every: rounds between two snapshots; 0: as the results since the last one ask.
        on_event: is told what happens.
        watching: the dashboard; ``None`` serves none.
        swarm_secret: that the nodes of the run share; random, and of this call only, if empty.
        credential: proves to nodes who this is; ``None``: nothing does, and nothing is encrypted.

    Raises:
        ListenError, MetricsError, DashboardError: an address cannot be used.
    """
    keep_freed_memory()
    plan = RunPlan.of(run_file, nodes=nodes, dtype=dtype, snapshot_every=snapshot_every)
    where = listen or run_file.coordinator.address
    with ExitStack() as stack:
        swarm_secret = swarm_secret or secrets.token_urlsafe(24)
        folder = snapshots or Path(stack.enter_context(TemporaryDirectory(prefix="atoll-")))
        keeping = Keeping(journal, FileChunkStore(folder), on_event, watching, credential, swarm_secret)
        main = _coordinate(plan, tables, token, where, metrics_listen, on_started, stop_event, stay, keeping)
        return _run(main)


def _run(main: Coroutine[Any, Any, Outcome]) -> Outcome:
    try:
        import uvloop
    except ImportError:  # not on every platform; the standard loop does the same, a little slower
        return asyncio.run(main)
    return uvloop.run(main)


async def _coordinate(
    plan: RunPlan,
    tables: TableSchedule,
    token: str | Access,
    listen: Address,
    metrics_listen: Address | None,
    on_started: Callable[[Started], None] | None,
    stop_event: threading.Event | None,
    stay: bool,
    keeping: Keeping,
) -> Outcome:
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[str] = loop.create_future()

    def stop(reason: str) -> None:
        if not stopping.done():
            stopping.set_result(reason)

    pool, file_pool = ThreadPool(loop), ThreadPool(loop)
    journal = keeping.journal(loop.call_soon_threadsafe) if keeping.journal is not None else None
    recorder = None
    if (watching := keeping.watching) is not None:
        recorder = Recorder(watching.sentence, keeping.on_event, now=time.monotonic, wall=time.time)
    hub = Hub(
        Run(
            plan,
            tables,
            timer=LoopTimer(loop),
            pool=pool,
            tally=tally,
            journal=journal,
            chunks=keeping.chunks,
            file_pool=file_pool,
            wall=time.time,
            tell=recorder or keeping.on_event,
        )
    )
    hub.run.mesh.dial, hub.run.mesh.knock = _dial(plan.run_digest, keeping.credential), knock
    hub.run.security = security_of(keeping.credential)
    hub.swarm_secret = keeping.swarm_secret
    access = token if isinstance(token, Access) else Access(token)
    metrics: MetricsServer | None = None
    dashboard: DashboardServer | None = None
    try:
        pool.submit(_warm_up, lambda frames, error: None)
        if metrics_listen is not None:
            metrics = MetricsServer(Metrics(hub), metrics_listen)
        if watching is not None and recorder is not None:
            where, exact = watching.listen, watching.exact
            dashboard = DashboardServer(hub, recorder, loop, where, access, exact=exact)
        server = await serve(hub, listen, access, credential=keeping.credential)
        try:
            with _signals(loop, stop):
                if on_started is not None:
                    others = (
                        beside.address if beside is not None else None for beside in (metrics, dashboard)
                    )
                    on_started(Started(server.address, *others))
                await _until_over(hub, stopping, stop_event, stay, lasting=journal is not None)
        finally:
            await server.stop()
    finally:
        if metrics is not None:
            await loop.run_in_executor(None, metrics.close)
        if dashboard is not None:
            await loop.run_in_executor(None, dashboard.close)
        hub.close()
        pool.close()
        file_pool.close()
        if journal is not None:
            await loop.run_in_executor(None, journal.close)
        await loop.shutdown_default_executor()
    return Outcome(hub.run.phase, hub.run.reason, hub.run.round)


def _dial(run_digest: str, credential: Credential | None) -> Dial:
    """How the addresses of nodes are tried: with TLS, if this coordinator has it."""

    async def dial(address: str, certificate: bytes) -> str:
        if credential is not None and not certificate:
            return "it has announced no certificate, and this run's connections are encrypted"
        return await reach(address, run_digest, certificate=certificate)

    return dial


def security_of(credential: Credential | None) -> str:
    """As the status tells it."""
    if credential is None:
        return "none"
    return "mtls" if credential.client_ca else "tls"


async def _until_over(
    hub: Hub,
    stopping: asyncio.Future[str],
    stop_event: threading.Event | None,
    stay: bool,
    *,
    lasting: bool,
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
            if lasting and reason == signal.SIGTERM.name:
                hub.suspend(f"the coordinator was suspended ({reason})")
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
