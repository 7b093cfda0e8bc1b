"""All nodes of a run, and the roster that is drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from coordinator.active_round import ActiveRound
from coordinator.nodes import Node
from coordinator.roster import Roster
from coordinator.rounds import State, Verdict

MAX_LEFT: Final = 64


class Registry:
    """Admitted nodes by identity, in the order of admission.

    Attributes:
        nodes: present ones.
        left: the last of those who have left.
        roster: members of the present round, or of the last one.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.left: list[Node] = []
        self.roster = Roster()

    def get(self, node: str | None) -> Node | None:
        """A present node."""
        return self.nodes.get(node) if node is not None else None

    def in_session(self) -> list[Node]:
        """Nodes that can be given orders."""
        return [node for node in self.nodes.values() if node.in_session]

    def joiners(self) -> list[Node]:
        """Nodes in session that are in no roster yet."""
        return [node for node in self.in_session() if node.state == "joining"]

    def remove(self, node: Node) -> bool:
        """Move a node to those who have left; ``False`` if it was not present."""
        if self.nodes.pop(node.node, None) is None:
            return False
        self.left = [*self.left[1 - MAX_LEFT :], node]
        return True

    def members(self) -> list[Node]:
        """Members of the roster that can be given orders."""
        found = (self.nodes.get(node) for node in self.roster.members)
        return [node for node in found if node is not None and node.in_session]

    def donors(self, round_index: int) -> list[str]:
        """Members that hold the state of ``round_index``, starting with another one in every round."""
        able = [m.node for m in self.members() if m.state == "active" and m.position == round_index]
        turn = round_index % max(1, len(able))
        return able[turn:] + able[:turn]

    def renew(self, newcomers: Sequence[tuple[Node, int]] = ()) -> None:
        """Make the next roster: whoever left is out, newcomers hold the state of the given round."""
        staying = {node.node for node in self.members()}
        gone = [node for node in self.roster.members if node not in staying]
        self.roster = self.roster.changed(leave=gone, join=[node.node for node, _ in newcomers])
        for node, held in newcomers:
            node.position = node.first_round = held
            node.opened = held - 1
            node.state = "active"

    def dissolve(self) -> None:
        """Nobody is a member any more."""
        self.roster = self.roster.changed(leave=self.roster.members)

    def settle(self, active: ActiveRound, verdict: Verdict) -> None:
        """Note what a committed round tells about its members."""
        result = active.result
        agreement = result.agreement()
        for member in active.members.values():
            node = self.nodes.get(member.node)
            if node is None:
                continue
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
