"""A world: one coordinator after the other on one disk, nodes, the network, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from bench.virtual import loop
from bench.virtual.invariants import Checker
from bench.virtual.line import KEEPALIVE, Line
from bench.virtual.loop import VirtualLoop
from bench.virtual.machine import Disk, Machine, MakeRun
from bench.virtual.network import Call
from bench.virtual.node import Node
from bench.virtual.schedule import COORDINATOR, JOIN, Fault, Schedule
from bench.virtual.site import Site
from coordinator.chunk_store import MemoryChunkStore
from coordinator.ending import ENDED
from coordinator.hub import Hub
from coordinator.journal import RoundRecord
from coordinator.run import Run
from node.exchange.base import ExchangeError
from protos import atoll_pb2 as pb

PATIENCE: Final = 400.0  # virtual seconds without a commit, and without a fault, that are too many
SUPERVISOR: Final = 2.0  # seconds after which a process that ended by itself is started again
OUTAGE: Final = 3.0  # of a coordinator, where the script does not say

_inside: contextvars.ContextVar[str] = contextvars.ContextVar("inside", default="")


class World:
    """Everything in one schedule. ``make_run`` is there for tests, which break it on purpose."""

    def __init__(self, schedule: Schedule, virtual: VirtualLoop, make_run: MakeRun = Run) -> None:
        self.schedule = schedule
        self.loop = virtual
        self.checker = Checker()
        self.site = Site()
        self.log: list[str] = []
        self.fired = 0
        self.hub: Hub | None = None
        self._make_run = make_run
        self._waiting = list(schedule.faults)
        self._draws = random.Random(f"{schedule.seed}/coordinator")
        self._disk = Disk(self.checker.begun, self._committed, self.checker.agreed, schedule.kept)
        self._chunks = MemoryChunkStore()
        self._machine: Machine | None = None
        self._lines: dict[str, Line] = {}
        self._nodes: dict[str, Node] = {}  # the present process of each
        self._tasks: dict[str, set[asyncio.Task[Any]]] = {}  # by process
        self._starts = 0
        self._moved_at = virtual.time()  # the last commit, or the end of the last fault
        self._announced = -1
        self._away: set[str] = set()
        self._gone: set[str] = set()  # left for good
        self.site.on_write = self._said
        self.site.on_answer = self._asked
        self.site.on_error = lambda call, error: self.checker.fail(
            "error", f"the coordinator's {call.name} failed: {_origin(error)}"
        )
        virtual.set_task_factory(self._task)
        virtual.set_exception_handler(self._unexpected)

    # ------------------------------------------------------------------------------------ from begin to end

    async def run(self) -> None:
        """Until the run is done, or can go on no more."""
        await self.begin()
        while not self.over:
            await asyncio.sleep(1.0)
        self.end()

    async def begin(self) -> None:
        """Start the coordinator and the first nodes."""
        self.start_hub()
        for index in range(self.schedule.nodes):
            self.start(f"n{index}")
        self._join_latecomers(0)

    @property
    def over(self) -> bool:
        """Whether everybody has left, or nothing has happened for too long."""
        if self.hub is not None and self.hub.run.phase in ENDED and not self._present():
            return True
        if self.loop.time() - self._moved_at > PATIENCE:
            self.checker.fail("progress", f"nothing was committed for {PATIENCE:g} s: {self._state()}")
            return True
        return False

    def end(self) -> None:
        """Judge what has come of it."""
        if self.hub is not None and self.hub.run.phase != "done" and not self.checker.violations:
            if self._recoverable():
                self.checker.fail("progress", f"the run ended early: {self._state()}")
            self.note("nobody and nothing held the shared state any more")
        self.checker.over(self._disk.journal.rounds)

    def _recoverable(self) -> bool:
        """Whether a node, in its memory or its checkpoint, or a snapshot holds a state from which the results
        that are kept lead on."""
        first = self._disk.first()
        held = [
            node.replica.round if node.process.alive else node.saved[0][0] if node.saved else 0
            for node in self._nodes.values()
        ]
        held += [pb.Manifest.FromString(manifest).round for _, manifest in self._chunks.kept()]
        return max(held) >= first

    def _present(self) -> list[str]:
        return [name for name in self._nodes if name not in self._gone] + sorted(self._away)

    def _state(self) -> str:
        hub = self.hub
        if hub is None:
            return "the coordinator is down"
        run = hub.run
        nodes = ", ".join(f"{node.name}={node.node} {node.state}" for node in run.registry.nodes.values())
        waits = run.active.waiting() if run.active is not None else run.reason
        return f"round {run.round}, {run.phase} ({waits}); nodes: {nodes or 'none'}; {self.loop.waits()}"

    def note(self, text: str) -> None:
        """For people who look for the cause of a violation."""
        self.log.append(f"{self.loop.time() - loop.START:9.3f}  {text}")

    def _committed(self, record: RoundRecord, payload: bytes) -> None:
        self._moved_at = max(self._moved_at, self.loop.time())
        trained = " ".join(f"{node}:{start}+{count}" for node, start, count in record.trained)
        self.note(f"round {record.round} is durable: {record.reason}; {trained}")
        self.checker.committed(record, payload)

    # ------------------------------------------------------------------------------------ the coordinator

    def start_hub(self) -> None:
        """A coordinator on the disk as it is."""
        self._machine = Machine(
            self.schedule,
            self._disk,
            self._chunks,
            self.site.process,
            self._draws,
            tally=self.checker.tally(),
            hook=self._coordinator_at,
            make_run=self._make_run,
        )
        self.hub = self._machine.hub
        self.site.listen(self.hub)
        self.note(f"the coordinator is up, next is round {self.hub.run.round}")

    def crash(self) -> None:
        """The coordinator dies."""
        self.note("the coordinator dies")
        self.hub = None
        if self._machine is not None:
            self._machine.die()
        self._machine = None
        for line in self._lines.values():
            line.cut()
        self.site.close()

    def _said(self, call: Call, message: bytes) -> None:
        """The coordinator sends something."""
        if call.name != "Session":
            return
        order = pb.CoordinatorMessage.FromString(message)
        if order.HasField("round_open"):
            opened = order.round_open
            self.note(
                f"{call.line.name} <- round {opened.round} {opened.lease_start}+{opened.lease_count}"
                f"{' ready' if opened.result_ready else ''}"
            )
            if not opened.result_ready:
                self._coordinator_at("open", opened.round)
        else:
            self.note(f"{call.line.name} <- {' '.join(str(order).split())}")

    def _asked(self, call: Call) -> None:
        """A call has come to the coordinator."""
        if call.name == "Session" and self.hub is not None and self.hub.run.phase == "gathering":
            self._coordinator_at("gathering", self.hub.run.round)

    def _coordinator_at(self, phase: str, round_index: int) -> None:
        if round_index < 0 and self.hub is not None:
            round_index = self.hub.run.round
        for fault in self._due(COORDINATOR, phase, round_index):
            self.strike(fault)

    def _strike_coordinator(self, fault: Fault) -> None:
        if fault.kind == "restart":
            self._quiet(fault.seconds or OUTAGE)
            self.loop.call_soon(self._restart_hub, fault.seconds or OUTAGE)
        elif fault.kind == "hang":
            self._quiet(fault.seconds)
            self.site.process.awake_at = self.loop.time() + fault.seconds
        elif self._machine is not None:
            self.loop.call_soon(self._machine.clock.jump, fault.seconds)

    def _restart_hub(self, seconds: float) -> None:
        if self.hub is not None:
            self.crash()
            self.loop.call_later(seconds, self.start_hub, context=contextvars.Context())

    # ------------------------------------------------------------------------------------ the nodes

    def start(self, name: str) -> None:
        """A process of the node ``name``."""
        self._away.discard(name)
        last = self._nodes.get(name)
        if name not in self._lines:
            self._lines[name] = Line(name, random.Random(f"{self.schedule.seed}/{name}"))
        self._starts += 1
        seed = f"{self.schedule.seed}/{name}/{self._starts}"
        node = Node(self, name, self._lines[name], seed, last.saved if last else None)
        self._nodes[name] = node
        self.checker.deviated.discard(name)
        identity = f"{name}/{self._starts}"
        self._tasks[identity] = set()
        node.identity = identity
        self.note(f"{name} starts from round {node.replica.round}")
        self._inside(identity, self._live(node))

    def _inside(self, identity: str, work: Coroutine[Any, Any, None]) -> None:
        context = contextvars.copy_context()
        context.run(_inside.set, identity)
        context.run(self.loop.create_task, work)

    def _task(self, virtual: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """Tasks belong to the process whose code makes them."""
        task: asyncio.Task[Any] = asyncio.Task(work, loop=virtual, **options)
        identity = _inside.get()
        if identity:
            task.set_name(f"{identity} {getattr(work, '__qualname__', '')}")
            tasks = self._tasks.get(identity)
            if tasks is None:  # its process is dead
                virtual.call_soon(task.cancel)
            else:
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        return task

    async def _live(self, node: Node) -> None:
        try:
            await node.live()
        except ExchangeError as error:
            self.note(f"{node.name} ends by itself: {error}")
            node.why = str(error)
        except Exception as error:
            self.checker.fail("error", f"{node.name} failed: {_origin(error)}")
            node.why = repr(error)
        self._ended(node)

    def _ended(self, node: Node) -> None:
        """A process has ended by itself."""
        self._bury(node)
        if node.done or (self.hub is not None and self.hub.run.phase in ENDED):
            self._gone.add(node.name)
        else:
            self.note(f"{node.name} is out of the run: {node.why}")
            self._later(node, SUPERVISOR)

    def _later(self, node: Node, seconds: float) -> None:
        self._away.add(node.name)
        self._quiet(seconds)
        self.loop.call_later(seconds, self.start, node.name)

    def _bury(self, node: Node, told: bool = True) -> None:
        node.process.alive = False
        for call in list(node.line.calls):
            call.broken(client=True, coordinator=told)
            if not told:
                self.loop.call_later(KEEPALIVE, call.broken, False, True)
        for task in self._tasks.pop(node.identity, ()):
            task.cancel()

    def _join_latecomers(self, round_index: int) -> None:
        for fault in [fault for fault in self._waiting if fault.kind == JOIN]:
            if fault.round <= round_index:
                self._waiting.remove(fault)
                self.strike(fault)

    def _unexpected(self, virtual: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback, or a task that nobody waits for, has failed."""
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, (ExchangeError, asyncio.InvalidStateError)):
            self.checker.fail("error", _origin(error))

    # ------------------------------------------------------------------------------------ faults

    def _due(self, who: str, phase: str, round_index: int) -> list[Fault]:
        found = [
            fault
            for fault in self._waiting
            if fault.who == who and fault.phase == phase and fault.round in (-1, round_index)
        ]
        for fault in found:
            self._waiting.remove(fault)
        return found

    def _quiet(self, seconds: float) -> None:
        """A fault lasts so long: progress is asked for only afterwards."""
        self._moved_at = max(self._moved_at, self.loop.time() + seconds)

    async def at(self, node: Node, phase: str, round_index: int) -> None:
        """A node has come to a phase."""
        if phase == "computing":
            self._join_latecomers(round_index)
        if phase == "applying" and round_index > self._announced:
            self._announced = round_index
            self._coordinator_at("committed", round_index)
        for fault in self._due(node.name, phase, round_index):
            self.strike(fault)
            if not node.process.alive:
                await asyncio.sleep(0)  # its tasks have been cancelled, this one with them
                await asyncio.get_running_loop().create_future()

    def strike(self, fault: Fault) -> None:
        """Let it happen now, wherever ``who`` is."""
        node = self._nodes.get(fault.who)
        self.fired += 1
        self.note(f"*** {fault}")
        if fault.who == COORDINATOR:
            self._strike_coordinator(fault)
        elif fault.kind != JOIN and node is not None and node.process.alive:
            self._strike(node, fault)
        elif fault.kind == JOIN and node is None:
            self.loop.call_later(fault.seconds, self.start, fault.who)

    def _strike(self, node: Node, fault: Fault) -> None:
        now, line, seconds = self.loop.time(), node.line, fault.seconds
        self._quiet(seconds)
        if fault.kind in ("kill", "vanish"):
            self._bury(node, told=fault.kind == "kill")
            self._return(node, seconds)
        elif fault.kind == "leave":
            self.loop.call_soon(self._leave, node, seconds)
        elif fault.kind == "hang":
            node.process.awake_at = max(node.process.awake_at, now + seconds)
        elif fault.kind == "cut":
            line.cut()
        elif fault.kind == "partition":
            line.silent_until = max(line.silent_until, now + seconds)
            if seconds > KEEPALIVE:
                for call in list(line.calls):
                    self.loop.call_later(KEEPALIVE, call.broken)
        elif fault.kind == "delay":
            line.slow_until, line.slow_by = now + seconds, min(seconds, 3.0)
        elif fault.kind == "reorder":
            line.spread_until, line.spread_by = now + seconds, min(seconds, 2.0)
        elif fault.kind == "duplicate":
            line.doubled = True
        elif fault.kind == "deviate":
            self.checker.deviated.add(node.name)
            node.replica.flip()
        elif fault.kind == "skew":
            node.ahead += seconds

    def _return(self, node: Node, seconds: float) -> None:
        if seconds:
            self._later(node, seconds)
        else:
            self._gone.add(node.name)

    def _leave(self, node: Node, seconds: float) -> None:
        if not node.process.alive:
            return
        tasks = self._tasks[node.identity]
        for task in [task for task in tasks if "_live" in task.get_name()]:
            task.cancel()

        async def leave() -> None:
            with contextlib.suppress(ExchangeError):
                await node.leave("interrupted by its user")
            self._bury(node)
            self._return(node, seconds)

        self._inside(node.identity, leave())


def _origin(error: BaseException) -> str:
    """An exception that nobody expected, and where it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-4:]))
    return f"{error!r} in {where}"
