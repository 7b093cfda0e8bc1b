"""Multiaddresses: what libp2p writes an address as, from ``/ip4/192.0.2.7/tcp/4601`` to relayed ones.

Checked and encoded here, because they come from other nodes, and because hivemind 1.1.12 writes a peer id
within an address as a CID, which its own daemon does not read.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

MAX_TEXT: Final = 400  # characters; a relayed address holds two peer ids
MAX_ADDRESSES: Final = 16

_CODES: Final = {
    "ip4": 0x04, "tcp": 0x06, "ip6": 0x29, "dns": 0x35, "dns4": 0x36, "dns6": 0x37, "udp": 0x0111,
    "p2p-circuit": 0x0122, "p2p": 0x01A5, "quic-v1": 0x01CD,
}  # fmt: skip
_BARE: Final = frozenset(("quic-v1", "p2p-circuit"))
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63}){0,10}")
_BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PEER_BYTES: Final = (34, 38)  # sha2-256 of an RSA key; an Ed25519 key itself


@dataclass(frozen=True)
class Multiaddress:
    """An address that can be used; ``parts`` are pairs of protocol and value, which is empty where a protocol
    has none."""

    parts: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Multiaddress:
        """Read one.

        Raises:
            ValueError: it is too long, no multiaddress, or of a protocol that the swarm does not use.
        """
        if len(text) > MAX_TEXT or not text.startswith("/"):
            raise ValueError(f"{text[:60]!r} is no multiaddress, such as /ip4/192.0.2.7/tcp/4601/p2p/Qm…")
        words = iter(text[1:].split("/"))
        parts = []
        for protocol in words:
            if protocol not in _CODES:
                raise ValueError(f"{text[:60]!r}: the swarm does not use the protocol {protocol[:20]!r}")
            value = "" if protocol in _BARE else next(words, "")
            _encoded(protocol, value)
            parts.append((protocol, value))
        return cls(tuple(parts))

    def to_bytes(self) -> bytes:
        """As libp2p encodes it."""
        return b"".join(
            _varint(_CODES[protocol]) + _encoded(protocol, value) for protocol, value in self.parts
        )

    def value(self, protocol: str) -> str:
        """The last value of ``protocol``; empty if there is none."""
        return next((value for name, value in reversed(self.parts) if name == protocol), "")

    @property
    def peer(self) -> str:
        """The peer id at the end; empty if there is none."""
        name, value = self.parts[-1]
        return value if name == "p2p" else ""

    @property
    def relayed(self) -> bool:
        """Whether it leads through another peer."""
        return any(name == "p2p-circuit" for name, _ in self.parts)

    @property
    def host(self) -> str:
        """The IP address or name that is dialled first."""
        return self.parts[0][1]

    def without_peer(self) -> Multiaddress:
        """The same without the peer id at the end."""
        return Multiaddress(self.parts[:-1]) if self.peer else self

    def __str__(self) -> str:
        return "".join(f"/{name}/{value}" if value else f"/{name}" for name, value in self.parts)


def parse_with_peer(text: str) -> Multiaddress:
    """Read an address that names its peer.

    Raises:
        ValueError: see :meth:`Multiaddress.parse`, or it names none.
    """
    address = Multiaddress.parse(text)
    if not address.peer:
        raise ValueError(f"{text[:80]!r} does not end in /p2p/ and the peer's id")
    return address


def ip_part(host: str) -> str:
    """``host`` as the beginning of a multiaddress."""
    try:
        return f"/ip{ipaddress.ip_address(host).version}/{host}"
    except ValueError:
        return f"/dns/{host}"


def is_peer_id(text: str) -> bool:
    """Whether ``text`` is a peer id in base 58."""
    try:
        peer_bytes(text)
    except ValueError:
        return False
    return True


def peer_bytes(text: str) -> bytes:
    """The multihash that a peer id is.

    Raises:
        ValueError: it is none.
    """
    number = 0
    if not 40 <= len(text) <= 60:
        raise ValueError(f"{text[:60]!r} is no peer id")
    for letter in text:
        digit = _BASE58.find(letter)
        if digit < 0:
            raise ValueError(f"{text!r} is no peer id: {letter!r} is no digit of base 58")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    data = bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
    if len(data) not in _PEER_BYTES or data[1] != len(data) - 2:
        raise ValueError(f"{text!r} is no peer id: its length is not one of a hash or a key")
    return data


def _encoded(protocol: str, value: str) -> bytes:
    if protocol in _BARE:
        return b""
    if protocol in ("ip4", "ip6"):
        kind = ipaddress.IPv4Address if protocol == "ip4" else ipaddress.IPv6Address
        return kind(value).packed
    if protocol in ("tcp", "udp"):
        if not re.fullmatch("[0-9]{1,5}", value) or int(value) > 65535:
            raise ValueError(f"{value[:20]!r} is no port")
        return int(value).to_bytes(2, "big")
    if protocol == "p2p":
        data = peer_bytes(value)
    elif _NAME.fullmatch(value):
        data = value.encode("ascii")
    else:
        raise ValueError(f"{value[:60]!r} is no host name")
    return _varint(len(data)) + data


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)
