"""The local exchange: one node alone, without a network, with the orders a coordinator would give.

One difference: samples of a round from which the node abstained are passed over. A coordinator hands them to
another node; alone, they would make the same node fail again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from node.exchange.base import (
    DonateOrder,
    ExchangeError,
    LoadOrder,
    Order,
    RoundOrder,
    RoundResult,
    StopOrder,
    WorkReport,
)


class LocalExchange:
    """World size 1: the majority of one vote, and the mean of one payload, is the payload.

    Args:
        rounds: of the run.
        batch: samples a round.
        evaluate_every: rounds between validation losses; 0 measures in the last round only.
        start: first round, for a run that is resumed.
        node: the node's name in the results.
    """

    def __init__(
        self, *, rounds: int, batch: int, evaluate_every: int = 0, start: int = 0, node: str = "node-0"
    ) -> None:
        if not 0 <= start <= rounds:
            raise ValueError(f"a run of {rounds} rounds cannot start at round {start}")
        if batch < 1:
            raise ValueError(f"a round reads at least one sample, not {batch}")
        self._rounds = rounds
        self._batch = batch
        self._evaluate_every = evaluate_every
        self._next = start
        self._node = node

    def next_order(self) -> Order:
        """The next round, or the stop after the last."""
        if self._next >= self._rounds:
            return StopOrder(done=True, reason=f"all {self._rounds} rounds are done", evaluate=False)
        last = self._next == self._rounds - 1
        return RoundOrder(
            round=self._next,
            epoch=1,
            members=(self._node,),
            lease_start=self._next * self._batch,
            lease_count=self._batch,
            evaluate=last or bool(self._evaluate_every and (self._next + 1) % self._evaluate_every == 0),
            result_ready=False,
        )

    def reduce(
        self, order: RoundOrder, payload: torch.Tensor | None, abstain_reason: str = ""
    ) -> RoundResult:
        """The payload itself; without one, a round without voters."""
        if order.round != self._next:
            raise ExchangeError(f"round {order.round} was contributed to, round {self._next} is open")
        self._next += 1
        if payload is None:
            return RoundResult(
                round=order.round,
                payload=None,
                voters=(),
                weights=(),
                counted=False,
                agreement=0.0,
                reason=f"no voters: {abstain_reason or 'the node abstained'}",
            )
        return RoundResult(
            round=order.round,
            payload=payload,
            voters=(self._node,),
            weights=(1,),
            counted=True,
            agreement=1.0,
            reason="the only node has contributed",
        )

    def report(self, report: WorkReport) -> None:
        """Nobody else listens."""

    def donate(self, order: DonateOrder, tensors: Mapping[str, torch.Tensor], state_digest: str) -> None:
        """Never ordered here."""
        raise ExchangeError("a run of one node has nobody to send its state to")

    def load(self, order: LoadOrder, tensors: Mapping[str, torch.Tensor]) -> str:
        """Never ordered here."""
        raise ExchangeError("a run of one node has nobody to get a state from")

    def ready(self, round_index: int, state_digest: str) -> None:
        """Nobody else listens."""

    def bytes_counted(self) -> tuple[int, int]:
        """No bytes travel."""
        return 0, 0

    def close(self, reason: str) -> None:
        """Nothing to end."""
