"""The invite: the one string a node needs to join a run, ``atoll://TOKEN@HOST:PORT``.

The token is a secret of the run: ``str(invite)`` holds it, ``repr(invite)`` does not.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from dataclasses import dataclass, field

from protos.address import Address, AddressError

SCHEME = "atoll"
EXAMPLE = (
    "atoll://TOKEN@HOST:PORT, for example atoll://Zx3k…@192.0.2.7:4600 or atoll://Zx3k…@[2001:db8::7]:4600"
)

_MAX_TOKEN = 128
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{1,{_MAX_TOKEN}}}")


class InviteError(ValueError):
    """A string that is not an invite; the text names the part that is wrong and shows a proper one."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. An invite looks like {EXAMPLE}")


@dataclass(frozen=True)
class Invite:
    """Where the coordinator listens and the secret it asks for.

    ``host`` is a host name, an IPv4 address, or an IPv6 address without brackets (a zone such as ``%eth0`` is
    kept). ``token`` is 1 to 128 characters of ``A-Z a-z 0-9 _ -``. ``port`` is 1 to 65535.

    Raises:
        InviteError: a field that does not fit.
    """

    token: str = field(repr=False)
    host: str
    port: int

    def __post_init__(self) -> None:
        check_token(self.token)
        if not 1 <= self.port <= 65535:
            raise InviteError(f"port {self.port} cannot be dialled, it is not within 1 to 65535")
        address = _address(str(Address(self.host, self.port)))
        if address.host != self.host or "@" in self.host:
            raise InviteError(f"{self.host[:60]!r} is not a host")

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Read what :meth:`__str__` wrote; white space around it is ignored.

        Raises:
            InviteError: anything else. The text never repeats the token.
        """
        text = text.strip()
        scheme, separator, rest = text.partition("://")
        if not separator:
            raise InviteError(f"an invite starts with {SCHEME}://" if text else "the invite is empty")
        if scheme.lower() != SCHEME:
            raise InviteError(f"the scheme is {scheme[:20]!r}, not {SCHEME!r}")
        token, separator, address = rest.rpartition("@")
        if not separator:
            raise InviteError("there is no token before an @")
        parsed = _address(address)
        return cls(token=token, host=parsed.host, port=parsed.port)

    @classmethod
    def create(cls, host: str, port: int) -> Invite:
        """An invite with a fresh random token of 128 bits."""
        return cls(token=new_token(), host=host, port=port)

    @property
    def address(self) -> str:
        """``HOST:PORT`` as gRPC dials it, IPv6 in brackets, without the token."""
        return str(Address(self.host, self.port))

    @property
    def reach(self) -> str:
        """Why other machines cannot use this invite, in words; empty if nothing speaks against it."""
        if self.host.lower() == "localhost":
            return f"{self.host} is this machine only: nodes on other machines cannot join"
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return ""
        if address.is_unspecified:
            return f"{self.host} means every address and cannot be dialled from elsewhere"
        if address.is_loopback:
            return f"{self.host} is this machine only: nodes on other machines cannot join"
        return ""

    def __str__(self) -> str:
        return f"{SCHEME}://{self.token}@{self.address}"


def new_token() -> str:
    """A random token of 128 bits, 22 characters."""
    return secrets.token_urlsafe(16)


def check_token(token: str) -> None:
    """Raise :class:`InviteError` unless ``token`` can stand in an invite; the text does not repeat it."""
    if not token:
        raise InviteError("the token is empty")
    if not _TOKEN.fullmatch(token):
        raise InviteError(f"a token has 1 to {_MAX_TOKEN} characters of A-Z a-z 0-9 _ -, this one does not")


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except AddressError as error:
        raise InviteError(str(error)) from None
