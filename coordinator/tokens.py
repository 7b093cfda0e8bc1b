"""Tokens: who may do what in a run, and until when. Pure: it knows no file and no clock.

Of a token's secret only the sha256 is kept. A secret of 128 random bits needs no slower hash: nobody finds it
by trying.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, cast, get_args

from protos.refusal import BAD_TOKEN, TOKEN_EXPIRED, TOKEN_REVOKED, WRONG_ROLE

Role = Literal["node", "observer", "admin"]

ROLES: Final[tuple[Role, ...]] = get_args(Role)
DEFAULT: Final = "default"  # the token of the first invite
MAX_TOKENS: Final = 4096
FORMAT: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class TokenError(ValueError):
    """A book of tokens that cannot be read, or not be changed as wanted; the text says why and what to do."""


@dataclass(frozen=True)
class Token:
    """A line of the book.

    Attributes:
        name: by which people revoke it.
        role: ``node`` takes part in rounds, ``observer`` looks on, ``admin`` looks on and gives orders at the
            dashboard.
        digest: sha256 of the secret, hex.
        created, expires, revoked: seconds since 1970; ``None``: never.

    Raises:
        TokenError: a field that does not fit.
    """

    name: str
    role: Role
    digest: str
    created: float
    expires: float | None = None
    revoked: float | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise TokenError(f"a token's name has 1 to 64 characters of A-Z a-z 0-9 . _ -, not {self.name!r}")
        if self.role not in ROLES:
            raise TokenError(f"a token's role is {', '.join(ROLES)}, not {self.role!r}")
        if not _DIGEST.fullmatch(self.digest):
            raise TokenError(f"the digest of token {self.name} is none")

    def ended(self, now: float) -> str:
        """The kind of refusal that whoever holds it gets at ``now``; empty: it is valid."""
        if self.revoked is not None:
            return TOKEN_REVOKED
        if self.expires is not None and now >= self.expires:
            return TOKEN_EXPIRED
        return ""

    def state(self, now: float) -> str:
        """``valid``, ``revoked`` or ``expired``."""
        return {TOKEN_REVOKED: "revoked", TOKEN_EXPIRED: "expired"}.get(self.ended(now), "valid")


@dataclass(frozen=True)
class Verdict:
    """Whether a secret lets one do something.

    Attributes:
        token: whose secret it is; ``None``: nobody's.
        refusal: why not, a kind of protos/refusal.py; empty: it does.
        reason: the same in words.
    """

    token: Token | None
    refusal: str = ""
    reason: str = ""


class TokenBook:
    """The tokens of a run, in the order of their making; immutable.

    Raises:
        TokenError: two of a name or of a secret, or too many.
    """

    def __init__(self, tokens: Iterable[Token] = ()) -> None:
        self.tokens = tuple(tokens)
        self._by_name = {token.name: token for token in self.tokens}
        self._by_digest = {token.digest: token for token in self.tokens}
        if len(self._by_name) < len(self.tokens) or len(self._by_digest) < len(self.tokens):
            raise TokenError("two tokens have the same name or secret")
        if len(self.tokens) > MAX_TOKENS:
            raise TokenError(f"a run has at most {MAX_TOKENS} tokens")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenBook) and self.tokens == other.tokens

    def __hash__(self) -> int:
        return hash(self.tokens)

    def named(self, name: str) -> Token | None:
        """The token of a name."""
        return self._by_name.get(name)

    def of(self, digest: str) -> Token | None:
        """The token whose secret has this sha256."""
        return self._by_digest.get(digest)

    def free_name(self, wanted: str) -> str:
        """``wanted``, or, if that is taken, with a number behind it."""
        names = (wanted, *(f"{wanted}-{number}" for number in range(2, MAX_TOKENS + 3)))
        return next(name for name in names if name not in self._by_name)

    def added(
        self, name: str, role: Role, secret: str, *, now: float, seconds: float | None = None
    ) -> TokenBook:
        """With one more token, valid for ``seconds`` from ``now`` on; ``None``: until it is revoked.

        In a full book it takes the place of the oldest one that is valid no more.

        Raises:
            TokenError: the name is taken or is none, the book is full, or the time is over at once.
        """
        if name in self._by_name:
            raise TokenError(f"there is a token {name!r} already: choose another name")
        if seconds is not None and seconds <= 0:
            raise TokenError("a token must be valid for some time")
        token = Token(name, role, digest_of(secret), now, None if seconds is None else now + seconds)
        kept = list(self.tokens)
        if len(kept) >= MAX_TOKENS:
            gone = next((old for old in kept if old.ended(now)), None)
            if gone is None:
                raise TokenError(f"all {MAX_TOKENS} tokens of the run are valid: revoke one first")
            kept.remove(gone)
        return TokenBook((*kept, token))

    def given(self, name: str, role: Role, secret: str, *, now: float) -> TokenBook:
        """With a token whose secret the owner has chosen; another one of that name and role is valid no more.

        Raises:
            TokenError: the secret is of a token of another role, or of one that is valid no more.
        """
        token = self.of(digest_of(secret))
        if token is None:
            others = [old for old in self.tokens if (old.name, old.role) != (name, role)]
            book = TokenBook(others)
            return book.added(book.free_name(name), role, secret, now=now)
        if state := token.ended(now):
            raise TokenError(f"the token that is given is {token.name}, {_words(state)}: give another one")
        if token.role != role:
            raise TokenError(f"the token that is given is {token.name}, of role {token.role}, not {role}")
        return self

    def revoked(self, name: str, now: float) -> TokenBook:
        """With a token that is valid no more; harmless twice.

        Raises:
            TokenError: there is none of that name.
        """
        token = self.named(name)
        if token is None:
            known = ", ".join(sorted(self._by_name)[:8]) or "none"
            raise TokenError(f"there is no token {name[:64]!r}; there are: {known}")
        gone = token if token.revoked is not None else replace(token, revoked=now)
        return TokenBook(gone if old is token else old for old in self.tokens)

    def verdict(self, secret: str, roles: Collection[Role], now: float) -> Verdict:
        """Whether ``secret`` lets one do what ``roles`` may."""
        token = self.of(digest_of(secret))
        if token is None:
            return Verdict(None, BAD_TOKEN, "the invite's token is not this run's: ask for a new invite")
        if kind := token.ended(now):
            return Verdict(
                token, kind, f"the invite's token {token.name} {_words(kind)}: ask for a new invite"
            )
        if token.role not in roles:
            return Verdict(
                token,
                WRONG_ROLE,
                f"the invite's token {token.name} is for role {token.role}, this needs "
                f"{' or '.join(roles)}: ask for an invite of that role",
            )
        return Verdict(token)

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads."""
        return {"format": FORMAT, "tokens": [asdict(token) for token in self.tokens]}

    @classmethod
    def from_json(cls, values: object) -> TokenBook:
        """Check and read a book.

        Raises:
            TokenError: it is damaged, or of a newer format.
        """
        if not isinstance(values, dict) or not isinstance(values.get("tokens"), list):
            raise TokenError("it is no book of tokens")
        if values.get("format") != FORMAT:
            raise TokenError(f"it has format {values.get('format')!r}, this Atoll knows {FORMAT}")
        return cls(_token(one) for one in values["tokens"])


def digest_of(secret: str) -> str:
    """The sha256 of a secret, hex."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _token(values: object) -> Token:
    if not isinstance(values, Mapping):
        raise TokenError("a token is no object")
    kinds: dict[str, tuple[type, ...]] = {
        "name": (str,),
        "role": (str,),
        "digest": (str,),
        "created": (int, float),
        "expires": (int, float, type(None)),
        "revoked": (int, float, type(None)),
    }
    if set(values) != set(kinds):
        raise TokenError(f"a token has the fields {', '.join(kinds)}")
    for field, allowed in kinds.items():
        value = values[field]
        if (
            not isinstance(value, allowed)
            or isinstance(value, bool)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            raise TokenError(f"the field {field} of a token is {value!r}"[:120])
    return Token(**cast("dict[str, Any]", dict(values)))


def _words(kind: str) -> str:
    return "has expired" if kind == TOKEN_EXPIRED else "was revoked"
