"""The local exchange: one node alone, without a network, with the orders a coordinator would give.

One difference: samples of a round from which the node abstained are passed over. A coordinator hands them to
another node; alone, they would make the same node fail again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Final

import torch

from node.exchange.base import (
    DonateOrder,
    ExchangeError,
    LoadOrder,
    Order,
    ReplayOrder,
    RoundOrder,
    RoundResult,
    StopOrder,
    WorkReport,
)
from node.exchange.filling import Filling
from optim.mean import F32
from optim.reduce import SingleNode
from protos.buckets import TableSchedule

if TYPE_CHECKING:
    from node.exchange.spool import Spool
    from node.exchange.tensor_bytes import Row

_FILLING_SECONDS: Final = 3600.0  # that a payload may take from the call on


class LocalExchange:
    """World size 1: the coordinator's reduction of one contribution.

    Args:
        tables: what would travel, round by round; for a rank of an island its lane.
        rounds: of the run.
        batch: samples a micro-step.
        micro_steps: of a round.
        evaluate_every: rounds between validation losses; 0 measures in the last round only.
        start: first round, for a run that is resumed.
        samples: first global sample index behind all that the run had leased before, to other nodes perhaps.
        node: the node's name in the results.
        reducer: :meth:`reducer_tensors` of an exchange that is to be continued.
    """

    def __init__(
        self,
        tables: TableSchedule,
        *,
        rounds: int,
        batch: int,
        micro_steps: Callable[[int], int] = lambda round_index: 1,
        evaluate_every: int = 0,
        start: int = 0,
        samples: int = 0,
        node: str = "node-0",
        reducer: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        if not 0 <= start <= rounds:
            raise ValueError(f"a run of {rounds} rounds cannot start at round {start}")
        if batch < 1:
            raise ValueError(f"a micro-step reads at least one sample, not {batch}")
        self._reduction = SingleNode()
        self._reduction.memory.load({name: tensor.numpy() for name, tensor in (reducer or {}).items()})
        self._filling: Filling | None = None  # the last one
        self._closed = False
        self._before: dict[str, F32] | None = None  # its memory, until the round's result is applied
        self._tables = tables
        self._rounds = rounds
        self._batch = batch
        self._micro_steps = micro_steps
        self._evaluate_every = evaluate_every
        self._next = start
        self._sample = max(samples, batch * sum(map(micro_steps, range(start))))
        self._node = node

    def next_order(self) -> Order:
        """The next round, or the stop after the last."""
        self._before = None
        if self._next >= self._rounds:
            return StopOrder(done=True, reason=f"all {self._rounds} rounds are done", evaluate=False)
        last = self._next == self._rounds - 1
        return RoundOrder(
            round=self._next,
            epoch=1,
            members=(self._node,),
            lease_start=self._sample,
            lease_count=self._batch * self._micro_steps(self._next),
            evaluate=last or bool(self._evaluate_every and (self._next + 1) % self._evaluate_every == 0),
            result_ready=False,
            frontier=self._sample + self._batch * self._micro_steps(self._next),
        )

    def reduce(
        self,
        order: RoundOrder,
        payload: torch.Tensor | None,
        abstain_reason: str = "",
        filling: Filling | None = None,
    ) -> RoundResult:
        """What the payload alone is reduced to, once it is there; without one, a round without voters."""
        if order.round != self._next:
            raise ExchangeError(f"round {order.round} was contributed to, round {self._next} is open")
        if payload is not None and filling is not None:
            self._filling = filling
            if self._closed:
                filling.finish(False)
            try:
                usable = filling.wait(_FILLING_SECONDS)
            except FutureTimeoutError:
                raise ExchangeError(
                    f"the payload of round {order.round + 1} was not finished in {_FILLING_SECONDS:g} s"
                ) from None
            if self._closed:
                raise ExchangeError(f"round {order.round + 1} was cut short: the exchange has been closed")
            if not usable:
                payload, abstain_reason = None, filling.reason
        self._before = self._reduction.memory.arrays()
        self._sample += order.lease_count
        self._next += 1
        result = self._reduction(payload, round_index=order.round, table=self._tables.of(order.round))
        if result is None:
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
            payload=result,
            voters=(self._node,),
            weights=(1,),
            counted=True,
            agreement=1.0,
            reason="the only node has contributed",
        )

    def report(self, report: WorkReport) -> None:
        """The round has been applied; nobody else listens."""
        self._before = None

    def replay(self, order: ReplayOrder) -> Generator[RoundResult, None, None]:
        """Never ordered here."""
        raise ExchangeError("a run of one node has no rounds that went on without it")

    def donate(self, order: DonateOrder, spool: Spool, done: Callable[[str], None]) -> None:
        """Never ordered here."""
        spool.close()
        raise ExchangeError("a run of one node has nobody to send its state to")

    def download(self, order: LoadOrder, rows: Sequence[Row]) -> Spool:
        """Never ordered here."""
        raise ExchangeError("a run of one node has nobody to get a state from")

    def ready(self, round_index: int, state_digest: str) -> None:
        """Nobody else listens."""

    def reducer_tensors(self) -> dict[str, torch.Tensor]:
        """Residuals and bases of the rounds that have been applied; not to be written to.

        A node that is interrupted between a reduction and its application makes the round again.
        """
        arrays = self._reduction.memory.arrays() if self._before is None else self._before
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def bytes_counted(self) -> tuple[int, int]:
        """No bytes travel."""
        return 0, 0

    def close(self, reason: str) -> None:
        """See :class:`node.exchange.base.Lane`."""
        self._closed = True
        if self._filling is not None:
            self._filling.finish(False, reason)
