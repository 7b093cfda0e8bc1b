"""The life of a run: gathering, rounds, newcomers that catch up meanwhile, and the end.

Everything here happens on the event loop in response to an event (a node arrived, delivered, left; an alarm
rang) and never waits. Who is in a round, when it closes and who reads which data is decided by the pure
modules.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

from coordinator.administration import Administration
from coordinator.catchup import result_bytes
from coordinator.chunk_store import ChunkStore, MemoryChunkStore
from coordinator.ending import ENDED, Ending
from coordinator.events import (
    JournalTrouble,
    Listener,
    NodeJoined,
    NodeLeft,
    NodeRejoined,
    RunBegun,
    RunResumed,
    ignore,
)
from coordinator.gathering import Gathering
from coordinator.history import History
from coordinator.journal import Journal, Kept, MemoryJournal, Recovered, StartRecord
from coordinator.leases import Lease, LeaseBook
from coordinator.mesh import Mesh
from coordinator.newcomers import Newcomers
from coordinator.nodes import Node
from coordinator.open_round import OpenRound
from coordinator.plan import RunPlan
from coordinator.reducing import Pool
from coordinator.registry import Registry
from coordinator.replay import first_kept
from coordinator.reports import Reports
from coordinator.result import Result, ResultRing
from coordinator.scrutiny import Scrutiny
from coordinator.snapshotting import Snapshotting
from coordinator.start import Start, ahead
from coordinator.timer import Timer
from coordinator.training import Training
from optim.aggregate import TallyFunction
from protos.atoll_pb2 import CoordinatorMessage, Ready, Stop
from protos.buckets import TableSchedule
from protos.identity import fingerprint
from protos.refusal import Refused
from protos.ring import RING_ROUNDS

log = logging.getLogger(__name__)

Phase = Literal["gathering", "syncing", "training", "paused", "done", "failed", "suspended"]

RECOVERED_RESULTS: Final = 4  # of the last rounds, read at a restart: who misses one of them is hardly behind


class Run:
    """A run in progress.

    Args:
        plan: what it is.
        tables: layout of the payloads, round by round.
        timer: the only clock.
        pool: for CPU work.
        tally: the majority function, ``optim.bits.tally``.
        journal: where everything is kept that has to outlast this object, and what it begins with.
        chunks: where snapshots are kept.
        file_pool: for work on snapshots, which may take long; ``pool`` if not given.
        wall: seconds since 1970, for people who read the journal.
        tell: is told what happens.

    Attributes:
        phase, reason: what it is doing and why, in words.
        round: next to commit.
        begun: whether it is settled from which state the run goes on; until then, whoever joins may say.
        settling: the first round still waits for those who load the state that it begins with.
        restarted: it was begun by a coordinator that has ended.
        registry: nodes and roster.
        tables: what travels, round by round.
        security: of the coordinator's connections, as the status tells it.
        counters: refused and ignored messages by kind.
        moved_bytes: that the nodes have sent and received, with whomever, as they report.
        state_bytes, data_digest: of the shared state and of the data, as the first node has told.
        finished: set when the run has ended and every node has left, or it is suspended.
        on_commit: called after each commit with seconds since the opening and since the first contribution.
        token_name: the name of the token with a secret of this sha256.
    """

    def __init__(
        self,
        plan: RunPlan,
        tables: TableSchedule,
        *,
        timer: Timer,
        pool: Pool,
        tally: TallyFunction,
        journal: Journal | None = None,
        chunks: ChunkStore | None = None,
        file_pool: Pool | None = None,
        wall: Callable[[], float] = lambda: 0.0,
        tell: Listener = ignore,
    ) -> None:
        self.plan = plan
        self.tables = tables
        self.phase: Phase = "gathering"
        self.reason = f"0 of {plan.nodes} nodes"
        self.round = 0
        self.begun = False
        self.settling = False
        self.restarted = False
        self.registry = Registry()
        self.leases = LeaseBook()
        self.results = ResultRing()
        self.history = History()
        self.counters: Counter[str] = Counter()
        self.security = "none"
        self.moved_bytes = 0
        self.started_at: float | None = None
        self.state_bytes = 0
        self.data_digest = plan.data_digest
        self.finished = asyncio.Event()
        self.result_bytes = result_bytes(tables)  # of the results of a first round up to, without, another
        self.on_commit: Callable[[float, float], None] = lambda total, after_first: None
        self.token_name: Callable[[str], str] = lambda digest: ""
        self.now = timer.now
        self.timer = timer
        self.journal = journal or MemoryJournal(keep=1)
        self.administration = Administration(self)
        self.reports = Reports(self)
        self.newcomers = Newcomers(self)
        self.gathering = Gathering(self)
        self.ending = Ending(self)
        self.snapshotting = Snapshotting(self, chunks or MemoryChunkStore(), file_pool or pool)
        self.snapshots = self.snapshotting.snapshots
        self.wall = wall
        self.tell = tell
        self.mesh = Mesh(self, plan.transport, secrets.token_bytes(32))
        self.scrutiny = Scrutiny(self, secrets.token_bytes(32))
        self.training = Training(self, pool, tally)
        if self.journal.recovered is not None:
            self._restore(self.journal.recovered)

    @property
    def active(self) -> OpenRound | None:
        """The round in flight."""
        return self.training.active

    def count(self, kind: str) -> None:
        """Count a refused or ignored message."""
        if kind:
            self.counters[kind] += 1

    # --------------------------------------------------------------------------------------------- beginning

    def begin(self, start: Start) -> None:
        """Settle the state that everybody goes on with; who holds another one loads it."""
        log.info("%s", start.reason)
        self.snapshots.discard("the run has begun anew")
        self.begun, self.round, self.started_at = True, start.round, self.now()
        self.settling = True
        self.leases = LeaseBook(start.samples)
        self.history.begin(start.round, start.digest)
        self.journal.begin(
            StartRecord(start.round, start.digest, start.samples, self.data_digest, self.state_bytes)
        )
        for node in self.registry.in_session():
            self.newcomers.add(
                node, start.round if node.node in start.holders else self.newcomers.trusted(node)
            )
        self._tell_begun(RunBegun, tuple(node.node for node in self.registry.in_session()), start.reason)
        self.between_rounds()

    def _restore(self, found: Recovered) -> None:
        """Go on where the journal ends."""
        if found.last is None and not found.roster.members:
            return  # it ended in the moment in which it began: it begins again
        self.begun = self.restarted = True
        self.round, self.started_at = found.round, self.now()
        self.state_bytes, self.data_digest = found.start.state_bytes, found.start.data_digest
        last = found.last
        self.leases = LeaseBook(
            found.samples,
            [Lease(start, count) for start, count in last.returned] if last else [],
            found.trained,
        )
        self.history.begin(found.start.round, found.start.digest, found.digests)
        self.registry.restore(found.roster)
        self.training.memory.load(found.memory)
        self.gathering.restore(self.registry.roster.members)
        at_nodes = last is not None and bool(last.slices)
        first = (
            self.round - RING_ROUNDS if at_nodes else max(self.round - RECOVERED_RESULTS, self.first_kept())
        )
        for index in range(max(0, first), self.round):
            self.journal.load(index, self._read)
        for note in found.notes:
            self.tell(JournalTrouble(note))
        self._tell_begun(RunResumed, self.registry.roster.members, self.reason)

    def _tell_begun(self, kind: type[RunBegun | RunResumed], nodes: tuple[str, ...], reason: str) -> None:
        plan, policy = self.plan, self.plan.policy
        waits = (policy.deadline, policy.start_timeout)
        self.tell(kind(plan.name, plan.method, self.round, plan.rounds, nodes, reason, *waits))

    def _read(self, kept: Kept | None) -> None:
        if kept is not None and self.results.get(kept.record.round) is None:
            result = Result.of(kept)
            result.holders = self.registry.names
            self.results.put(result)
            self.newcomer_moved()

    def skip(self, start: Start) -> None:
        """The nodes are ahead of the journal, whose last rounds were lost: go on from their state."""
        text = f"the journal ends after {self.round} rounds, nodes hold the state after {start.round}"
        log.warning("%s: %s", text, start.reason)
        self.tell(JournalTrouble(text))
        self.round = start.round
        self.leases = self.leases.skipped(
            start.samples,
            [
                Lease(*node.claim.work[1:])
                for node in self.registry.in_session()
                if node.node in start.holders and node.claim.work and node.claim.work[0] == start.round
            ],
        )
        self.history.begin(start.round, start.digest, self.history.agreed)
        self.journal.skipped(start.round, self.leases.frontier)
        for node in self.registry.in_session():
            self.newcomers.add(
                node, start.round if node.node in start.holders else self.newcomers.trusted(node)
            )

    # ----------------------------------------------------------------------------------------------- results

    def first_kept(self) -> int:
        """The first round from which on all results can be had."""
        at_nodes = self.registry.received_since(self.round)
        return first_kept(self.results, self.journal, self.round, at_nodes=at_nodes)

    # --------------------------------------------------------------------------------------------- nodes

    def arrived(self, node: Node) -> None:
        """A node has opened its session."""
        node.held = self.newcomers.trusted(node)
        kind = NodeRejoined if node.known else NodeJoined
        self.tell(
            kind(
                node.node,
                node.name,
                node.address,
                node.claim.round,
                node.weight,
                node.ranks,
                self.token_name(node.token),
                fingerprint(node.key),
            )
        )
        self.mesh.arrived(node)
        problem = ahead(node.claim.round, self.round) if self.begun else None
        if self.phase in ENDED:
            self.ending.arrived(node)
        elif not self.begun:
            self.gathering.changed()
        elif problem is not None and self.gathering.awaited:
            self.gathering.changed()  # the journal may have lost its last rounds
        elif problem is not None and not node.known:
            self.dismiss(node, problem)
        elif not self.training.returned(node):
            self.newcomers.add(node, node.held)
            self.newcomer_moved()

    def newcomer_moved(self) -> None:
        """A newcomer is nearer to being a member: go on, if that was waited for."""
        if self.phase in ("syncing", "paused"):
            self.between_rounds()
        elif self.phase == "gathering" and self.begun:
            self.gathering.changed()

    def ready(self, node: Node, message: Ready) -> str:
        """A node holds what it was told to load; returns what is wrong with that, or an empty string."""
        node.progress_at = self.now()
        return self.newcomers.answered(node, message)

    def departed(self, node: Node, reason: str, *, cleanly: bool = False) -> None:
        """A node's session has ended, ``cleanly`` if it said so itself, or it never opened one."""
        if not self.registry.remove(node):
            return
        node.state = "left"
        node.cut_off = not cleanly
        node.left_cleanly = cleanly or bool(node.stopping)
        node.reason = node.stopping or reason
        self.tell(NodeLeft(node.node, node.name, node.reason, node.left_cleanly))
        if node.outbox is not None:
            node.outbox.close(cleanly=cleanly)
            node.outbox = None
        for exchange in node.exchanges:
            exchange.close(Refused("", f"the session of {node.node} has ended: {reason}", "ABORTED"))
        self.newcomers.departed(node)
        self.mesh.departed(node)
        self.withdraw(node, reason)
        if not self.begun:
            self.gathering.changed()
        else:
            self.newcomer_moved()
        self.ending.departed()

    def dismiss(self, node: Node, reason: str, *, done: bool = False, evaluate: bool = False) -> None:
        """Tell a node to leave. Unless the run is ``done``, it is out of it at once."""
        if node.stopping:
            return
        sent = node.send(CoordinatorMessage(stop=Stop(done=done, reason=reason, evaluate=evaluate)))
        node.stopping = reason
        node.seen_at = self.now()
        if not sent:
            self.departed(node, reason)
        elif not done:
            self.withdraw(node, reason)

    def withdraw(self, node: Node, reason: str) -> None:
        """Take a node out of whatever goes on."""
        if self.active is not None:
            self.active.departed(node.node)
        self.snapshots.departed(node.node, reason)

    def send(self, node: Node | None, message: CoordinatorMessage) -> None:
        """Give a node an order; one that does not read its orders is out."""
        if node is not None and node.in_session and not node.send(message):
            self.departed(node, "it does not read its orders")

    # --------------------------------------------------------------------------------------------- rounds

    def between_rounds(self) -> None:
        """Make the next roster, then open the next round or do what has to be done before."""
        with self.guarded():
            self._between_rounds()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A defect is told, and the run suspended, rather than left standing still."""
        try:
            yield
        except Exception as error:
            log.exception("a defect of the coordinator in round %d", self.round + 1)
            self.suspend(
                f"a defect of the coordinator in round {self.round + 1}: {error!r}; please report it"
            )

    def _between_rounds(self) -> None:
        if self.newcomers.seat():
            self.journal.roster(self.registry.record())
        if self.round >= self.plan.rounds:
            self.ending.end("done", f"all {self.plan.rounds} rounds are committed")
        elif not self.registry.roster.members:
            self.gathering.regroup()
        elif self.settling and (waiting := self.newcomers.waiting()):
            names = ", ".join(node.node for node in waiting)
            self.phase, self.reason = "syncing", f"{names} loading the state after {self.round} rounds"
            self.snapshotting.consider()
        elif self.mesh.settling:
            self.phase, self.reason = "syncing", f"trying the address of {self.mesh.settling}"
        elif self.administration.paused:
            self.phase, self.reason = "paused", self.administration.paused
            self.snapshotting.consider()
        else:
            self.settling = False
            self.phase, self.reason = "training", f"round {self.round + 1} of {self.plan.rounds}"
            self.gathering.end()
            self.snapshotting.consider()
            self.training.open()

    def served(self, node: Node, round_index: int) -> None:
        """A node is being given the result of a committed round: it can go on to the next."""
        if not node.seated:
            return
        node.position = max(node.position, round_index + 1)
        if self.phase == "done" and node.position >= self.round:
            self.dismiss(node, self.reason, done=True)
        else:
            self.training.order(node)

    # --------------------------------------------------------------------------------------------- end

    def stop(self, reason: str) -> None:
        """End the run before its last round; nodes are told why."""
        self.ending.end("failed", reason)

    def suspend(self, reason: str) -> None:
        """Go no further; see :meth:`coordinator.ending.Ending.suspend`."""
        self.ending.suspend(reason)
