"""A result on its way down one stream: the frames that all receivers share, or what of them is the lane's."""

from __future__ import annotations

import xxhash

from coordinator.result import Result
from protos.frame_log import FrameReader
from protos.lane_layout import LaneLayout
from protos.wire import CHUNK, RESTART, decode_frame, encode_frame


class Delivery:
    """Reads a result front to back, also while it is still being made.

    A lane's chunks are cut out of the shared frames as they are sent: nothing is kept.

    Attributes:
        result: what is read.
        served: the COMMIT has been handed out.
    """

    def __init__(self, result: Result, lane: LaneLayout, node: str) -> None:
        self.result = result
        self.served = False
        self._lane = lane
        self._node = node
        self._reader = FrameReader(result)
        self._hasher = xxhash.xxh3_128()
        self._sent = 0  # bytes of this attempt

    def next(self) -> bytes | None:
        """The next frame if there is one now."""
        result = self.result
        while (frame := self._reader.next()) is not None:
            if decode_frame(frame).kind == RESTART:
                self._sent = 0
                self._hasher.reset()
                return frame
            if (own := self._own(frame)) is not None:
                return own
        if result.committed and not self.served:
            self.served = True
            if not self._lane.part:
                return result.commit_frame(self._node)
            digest = self._hasher.hexdigest() if self._sent else ""
            return result.commit_frame(self._node, nbytes=self._sent, digest=digest)
        return None

    def _own(self, message: bytes) -> bytes | None:
        """What of a shared frame belongs to the lane, as a frame."""
        if not self._lane.part:
            return message
        frame = decode_frame(message)
        place, found = self._lane.down.within(frame.offset, frame.offset + len(frame.body))
        if not found:
            return None
        parts = [frame.body[start - frame.offset : end - frame.offset] for start, end in found]
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._hasher.update(body)
        self._sent += len(body)
        return encode_frame(CHUNK, body, attempt=frame.attempt, offset=place)
