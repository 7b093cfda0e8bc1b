"""Snapshots of the shared state to and from others, by a node of any number of ranks.

The leader alone speaks with the coordinator, and not while others wait for it in the middle of something: it
downloads before it shares the order with them, and uploads after it has what they hold. What travels lies in
a temporary file meanwhile, and nothing is overwritten before all of it has come and been checked.
"""

from __future__ import annotations

from collections.abc import Callable

from node.exchange.base import DonateOrder, Exchange, ExchangeError, LoadOrder
from node.exchange.spool import Spool
from node.exchange.trouble import TransferError
from node.joint import gathered
from node.ranks import Ranks
from node.whole_state import WholeState
from protos.snapshots import chunk_range

_NOTHING = ("", "nothing was downloaded")


class Handover:
    """The way of the shared state between this node and others.

    Args:
        state: of the node.
        ranks: of the node.
        exchange: the leader's; ``None`` on other ranks.
    """

    def __init__(self, state: WholeState, ranks: Ranks, exchange: Exchange | None) -> None:
        self._state = state
        self._ranks = ranks
        self._exchange = exchange
        self._spool: Spool | None = None  # a whole state that has come and is not loaded yet
        self._came = _NOTHING  # its digest, or why there is none

    def donate(self, order: DonateOrder, digest: str, done: Callable[[str], None]) -> int:
        """Keep the chunks that were ordered of the state, whose digest is ``digest``; they go up while the
        node trains on. All ranks call it. Returns how many bytes they are.

        ``done`` is told on the leader, in another thread, why they did not get through; an empty text if they
        did.

        Raises:
            TransferError: on the leader, and on all ranks if that is known before they begin: the chunks
                cannot be kept. This node is unharmed.
        """
        start, stop = chunk_range(self._state.nbytes, order.first, order.count)
        spool, trouble = None, ""
        if self._ranks.rank == 0:
            try:
                spool = Spool(self._state.rows, order.first, order.count, digest)
            except (TransferError, ValueError) as error:
                trouble = str(error)
        try:
            what = f"room for chunks of round {order.round}'s state"
            if trouble := gathered(self._ranks, what, trouble)[0]:
                raise TransferError(trouble)
            full: TransferError | None = None
            for offset, data in self._state.pieces(start, stop):
                assert spool is not None, "the leader alone gets pieces"
                try:
                    if full is None:  # else: the others do not know, and send on
                        spool.write(offset, data)
                except TransferError as error:
                    full = error
            if full is not None:
                raise full
        except BaseException:
            if spool is not None:
                spool.close()
            raise
        if spool is not None:
            assert self._exchange is not None, "the leader has an exchange"
            self._exchange.donate(order, spool, done)
        return stop - start

    def download(self, order: LoadOrder) -> None:
        """The leader's part of :meth:`load`, before the others know of the order. Overwrites nothing."""
        assert self._exchange is not None, "the leader has an exchange"
        self.close()
        try:
            self._spool = self._exchange.download(order, self._state.rows)
            held = self._spool.digest()
        except TransferError as error:
            self._came = "", str(error)
        else:
            announced = self._spool.state_digest
            wrong = (
                f"the state of round {order.round} that came has the digest {held}, announced was {announced}"
            )
            self._came = announced, "" if held == announced else wrong

    def load(self, order: LoadOrder) -> str:
        """Take what the leader has downloaded. All ranks call it; returns the digest of the new state.

        Raises:
            TransferError: on all ranks: it did not arrive, or is not what was announced. The state is as it
                was.
            ExchangeError: the state is half loaded or damaged, and of no use any more.
        """
        announced, trouble = gathered(
            self._ranks, f"the download of round {order.round}'s state", self._came
        )[0]
        try:
            if trouble:
                raise TransferError(trouble)
            try:
                self._state.fill(None if self._spool is None else self._spool.read)
            except TransferError as error:
                raise ExchangeError(f"loading the state of round {order.round} broke off: {error}") from error
        finally:
            self.close()
        digest = self._state.digest()
        if digest != announced:
            raise ExchangeError(
                f"the state of round {order.round} has the digest {digest} once it is loaded, {announced} in "
                "its file: this machine's memory or its disk damages data"
            )
        return digest

    def close(self) -> None:
        """Forget what was downloaded and not loaded; harmless twice."""
        if self._spool is not None:
            self._spool.close()
        self._spool, self._came = None, _NOTHING
