"""Invites on a machine: which host one names, and the file in which a coordinator hands it to nodes."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deploy.errors import UserError
from protos.address import Address
from protos.invite import Invite, InviteError

if TYPE_CHECKING:
    from protos.tls import ClientTls

FILE_MARK: Final = "@"  # before the name of a file with an invite in it
_POLL_SECONDS: Final = 0.2

log = logging.getLogger(__name__)

# Addresses set aside for documentation: connecting a datagram socket sends nothing, it only picks a route.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def outgoing_address(family: socket.AddressFamily) -> str:
    """This machine's address on the route to the outside; empty without such a route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_ELSEWHERE[family], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def advertised_host(
    listen: Address,
    wanted: str | None = None,
    outgoing: Callable[[socket.AddressFamily], str] = outgoing_address,
) -> str:
    """The host an invite names: ``wanted``, the one listened on, or the one that leads outside.

    ``wanted`` may be an IPv6 address in brackets.
    """
    if wanted:
        return wanted[1:-1] if wanted.startswith("[") and wanted.endswith("]") else wanted
    if not listen.is_unspecified:
        return listen.host
    families = [socket.AF_INET6, socket.AF_INET] if ":" in listen.host else [socket.AF_INET]
    # A socket on :: takes IPv4 as well, which more machines have a route for.
    for family in reversed(families):
        if host := outgoing(family):
            return host
    return socket.gethostname()


@contextlib.contextmanager
def handed_over(invite: Invite, path: Path | None) -> Iterator[None]:
    """Keep ``invite`` in a file that only its owner reads while the block runs; ``None``: no file.

    The file appears whole, so whoever waits for it can read it at once.

    Raises:
        UserError: it cannot be written.
    """
    if path is None:
        yield
        return
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{invite}\n")
        scratch.replace(path)
    except OSError as error:
        raise UserError(f"the invite cannot be written to {path}: {error.strerror or error}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def client_tls(invite: Invite, ca: Path | None, certificate: Path | None, key: Path | None) -> ClientTls:
    """What a machine brings beside the invite, out of files.

    Raises:
        CertificateError: they hold something else.
        UserError: they do not go together.
    """
    from protos.certificate import authority, loaded
    from protos.tls import ClientTls

    if (certificate is None) != (key is None):
        raise UserError("--tls-cert and --tls-key go together: a certificate and its key")
    if invite.insecure and (ca is not None or certificate is not None):
        raise UserError(
            "the invite is for an insecure coordinator (atoll+insecure://), which speaks no TLS: leave the "
            "options --tls-… out, or ask for another invite"
        )
    own = None if certificate is None or key is None else loaded(certificate, key)
    return ClientTls(b"" if ca is None else authority(ca), own)


def given(
    text: str,
    wait: float = 0.0,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Invite:
    """The invite that a user gives: itself, or ``@FILE`` with the file that holds it.

    A file keeps the token out of command lines, which everybody on a machine can read. One that is not there
    yet is waited for so many seconds.

    Raises:
        InviteError: neither is an invite.
        UserError: the file cannot be read, or did not come.
    """
    if not text.startswith(FILE_MARK):
        try:
            return Invite.parse(text)
        except InviteError:
            # Not Path.is_file(), which fails where a text is too long for a path.
            if os.path.isfile(text):
                raise InviteError(
                    f"{text} is a file: to read the invite from it, write {FILE_MARK}{text}"
                ) from None
            raise
    path, end, told = Path(text[len(FILE_MARK) :]), now() + wait, False
    while True:
        try:
            return Invite.parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if now() >= end:
                waited = f" after {wait:g} s" if wait else ""
                raise UserError(
                    f"there is no invite in {path}{waited}; 'atoll coordinator --invite-file' writes it there"
                ) from None
            if not told:
                log.info("there is no invite in %s yet; waiting %g s for it", path, wait)
                told = True
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the invite cannot be read from {path}: {error}") from error
        sleep(_POLL_SECONDS)
