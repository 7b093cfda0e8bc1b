"""Uploads and downloads of the shared state, by a node of any number of ranks.

The leader alone speaks with the coordinator, and not while others wait for it in the middle of something: it
downloads before it shares the order with them, and uploads after it has what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from node.exchange.base import DonateOrder, Exchange, LoadOrder
from node.exchange.trouble import TransferError
from node.joint import gathered
from node.ranks import Ranks
from node.whole_state import WholeState


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
        self._staged: Mapping[str, torch.Tensor] = {}
        self._came = ("", "")  # the announced digest of the last download, or why there is none

    def donate(self, order: DonateOrder, digest: str) -> None:
        """Upload the state, whose digest is ``digest``. All ranks call it; the leader returns last.

        Raises:
            TransferError: on the leader: it did not get through.
        """
        tensors = self._state.collect()
        if self._ranks.rank == 0:
            assert self._exchange is not None
            self._exchange.donate(order, tensors, digest)

    def download(self, order: LoadOrder) -> None:
        """The leader's part of :meth:`load`, before the others know of the order. Its own tensors are
        overwritten, whether or not the download comes to its end."""
        assert self._exchange is not None
        self._staged = self._state.staging()
        try:
            self._came = self._exchange.load(order, self._staged), ""
        except TransferError as error:
            self._came = "", str(error)

    def load(self, order: LoadOrder) -> str:
        """Take what the leader has downloaded. All ranks call it; returns the digest of the new state.

        Raises:
            TransferError: on all ranks: it did not arrive, or is not what the donor announced. What is held
                then is a part of it at best.
        """
        announced, trouble = gathered(
            self._ranks, f"the download of round {order.round}'s state", self._came
        )[0]
        if trouble:
            self._staged = {}
            raise TransferError(trouble)
        self._state.spread(self._staged)
        self._staged = {}
        digest = self._state.digest()
        if digest != announced:
            raise TransferError(f"the loaded state has the digest {digest}, the donor announced {announced}")
        return digest
