"""State transfers: one donor's upload is passed on to the joiners as it comes; nothing is kept.

Messages travel unchanged through one bounded lane per joiner. The donor is read only as fast as the slowest
lane accepts, so memory stays at a few chunks whatever the size of the state.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Literal

from google.protobuf.message import DecodeError

from coordinator.refusal import BAD_TRANSFER, Refused
from protos.atoll_pb2 import StateHeader
from protos.wire import CHUNK, END, HEADER, FrameError, decode_frame

LANE_MESSAGES: Final = 8


class Lane:
    """The way to one joiner: at most ``depth`` messages."""

    def __init__(self, node: str, now: Callable[[], float], depth: int = LANE_MESSAGES) -> None:
        self.node = node
        self.attached = False
        self.finished = False  # the last message has been taken
        self.error: Refused | None = None
        self.on_close: Callable[[], None] | None = None  # set by the transport: wake a blocked write
        self.progress_at = now()
        self._now = now
        self._depth = depth
        self._messages: deque[bytes] = deque()
        self._closed = False
        self._room: asyncio.Future[None] | None = None
        self._more: asyncio.Future[None] | None = None

    @property
    def blocked(self) -> bool:
        """Whether it is full: its joiner is what the transfer waits for."""
        return len(self._messages) >= self._depth

    async def put(self, message: bytes) -> None:
        """Wait for room, at most the transfer's stall limit, and append; a failed lane drops the message."""
        while self.error is None and self.blocked:
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        if self.error is None:
            self._messages.append(message)
            _wake(self._more)

    async def get(self) -> bytes | None:
        """The next message, ``None`` after the last; raises :class:`Refused` when the transfer has failed."""
        while not self._messages:
            if self.error is not None:
                raise self.error
            if self._closed:
                self.finished = True
                return None
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        message = self._messages.popleft()
        self.progress_at = self._now()
        _wake(self._room)
        return message

    def close(self) -> None:
        """No more messages."""
        self._closed = True
        _wake(self._more)

    def fail(self, error: Refused) -> None:
        """Drop what is queued and let both sides go."""
        if self.error is None and not self.finished:
            self.error = error
            self._messages.clear()
            _wake(self._more)
            _wake(self._room)
            if self.on_close is not None:
                self.on_close()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Transfer:
    """One attempt to bring the state of a round from a donor to joiners.

    ``on_end`` is called once, when the upload has succeeded or failed; the joiners may still be reading by
    then. ``expected_digest`` tells what the nodes agreed on, or an empty string while that is open.

    Attributes:
        phase: ``"offered"`` until the donor begins, then ``"running"``, ``"complete"`` or ``"failed"``.
        header: what the donor announced.
        relayed: payload bytes passed on so far.
    """

    def __init__(
        self,
        transfer: str,
        round_index: int,
        donor: str,
        joiners: Iterable[str],
        *,
        stall: float,
        now: Callable[[], float],
        on_end: Callable[[Transfer], None],
        expected_digest: Callable[[], str] = str,
    ) -> None:
        self.id = transfer
        self.round = round_index
        self.donor = donor
        self.lanes = {node: Lane(node, now) for node in joiners}
        self.phase: Literal["offered", "running", "complete", "failed"] = "offered"
        self.reason = ""
        self.header: StateHeader | None = None
        self.relayed = 0
        self._stall = stall
        self._now = now
        self._on_end = on_end
        self._expected_digest = expected_digest
        self._progress_at = now()
        self._attached: asyncio.Future[None] | None = None

    # --------------------------------------------------------------------------------------------- donor

    async def feed(self, message: bytes) -> bool:
        """Take one message of the donor and pass it on; ``True`` after the last. Waits for slow joiners.

        Raises:
            Refused: a message that does not fit; the transfer has failed then.
        """
        try:
            return await self._feed(message)
        except Refused as refusal:
            self.fail(refusal.text)
            raise

    async def _feed(self, message: bytes) -> bool:
        if self.phase == "failed":
            raise Refused(BAD_TRANSFER, self.reason, "ABORTED")
        self._progress_at = self._now()
        try:
            frame = decode_frame(message)
        except FrameError as error:
            raise Refused(BAD_TRANSFER, str(error)) from error
        if self.header is None:
            if frame.kind != HEADER:
                raise Refused(BAD_TRANSFER, f"a state begins with a HEADER frame, not with kind {frame.kind}")
            self._begin(parse_state_header(bytes(frame.body)))
            await self._all_attached()
        elif frame.kind == CHUNK:
            end = self.relayed + len(frame.body)
            if frame.offset != self.relayed or not frame.body or end > self.header.nbytes:
                raise Refused(
                    BAD_TRANSFER,
                    f"a chunk of {len(frame.body)} bytes at offset {frame.offset}; expected offset "
                    f"{self.relayed} of {self.header.nbytes}",
                )
            self.relayed = end
        elif frame.kind != END or self.relayed != self.header.nbytes:
            raise Refused(
                BAD_TRANSFER,
                f"a frame of kind {frame.kind} after {self.relayed} of {self.header.nbytes} bytes",
            )
        for lane in self.lanes.values():
            await lane.put(message)
        self._progress_at = self._now()
        if all(lane.error is not None for lane in self.lanes.values()):
            raise Refused(BAD_TRANSFER, "no joiner is left to take the state", "ABORTED")
        if frame.kind == END and self.phase == "running":
            self._finish("complete", "")
            for lane in self.lanes.values():
                lane.close()
            return True
        return False

    def _begin(self, header: StateHeader) -> None:
        if self.phase != "offered":
            raise Refused(BAD_TRANSFER, "this state is being uploaded already", "ALREADY_EXISTS")
        if header.transfer != self.id or header.round != self.round:
            raise Refused(
                BAD_TRANSFER,
                f"the header names transfer {header.transfer[:64]!r} of round {header.round}, the "
                f"coordinator asked for {self.id!r} of round {self.round}",
            )
        if not header.state_digest:
            raise Refused(BAD_TRANSFER, "the header of a state must name its digest")
        expected = self._expected_digest()
        if expected and header.state_digest != expected:
            raise Refused(
                BAD_TRANSFER,
                f"the donor's state of round {self.round} has digest {header.state_digest[:128]}, the nodes "
                f"agreed on {expected}",
                "FAILED_PRECONDITION",
            )
        self.header = header
        self.phase = "running"

    async def _all_attached(self) -> None:
        while any(not lane.attached and lane.error is None for lane in self.lanes.values()):
            self._attached = asyncio.get_running_loop().create_future()
            await self._attached

    # --------------------------------------------------------------------------------------------- joiners

    def attach(self, node: str) -> Lane:
        """A joiner begins to read.

        Raises:
            Refused: the transfer is not for this node, has failed, or is read already.
        """
        lane = self.lanes.get(node)
        if lane is None:
            raise Refused(BAD_TRANSFER, f"transfer {self.id} is not for {node}", "NOT_FOUND")
        if lane.error is not None:
            raise lane.error
        if lane.attached:
            raise Refused(BAD_TRANSFER, f"{node} is reading transfer {self.id} already", "ALREADY_EXISTS")
        lane.attached = True
        lane.progress_at = self._now()
        _wake(self._attached)
        return lane

    def drop(self, node: str, reason: str) -> None:
        """A joiner is out; the others go on."""
        lane = self.lanes.get(node)
        if lane is not None:
            lane.fail(Refused(BAD_TRANSFER, reason, "ABORTED"))
            _wake(self._attached)

    # --------------------------------------------------------------------------------------------- end

    def fail(self, reason: str) -> None:
        """Give the transfer up; joiners see UNAVAILABLE and wait for the next offer."""
        if self.phase in ("offered", "running"):
            for lane in self.lanes.values():
                lane.fail(Refused(BAD_TRANSFER, f"the transfer of the state failed: {reason}", "UNAVAILABLE"))
            _wake(self._attached)
            self._finish("failed", reason)

    def _finish(self, phase: Literal["complete", "failed"], reason: str) -> None:
        self.phase = phase
        self.reason = reason
        self._on_end(self)

    def sweep(self) -> tuple[str, ...]:
        """Fail the donor, or drop the joiners, that have made no progress for the stall limit: the latter."""
        if self.phase not in ("offered", "running"):
            return ()
        now = self._now()
        waits = [
            lane
            for lane in self.lanes.values()
            if lane.error is None and (lane.blocked or (self.phase == "running" and not lane.attached))
        ]
        stuck = tuple(lane.node for lane in waits if now - lane.progress_at >= self._stall)
        for node in stuck:
            self.drop(node, f"{node} has not read the state for {self._stall:g} s")
        if not waits and now - self._progress_at >= self._stall:
            did = "sent nothing" if self.phase == "running" else "not begun to send the state"
            self.fail(f"the donor {self.donor} has {did} for {self._stall:g} s")
        return stuck


def parse_state_header(body: bytes) -> StateHeader:
    """Parse the body of a state's HEADER frame, or the request of GetState; raises :class:`Refused`."""
    try:
        return StateHeader.FromString(body)
    except DecodeError as error:
        raise Refused(BAD_TRANSFER, "the header of a state cannot be read") from error
