"""Between two rounds: joiners receive the shared state from a member before the next round opens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from coordinator.timer import Alarm, Timer
from coordinator.transfers import Transfer
from protos.atoll_pb2 import CoordinatorMessage, Donate, LoadState, Ready

Send = Callable[[str, CoordinatorMessage], None]

MIN_PROGRESS: Final = 1 / 64  # of a state within one start timeout; less is given up


class Syncing:
    """One pause of the run in which joiners load the state of ``round``.

    Donors are tried in the given order, each once. It ends, with ``on_end(ready, failed)``, when every joiner
    is ready or has failed; ``failed`` maps joiners to reasons.

    Args:
        round_index: whose state it is: the next round to open.
        joiners: who loads it.
        donors: who holds it.
        frontier: first sample behind all leases of the run, which the joiners are told.
        timer: the clock.
        timeout: seconds in which a transfer has to move by ``MIN_PROGRESS``.
        stall: seconds after which a donor or joiner that does nothing is given up.
        agreed: tells the digest that the state must have, or an empty string while that is open.
        send: gives a node an order.
        on_end: see above.

    Attributes:
        transfer: the attempt that is running, or the last one.
    """

    def __init__(
        self,
        round_index: int,
        joiners: Sequence[str],
        donors: Sequence[str],
        *,
        frontier: int,
        timer: Timer,
        timeout: float,
        stall: float,
        agreed: Callable[[], str],
        send: Send,
        on_end: Callable[[tuple[str, ...], dict[str, str]], None],
    ) -> None:
        self.round = round_index
        self.transfer: Transfer | None = None
        self._donors = list(donors)
        self._frontier = frontier
        self._waiting = list(joiners)
        self._ready: list[str] = []
        self._failed: dict[str, str] = {}
        self._timer = timer
        self._timeout = timeout
        self._stall = stall
        self._agreed = agreed
        self._send = send
        self._attempts = 0
        self._on_end = on_end
        self._alarm: Alarm | None = None
        self._mark = 0.0
        self._ended = False

    @property
    def joiners(self) -> tuple[str, ...]:
        """Who is still loading."""
        return tuple(self._waiting)

    @property
    def reason(self) -> str:
        """In words, what it waits for."""
        donor = self.transfer.donor if self.transfer else "nobody"
        return f"{', '.join(self._waiting)} loading the state of round {self.round} from {donor}"

    def begin(self) -> None:
        """Ask the first donor."""
        self._alarm = self._timer.call_at(self._timer.now() + self._timeout, self._expired)
        self._next_donor("no member holds the state")

    def transfer_ended(self, transfer: Transfer) -> None:
        """The upload of a donor has succeeded or failed."""
        if transfer is not self.transfer or self._ended:
            return
        if transfer.phase == "failed":
            self._next_donor(transfer.reason)

    def ready(self, node: str, message: Ready) -> str:
        """A joiner says that it holds the state; returns why not, or an empty string."""
        if node not in self._waiting or self.transfer is None or self.transfer.header is None:
            return ""
        expected = self.transfer.header.state_digest
        problem = ""
        if message.round != self.round:
            problem = f"{node} is ready for round {message.round}, not {self.round}"
        elif message.state_digest != expected:
            problem = (
                f"the state that {node} loaded has digest {message.state_digest[:128]}, "
                f"{self.transfer.donor}'s has {expected}"
            )
        if problem:
            self._fail(node, problem)
        else:
            self._waiting.remove(node)
            self._ready.append(node)
        self._check()
        return problem

    def departed(self, node: str, reason: str) -> None:
        """A node, donor or joiner, has left."""
        if self._ended:
            return
        if node in self._donors:
            self._donors.remove(node)
        if node in self._ready:
            self._ready.remove(node)
        if node in self._waiting:
            self.failed(node, reason)
        elif self.transfer is not None and self.transfer.donor == node:
            self.transfer.fail(f"the donor {node} left")

    def stop(self) -> None:
        """End without an outcome."""
        self._ended = True
        if self._alarm is not None:
            self._alarm.cancel()
        if self.transfer is not None:
            self.transfer.fail("the coordinator is stopping")

    def failed(self, node: str, reason: str) -> None:
        """A joiner cannot load the state."""
        if node in self._waiting and not self._ended:
            self._fail(node, reason)
            self._check()

    def sweep(self) -> int:
        """Give up on donor and joiners that make no progress; returns how many joiners."""
        stuck = self.transfer.sweep() if self.transfer is not None else ()
        for node in stuck:
            self.failed(node, f"{node} stopped reading the state of round {self.round}")
        return len(stuck)

    def _next_donor(self, reason: str) -> None:
        if self._waiting and self._donors:
            self._offer(self._donors.pop(0))
            return
        for node in list(self._waiting):
            self._fail(node, f"no donor is left: {reason}")
        self._check()

    def _offer(self, donor: str) -> None:
        self._attempts += 1
        self._mark = 0.0
        self.transfer = Transfer(
            f"round-{self.round}-{self._attempts}",
            self.round,
            donor,
            self._waiting,
            stall=self._stall,
            now=self._timer.now,
            on_end=self.transfer_ended,
            expected_digest=self._agreed,
        )
        # Later: sending an order may find that a node is gone, and end this transfer.
        asyncio.get_running_loop().call_soon(self._announce, self.transfer)

    def _announce(self, transfer: Transfer) -> None:
        if transfer is not self.transfer or transfer.phase != "offered" or self._ended:
            return
        for node in list(self._waiting):
            load = LoadState(transfer=transfer.id, round=transfer.round, frontier=self._frontier)
            self._send(node, CoordinatorMessage(load_state=load))
        self._send(
            transfer.donor, CoordinatorMessage(donate=Donate(transfer=transfer.id, round=transfer.round))
        )

    def _fail(self, node: str, reason: str) -> None:
        self._waiting.remove(node)
        self._failed[node] = reason
        if self.transfer is not None:
            self.transfer.drop(node, reason)

    def _expired(self) -> None:
        self._alarm = None
        transfer = self.transfer
        share = transfer.relayed / max(1, transfer.header.nbytes) if transfer and transfer.header else 0.0
        if share - self._mark >= MIN_PROGRESS:  # slow, but moving
            self._mark = share
            self._alarm = self._timer.call_at(self._timer.now() + self._timeout, self._expired)
            return
        for node in list(self._waiting):
            self._fail(node, f"{node} did not load the state within {self._timeout:g} s")
        if transfer is not None:
            transfer.fail("it took too long")
        self._check()

    def _check(self) -> None:
        if not self._waiting and not self._ended:
            self._ended = True
            if self._alarm is not None:
                self._alarm.cancel()
            self._on_end(tuple(self._ready), dict(self._failed))
