"""The dashboard that a coordinator is to serve, as the command line says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.dashboard.server import EXTRA, PORT, installed, is_loopback
from coordinator.journal_folder import JournalFolder
from coordinator.service import Watching
from coordinator.tokens import TokenBook
from deploy.errors import UserError
from deploy.event_words import sentence
from deploy.options import OFF
from protos.address import Address

DEFAULT: Final = Address("127.0.0.1", PORT)
SHORTEST: Final = 16  # characters of an admin token


def watching(choice: str | None, token: str | None = None) -> Watching | None:
    """What to serve; ``None`` for nothing.

    Without a ``choice`` it is served to this machine alone, on another port if the usual one is taken, and
    not at all where its packages are missing.

    Raises:
        AddressError, UserError: a choice or a token that cannot be used.
    """
    if token is not None and len(token) < SHORTEST:
        raise UserError(f"the admin token must have at least {SHORTEST} characters: it lets one expel nodes")
    if choice == OFF or (choice is None and not installed()):
        return None
    listen = DEFAULT if choice is None else Address.parse(choice)
    if not installed():
        raise UserError(EXTRA)
    return Watching(listen, choice is not None, sentence)


def announce(address: Address, book: TokenBook, folder: JournalFolder, say: Callable[[str], None]) -> None:
    """Tell where the dashboard is, and what lets its reader act."""
    host = "localhost" if address.is_unspecified else address.host
    say(f"dashboard at http://{Address(host, address.port)}/")
    if not is_loopback(address.host):
        say("  other machines reach it, and it is not encrypted: put a proxy with TLS before it")
    admins = [token.name for token in book.tokens if token.role == "admin" and token.revoked is None]
    how = f"the token {admins[-1]}, or " if admins else ""
    say(
        f"  anybody who reaches it may look; to pause the run or expel nodes: {how}an invite of "
        f"'atoll invite create {folder.path} --role admin'"
    )
