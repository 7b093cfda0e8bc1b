"""One Exchange stream: a contribution, or a lane of one, goes up, the result comes down, both at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from coordinator.active_round import ActiveRound
from coordinator.contribution import Contribution, parse_header
from coordinator.delivery import Delivery
from coordinator.nodes import Node
from coordinator.result import Result
from protos.atoll_pb2 import ContributionHeader
from protos.lane_layout import LaneLayout
from protos.refusal import BAD_FRAME, BROKEN, OVERSIZED, TRUNCATED, Refused, check_length, frame_of
from protos.wire import END, HEADER, MAX_MESSAGE_BYTES, FrameError, decode_frame


class Desk(Protocol):
    """What an exchange asks of the hub."""

    def begin(self, exchange: Exchange, header: ContributionHeader) -> None:
        """Name the exchange's lane, attach it to a result, and to a contribution if wanted; raises
        :class:`Refused`."""
        ...

    def refused(self, exchange: Exchange, refusal: Refused) -> None:
        """The stream was refused."""
        ...

    def count(self, kind: str) -> None:
        """Count an event."""
        ...

    def ignored(self, exchange: Exchange) -> None:
        """All of a contribution has come that does not count."""
        ...

    def now(self) -> float:
        """Seconds on the coordinator's clock."""
        ...


class Exchange:
    """The state of one stream. Every method is called on the event loop.

    Attributes:
        lane, round_index: what it carries and of which round, once the header has been read.
        contributes: it brings a contribution, wanted or not, rather than ask for a result.
        round: the active round that it contributes to, or ``None``.
        progress_at: when the stream last moved.
        spent: nothing more has to be read from the node: its END has come, or more than will be discarded.

    Args:
        node: whose stream it is.
        desk: the hub's side.
        discards: bytes of messages that are read and dropped at most: of a contribution that is ignored, or
            that is still coming when the stream has been answered.
    """

    def __init__(self, node: Node, desk: Desk, *, discards: int = 4 * MAX_MESSAGE_BYTES) -> None:
        self.node = node
        self.lane: LaneLayout | None = None
        self.round_index = -1
        self.contributes = False
        self.round: ActiveRound | None = None
        self.contribution: Contribution | None = None
        self.progress_at = desk.now()
        self.on_close: Callable[[], None] | None = None  # set by the transport: wake a blocked write
        self.spent = False
        self._desk = desk
        self._discards = discards
        self._uploaded = False
        self._delivery: Delivery | None = None
        self._error: Refused | None = None

    def attach(self, result: Result, active: ActiveRound | None = None) -> None:
        """The node is to receive its lane of ``result``; ``active`` is its round if that is in flight."""
        assert self.lane is not None
        self.round = active
        self._delivery = Delivery(result, self.lane, self.node.node)

    def supersedes(self, other: Exchange) -> bool:
        """Whether this stream takes the place of an older one of its node.

        A stream of everything does in any case. A lane takes the place of the same lane, sent again, and of
        what is left of earlier rounds.
        """
        if self.lane is None or not self.lane.part:
            return self.lane is not None
        if other.lane is None:
            return False
        same = bool(self.lane.buckets) and other.lane.buckets == self.lane.buckets
        return other.round_index < self.round_index or (same and other.round_index == self.round_index)

    # --------------------------------------------------------------------------------------------- up

    def feed(self, message: bytes) -> None:
        """Take one message of the node. A refusal reaches the node through :meth:`next_frame`."""
        if self._error is not None:
            self._discard(message)
            return
        self.progress_at = self.node.seen_at = self._desk.now()
        try:
            self._feed(message)
        except Refused as refusal:
            self._refuse(refusal)

    def _feed(self, message: bytes) -> None:
        if len(message) > MAX_MESSAGE_BYTES:
            self.spent = True
        check_length(message)
        frame = frame_of(message)
        self.spent = self.spent or frame.kind == END
        if self.result is None:
            if frame.kind != HEADER:
                raise Refused(
                    BAD_FRAME, f"an exchange begins with a HEADER frame, not with kind {frame.kind}"
                )
            self._desk.begin(self, parse_header(frame))
            return
        if self._uploaded:
            raise Refused(BAD_FRAME, "a frame after the end of the contribution")
        # After the commit the row belongs to the next round, perhaps to another node of it.
        if (
            self.contribution is None or self.round is None or self.result.committed
        ):  # is ignored, or abstains
            self._uploaded = frame.kind == END
            if self._uploaded:
                self._desk.ignored(self)
            if self._exceeds(len(message)):
                raise Refused(OVERSIZED, "far more came than a contribution that is ignored can have")
            return
        self.contribution.feed(frame)
        self._uploaded = self.contribution.complete
        self.round.delivered(self.node.node, self.contribution)

    def _discard(self, message: bytes) -> None:
        """Look only for the end of what the node still sends."""
        if not self._exceeds(len(message)):
            with contextlib.suppress(FrameError):
                self.spent = self.spent or decode_frame(message).kind == END

    def _exceeds(self, nbytes: int) -> bool:
        self._discards -= nbytes
        self.spent = self.spent or self._discards < 0
        return self._discards < 0

    def ended(self) -> None:
        """The node has closed its side of the stream."""
        if self._error is not None:
            return
        if self.result is None:
            self._refuse(Refused(TRUNCATED, "the exchange ended before its header"))
        elif self.contribution is not None and self.unfinished:
            received = self.contribution.received
            self._refuse(
                Refused(TRUNCATED, f"the contribution ended after {received} bytes, without its END frame")
            )

    def broke(self) -> None:
        """The stream is lost. An unfinished contribution is dropped, a whole one counts."""
        if self.unfinished:
            self._desk.count(BROKEN)
        if self.round is not None and self.contribution is not None and not self.contribution.complete:
            self.round.lost(self.node.node, self.contribution)
        if self in self.node.exchanges:
            self.node.exchanges.remove(self)

    def close(self, refusal: Refused) -> None:
        """End the stream from this side; the node sees ``refusal``."""
        if self._error is None:
            self._error = refusal
            if self.result is not None:
                self.result.nudge()
            if self.on_close is not None:
                self.on_close()

    def _refuse(self, refusal: Refused) -> None:
        self._error = refusal
        self._desk.refused(self, refusal)
        if self.result is not None:
            self.result.nudge()

    # --------------------------------------------------------------------------------------------- down

    @property
    def result(self) -> Result | None:
        """What the node receives."""
        return self._delivery.result if self._delivery is not None else None

    @property
    def served(self) -> bool:
        """Whether the COMMIT has been handed to the transport."""
        return self._delivery is not None and self._delivery.served

    @property
    def unfinished(self) -> bool:
        """Whether the end of the node's side would leave a contribution in the middle."""
        if self._error is not None:
            return False
        if self.result is None:
            return True
        begun = self.contribution is not None and not self.contribution.complete
        return begun and not self.result.committed

    @property
    def refusal(self) -> Refused | None:
        """Why the stream has to be aborted."""
        return self._error

    async def next_frame(self) -> bytes | None:
        """The next frame for the node, ``None`` after the COMMIT.

        Raises:
            Refused: the stream has to be aborted.
        """
        while True:
            if self._error is not None:
                raise self._error
            delivery = self._delivery
            if delivery is None:
                raise RuntimeError("an exchange has no frames before its header")
            if delivery.result.error is not None:
                raise delivery.result.error
            frame = delivery.next()
            if frame is not None:
                self.progress_at = self._desk.now()
                return frame
            if delivery.served:
                return None
            await delivery.result.changed()
