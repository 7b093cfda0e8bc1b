"""The invite: the one string a node needs to join a run, ``atoll://TOKEN@HOST:PORT/PIN``.

The pin is the digest of the certificate that the coordinator shows: whoever else answers there is not it. The
token is a secret of the run: ``str(invite)`` holds it, ``repr(invite)`` does not.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from dataclasses import dataclass, field

from protos.address import Address, AddressError

SCHEME = "atoll"
INSECURE = "atoll+insecure"  # of a coordinator that was started with --insecure: neither encrypted nor proven
EXAMPLE = (
    "atoll://TOKEN@HOST:PORT/PIN, for example atoll://Zx3k…@192.0.2.7:4600/kq8Z… or "
    "atoll://Zx3k…@[2001:db8::7]:4600/kq8Z…"
)

_MAX_TOKEN = 128
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{1,{_MAX_TOKEN}}}")
_PIN = re.compile(r"[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]")  # 32 bytes in base64url


class InviteError(ValueError):
    """A string that is not an invite; the text names the part that is wrong and shows a proper one."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. An invite looks like {EXAMPLE}")


@dataclass(frozen=True)
class Invite:
    """Where the coordinator listens, the secret it asks for, and how it proves who it is.

    ``host`` is a host name, an IPv4 address, or an IPv6 address without brackets (a zone such as ``%eth0`` is
    kept). ``token`` is 1 to 128 characters of ``A-Z a-z 0-9 _ -``. ``port`` is 1 to 65535. ``pin`` is that of
    the coordinator's certificate (:func:`protos.certificate.pin_of`); empty: no TLS, and no proof.

    Raises:
        InviteError: a field that does not fit.
    """

    token: str = field(repr=False)
    host: str
    port: int
    pin: str = ""

    def __post_init__(self) -> None:
        check_token(self.token)
        if not 1 <= self.port <= 65535:
            raise InviteError(f"port {self.port} cannot be dialled, it is not within 1 to 65535")
        address = _address(str(Address(self.host, self.port)))
        if address.host != self.host or "@" in self.host:
            raise InviteError(f"{self.host[:60]!r} is not a host")
        if self.pin and not _PIN.fullmatch(self.pin):
            raise InviteError(f"the pin {self.pin[:60]!r} is not 43 characters of base64url")

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
        if scheme.lower() not in (SCHEME, INSECURE):
            raise InviteError(f"the scheme is {scheme[:20]!r}, not {SCHEME!r}")
        token, separator, rest = rest.rpartition("@")
        if not separator:
            raise InviteError("there is no token before an @")
        address, separator, pin = rest.partition("/")
        parsed = _address(address)
        invite = cls(token=token, host=parsed.host, port=parsed.port, pin=pin)
        if scheme.lower() == INSECURE:
            if separator:
                raise InviteError(f"an invite with {INSECURE}:// ends with the port: it has no pin")
        elif not pin:
            raise InviteError(
                "there is no pin behind the port, by which the right coordinator is known: copy the whole "
                "line that 'atoll coordinator' prints. One that was started with --insecure has none, and "
                f"its invite begins with {INSECURE}://"
            )
        return invite

    @classmethod
    def create(cls, host: str, port: int, pin: str = "") -> Invite:
        """An invite with a fresh random token of 128 bits."""
        return cls(token=new_token(), host=host, port=port, pin=pin)

    @property
    def insecure(self) -> bool:
        """Whether the connection is neither encrypted nor proven."""
        return not self.pin

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
        if self.insecure:
            return f"{INSECURE}://{self.token}@{self.address}"
        return f"{SCHEME}://{self.token}@{self.address}/{self.pin}"


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
