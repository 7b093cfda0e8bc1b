"""Names, limits and framing of the wire protocol: what node and coordinator agree on beside the messages.

Bulk streams carry raw frames: a 16-byte little-endian prefix (kind, attempt, two zero bytes, body length,
offset) and the body. Offsets count payload bytes. A stream that ends without its last frame is truncated: the
end of a stream alone never means success.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

PROTOCOL: Final = 5  # raised when old and new nodes cannot work together

CONTROL_SERVICE: Final = "atoll.v1.Coordinator"  # GetRun, Join, Session, GetStatus, Probe
BULK_SERVICE: Final = "atoll.v1.Bulk"  # Exchange, PutChunks, GetChunks, GetResults, Tunnel, Measure: bytes
PEER_SERVICE: Final = "atoll.v1.Peer"  # of a node, for other nodes: Stream, Reach. Raw bytes
TOKEN_KEY: Final = "atoll-token"
SESSION_KEY: Final = "atoll-session"
REFUSAL_KEY: Final = "atoll-refusal"  # with the status of a refused call: the kind, of protos/refusal.py
PEER_END: Final = b""  # a side's last message on a stream between nodes: not a frame, so nothing else is it
TUNNEL_TO_KEY: Final = "atoll-tunnel-to"  # of the call Tunnel: the node that is called
TUNNEL_KEY: Final = "atoll-tunnel"  # of the call Tunnel by the node that is called: the key it was given
SESSION_UNKNOWN: Final = "join again: "  # begins the details of UNAUTHENTICATED where that helps

CHUNK_BYTES: Final = 1 << 20  # body of a CHUNK frame; a multiple of 64
MAX_HEADER_BYTES: Final = 1 << 20  # body of any other frame
MAX_MESSAGE_BYTES: Final = CHUNK_BYTES + (64 << 10)  # gRPC's cap on both sides

Message = bytes | memoryview  # that was received

_PREFIX: Final = struct.Struct("<BBHIQ")
PREFIX_BYTES: Final = _PREFIX.size

HEADER: Final = 1  # first frame of a stream, a protobuf message
CHUNK: Final = 2  # payload bytes at an offset
RESTART: Final = 3  # the voters changed: forget the result chunks of earlier attempts
COMMIT: Final = 4  # last frame of a result
END: Final = 5  # last frame of an upload
REFUSAL: Final = 6  # last frame of a stream between nodes: why it came to nothing
_KINDS: Final = frozenset((HEADER, CHUNK, RESTART, COMMIT, END, REFUSAL))


class FrameError(ValueError):
    """A frame that breaks the protocol; the text says which field and why."""


@dataclass(frozen=True)
class Frame:
    """A parsed frame; ``body`` is a view into the received message, not a copy."""

    kind: int
    attempt: int
    offset: int
    body: memoryview


def encode_frame(
    kind: int, body: bytes | bytearray | memoryview = b"", *, attempt: int = 0, offset: int = 0
) -> bytes:
    """One message: prefix and a copy of ``body``."""
    return b"".join((_PREFIX.pack(kind, attempt & 0xFF, 0, len(body), offset), body))


def decode_frame(message: Message) -> Frame:
    """Check and split one message.

    Raises:
        FrameError: too short, unknown kind, a length that is not the body's, or a body over its limit.
    """
    if len(message) < PREFIX_BYTES:
        raise FrameError(f"a frame has at least {PREFIX_BYTES} bytes, this one {len(message)}")
    kind, attempt, reserved, length, offset = _PREFIX.unpack_from(message)
    if kind not in _KINDS:
        raise FrameError(f"unknown frame kind {kind}")
    if reserved:
        raise FrameError(f"reserved bytes of a frame must be 0, not {reserved}")
    body = memoryview(message)[PREFIX_BYTES:]
    if length != len(body):
        raise FrameError(f"a frame announces {length} bytes and holds {len(body)}")
    limit = CHUNK_BYTES if kind == CHUNK else MAX_HEADER_BYTES
    if length > limit:
        raise FrameError(f"a frame of kind {kind} may hold {limit} bytes, this one holds {length}")
    return Frame(kind, attempt, offset, body)


def payload_digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3_128 in hex: guards against truncation and mix-ups, not against an attacker."""
    return xxhash.xxh3_128_hexdigest(data)
