"""What an administrator decides: that a run pauses, goes on, or does without one of its nodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from coordinator.ending import ENDED
from coordinator.events import NodeExpelled, RunPaused, RunUnpaused
from coordinator.journal import AdminRecord, ExpelledNode
from coordinator.nodes import Node, lasting
from protos.address import peer
from protos.atoll_pb2 import CoordinatorMessage, Paused
from protos.digests import sha256_text
from protos.identity import fingerprint

if TYPE_CHECKING:
    from coordinator.run import Run

log = logging.getLogger(__name__)

MAX_EXPELLED: Final = 4096  # the oldest may come back
MAX_REASON: Final = 200  # characters


@dataclass(frozen=True)
class Answer:
    """Whether an order was carried out, and what came of it, in words."""

    done: bool
    text: str


def host_of(address: str) -> str:
    """The host from which a node called, without the port."""
    return peer(address).rpartition(":")[0]


def barred(
    expelled: Sequence[ExpelledNode],
    secret: str,
    name: str,
    address: str,
    *,
    known: bool = False,
    key: bytes = b"",
) -> str:
    """Why a node may not join any more; empty if it may.

    Who was expelled is known by its key, by the secret of a former session or, started afresh, by its name
    and host together; another node that is ``known`` by its own secret may share these.
    """
    mark = sha256_text(lasting(secret)) if secret else ""
    for one in expelled:
        same = one.secret == mark or (one.key and one.key == fingerprint(key))
        if same or (not known and (one.name, one.host) == (name, host_of(address))):
            return f"{one.node} ({one.name}) was expelled from this run: {one.reason}"
    return ""


class Administration:
    """The orders that an administrator has given; the journal keeps them. ``by`` is the name of the token
    that let somebody give one, for the log of events.

    Args:
        run: that they are given to.

    Attributes:
        record: what holds now.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.record: AdminRecord = run.journal.administration

    @property
    def paused(self) -> str:
        """Why no round is opened; empty: the run is not paused."""
        return self.record.paused

    def pause(self, reason: str = "", *, by: str = "") -> Answer:
        """Open no more rounds once the one in flight is committed; the nodes wait."""
        run = self._run
        if run.phase in ENDED:
            return Answer(False, f"the run has ended: {run.reason}")
        if self.paused:
            return Answer(False, f"the run is paused already: {self.paused}")
        reason = _words(reason) or "by the administrator"
        self._keep(replace(self.record, paused=reason))
        log.warning("the run is paused after %d rounds: %s", run.round, reason)
        run.tell(RunPaused(run.round, reason, by))
        for node in run.registry.in_session():
            self.arrived(node)
        if run.active is not None:
            return Answer(True, f"the run pauses once round {run.round + 1} is committed")
        if run.phase == "syncing":
            run.between_rounds()
        return Answer(True, "the run is paused")

    def resume(self, *, by: str = "") -> Answer:
        """Open rounds again."""
        run = self._run
        if not self.paused:
            return Answer(False, "the run is not paused")
        self._keep(replace(self.record, paused=""))
        log.warning("the run goes on after %d rounds", run.round)
        run.tell(RunUnpaused(run.round, by))
        for node in run.registry.in_session():
            run.send(node, CoordinatorMessage(paused=Paused()))
        if run.phase == "paused":
            run.between_rounds()
        return Answer(True, "the run goes on")

    def expel(self, name: str, reason: str = "", *, by: str = "") -> Answer:
        """Have a node leave; it is refused until the run ends."""
        run = self._run
        node = run.registry.get(name)
        if run.phase in ENDED:
            return Answer(False, f"the run has ended: {run.reason}")
        if node is None:
            return Answer(False, f"there is no node {name[:64]!r} in this run now")
        reason = _words(reason) or "by the administrator"
        secret = sha256_text(lasting(node.secret))
        key = fingerprint(node.key)
        mark = ExpelledNode(node.node, node.name, host_of(node.address), secret, reason, key)
        others = (*self.record.expelled, mark)[-MAX_EXPELLED:]
        self._keep(replace(self.record, expelled=others))
        log.warning("%s (%s) is expelled: %s", node.node, node.name, reason)
        run.tell(NodeExpelled(node.node, node.name, reason, by))
        run.dismiss(node, f"expelled from this run: {reason}")
        run.newcomer_moved()
        return Answer(True, f"{node.node} ({node.name}) is expelled")

    def arrived(self, node: Node) -> None:
        """Tell a node that it will wait, if it will."""
        if self.paused:
            message = CoordinatorMessage(paused=Paused(reason=self.paused, round=self._run.round))
            self._run.send(node, message)

    def _keep(self, record: AdminRecord) -> None:
        self.record = record
        self._run.journal.administer(record)


def _words(text: str) -> str:
    """One line of what somebody has typed."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MAX_REASON]
