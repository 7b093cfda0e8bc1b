"""The first message of a stream between nodes."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from protos.atoll_pb2 import PeerHello
from protos.refusal import BAD_FRAME, JOIN, TRUNCATED, Refused
from protos.wire import HEADER, PROTOCOL, FrameError, decode_frame


def read_hello(message: bytes | None, run_digest: str) -> PeerHello:
    """Read it; who has sent it is not known yet.

    Args:
        message: as it came; ``None`` if the stream has ended instead.
        run_digest: of this node's run.

    Raises:
        Refused: it cannot be read, or is that of a node of another run or protocol.
    """
    if message is None:
        raise Refused(TRUNCATED, "a stream between nodes ended before its first frame")
    try:
        frame = decode_frame(message)
        hello = PeerHello.FromString(bytes(frame.body))
    except (FrameError, DecodeError) as error:
        raise Refused(BAD_FRAME, f"the first frame of a stream cannot be read: {error}") from error
    if frame.kind != HEADER or hello.WhichOneof("kind") is None:
        raise Refused(BAD_FRAME, "a stream between nodes begins with a HEADER that says what is wanted")
    if hello.protocol != PROTOCOL:
        raise Refused(
            JOIN,
            f"{hello.sender[:64]!r} speaks protocol {hello.protocol}, this node {PROTOCOL}: install the same "
            "version of Atoll on all nodes",
        )
    if hello.run_digest != run_digest:
        raise Refused(JOIN, f"{hello.sender[:64]!r} takes part in another run than this node")
    return hello
