"""One Exchange stream: a node's contribution to a round goes up, the result comes down, both at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from coordinator.active_round import ActiveRound
from coordinator.contribution import Contribution, parse_header
from coordinator.nodes import Node
from coordinator.refusal import BAD_FRAME, BROKEN, OVERSIZED, TRUNCATED, Refused
from coordinator.result import Result
from protos.atoll_pb2 import ContributionHeader
from protos.wire import END, HEADER, MAX_MESSAGE_BYTES, RESTART, FrameError, decode_frame, encode_frame


class Desk(Protocol):
    """What an exchange asks of the hub."""

    def begin(self, exchange: Exchange, header: ContributionHeader) -> None:
        """Attach the exchange to a result, and to a contribution if wanted; raises :class:`Refused`."""
        ...

    def refused(self, exchange: Exchange, refusal: Refused) -> None:
        """The stream was refused."""
        ...

    def count(self, kind: str) -> None:
        """Count an event."""
        ...

    def now(self) -> float:
        """Seconds on the coordinator's clock."""
        ...


class Exchange:
    """The state of one stream. Every method is called on the event loop.

    Attributes:
        result: what the node receives, once the header has been read.
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
        self.result: Result | None = None
        self.round: ActiveRound | None = None
        self.contribution: Contribution | None = None
        self.progress_at = desk.now()
        self.served = False  # COMMIT has been handed to the transport
        self.on_close: Callable[[], None] | None = None  # set by the transport: wake a blocked write
        self.spent = False
        self._desk = desk
        self._discards = discards
        self._uploaded = False
        self._attempt = 0
        self._cursor = 0
        self._error: Refused | None = None

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
            raise Refused(
                OVERSIZED, f"a message of {len(message)} bytes; at most {MAX_MESSAGE_BYTES} are taken"
            )
        try:
            frame = decode_frame(message)
        except FrameError as error:
            raise Refused(BAD_FRAME, str(error)) from error
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
        if self.node.exchange is self:
            self.node.exchange = None

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
            result = self.result
            if result is None:
                raise RuntimeError("an exchange has no frames before its header")
            if result.error is not None:
                raise result.error
            frame = self._ready(result)
            if frame is not None:
                self.progress_at = self._desk.now()
                return frame
            if self.served:
                return None
            await result.changed()

    def _ready(self, result: Result) -> bytes | None:
        if result.attempt != self._attempt:
            self._attempt = result.attempt
            self._cursor = 0
            return encode_frame(RESTART, attempt=result.attempt)
        if self._cursor < len(result.frames):
            self._cursor += 1
            return result.frames[self._cursor - 1]
        if result.committed and not self.served:
            self.served = True
            return result.commit_frame(self.node.node)
        return None
