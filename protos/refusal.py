"""Refusals: why something that was sent is not taken; a kind to count and a text for people."""

from __future__ import annotations

from typing import Any, Final, Literal

from protos.wire import MAX_MESSAGE_BYTES, REFUSAL_KEY, Frame, FrameError, Message, decode_frame

Code = Literal[
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "ALREADY_EXISTS",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "UNAVAILABLE",
]

# A contribution, or a stream that should have been one.
TRUNCATED: Final = "truncated"
OVERSIZED: Final = "oversized"
OUT_OF_ORDER: Final = "out-of-order"
BAD_FRAME: Final = "bad-frame"
BAD_DIGEST: Final = "bad-digest"
BAD_WEIGHT: Final = "bad-weight"
WRONG_TABLE: Final = "wrong-table"
WRONG_ROUND: Final = "wrong-round"
NOT_FINITE: Final = "not-finite"
BAD_CODE: Final = "bad-code"
BAD_LANE: Final = "bad-lane"
WRONG_SLICE: Final = "wrong-slice"
NOT_A_MEMBER: Final = "not-a-member"
# Ignored: the sender gets the stored result instead.
DUPLICATE: Final = "duplicate"
LATE: Final = "late"
# Everything else.
JOIN: Final = "join-refused"
BAD_TOKEN: Final = "bad-token"
TOKEN_EXPIRED: Final = "token-expired"
TOKEN_REVOKED: Final = "token-revoked"
WRONG_ROLE: Final = "wrong-role"
REPLAYED_JOIN: Final = "replayed-join"
KEY_IN_USE: Final = "key-in-use"
BAD_IDENTITY: Final = "bad-identity"
OLD_VERSION: Final = "old-version"
EXPELLED: Final = "expelled"
BAD_SESSION: Final = "bad-session"
SECOND_SESSION: Final = "second-session"
BAD_MESSAGE: Final = "bad-message"
BAD_TRANSFER: Final = "bad-transfer"
STALLED: Final = "stalled"
REPLACED: Final = "replaced-stream"
BROKEN: Final = "broken-stream"
DIGEST_MISMATCH: Final = "digest-mismatch"
FELL_BEHIND: Final = "fell-behind"
NOT_KEPT: Final = "not-kept"
OVERLOADED: Final = "overloaded"
FLOOD: Final = "flood"  # too often in too short a time
SILENT: Final = "silent-connection"  # no right token in time
CROWDED: Final = "crowded-address"  # too many connections
TUNNEL: Final = "tunnel-refused"


class Refused(Exception):
    """``kind`` is counted, ``text`` says what was wrong and what to do, ``code`` is gRPC's status name."""

    def __init__(self, kind: str, text: str, code: Code = "INVALID_ARGUMENT") -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.code: Code = code


def check_length(message: Message) -> None:
    """Of a message on a stream of bytes.

    Raises:
        Refused: it is longer than any may be.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise Refused(OVERSIZED, f"a message of {len(message)} bytes; at most {MAX_MESSAGE_BYTES} are taken")


def frame_of(message: Message, kind: str = BAD_FRAME) -> Frame:
    """The frame that a peer has sent.

    Raises:
        Refused: of ``kind``; the message is no frame, see :func:`protos.wire.decode_frame`.
    """
    try:
        return decode_frame(message)
    except FrameError as error:
        raise Refused(kind, str(error)) from error


def kind_in(metadata: Any) -> str:
    """The kind of refusal that came with the status of a call, in its trailing metadata; empty: none."""
    return next((str(value) for key, value in metadata or () if key == REFUSAL_KEY), "")
