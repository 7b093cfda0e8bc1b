"""The gate: what strangers and nodes may ask for, how often, and whose connections are cut.

What it costs to be refused is kept small on this side: no message of a caller is read before its token, no
memory is taken for what has only been announced, and what is remembered of addresses is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from coordinator.inbound import Connections, Inbound
from coordinator.nodes import Node
from coordinator.rates import Rates, caller
from protos.limits import LIMITS, Limits
from protos.refusal import CROWDED, FLOOD, SILENT, Refused

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0  # between two looks at the connections
SAY_SECONDS: Final = 10.0  # between two sentences in the log
_LOOKS: Final = 3


@dataclass
class Standing:
    """A connection: since when, on the coordinator's clock, and whether it has shown a right token."""

    since: float
    shown: bool = False


def to_cut(
    connections: Iterable[tuple[Inbound, Standing]], limits: Limits, now: float, hostile: Iterable[str] = ()
) -> list[tuple[Inbound, str, str]]:
    """Which connections have to go: each with a kind, to count, and the reason in words.

    Of an address that has too many, those go first that have shown no token, then the newest.

    Args:
        connections: all of them.
        limits: that hold.
        now: seconds on the clock of their ``since``.
        hostile: addresses that have shown too many wrong tokens.
    """
    hostile, cut, staying = set(hostile), [], []
    for connection, standing in connections:
        waited = now - standing.since
        if not standing.shown and connection.origin in hostile:
            why = f"{connection.origin} has shown more than {limits.wrong_tokens} wrong tokens a minute"
            cut.append((connection, FLOOD, why))
        elif not standing.shown and waited >= limits.first_call_seconds:
            why = f"no call with a right token within {limits.first_call_seconds:g} s"
            cut.append((connection, SILENT, why))
        else:
            staying.append((connection, standing))
    staying.sort(key=lambda one: (not one[1].shown, one[1].since))
    counts: Counter[str] = Counter()
    for connection, _ in staying:
        counts[connection.origin] += 1
        if counts[connection.origin] > limits.connections_per_address:
            why = f"{connection.origin} has {limits.connections_per_address} connections already"
            cut.append((connection, CROWDED, why))
    return cut


class Gate:
    """Lives on the coordinator's event loop.

    Args:
        now: seconds on a monotonic clock.
        count: is told the kind of each refusal.
        limits: that hold.
    """

    def __init__(
        self, now: Callable[[], float], count: Callable[[str], None], limits: Limits = LIMITS
    ) -> None:
        self.limits = limits
        self._now, self._count = now, count
        self._wrong = Rates(limits.wrong_tokens, now)
        self._joins = Rates(limits.joins, now)
        self._questions = Rates(limits.questions, now)
        self._contributions = Rates(limits.contributions, now)
        self._messages = Rates(limits.messages, now)
        # Callers with a right token, until a look finds their connections; how many have not. A look may have
        # been taken just before a connection came.
        self._shown: dict[str, int] = {}
        self._hostile: set[str] = set()
        self._standings: dict[Inbound, Standing] = {}
        self._said = -SAY_SECONDS

    # --------------------------------------------------------------------------------------------- calls

    def welcome(self, peer: str) -> None:
        """A call with a right token."""
        self._shown[peer] = 0

    def wrong_token(self, peer: str) -> None:
        """A call with a wrong one."""
        address, _ = caller(peer)
        if not self._wrong.take(address):
            self._hostile.add(address)

    def join(self, peer: str) -> None:
        """Somebody wants to join; raises :class:`Refused` if that is too often."""
        self._ask(self._joins, peer, f"more than {self.limits.joins} nodes a minute join")

    def question(self, peer: str) -> None:
        """Somebody asks about the run; raises :class:`Refused` if that is too often."""
        self._ask(self._questions, peer, f"more than {self.limits.questions} questions a minute come")

    def contribution(self, node: Node) -> None:
        """A node opens a stream of a contribution; raises :class:`Refused` if that is too often."""
        if not self._contributions.take(node.node, 1 / node.ranks):
            self._count(FLOOD)
            text = f"{node.node} opens more than {self.limits.contributions} streams a minute for each rank"
            raise Refused(FLOOD, f"{text}: the next ones are taken in a moment", "UNAVAILABLE")

    def pause(self, node: Node) -> float:
        """A message of a node's session has come; seconds to wait before the next one is read."""
        return self._messages.wait(node.node, 1 / node.ranks)

    def _ask(self, rates: Rates, peer: str, what: str) -> None:
        address, _ = caller(peer)
        if not rates.take(address):
            self._count(FLOOD)
            raise Refused(FLOOD, f"{what} from {address}: try again in a moment", "UNAVAILABLE")

    # -------------------------------------------------------------------------------------------- connections

    def judge(self, open_now: Iterable[Inbound]) -> list[tuple[Inbound, str]]:
        """Which of the connections that are open now have to go, and why; they are counted."""
        now, shown = self._now(), {caller(peer): peer for peer in self._shown}
        self._standings = {one: self._standings.get(one) or Standing(now) for one in open_now}
        for one, standing in self._standings.items():
            if (peer := shown.get((one.origin, one.port))) is not None:
                standing.shown = True
                self._shown.pop(peer, None)
        self._shown = {peer: looks + 1 for peer, looks in self._shown.items() if looks < _LOOKS}
        verdicts = to_cut(self._standings.items(), self.limits, now, self._hostile)
        self._hostile.clear()
        for _, kind, _ in verdicts:
            self._count(kind)
        return [(connection, why) for connection, _, why in verdicts]

    async def watch(self, connections: Connections, seconds: float = LOOK_SECONDS) -> None:
        """Look after ``connections`` until it is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            found = await asyncio.to_thread(connections.look)
            verdicts = self.judge(found)
            if verdicts:
                await asyncio.to_thread(connections.cut, [connection for connection, _ in verdicts])
                connection, why = verdicts[0]
                more = f", and {len(verdicts) - 1} more" if len(verdicts) > 1 else ""
                self._say(f"a connection from {connection.origin} port {connection.port} is cut{more}: {why}")

    def _say(self, text: str) -> None:
        if (now := self._now()) - self._said >= SAY_SECONDS:
            self._said = now
            log.warning("%s", text)
