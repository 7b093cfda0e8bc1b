"""Channel and server options of gRPC that node and coordinator share. Plain data: imports no grpc.

Messages are at most one chunk; keepalive finds a dead peer within 20 s on an idle or stalled connection; a
port is never shared silently between two servers. Compression stays off, which is gRPC's default: packed
signs do not compress and gzip costs far more than the network.
"""

from __future__ import annotations

from typing import Final

from protos.limits import LIMITS, Limits
from protos.wire import MAX_MESSAGE_BYTES

Options = tuple[tuple[str, int], ...]

_SHARED: Final[Options] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_metadata_size", 8 << 10),
)

CHANNEL_OPTIONS: Final[Options] = (*_SHARED, ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES))

# Of a node's channels: connections of their own, and no pauses between attempts worth the name: whoever dials
# pauses by itself.
DIAL_OPTIONS: Final[Options] = (
    *CHANNEL_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 200),
)

# Of a node's channel for snapshots and results that it missed. Left to itself gRPC reads ahead by twice what
# it takes for the link's bandwidth times delay; on a busy machine it takes the reader's delay for the link's,
# and the window grows on and on. 64 MiB carry 10 Gbit/s over 50 ms. Not of the channel for bulk: a tunnel
# that nobody reads would take as much.
DOWNLOAD_OPTIONS: Final[Options] = (
    *DIAL_OPTIONS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 20),
    ("grpc.http2.max_frame_size", MAX_MESSAGE_BYTES),  # without probes gRPC would leave it at 16 KiB
)

SERVER_OPTIONS: Final[Options] = (
    *_SHARED,
    # A message somewhat over the limit is refused in words; gRPC would break the stream without any.
    ("grpc.max_receive_message_length", 4 * MAX_MESSAGE_BYTES),
    # Clients' keepalive comes three times as seldom; who pings faster for long is answered with GOAWAY.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 64),
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 1024),  # of one connection
    ("grpc.max_connection_idle_ms", 15 * 60_000),  # a connection without calls ends
)

# Of a node's server for other nodes: what a stranger sends is read before it is known who that is.
PEER_OPTIONS: Final[Options] = (
    *(option for option in SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
    ("grpc.max_allowed_incoming_connections", LIMITS.connections),
    ("grpc.server_handshake_timeout_ms", round(1e3 * LIMITS.handshake_seconds)),
)


def limited(limits: Limits) -> Options:
    """The options of a coordinator's server."""
    milliseconds = round(1e3 * limits.handshake_seconds)
    return (
        *SERVER_OPTIONS,
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.server_handshake_timeout_ms", milliseconds),
        ("grpc.http2.settings_timeout", milliseconds),
    )
