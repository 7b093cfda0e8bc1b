"""Where the leader of an island takes the lanes of its other ranks."""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass, field
from typing import Final

from protos.address import Address

_TOKEN_BYTES: Final = 16


@dataclass(frozen=True)
class LeaderPlace:
    """What another rank has to know of the leader; it travels between the ranks as JSON.

    Attributes:
        address: HOST:PORT.
        run_digest: of the run.
        token: shows that a caller is a rank of this island, hex.
    """

    address: str
    run_digest: str
    token: str = field(default_factory=lambda: secrets.token_hex(_TOKEN_BYTES), repr=False)


def listening_for(host: str) -> Address:
    """Where the leader listens, at any free port, for ranks that reach it at ``host``: there, if that is
    within this machine; else everywhere, as a machine may know itself by another address than others do."""
    try:
        known = ipaddress.ip_address(host)
    except ValueError:
        return Address(host if host == "localhost" else "0.0.0.0", 0)
    if known.is_loopback:
        return Address(host, 0)
    return Address("0.0.0.0" if known.version == 4 else "::", 0)
