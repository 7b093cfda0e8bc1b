"""The life of a run: gathering, rounds, pauses in which newcomers load the state, and the end.

Everything here happens on the event loop in response to an event (a node arrived, delivered, left; an alarm
rang) and never waits. Who is in a round, when it closes and who reads which data is decided by the pure
modules.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Literal

from coordinator.active_round import ActiveRound, Pool, Reducing
from coordinator.digests import Judgement
from coordinator.history import History
from coordinator.leases import LeaseBook
from coordinator.member import Member
from coordinator.nodes import Node
from coordinator.plan import RunPlan
from coordinator.reducer import Slab
from coordinator.refusal import DIGEST_MISMATCH, Refused
from coordinator.registry import Registry
from coordinator.result import ResultRing
from coordinator.rounds import State, Verdict, evaluates, evaluator, worth_waiting
from coordinator.start import Start, ahead, choose
from coordinator.syncing import Syncing
from coordinator.timer import Alarm, Timer
from optim.aggregate import ReducerMemory, TallyFunction
from protos.atoll_pb2 import CoordinatorMessage, Report, RoundOpen, Stop
from protos.buckets import TableSchedule

log = logging.getLogger(__name__)

Phase = Literal["gathering", "syncing", "training", "done", "failed"]

ENDED: Final = ("done", "failed")
RETURN_SECONDS: Final = 120.0  # for a node that was cut off to come back when nobody else is left


class Run:
    """A run in progress.

    Attributes:
        phase, reason: what it is doing and why, in words.
        round: next to commit.
        begun: whether it is settled from which state the run goes on; until then, whoever joins may say.
        registry: nodes and roster.
        tables: what travels, round by round.
        counters: refused and ignored messages by kind.
        finished: set when the run has ended and every node has left.
        on_commit: called after each commit with seconds since the opening and since the first contribution.
    """

    def __init__(
        self, plan: RunPlan, tables: TableSchedule, *, timer: Timer, pool: Pool, tally: TallyFunction
    ) -> None:
        self.plan = plan
        self.tables = tables
        self.phase: Phase = "gathering"
        self.reason = f"0 of {plan.nodes} nodes"
        self.round = 0
        self.begun = False
        self.registry = Registry()
        self.leases = LeaseBook()
        self.results = ResultRing()
        self.history = History()
        self.counters: Counter[str] = Counter()
        self.active: ActiveRound | None = None
        self.syncing: Syncing | None = None
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.finished = asyncio.Event()
        self.on_commit: Callable[[float, float], None] = lambda total, after_first: None
        self.now = timer.now
        self._timer = timer
        self._slab = Slab(tables.nbytes)
        memory = ReducerMemory()
        self._reducing = {
            table.digest: Reducing.of(table, memory=memory, tally=tally, pool=pool) for table in tables.tables
        }
        self._alarm: Alarm | None = None  # of the gathering
        self._evaluator: str | None = None  # of the round in flight, or of the last one
        self._frontier = 0  # no sample from there on is leased in the round in flight

    def count(self, kind: str) -> None:
        """Count a refused or ignored message."""
        if kind:
            self.counters[kind] += 1

    # --------------------------------------------------------------------------------------------- nodes

    def arrived(self, node: Node) -> None:
        """A node has opened its session."""
        if self.phase in ENDED:
            self.dismiss(node, self.reason)
        elif self.begun and (problem := ahead(node.claim.round, self.round)) is not None:
            self.dismiss(node, problem)
        elif self.phase == "gathering":
            self._gather()

    def departed(self, node: Node, reason: str, *, cleanly: bool = False) -> None:
        """A node's session has ended, ``cleanly`` if it said so itself, or it never opened one."""
        if not self.registry.remove(node):
            return
        node.state = "left"
        node.left_cleanly = cleanly or bool(node.stopping)
        node.reason = node.stopping or reason
        if node.outbox is not None:
            node.outbox.close(cleanly=cleanly)
            node.outbox = None
        for exchange in node.exchanges:
            exchange.close(Refused("", f"the session of {node.node} has ended: {reason}", "ABORTED"))
        self._withdraw(node, reason)
        if self.phase == "gathering":
            self._gather()
        if self.phase in ENDED and not self.registry.nodes:
            self.finished.set()

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
            self._withdraw(node, reason)

    def _withdraw(self, node: Node, reason: str) -> None:
        """Take a node out of whatever goes on."""
        if self.active is not None:
            self.active.departed(node.node)
        if self.syncing is not None:
            self.syncing.departed(node.node, reason)
        for judgement in self.history.departed(node.node):
            self._sentence(judgement)

    def _send(self, node: Node | None, message: CoordinatorMessage) -> None:
        if node is not None and node.in_session and not node.send(message):
            self.departed(node, "it does not read its orders")

    # --------------------------------------------------------------------------------------------- gathering

    def _gather(self) -> None:
        """Begin if enough nodes are here."""
        if self.begun:
            self._regroup()
            return
        ready = self.registry.in_session()
        self.reason = f"{len(ready)} of {self.plan.nodes} nodes"
        if len(ready) >= self.plan.nodes:
            self._cancel_alarm()
            self._begin(choose(node.claim for node in ready))
        elif not ready:
            self._cancel_alarm()
        else:
            self._set_alarm(self.plan.policy.start_timeout)

    def _begin(self, start: Start) -> None:
        """Settle the state that everybody goes on with; who holds another one loads it."""
        log.info("%s", start.reason)
        self.begun, self.round, self.started_at = True, start.round, self.now()
        self.leases = LeaseBook(start.samples)
        self.history.begin(start.round, start.digest)
        holders = [node for node in self.registry.in_session() if node.node in start.holders]
        self.registry.renew([(node, start.round) for node in holders])
        self._between_rounds()

    def _regroup(self) -> None:
        """Nobody is left who holds the shared state: wait for a node that was cut off to come back; before
        the first commit anybody will do."""
        self.phase = "gathering"
        if self.history.newest < 0:
            self.begun, self.round, self.started_at = False, 0, None
            self._gather()
            return
        self.reason = f"every node left before round {self.round + 1}: nobody holds the shared state any more"
        if all(node.left_cleanly for node in self.registry.left):
            self._end("failed", self.reason)
        elif any(self.replays(node) for node in self.registry.joiners()):
            self._cancel_alarm()
            self._between_rounds()
        else:
            self._set_alarm(min(self.plan.policy.start_timeout, RETURN_SECONDS))

    def _gave_up(self) -> None:
        self._alarm = None
        if not self.begun:
            self.reason = (
                f"only {self.reason} came within {self.plan.policy.start_timeout:g} s of the first: "
                "start the others earlier, raise [round] start_timeout or lower [run] nodes"
            )
        self._end("failed", self.reason)

    def _set_alarm(self, seconds: float) -> None:
        if self._alarm is None:
            self._alarm = self._timer.call_at(self.now() + seconds, self._gave_up)

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    # --------------------------------------------------------------------------------------------- rounds

    def _open_round(self) -> None:
        self.phase = "training"
        self.reason = f"round {self.round + 1} of {self.plan.rounds}"
        plan, roster, table = self.plan, self.registry.roster, self.tables.of(self.round)
        members, frontier = [], self.leases.frontier
        for node_id, row in zip(roster.members, self._slab.rows(len(roster)), strict=True):
            node = self.registry.nodes[node_id]
            if node.position < self.round:
                node.state = "lagging"
            state = State.LAGGING if node.state == "lagging" else State.EXPECTED
            members.append(Member(node_id, node.weight, row[: table.nbytes], state))
            frontier += plan.samples(self.round, node.batch)
        self._frontier = frontier
        self._evaluator = None
        if evaluates(self.round, plan.rounds, plan.evaluate_every):
            candidates = [member.node for member in members if member.state is State.EXPECTED]
            self._evaluator = evaluator(self.round, plan.evaluate_every, candidates)
        active = ActiveRound(
            self.round,
            roster.epoch,
            members,
            policy=plan.policy,
            reducing=self._reducing[table.digest],
            timer=self._timer,
            on_close=self._closed,
        )
        self.active = active
        for member in members:
            self._order(self.registry.get(member.node))
        if self.active is active:
            active.begin()

    def _order(self, node: Node | None) -> None:
        """Send a member the next RoundOpen that it can act on, unless it has it already."""
        roster, active = self.registry.roster, self.active
        if node is None or not node.in_session or node.opened >= node.position or node.node not in roster:
            return
        position = node.position
        order = RoundOpen(round=position, epoch=roster.epoch, members=roster.members, frontier=self._frontier)
        if position < self.round:
            order.result_ready = True
        elif position == self.round and active is not None and node.node in active.members:
            lease = self.leases.take(node.node, position, self.plan.samples(position, node.batch))
            order.lease_start, order.lease_count = lease.start, lease.count
            active.members[node.node].samples = lease.count
            order.evaluate = node.node == self._evaluator
        else:
            return
        node.opened = position
        self._send(node, CoordinatorMessage(round_open=order))
        again = worth_waiting(position, node.silent_at, node.silent_streak)
        if again and active is not None and position == active.round:
            active.expect(node.node)

    def served(self, node: Node, round_index: int) -> None:
        """A node is being given the result of a committed round: it can go on to the next."""
        node.position = max(node.position, round_index + 1)
        self._order(node)

    def _closed(self, active: ActiveRound, verdict: Verdict) -> None:
        self.active = None
        if verdict.action == "fail":
            self._abandoned(active, verdict.reason)
            return
        self.results.put(active.result)
        self.leases.settle(active.round, verdict.voters)
        self.registry.settle(active, verdict)
        self.round = active.round + 1
        shares = [share for share in active.result.agreement().values() if not math.isnan(share)]
        members = [node.node for node in self.registry.members()]
        self.history.committed(active.round, members, sum(shares) / len(shares) if shares else math.nan)
        now = self.now()
        first = active.opened_at if active.first_at is None else active.first_at
        self.on_commit(now - active.opened_at, now - first)
        self._between_rounds()

    def _between_rounds(self) -> None:
        """Make the next roster, then open the next round or do what has to be done before."""
        joiners = self.registry.joiners()
        self.registry.renew([(node, node.claim.round) for node in joiners if self.replays(node)])
        joiners = self.registry.joiners()
        if self.round >= self.plan.rounds:
            self._end("done", f"all {self.plan.rounds} rounds are committed")
        elif not self.registry.roster.members:
            self._regroup()
        elif joiners:
            self._sync(joiners)
        else:
            self._open_round()

    def _abandoned(self, active: ActiveRound, reason: str) -> None:
        """The round in flight cannot be closed: everybody has left, or the reducer has failed."""
        if any(member.live for member in active.members.values()):
            self._end("failed", reason)
            return
        self.leases.settle(active.round, ())
        self.registry.dissolve()
        self._regroup()

    # --------------------------------------------------------------------------------------------- newcomers

    def replays(self, node: Node) -> bool:
        """Whether a joiner was in the run before and needs only results that are still kept."""
        claimed, digest = node.claim.round, node.claim.digest
        if not 0 < claimed <= self.round or digest != self.history.digest_after(claimed - 1):
            return False
        return all(self.results.get(index) is not None for index in range(claimed, self.round))

    def _sync(self, joiners: Sequence[Node]) -> None:
        self.phase = "syncing"
        for node in joiners:
            node.state = "loading"
        self.syncing = Syncing(
            self.round,
            [node.node for node in joiners],
            self.registry.donors(self.round),
            frontier=self.leases.frontier,
            timer=self._timer,
            timeout=self.plan.policy.start_timeout,
            stall=self.plan.stall,
            agreed=lambda: self.history.digest_after(self.round - 1),
            send=lambda node, order: self._send(self.registry.get(node), order),
            on_end=self._synced,
        )
        self.syncing.begin()

    def _synced(self, ready: tuple[str, ...], failed: dict[str, str]) -> None:
        self.syncing = None
        for node_id, why in failed.items():
            node = self.registry.get(node_id)
            if node is not None:
                self.dismiss(node, why)
        loaded = [node for node in self.registry.in_session() if node.node in ready]
        self.registry.renew([(node, self.round) for node in loaded])
        if self.registry.roster.members:
            self._open_round()
        else:
            self._regroup()

    # --------------------------------------------------------------------------------------------- reports

    def reported(self, node: Node, report: Report) -> None:
        """A node tells what it did in a round."""
        node.take(report)
        judgement = self.history.reported(node.node, report)
        if judgement is not None:
            self._sentence(judgement)

    def _sentence(self, judgement: Judgement) -> None:
        for node_id in judgement.deviants:
            node = self.registry.get(node_id)
            if node is not None and not node.deviated:
                node.deviated = True
                self.count(DIGEST_MISMATCH)
                self.dismiss(node, f"{node_id} has left the common state: {judgement.reason}")

    # --------------------------------------------------------------------------------------------- end

    def stop(self, reason: str) -> None:
        """End the run from outside; nodes are told why."""
        self._end("failed", reason)

    def _end(self, phase: Literal["done", "failed"], reason: str) -> None:
        if self.phase in ENDED:
            return
        self.phase, self.reason = phase, reason
        self.ended_at = self.now()
        self._cancel_alarm()
        active, self.active = self.active, None
        if active is not None:
            active.stop(Refused("", f"the run has ended: {reason}", "UNAVAILABLE"))
        syncing, self.syncing = self.syncing, None
        if syncing is not None:
            syncing.stop()
        evaluating = self._last_evaluator() if phase == "done" else None
        for node in list(self.registry.nodes.values()):
            self.dismiss(node, reason, done=phase == "done", evaluate=node is evaluating)
        if not self.registry.nodes:
            self.finished.set()

    def _last_evaluator(self) -> Node | None:
        """Who has to evaluate the final state because the one that was ordered to cannot."""
        holders = [node for node in self.registry.in_session() if node.position == self.round]
        if any(node.node == self._evaluator for node in holders):
            return None
        return holders[0] if holders else None
