"""The exchange: how a worker takes part in rounds, whatever carries the bytes.

The worker loop asks for its next order, computes, and hands its contribution over; it never sees a socket.
The hub (gRPC), the local exchange (world size 1) and later transports all fit here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from node.exchange.filling import Filling

if TYPE_CHECKING:
    import torch

    from node.exchange.spool import Spool
    from node.exchange.tensor_bytes import Row


class ExchangeError(RuntimeError):
    """The exchange cannot go on; the text says what happened, with whom, and what to do next."""


@dataclass(frozen=True)
class RoundOrder:
    """Compute and contribute to a round."""

    round: int
    epoch: int
    members: tuple[str, ...]
    lease_start: int  # first global sample index this node reads
    lease_count: int  # number of samples (sequences)
    evaluate: bool  # measure the validation loss after applying
    result_ready: bool  # committed already without us: fetch and apply, do not compute
    frontier: int = 0  # first global sample index behind all leases of the run, this round's included
    topology: int = 0  # by which slices travel between nodes; 0: all goes to the coordinator
    generation: int = field(default=0, compare=False)  # of the session's stream that brought the order


@dataclass(frozen=True)
class DonateOrder:
    """Keep ``count`` chunks, from ``first`` on, of the shared state, which must be that of ``round``, and
    upload them in the background: a snapshot for nodes that are joining is put together from them."""

    snapshot: str
    round: int
    first: int
    count: int


@dataclass(frozen=True)
class LoadOrder:
    """Download a snapshot, the shared state of ``round``, and replace one's own by it."""

    snapshot: str
    round: int
    frontier: int = 0  # first global sample index behind all leases of the run


@dataclass(frozen=True)
class ReplayOrder:
    """Fetch the results of ``count`` rounds from ``first`` on, and apply them in order."""

    first: int
    count: int
    frontier: int = 0  # first global sample index behind all leases of the run


@dataclass(frozen=True)
class StopOrder:
    """Leave: the run is done, or this node cannot go on."""

    done: bool
    reason: str
    evaluate: bool


Order = RoundOrder | DonateOrder | LoadOrder | ReplayOrder | StopOrder


@dataclass(frozen=True)
class RoundResult:
    """A committed round as every node sees it.

    ``payload`` is uint8[lane.of(round).result_nbytes] on the CPU, valid until the next call of
    :meth:`Lane.reduce`; ``None`` for a round without voters. The lane is the whole of the round's table, but
    for the ranks of an island: each has the buckets that it holds, and none is allowed.
    """

    round: int
    payload: torch.Tensor | None
    voters: tuple[str, ...]
    weights: tuple[int, ...]
    counted: bool
    agreement: float
    reason: str


@dataclass(frozen=True)
class WorkReport:
    """What a worker tells after a round; units as in the message ``Report`` of atoll.proto.

    ``bytes_up`` and ``bytes_down`` are of all lanes of the node; 0: as the exchange itself has counted.
    """

    round: int
    state_digest: str
    loss: float
    tokens: int
    compute_seconds: float
    busy_seconds: float
    validation_loss: float | None = None
    bits_per_byte: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0


class Lane(Protocol):
    """What every rank of a node needs of a transport: its own lane to whoever reduces.

    Calls block with a deadline and raise :class:`ExchangeError`.
    """

    def reduce(
        self,
        order: RoundOrder,
        payload: torch.Tensor | None,
        abstain_reason: str = "",
        filling: Filling | None = None,
    ) -> RoundResult:
        """Contribute ``payload`` and wait for the commit; may be called in another thread than the others.

        ``payload`` is uint8[lane.of(round).nbytes] on the CPU; ``None``: abstain, or catch up. With a
        ``filling``, of as many bytes, the payload is still being written: what is final is sent at once, the
        contribution counts once it has been finished, and if it turns out not to be usable, the node
        abstains for the reason given there.
        """
        ...

    def replay(self, order: ReplayOrder) -> Generator[RoundResult, None, None]:
        """The results of rounds that have been committed without this node, in order; each is whole and
        checked before it is handed out, and valid until the next one is asked for.

        Raises:
            ExchangeError: from the iterator: the next one is not to be had any more.
        """
        ...

    def bytes_counted(self) -> tuple[int, int]:
        """Bytes sent and received at the transport so far, framing included."""
        ...

    def close(self, reason: str) -> None:
        """Leave cleanly, and end a :meth:`reduce` that another thread waits in; safe to call twice."""
        ...


class Exchange(Lane, Protocol):
    """What the worker loop of a node, or of the rank that leads it, needs of a transport."""

    def next_order(self) -> Order:
        """Wait for what to do next."""
        ...

    def report(self, report: WorkReport) -> None:
        """Tell the others; does not wait."""
        ...

    def donate(self, order: DonateOrder, spool: Spool, done: Callable[[str], None]) -> None:
        """Upload the chunks in ``spool`` while rounds go on, and close it in the end.

        Does not wait. ``done`` is told, in another thread, why they did not get through; an empty text if
        they did.
        """
        ...

    def download(self, order: LoadOrder, rows: Sequence[Row]) -> Spool:
        """A snapshot whose tensors are ``rows``; the caller closes what it gets."""
        ...

    def ready(self, round_index: int, state_digest: str) -> None:
        """Tell that the shared state is that before ``round_index`` now."""
        ...

    def reducer_tensors(self) -> dict[str, torch.Tensor]:
        """What the reduction carries from round to round, for this node's checkpoint; empty unless it is made
        here."""
        ...
