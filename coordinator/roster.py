"""The committed members of a round, numbered by epoch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Roster:
    """Members in slot order. Epoch 0 is the empty roster before the first round."""

    epoch: int = 0
    members: tuple[str, ...] = ()

    def changed(self, *, leave: Collection[str] = (), join: Iterable[str] = ()) -> Roster:
        """The next roster: those who leave close up, newcomers take the last slots.

        The epoch rises by one if anything changed; otherwise the same roster is returned.

        Raises:
            ValueError: somebody joins twice, or leaves without being a member.
        """
        newcomers = tuple(join)
        strangers = sorted(set(leave) - set(self.members))
        if strangers:
            raise ValueError(f"{', '.join(strangers)} cannot leave epoch {self.epoch}: not a member")
        members = tuple(node for node in self.members if node not in leave) + newcomers
        if len(set(members)) != len(members):
            raise ValueError(f"a node would be twice in epoch {self.epoch + 1}: {', '.join(members)}")
        return self if members == self.members else Roster(self.epoch + 1, members)

    def __contains__(self, node: object) -> bool:
        return node in self.members

    def __len__(self) -> int:
        return len(self.members)
