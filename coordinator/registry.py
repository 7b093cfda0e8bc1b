"""All nodes of a run, and the roster that is drawn from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from coordinator.journal import NodeRecord, RosterRecord
from coordinator.nodes import Node, lasting, mark_of
from coordinator.open_round import OpenRound
from coordinator.roster import Roster
from coordinator.rounds import State, Verdict

MAX_LEFT: Final = 64
MAX_FORMER: Final = 4096  # sessions whose nodes may come back under their old names


class Registry:
    """Admitted nodes by identity, in the order of admission.

    Attributes:
        nodes: present ones.
        left: the last of those who have left.
        roster: members of the present round, or of the last one.
        numbers: names given so far.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.left: list[Node] = []
        self.roster = Roster()
        self.numbers = 0
        self._former: OrderedDict[str, NodeRecord] = OrderedDict()  # by their secrets, as records hold them

    def restore(self, record: RosterRecord) -> None:
        """Begin with the roster of a coordinator that has ended; its members may come back."""
        self.roster = Roster(record.epoch, tuple(member.node for member in record.members))
        self.numbers = record.numbers
        self._former = OrderedDict((member.secret, member) for member in record.members)

    def record(self) -> RosterRecord:
        """The roster, for the journal."""
        known = {member.node: member for member in self._former.values()}
        for name in self.roster.members:
            if (node := self.nodes.get(name)) is not None:
                known[name] = _record(node)
        members = tuple(known[name] for name in self.roster.members if name in known)
        return RosterRecord(self.roster.epoch, members, self.numbers)

    def former(self, secret: str, key: bytes = b"") -> str | None:
        """The name of the node with this key one of whose sessions had this secret."""
        mark = lasting(secret)
        if not mark:
            return None
        record = self._former.get(mark_of(secret, key))
        if record is not None:
            return record.node
        for node in self.nodes.values():
            if lasting(node.secret) == mark and node.key == key:
                return node.node
        return None

    def with_key(self, key: bytes) -> list[Node]:
        """The present nodes with this key."""
        return [node for node in self.nodes.values() if key and node.key == key]

    def new_name(self) -> str:
        """For a node that was not here before."""
        self.numbers += 1
        return f"node-{self.numbers - 1}"

    def get(self, node: str | None) -> Node | None:
        """A present node."""
        return self.nodes.get(node) if node is not None else None

    def last(self, name: str) -> Node | None:
        """A present node, or what it was when it left."""
        return self.nodes.get(name) or next((node for node in self.left if node.node == name), None)

    def in_session(self) -> list[Node]:
        """Nodes that can be given orders."""
        return [node for node in self.nodes.values() if node.in_session]

    def joiners(self) -> list[Node]:
        """Nodes in session that are no members, or are to be members no more."""
        return [node for node in self.nodes.values() if node.joining]

    def remove(self, node: Node) -> bool:
        """Move a node to those who have left; ``False`` if it was not present."""
        if self.nodes.get(node.node) is not node:  # it may have joined again under its name
            return False
        del self.nodes[node.node]
        self.left = [*(old for old in self.left[1 - MAX_LEFT :] if old.node != node.node), node]
        record = _record(node)
        self._former[record.secret] = record
        while len(self._former) > MAX_FORMER:
            self._former.popitem(last=False)
        return True

    def members(self) -> list[Node]:
        """Members of the roster that can be given orders."""
        found = (self.nodes.get(node) for node in self.roster.members)
        return [node for node in found if node is not None and node.seated]

    def received_since(self, committed: int) -> int:
        """The first round whose result somebody may have for others; ``committed``: nobody has any. A node
        keeps what it has itself received, as long as its process lives."""
        since = committed
        for node in self.in_session():
            if node.known:
                return 0
            if node.seated:
                since = min(since, node.first_round)
        return since

    def names(self) -> list[str]:
        """Of the members that can be given orders."""
        return [node.node for node in self.members()]

    def donors(self, round_index: int) -> list[str]:
        """Members that hold the state of ``round_index``, starting with another one in every round."""
        able = [m.node for m in self.members() if m.state == "active" and m.position == round_index]
        turn = round_index % max(1, len(able))
        return able[turn:] + able[:turn]

    def renew(self, newcomers: Sequence[tuple[Node, int]] = ()) -> bool:
        """Make the next roster: whoever left is out, newcomers hold the state of the given round. Returns
        whether it is another one.

        A newcomer whose name is in the roster still, as it was cut off for a moment, keeps its slot.
        """
        for node, held in newcomers:
            node.position = node.first_round = held
            node.opened = held - 1
            node.state, node.goal = "active", -1
        staying = {node.node for node in self.members()}
        gone = [node for node in self.roster.members if node not in staying]
        joining = [node.node for node, _ in newcomers if node.node not in self.roster]
        before, self.roster = self.roster, self.roster.changed(leave=gone, join=joining)
        return self.roster is not before

    def dissolve(self) -> None:
        """Nobody is a member any more."""
        self.roster = self.roster.changed(leave=self.roster.members)

    def settle(self, active: OpenRound, verdict: Verdict) -> None:
        """Note what a committed round tells about its members."""
        result = active.result
        agreement = result.agreement()
        for member in active.members.values():
            node = self.nodes.get(member.node)
            if node is None or node.state not in ("active", "lagging"):
                continue  # it is gone, or back without its seat, or has left the common state
            lanes = [
                exchange.lane
                for exchange in node.exchanges
                if exchange.result is result and exchange.refusal is None and exchange.lane is not None
            ]
            if lanes and node.give(active.round, lanes):
                node.position = active.round + 1  # the commit is on its way
            if member.node in verdict.voters:
                node.agreement = agreement[member.node]
                node.state, node.silent_streak = "active", 0
                continue
            node.missed += 1
            if member.state is State.ABSTAINED:
                node.abstained += 1
                node.state, node.silent_streak = "active", 0
            elif member.node in verdict.silent:
                node.state, node.silent_at = "lagging", active.round
                node.silent_streak += 1


def _record(node: Node) -> NodeRecord:
    return NodeRecord(node.node, node.name, mark_of(node.secret, node.key))
