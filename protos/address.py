"""Network addresses as people write them: ``host:port``, with IPv6 in brackets."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import unquote

_LABEL = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
_HOST_NAME = re.compile(rf"(?=.{{1,254}}$){_LABEL}(?:\.{_LABEL})*\.?")


class AddressError(ValueError):
    """An address that cannot be used; the text quotes it and shows one that can."""


@dataclass(frozen=True)
class Address:
    """A host name or IP address (IPv6 without brackets) and a port, 0 to 65535; 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``"example.org:4600"``, ``"10.0.0.5:4600"`` or ``"[::1]:4600"``.

        Raises:
            AddressError: no port, a port out of range, IPv6 without brackets, or not a host.
        """
        head, colon, tail = text.rpartition(":")
        if not colon or (head.startswith("[") and not head.endswith("]")):
            raise AddressError(
                f"{text!r} has no port; write host:port, for example '0.0.0.0:4600' or '[::]:4600'"
            )
        if head.startswith("["):
            host = head[1:-1]
            try:
                ipaddress.IPv6Address(host)
            except ValueError as error:
                raise AddressError(f"{text!r}: {host!r} in brackets is not an IPv6 address") from error
        else:
            host = head
            if ":" in host:
                raise AddressError(f"{text!r}: write an IPv6 address in brackets, for example '[::1]:4600'")
            if not _is_host(host):
                raise AddressError(f"{text!r}: {host!r} is neither an IPv4 address nor a host name")
        if not re.fullmatch(r"[0-9]{1,5}", tail) or int(tail) > 65535:
            raise AddressError(f"{text!r}: the port must be a number from 0 to 65535, not {tail!r}")
        return cls(host, int(tail))

    @property
    def is_unspecified(self) -> bool:
        """True for 0.0.0.0 and ::, which one can listen on but not connect to."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def peer(address: str) -> str:
    """``HOST:PORT`` of a peer as gRPC names it: ``ipv6:%5B::1%5D:5000`` is ``[::1]:5000``."""
    kind, separator, rest = unquote(address).partition(":")
    return rest if separator and kind in ("ipv4", "ipv6") else address


def port_of(address: str) -> int:
    """The port of such a peer; 0 if it has none."""
    port = peer(address).rpartition(":")[2]
    return int(port) if port.isdigit() else 0


def _is_host(host: str) -> bool:
    if re.fullmatch(r"[0-9.]+", host):  # all digits and dots: meant as IPv4, so it has to be one
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return False
        return True
    return _HOST_NAME.fullmatch(host) is not None
