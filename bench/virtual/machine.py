"""The coordinator's machine: a disk that outlives it, a clock that may jump, a pool whose work takes time.

Each incarnation has handles of its own; once it is dead they do nothing any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from bench.virtual.line import Process
from bench.virtual.schedule import Schedule
from bench.virtual.state import BATCH, RUN_DIGEST, TABLES
from coordinator import active_round
from coordinator.chunk_store import ChunkStore
from coordinator.hub import Hub
from coordinator.journal import (
    AdminRecord,
    Done,
    Loaded,
    MemoryJournal,
    Recovered,
    RosterRecord,
    RoundRecord,
    StartRecord,
)
from coordinator.plan import RunPlan
from coordinator.result import ResultRing
from coordinator.rounds import Policy
from coordinator.run import Run
from optim import reduction
from optim.aggregate import TallyFunction
from optim.mean import F32

WRITE: Final = (0.002, 0.03)  # seconds until a record is durable
REDUCE: Final = (0.001, 0.01)
POLICY: Final = Policy(deadline=4.0, start_timeout=90.0, quorum=0.6)

Hook = Callable[[str, int], None]  # phase, round
MakeRun = Callable[..., Run]
Committed = Callable[[RoundRecord, bytes], None]


class Disk:
    """What is durable: a journal, and who is told of every round that comes into it."""

    def __init__(
        self,
        on_begin: Callable[[StartRecord], None],
        on_commit: Committed,
        on_agreed: Callable[[int, str], None],
        kept: int = 0,
    ) -> None:
        self.journal = MemoryJournal()
        self.kept = kept  # rounds whose results can be read; 0: all
        self.on_begin = on_begin
        self.on_commit = on_commit
        self.on_agreed = on_agreed

    def first(self) -> int:
        """The first round whose result can be read."""
        return max(0, self.journal.next - self.kept) if self.kept else 0


class Writer:
    """A :class:`coordinator.journal.Journal` whose records become durable a little later, in order.

    What a crash finds unwritten is lost.
    """

    def __init__(self, disk: Disk, process: Process, draws: random.Random, hook: Hook) -> None:
        self.disk = disk
        self.recovered: Recovered | None = disk.journal.recovered
        self._process = process
        self._draws = draws
        self._hook = hook
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._queue: list[Callable[[], None]] = []
        self.dead = False

    def begin(self, start: StartRecord) -> None:
        """See :class:`coordinator.journal.Journal`."""

        def write() -> None:
            self.disk.on_begin(start)
            self.disk.journal.begin(start)

        self._write(write)

    @property
    def administration(self) -> AdminRecord:
        """See :class:`coordinator.journal.Journal`."""
        return self.disk.journal.administration

    def administer(self, record: AdminRecord) -> None:
        """See :class:`coordinator.journal.Journal`."""
        self._write(lambda: self.disk.journal.administer(record))

    def roster(self, record: RosterRecord) -> None:
        """See :class:`coordinator.journal.Journal`."""
        self._write(lambda: self.disk.journal.roster(record))

    def commit(
        self, record: RoundRecord, payload: Sequence[memoryview], memory: Mapping[str, F32] | None, done: Done
    ) -> None:
        """See :class:`coordinator.journal.Journal`."""

        def write() -> None:
            self.disk.on_commit(record, b"".join(payload))
            self.disk.journal.commit(record, payload, memory, lambda error: None)
            self._hook("durable", record.round)
            self._later(lambda: done(None))

        self._write(write)
        self._hook("journaling", record.round)

    def agreed(self, round_index: int, digest: str) -> None:
        """See :class:`coordinator.journal.Journal`."""
        self.disk.on_agreed(round_index, digest)
        self._write(lambda: self.disk.journal.agreed(round_index, digest))

    def first_kept(self, end: int) -> int:
        """See :class:`coordinator.journal.Journal`."""
        first = self.disk.journal.first_kept(end)
        return min(end, max(first, self.disk.first()))

    def load(self, round_index: int, done: Loaded) -> None:
        """See :class:`coordinator.journal.Journal`."""
        kept = self.disk.journal.rounds.get(round_index) if round_index >= self.disk.first() else None
        self._later(lambda: done(kept))

    def forget(self, round_index: int) -> None:
        """See :class:`coordinator.journal.Journal`."""
        self._write(lambda: self.disk.journal.forget(round_index))

    def skipped(self, round_index: int, samples: int) -> None:
        """See :class:`coordinator.journal.Journal`."""
        self._write(lambda: self.disk.journal.skipped(round_index, samples))

    def close(self) -> None:
        """Write what is left."""
        while self._queue and not self.dead:
            self._queue.pop(0)()
        self.dead = True

    def _write(self, act: Callable[[], None]) -> None:
        self._due = max(self._due, self._loop.time() + self._draws.uniform(*WRITE))
        self._queue.append(act)
        self._loop.call_at(self._due, self._next)

    def _next(self) -> None:
        if self._queue and not self.dead:
            self._queue.pop(0)()

    def _later(self, act: Callable[[], None]) -> None:
        """A call back into the coordinator, once it runs."""

        def call() -> None:
            if self.dead:
                return
            if self._process.awake_at > self._loop.time():
                self._loop.call_at(self._process.awake_at, call)
            else:
                act()

        self._loop.call_at(max(self._loop.time() + 0.001, self._process.awake_at), call)


class Clock:
    """A :class:`coordinator.timer.Timer` that may jump; alarms ring late while the process is asleep."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ahead = 0.0
        self._alarms: set[_Alarm] = set()
        self._stopped = False

    def now(self) -> float:
        """See :class:`coordinator.timer.Timer`."""
        return self._loop.time() + self._ahead

    def call_at(self, when: float, callback: Callable[[], None]) -> _Alarm:
        """See :class:`coordinator.timer.Timer`."""
        alarm = _Alarm(self, when, callback)
        if not self._stopped:
            self._alarms.add(alarm)
            self._set(alarm)
        return alarm

    def jump(self, seconds: float) -> None:
        """It is ``seconds`` later at once."""
        self._ahead += seconds
        for alarm in sorted(self._alarms, key=lambda alarm: alarm.when):
            self._set(alarm)

    def stop(self) -> None:
        """Nothing rings any more."""
        self._stopped = True
        for alarm in list(self._alarms):
            alarm.cancel()

    def _set(self, alarm: _Alarm) -> None:
        if alarm.handle is not None:
            alarm.handle.cancel()
        when = max(alarm.when - self._ahead, self._loop.time(), self._process.awake_at)
        alarm.handle = self._loop.call_at(when, self._ring, alarm)

    def _ring(self, alarm: _Alarm) -> None:
        if self._process.awake_at > self._loop.time() or alarm.when > self.now():
            self._set(alarm)
        else:
            self._alarms.discard(alarm)
            alarm.callback()

    def forget(self, alarm: _Alarm) -> None:
        """It is not to ring."""
        self._alarms.discard(alarm)


class _Alarm:
    def __init__(self, clock: Clock, when: float, callback: Callable[[], None]) -> None:
        self.when, self.callback = when, callback
        self.handle: asyncio.TimerHandle | None = None
        self._clock = clock

    def cancel(self) -> None:
        """See :class:`coordinator.timer.Alarm`."""
        self._clock.forget(self)
        if self.handle is not None:
            self.handle.cancel()


class Pool:
    """A :class:`coordinator.active_round.Pool` whose work takes virtual time; one job after the other."""

    def __init__(self, process: Process, draws: random.Random, hook: Callable[[], None]) -> None:
        self._process = process
        self._draws = draws
        self._hook = hook
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0
        self.dead = False

    def submit(self, work: Callable[[], Any], done: Callable[..., None]) -> Future[Any]:
        """See :class:`coordinator.active_round.Pool`."""
        self._free_at = max(self._free_at, self._loop.time()) + self._draws.uniform(*REDUCE)
        future: Future[Any] = Future()
        self._loop.call_at(self._free_at, self._run, work, done, future)
        self._hook()
        return future

    def _run(self, work: Callable[[], Any], done: Callable[..., None], future: Future[Any]) -> None:
        if self.dead:
            return
        if self._process.awake_at > self._loop.time():
            self._loop.call_at(self._process.awake_at, self._run, work, done, future)
            return
        try:
            outcome = work()
        except Exception as error:
            done(None, error)
        else:
            future.set_result(outcome)
            done(outcome, None)


class Machine:
    """One incarnation of the coordinator, from its start on the disk as it is to its death.

    Attributes:
        hub: what is under test.
        clock: its.
    """

    def __init__(
        self,
        schedule: Schedule,
        disk: Disk,
        chunks: ChunkStore,
        process: Process,
        draws: random.Random,
        *,
        tally: TallyFunction,
        hook: Hook,
        make_run: MakeRun,
    ) -> None:
        self.clock = Clock(process)
        self._writer = Writer(disk, process, draws, hook)
        self._pools = (
            Pool(process, draws, lambda: hook("reducing", self.hub.run.round)),
            Pool(process, draws, lambda: None),
        )
        self.hub = Hub(
            make_run(
                plan_of(schedule),
                TABLES,
                timer=self.clock,
                pool=self._pools[0],
                tally=tally,
                journal=self._writer,
                chunks=chunks,
                file_pool=self._pools[1],
            )
        )
        if schedule.kept:
            self.hub.run.results = ResultRing(schedule.kept)

    def die(self) -> None:
        """Nothing that it has begun goes on."""
        self._writer.dead = True
        self.clock.stop()
        for pool in self._pools:
            pool.dead = True


def plan_of(schedule: Schedule) -> RunPlan:
    return RunPlan(
        name="simulated",
        run_file="[run]\n",
        run_digest=RUN_DIGEST,
        method="sign-muon",
        rounds=schedule.rounds,
        nodes=schedule.nodes,
        evaluate_every=0,
        batch=BATCH,
        policy=POLICY,
        heartbeat=1.0,
        stall=8.0,
        snapshot_every=4,
    )


@contextlib.contextmanager
def pooled() -> Iterator[None]:
    """Small payloads are reduced in the pool, as large ones are."""
    inline = reduction.INLINE_BYTES
    vars(active_round)["INLINE_BYTES"] = 0  # a constant everywhere else
    try:
        yield
    finally:
        vars(active_round)["INLINE_BYTES"] = inline
