"""Listening: a port is bound, or it is said in words why not, which gRPC does not tell."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

from protos.address import Address


class ListenError(OSError):
    """Somebody cannot listen; the text names the address, the cause and what to do."""


async def bound(bind: Callable[[str], int], address: Address, setting: str, *, others: str) -> Address:
    """Have ``bind`` take ``address`` (port 0: a free one); where it is, with the real port.

    Args:
        bind: a server's ``add_insecure_port``: returns the port, or 0, or raises RuntimeError.
        address: to listen on.
        setting: where people choose that address, as they write it.
        others: what may hold the port already, for the text.

    Raises:
        ListenError: the port is taken, or the address cannot be used.
    """
    try:
        port = bind(str(address))
    except RuntimeError:
        port = 0
    if not port:
        raise ListenError(await asyncio.to_thread(_why_not, address, setting, others))
    return Address(address.host, port)


def _why_not(address: Address, setting: str, others: str) -> str:
    advice = f"choose another address with {setting}"
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        return f"cannot listen on {address}: the host name cannot be resolved ({error}); {advice}"
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(where)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return (
                        f"cannot listen on {address}: port {address.port} is in use by another program; stop "
                        f"that (perhaps another {others}), or choose another port with {setting} "
                        "(port 0 takes a free one)"
                    )
                return f"cannot listen on {address}: {os.strerror(error.errno or 0)}; {advice}"
    return f"cannot listen on {address}; {advice}"
