"""Access: which calls are let in, by their tokens and by the keys of nodes; and who is told of it.

Every call shows a token (:mod:`coordinator.tokens`); a join shows that its node has a key, too.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final, Protocol

from coordinator.events import AccessRefused, Listener, TokenAdded, TokenEnded, TokenUsed, ignore
from coordinator.nonces import Nonces
from coordinator.tokens import DEFAULT, Role, Token, TokenBook, TokenError, Verdict, digest_of
from protos.address import peer
from protos.atoll_pb2 import JoinRequest
from protos.identity import fingerprint, signed
from protos.refusal import (
    BAD_IDENTITY,
    OVERLOADED,
    REPLAYED_JOIN,
    WRONG_ROLE,
    Code,
    Refused,
)

log = logging.getLogger(__name__)

NODE: Final[frozenset[Role]] = frozenset(("node",))
ADMIN: Final[frozenset[Role]] = frozenset(("admin",))
ANYBODY: Final[frozenset[Role]] = frozenset(("node", "observer", "admin"))
LOOK_SECONDS: Final = 1.0  # between two looks at the book
TELL_SECONDS: Final = 60.0  # between two events of the same refusal to the same host
MAX_HOSTS: Final = 1024  # of whom that is remembered
_OWN: Final = "coordinator"  # the token by which the coordinator's own process looks at its status


class Tokens(Protocol):
    """Where a book comes from."""

    @property
    def book(self) -> TokenBook:
        """As last read."""

    def look(self) -> bool:
        """Read it again; whether it is another one.

        Raises:
            TokenError, OSError: it cannot be read.
        """


class Fixed:
    """A book that stays as it is."""

    def __init__(self, book: TokenBook) -> None:
        self.book = book

    def look(self) -> bool:
        """Nothing changes."""
        return False


def only(token: str) -> Fixed:
    """The book of a run with one token, which nodes show."""
    return Fixed(TokenBook().added(DEFAULT, "node", token, now=0.0))


class Access:
    """Lives on the event loop of the run; :meth:`admin` may be called from any thread.

    Args:
        tokens: the book.
        wall: seconds since 1970, for what expires.
        now: monotonic seconds.
        tell: is told of tokens that are used, added, or valid no more, and of calls that are refused.
        count: is told the kind of each refusal.

    Attributes:
        own: a secret with which this process itself may look on.
    """

    def __init__(
        self,
        tokens: Tokens | str,
        *,
        wall: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
        tell: Listener = ignore,
        count: Callable[[str], None] = lambda kind: None,
        own: str = "",
    ) -> None:
        self._tokens: Tokens = only(tokens) if isinstance(tokens, str) else tokens
        self._wall, self._now = wall, now
        self.tell, self.count = tell, count
        self.own = own or secrets.token_urlsafe(16)
        self._own = Token(_OWN, "observer", digest_of(self.own), wall())
        self._nonces = Nonces(secrets.token_bytes(32), now, secrets.token_bytes)
        self._known = self._tokens.book
        self._ended = {token.digest for token in self._known.tokens if token.ended(wall())}
        self._used: set[tuple[str, str]] = set()  # digest, host
        self._told: OrderedDict[tuple[str, str], tuple[float | None, int]] = OrderedDict()
        self._trouble = ""

    # ----------------------------------------------------------------------------------------------- tokens

    def check(self, secret: str, roles: Collection[Role], address: str) -> Token:
        """The token of a call from ``address``.

        Raises:
            Refused: it lets nobody do this.
        """
        verdict = self._verdict(secret, roles)
        if verdict.token is not None and not verdict.refusal:
            self._note_use(verdict.token, address)
            return verdict.token
        code: Code = "PERMISSION_DENIED" if verdict.refusal == WRONG_ROLE else "UNAUTHENTICATED"
        raise self.refused(
            Refused(verdict.refusal, verdict.reason, code),
            address,
            verdict.token.name if verdict.token else "",
        )

    def admin(self, secret: str) -> str:
        """The name of the administrator's token with this secret; empty: it is none, or is valid no more."""
        verdict = self._tokens.book.verdict(secret, ADMIN, self._wall())
        return verdict.token.name if verdict.token is not None and not verdict.refusal else ""

    def still_admin(self, name: str) -> bool:
        """Whether the token of this name lets one give orders now."""
        token = self._tokens.book.named(name)
        return token is not None and token.role in ADMIN and not token.ended(self._wall())

    def name(self, digest: str) -> str:
        """The name of a token, by the digest of its secret; empty: there is none."""
        token = self._tokens.book.of(digest)
        return token.name if token is not None else ""

    def standing(self, digest: str) -> str:
        """Why a token, by the digest of its secret, is valid no more; empty: it is."""
        token = self._tokens.book.of(digest)
        if token is None:
            return "its token was replaced"
        state = token.state(self._wall())
        words = {"revoked": "was revoked", "expired": "has expired"}
        return f"its token {token.name} {words[state]}" if state in words else ""

    def look(self) -> bool:
        """Read the book again, and tell what is new in it; whether a token has become invalid."""
        self._read()
        book, now = self._tokens.book, self._wall()
        for token in book.tokens:
            if self._known.of(token.digest) is None:
                self.tell(TokenAdded(token.name, token.role, token.expires))
        ended = {token.digest: token for token in book.tokens if token.ended(now)}
        gone = {token.digest: token for token in self._known.tokens if book.of(token.digest) is None}
        new = [digest for digest in (*ended, *gone) if digest not in self._ended]
        for digest in new:
            token = ended.get(digest) or gone[digest]
            self.tell(TokenEnded(token.name, token.role, token.state(now) if digest in ended else "replaced"))
        self._known, self._ended = book, {*ended, *gone}
        return bool(new)

    def _verdict(self, secret: str, roles: Collection[Role]) -> Verdict:
        if digest_of(secret) == self._own.digest:
            allowed = self._own.role in roles
            return Verdict(self._own) if allowed else Verdict(self._own, WRONG_ROLE, "this needs an invite")
        self._read()
        return self._tokens.book.verdict(secret, roles, self._wall())

    def _read(self) -> None:
        """What was read before holds if the book cannot be read."""
        try:
            self._tokens.look()
            self._trouble = ""
        except (TokenError, OSError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.error("%s; what was read before holds", error)

    def _note_use(self, token: Token, address: str) -> None:
        use = (token.digest, _host(address))
        if token is self._own or use in self._used:
            return
        if len(self._used) >= MAX_HOSTS:
            self._used.clear()
        self._used.add(use)
        self.tell(TokenUsed(token.name, token.role, use[1]))

    # ------------------------------------------------------------------------------------------------ joins

    def nonce(self) -> bytes:
        """For one join."""
        return self._nonces.make()

    def check_key(self, request: JoinRequest, address: str, token: str) -> None:
        """Check that a join is of the owner of its key, and new.

        Raises:
            Refused: it is not.
        """
        if not signed(request.key, request.signature, request.nonce, request.run_digest):
            text = "the node's key and its signature do not fit: install the same version of atoll on both"
            raise self.refused(Refused(BAD_IDENTITY, text, "UNAUTHENTICATED"), address, token)
        verdict = self._nonces.spend(request.nonce)
        if verdict == "spent":
            text = "this join has been used before: whoever sends it again is not let in"
            raise self.refused(Refused(REPLAYED_JOIN, text, "FAILED_PRECONDITION"), address, token)
        if verdict == "busy":
            raise self.refused(
                Refused(OVERLOADED, "too many nodes join at once", "UNAVAILABLE"), address, token
            )
        if verdict != "fresh":  # an honest node asks for another one
            text = "the nonce of this join is too old, or of another coordinator: ask for a new one"
            raise self.refused(Refused(REPLAYED_JOIN, text, "ABORTED"), address, token)

    def refused(self, refused: Refused, address: str, token: str = "") -> Refused:
        """Count and tell of a call that is not let in; returns the refusal."""
        self.count(refused.kind)
        self.note(refused, address, token)
        return refused

    def note(self, refused: Refused, address: str, token: str = "", key: bytes = b"") -> None:
        """Tell of a call that is not let in, unless that was done a moment ago."""
        host, now = _host(address), self._now()
        told_at, untold = self._told.pop((refused.kind, host), (None, 0))
        if told_at is None or now - told_at >= TELL_SECONDS:
            self.tell(AccessRefused(refused.kind, token, host, fingerprint(key), refused.text, untold + 1))
            told_at, untold = now, -1
        self._told[refused.kind, host] = (told_at, untold + 1)
        while len(self._told) > MAX_HOSTS:
            self._told.popitem(last=False)


def _host(address: str) -> str:
    return peer(address).rpartition(":")[0] or address[:128]
