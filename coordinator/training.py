"""One round after the other: its opening, its orders, its entry in the journal, and its close."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from coordinator.active_round import ActiveRound
from coordinator.arrivals import Deadlines
from coordinator.events import JournalTrouble, RoundCommitted, RoundOpened
from coordinator.history import margin
from coordinator.inquiry import Finding, Inquiries
from coordinator.journal import Done
from coordinator.member import Member
from coordinator.nodes import Node
from coordinator.open_round import Opening, OpenRound
from coordinator.ramp import ramp
from coordinator.record import round_record
from coordinator.reducing import Pool, Reducing
from coordinator.rounds import Policy, State, Verdict, evaluates, evaluator, worth_waiting
from coordinator.sliced_round import SlicedRound
from coordinator.topology import Assigned
from optim.aggregate import Bytes, ReducerMemory, TallyFunction
from optim.reduction import Slab
from protos.atoll_pb2 import CoordinatorMessage, RoundOpen
from protos.buckets import BucketTable

if TYPE_CHECKING:
    from coordinator.run import Run

log = logging.getLogger(__name__)


class Training:
    """The rounds of a run.

    Args:
        run: whose members are in them.
        pool: for CPU work.
        tally: the majority function.

    Attributes:
        active: the round in flight.
        members: of that, or of the last one.
        memory: what the reducer carries from round to round.
        deadlines: how long rounds wait behind their first contribution.
        inquiries: about what nodes have reduced.
    """

    def __init__(self, run: Run, pool: Pool, tally: TallyFunction) -> None:
        self._run = run
        self.active: OpenRound | None = None
        self.members: tuple[str, ...] = ()
        self.memory = ReducerMemory()
        self.deadlines = Deadlines(run.plan.policy.deadline)
        self.inquiries = Inquiries(run.plan.effort, random.SystemRandom(), tally)
        self._slab = Slab(run.tables.nbytes)
        self._reducing = {
            table.digest: Reducing.of(table, memory=self.memory, tally=tally, pool=pool)
            for table in run.tables.tables
        }
        self._evaluator: str | None = None  # of the round in flight, or of the last one
        self._frontier = 0  # no sample from there on is leased in the round in flight
        self._newcomers: tuple[str, ...] = ()  # who take part for the first time

    def seated(self, nodes: Sequence[Node]) -> None:
        """These have become members since the last round."""
        self._newcomers += tuple(node.node for node in nodes)

    def open(self) -> None:
        """Open the next round with the members of the roster."""
        run, table = self._run, self._run.tables.of(self._run.round)
        plan, roster = run.plan, run.registry.roster
        members, frontier = [], run.leases.frontier
        self.members = roster.members
        slices = run.mesh.slices(table)
        nbytes = table.nbytes if slices is None else 0
        for node_id, row in zip(roster.members, self._rows(len(roster), nbytes), strict=True):
            node = run.registry.get(node_id)
            if node is None:  # gone since the roster was made
                members.append(Member(node_id, 1, row, State.GONE, live=False))
                continue
            if node.position < run.round and run.leases.held_by(node_id, run.round) is None:
                node.state = "lagging"  # but for one that is back with the others after a restart
            state = State.LAGGING if node.state == "lagging" else State.EXPECTED
            share = (1, 1)
            if node.since is not None:
                share = ramp(run.round - node.since, plan.momentum, plan.local_steps // plan.fragments)
            held = run.leases.held_by(node_id, run.round)
            penalty = run.scrutiny.penalty(node_id)
            members.append(Member(node_id, node.weight, row, state, share=share, penalty=penalty, lease=held))
            if held is None:
                frontier += plan.samples(run.round, node.batch)
        self._frontier = frontier
        wait = self.deadlines.opened(self._exceptional())
        self._newcomers = ()
        self._evaluator = None
        if evaluates(run.round, plan.rounds, plan.evaluate_every):
            candidates = [member.node for member in members if member.state is State.EXPECTED]
            self._evaluator = evaluator(run.round, plan.evaluate_every, candidates)
        active = self._opened(members, table, slices, replace(plan.policy, deadline=wait.seconds))
        self.active = active
        lagging = tuple(member.node for member in members if member.state is State.LAGGING)
        run.tell(RoundOpened(run.round, roster.epoch, roster.members, lagging, wait.seconds, wait.reason))
        for member in members:
            self.order(run.registry.get(member.node))
        if self.active is active:
            active.begin()

    def _rows(self, count: int, nbytes: int) -> list[Bytes]:
        """For contributions that come to the coordinator."""
        rows = self._slab.rows(count) if nbytes else [np.empty(0, np.uint8)] * count
        return [row[:nbytes] for row in rows]

    def _opened(
        self,
        members: Sequence[Member],
        table: BucketTable,
        slices: Sequence[Assigned] | None,
        policy: Policy,
    ) -> OpenRound:
        """The next round: between the nodes, or at the hub."""
        run = self._run
        opening = Opening(
            run.round,
            run.registry.roster.epoch,
            members,
            policy=policy,
            table=table,
            timer=run.timer,
            on_close=self._closed,
            keep=self._keep,
        )
        if slices is None:
            return ActiveRound(opening, self._reducing[table.digest])
        active = SlicedRound(
            opening,
            assigned=slices,
            topology=run.mesh.number,
            send=lambda node, message: run.send(run.registry.get(node), message),
            move=self._move,
            inquiries=self.inquiries,
            accuse=self._accuse,
        )
        active.result.holders = lambda: active.holders(run.registry.names())
        return active

    def _move(self, active: SlicedRound, failed: Mapping[str, str]) -> None:
        """Reducers of the round in flight have failed."""
        run = self._run
        if active is not self.active:
            return
        log.warning("%s", "; ".join(failed.values()))
        active.reassign(run.mesh.move(active.table, failed), run.mesh.number)

    def _accuse(self, active: SlicedRound, findings: Sequence[Finding]) -> bool:
        """What reducers of the round in flight have made is in question; whether others reduce it now."""
        run = self._run
        run.scrutiny.found(active, findings)
        self.inquiries.distrusted = run.scrutiny.liars()
        barred = run.scrutiny.barred()
        reducers = {
            one.reducer: f"{one.reducer} shall not reduce any more: {one.verdict.reason}"
            for one in findings
            if one.reducer in barred
        }
        if not reducers:
            return False
        if not set(active.able()) - barred.keys():
            log.warning("%s; but nobody else is left to reduce", "; ".join(reducers.values()))
            return False
        self._move(active, reducers)
        return True

    def _announce(self, active: SlicedRound) -> None:
        """Tell the members that a round is committed whose result lies at nodes. Who still works on it goes
        on once it has reported it."""
        run = self._run
        for member in active.members.values():
            node = run.registry.get(member.node)
            if node is None or not node.seated:
                continue
            run.send(node, CoordinatorMessage(committed=active.result.commit_of(node.node)))
            if not member.pending:
                node.position = max(node.position, active.round + 1)

    def _exceptional(self) -> str:
        """Why somebody will come late in the round that opens, if that is known."""
        run = self._run
        if not run.plan.adaptive:
            return "the run file says so"
        if self._evaluator is not None:
            return f"{self._evaluator} evaluates after the last round"
        if self._newcomers:
            return f"{', '.join(self._newcomers)} take part for the first time"
        if run.round and run.plan.samples(run.round) != run.plan.samples(run.round - 1):
            return f"round {run.round + 1} has other steps than the one before"
        usual = run.plan.samples(run.round)
        if any(lease.count % usual for lease in run.leases.returned):
            return "returned samples make leases of unlike length"
        return ""

    def order(self, node: Node | None) -> None:
        """Send a member the next RoundOpen that it can act on, unless it has it already."""
        run, active = self._run, self.active
        roster = run.registry.roster
        if node is None or not node.seated or node.opened >= node.position or node.node not in roster:
            return
        position = node.position
        order = RoundOpen(round=position, epoch=roster.epoch, members=roster.members, frontier=self._frontier)
        if position < run.round:
            order.result_ready = True
        elif (
            position == run.round
            and active is not None
            and not active.closing
            and node.node in active.members
        ):
            held = run.leases.held_by(node.node, position)
            lease = held or run.leases.take(node.node, position, run.plan.samples(position, node.batch))
            order.lease_start, order.lease_count = lease.start, lease.count
            member = active.members[node.node]
            member.lease, member.samples = lease, lease.count
            order.evaluate = node.node == self._evaluator
            order.topology = active.topology if isinstance(active, SlicedRound) else 0
        else:
            return
        node.opened = position
        run.send(node, CoordinatorMessage(round_open=order))
        again = worth_waiting(position, node.silent_at, node.silent_streak)
        if again and active is not None and position == active.round:
            active.expect(node.node)

    def returned(self, node: Node) -> bool:
        """Give a member that was cut off for a moment its seat in the round in flight again."""
        run, active = self._run, self.active
        if active is None or node.held != run.round:
            return False
        if isinstance(active, SlicedRound) and not self._same_work(node):
            return False  # what has come of it before may be of other samples
        if not active.returned(node.node, node.weight):
            return False
        node.position = node.first_round = run.round
        node.opened, node.state = run.round - 1, "active"
        self.order(node)
        return True

    def _same_work(self, node: Node) -> bool:
        """Whether a node works on what it has leased in the round in flight."""
        lease = self._run.leases.held_by(node.node, self._run.round)
        return lease is not None and node.claim.work == (self._run.round, lease.start, lease.count)

    def _keep(self, active: OpenRound, done: Done) -> None:
        """Make a round last before its commit is announced."""
        run = self._run
        trained = run.leases.settle(active.round, active.result.voters)
        record = round_record(active.result, trained, run.leases, run.wall())
        memory = None if record.slices else self.memory.arrays() or None
        run.journal.commit(record, active.result.payload, memory, done)

    def _closed(self, active: OpenRound, verdict: Verdict) -> None:
        if self.active is active:  # else the run has ended meanwhile
            self.active = None
            with self._run.guarded():
                self._close(active, verdict)

    def _close(self, active: OpenRound, verdict: Verdict) -> None:
        run, result, now = self._run, active.result, self._run.now()
        if verdict.action == "fail":
            if active.settled:  # and could not be kept
                run.tell(JournalTrouble(verdict.reason, fatal=True))
                run.suspend(verdict.reason)
                active.stop(run.ending.refusal())
            elif any(member.live for member in active.members.values()):
                run.stop(verdict.reason)
            else:
                run.leases.settle(active.round, ())
                run.registry.dissolve()
                run.gathering.regroup()
            return
        run.results.put(result)
        run.registry.settle(active, verdict)
        if isinstance(active, SlicedRound):
            self._announce(active)
        run.round = active.round + 1
        shares = [share for share in result.agreement().values() if not math.isnan(share)]
        agreement = sum(shares) / len(shares) if shares else math.nan
        present = {node.node for node in run.registry.members()}
        reporting = [node for node in active.members if node in present or node in result.voters]
        distance = margin(list(result.agreement().values()), result.facts.weights)
        run.history.committed(active.round, reporting, agreement, distance)
        self.deadlines.committed(active.round, active.opened_at, active.whole_at, active.missing)
        first = active.opened_at if active.first_at is None else active.first_at
        run.on_commit(now - active.opened_at, now - first)
        run.tell(
            RoundCommitted(
                round=active.round,
                epoch=active.epoch,
                voters=result.voters,
                silent=verdict.silent,
                reason=verdict.reason,
                seconds=now - active.opened_at,
                after_first=now - first,
                nbytes=result.facts.nbytes,
                agreement=agreement,
                weights=tuple(result.facts.weights),
                margin=distance,
            )
        )
        run.scrutiny.committed(active)
        run.between_rounds()

    def last_evaluator(self) -> Node | None:
        """Who has to evaluate the final state because the one that was ordered to cannot."""
        run = self._run
        holders = [node for node in run.registry.in_session() if node.position == run.round]
        if any(node.node == self._evaluator for node in holders):
            return None
        return holders[0] if holders else None
