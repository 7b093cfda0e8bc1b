"""Ports: whether one is free, which libp2p does not ask.

It shares a port with whoever else listens there (SO_REUSEPORT), and then each gets some of the other's peers.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack

from node.exchange.swarm.phases import SwarmTrouble

_TRIES = 20


def choose(hosts: Sequence[str], port: int, quic: bool) -> int:
    """``port``, or if it is 0 one that is free at all ``hosts``, for TCP and for UDP if ``quic``.

    Raises:
        SwarmTrouble: it is taken, or a host is none of this machine.
    """
    for attempt in range(1, _TRIES + 1):
        try:
            return _taken(hosts, port, quic)
        except OSError as error:
            if port or attempt == _TRIES:
                what = f"port {port}" if port else "any port"
                raise SwarmTrouble(
                    "listen",
                    f"cannot listen at {what} of {', '.join(hosts)}: {error.strerror or error}; end what "
                    "uses it, or give another port or address",
                ) from error
    return port


def _taken(hosts: Sequence[str], port: int, quic: bool) -> int:
    with ExitStack() as stack:
        for host in hosts:
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM) if quic else (socket.SOCK_STREAM,):
                family, _, _, _, address = socket.getaddrinfo(host, port, type=kind)[0]
                probe = stack.enter_context(socket.socket(family, kind))
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if kind == socket.SOCK_STREAM:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # over closed connections
                probe.bind(address)
                if kind == socket.SOCK_STREAM:
                    probe.listen()
                port = probe.getsockname()[1]
    return port
