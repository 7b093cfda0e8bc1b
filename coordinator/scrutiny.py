"""Scrutiny of a run's votes: each round is looked at once it is committed, and something may follow."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.active_round import ActiveRound
from coordinator.ballots import UNKNOWN, Ballot, Former, Sampler, judge_agreement, judge_words
from coordinator.events import NodeSuspected, SliceDisputed
from coordinator.inquiry import Finding
from coordinator.member import Member
from coordinator.open_round import OpenRound
from coordinator.ramp import FULL
from coordinator.retally import Disputes
from coordinator.rounds import State
from coordinator.suspicion import PENALTY, Action, Cause, Sighting, Suspicion, Suspicions

if TYPE_CHECKING:
    from coordinator.run import Run

log = logging.getLogger(__name__)


class Scrutiny:
    """What is thought of the nodes of a run.

    A restarted coordinator begins afresh; who was expelled stays so.

    Args:
        run: whose rounds are looked at.
        secret: decides which bits of the votes.
    """

    def __init__(self, run: Run, secret: bytes) -> None:
        self._run = run
        self._sampler = Sampler(secret)
        self._former = Former()
        self._suspicions = Suspicions(run.plan.thresholds)
        self._disputes = Disputes()
        self._actions: dict[str, Action] = {}

    def scores(self, node: str) -> dict[Cause, float]:
        """See :meth:`coordinator.suspicion.Suspicions.scores`."""
        return self._suspicions.scores(node)

    def action(self, node: str) -> Action:
        """What has been done about a node."""
        return self._actions.get(node, "none")

    def penalty(self, node: str) -> int:
        """By what the weight of its votes and means is divided."""
        return PENALTY if self.action(node) == "downweight" else 1

    def barred(self) -> dict[str, str]:
        """Who shall not reduce in this run, and why."""
        return self._disputes.barred()

    def liars(self) -> frozenset[str]:
        """Who has lied about a slice for certain."""
        return frozenset(self._disputes.liars)

    def found(self, active: OpenRound, findings: Sequence[Finding]) -> None:
        """What reducers of a round have made is in question."""
        run = self._run
        for reducer, verdict in ((finding.reducer, finding.verdict) for finding in findings):
            node = run.registry.get(reducer)
            name = "" if node is None else node.name
            log.warning("the slice of %s (%s): %s: %s", reducer, name, verdict.outcome, verdict.reason)
            run.tell(
                SliceDisputed(reducer, name, active.round, verdict.outcome, verdict.against, verdict.reason)
            )
            for liar, reason in self._disputes.add(reducer, verdict, active.members).items():
                self._suspicions.lied(liar, reason)

    def committed(self, active: OpenRound) -> None:
        """Look at a round that has just been committed, before the next one is opened."""
        run = self._run
        voters = active.result.voters
        ballots = dict(zip(voters, self._ballots(active), strict=True))
        sightings = {
            member.node: sighting
            for member in active.members.values()
            if (sighting := _sighting(member, ballots.get(member.node))) is not None
        }
        self._suspicions.saw(sightings)
        known = {node.node for node in run.registry.left} | set(run.registry.nodes)
        self._suspicions.forget_all_but(known)
        self._disputes.forget_all_but(known)
        run.training.inquiries.forget_all_but(known)
        self._actions = {node: action for node, action in self._actions.items() if node in known}
        for node, suspicion in self._suspicions.judge(run.registry.names()).items():
            self._act(node, active.round, suspicion)

    def _ballots(self, active: OpenRound) -> list[Ballot]:
        voters, result = active.result.voters, active.result
        if not voters:
            return []
        members = [active.members[node] for node in voters]
        if isinstance(active, ActiveRound):
            words = self._sampler.take(active.table, [member.row for member in members])
            if words is None:
                return [UNKNOWN] * len(voters)
            arrival = [active.place(node) for node in voters]
            return judge_words(words, arrival, self._former, active.table.digest)
        agreement = result.agreement()
        return judge_agreement([agreement[node] for node in voters], list(result.facts.weights))

    def _act(self, name: str, round_index: int, found: Suspicion) -> None:
        run, before, node = self._run, self.action(name), self._run.registry.get(name)
        if found.action == before or node is None:
            return
        self._actions[name] = found.action
        if found.action == "none":
            log.info("%s (%s) is under suspicion no more", name, node.name)
        else:
            log.warning("%s (%s) is under suspicion (%s): %s", name, node.name, found.action, found.reason)
        run.tell(
            NodeSuspected(name, node.name, round_index, found.action, found.cause, found.score, found.reason)
        )
        if found.action == "expel":
            run.administration.expel(name, f"[byzantine] expel: {found.reason}")


def _sighting(member: Member, ballot: Ballot | None) -> Sighting | None:
    """What a round tells of a member; ``None`` of one that was late or gone, which is no fault."""
    if ballot is not None:
        # The vote of a newcomer is noisier than the others', and weighs less as long as it is.
        return Sighting(ballot if member.share == FULL else replace(ballot, gap=math.nan))
    if member.refused:
        return Sighting(invalid=True)
    return Sighting(abstained=True) if member.state is State.ABSTAINED else None
