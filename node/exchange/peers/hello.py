"""The first message of a stream between nodes."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from node.exchange.peers.plan import Plan
from protos.atoll_pb2 import PeerHello
from protos.refusal import BAD_FRAME, BAD_TOKEN, JOIN, TRUNCATED, Refused
from protos.wire import HEADER, PROTOCOL, FrameError, Message, decode_frame


def read_hello(message: Message | None, run_digest: str) -> PeerHello:
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


def trusted(hello: PeerHello, plans: Sequence[Plan], me: str, local: bool) -> bool:
    """Whether the sender is who it says it is; false if a topology may be on its way that says so.

    Args:
        hello: of the stream.
        plans: that hold, or have held a moment ago, the present one first.
        me: name of this node.
        local: the stream comes from this node itself, if it says so.

    Raises:
        Refused: it is not.
    """
    if local and hello.sender == me:
        return True
    peers = [plan.peers[hello.sender] for plan in plans if hello.sender in plan.peers]
    if any(
        peer.accept_token and hmac.compare_digest(peer.accept_token, hello.token)
        for peer in peers
        if peer.node != me
    ):
        return True
    ahead = not plans or hello.slice.topology > plans[0].number
    if ahead or (not peers and hello.WhichOneof("kind") == "fetch"):
        return False
    raise Refused(
        BAD_TOKEN,
        f"the token of a stream is not that of {hello.sender[:64]!r} in topology {plans[0].number}",
        "UNAUTHENTICATED",
    )
