"""One stream of a sender to the reducer of a slice: its contribution comes up while the result goes down."""

from __future__ import annotations

import asyncio
from typing import Final

from node.exchange.peers.base import PeerStream
from node.exchange.peers.slice_contribution import SliceContribution
from node.exchange.peers.slice_reducer import SliceReducer
from node.exchange.peers.uplink import Uplink
from protos.frame_log import FrameReader
from protos.refusal import OVERSIZED, TRUNCATED, Refused, check_length, frame_of
from protos.wire import MAX_MESSAGE_BYTES, Message

_SPARE_BYTES: Final = 4 * MAX_MESSAGE_BYTES  # of frames around a contribution that does not count


class SliceStream:
    """The desk's side of such a stream, behind its HEADER.

    A receiver that does not read holds up nobody but itself: the frames of the result are shared, and each
    stream takes them at its own pace.

    Args:
        stream: to the sender.
        sender: its name.
        reducer: of the slice.
        contribution: that comes; ``None``: it is here already, and what comes is ignored.
        patience: seconds for what is left once it is clear that nothing more counts.
        uplink: that the result leaves by; ``None``: none, the sender is this node.
    """

    def __init__(
        self,
        stream: PeerStream,
        sender: str,
        reducer: SliceReducer,
        contribution: SliceContribution | None,
        patience: float,
        uplink: Uplink | None = None,
    ) -> None:
        self.sender = sender
        self.reducer = reducer
        self._stream = stream
        self._contribution = contribution
        self._patience = patience
        self._uplink = uplink
        self._ignored = 0  # bytes
        self._refusal: Refused | None = None
        self._error: Exception | None = None
        self._over = asyncio.Event()

    def close(self, refusal: Refused) -> None:
        """End it; the sender is to be told why."""
        if self._refusal is None:
            self._refusal = refusal
            self._over.set()
            self.reducer.frames.nudge()

    async def run(self) -> None:
        """Returns once the committed result has gone out and the sender has ended the stream.

        Raises:
            Refused: the sender is to be told; nothing is being read from the stream or written to it.
            Trouble: the stream broke.
        """
        reading = asyncio.ensure_future(self._read())
        writing = asyncio.ensure_future(self._write())
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({writing, over}, return_when=asyncio.FIRST_COMPLETED)
            if self._error is None:  # let a frame be written to its end: the refusal comes behind it
                await asyncio.wait({writing}, timeout=self._patience)
            if self._refusal is None and self._error is None:
                writing.result()
                await asyncio.wait({reading}, timeout=self._patience)
        finally:
            tasks = (reading, writing, over)
            if self._contribution is not None:
                self.reducer.lost(self.sender, self._contribution)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._refusal is not None:
            raise self._refusal
        if self._error is not None:
            raise self._error

    async def _write(self) -> None:
        reader, reducer = FrameReader(self.reducer.frames), self.reducer
        while self._refusal is None:
            if reducer.closed is not None:
                self.close(reducer.closed)
            elif (message := reader.next()) is not None:
                if self._uplink is not None:
                    await self._uplink.turn()
                await self._stream.write(message)
            elif reducer.committed:
                await self._stream.end()
                return
            else:
                await reducer.frames.changed()

    async def _read(self) -> None:
        try:
            while (message := await self._stream.read()) is not None:
                self._feed(message)
            if self._contribution is not None and self._contribution.wanted:
                self._check_whole(self._contribution)
        except Refused as refusal:
            self.reducer.refuse(self.sender, self._contribution, refusal)
            self.close(refusal)
        except Exception as error:
            self._error = error
            self._over.set()

    def _feed(self, message: Message) -> None:
        contribution = self._contribution
        check_length(message)
        if contribution is None or not contribution.wanted:
            self._ignored += len(message)
            if self._ignored > self.reducer.part.nbytes + _SPARE_BYTES:
                raise Refused(OVERSIZED, "far more came than a contribution that is ignored can have")
            return
        contribution.feed(frame_of(message))
        self.reducer.delivered(self.sender, contribution)

    def _check_whole(self, contribution: SliceContribution) -> None:
        if not contribution.complete:
            raise Refused(
                TRUNCATED,
                f"the contribution ended after {contribution.received} bytes, without its END frame",
            )
