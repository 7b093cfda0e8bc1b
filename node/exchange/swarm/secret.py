"""Who belongs to the run: proofs and keys that come from the token of its invite.

libp2p proves to each side which peer the other one is, and lets anybody in. Whoever has the token can make
these; to everybody else they look like noise.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Final

from node.exchange.swarm.library import hivemind

PROOF_BYTES: Final = hashlib.sha256().digest_size
_TOKEN_SECONDS: Final = 3600.0


class RunSecret:
    """Derived from the invite's token, which it does not keep."""

    def __init__(self, token: str) -> None:
        self._key = hmac.digest(token.encode(), b"atoll swarm 1", "sha256")

    def label(self, purpose: str) -> str:
        """A name of the run for ``purpose`` that tells nothing about the token: 32 hex digits."""
        return self._mac("label", purpose.encode())[:16].hex()

    def proof(self, caller: str, callee: str, purpose: bytes) -> bytes:
        """What the peer ``caller`` shows the peer ``callee`` when it opens a stream; of no use to others."""
        return self._mac("stream", purpose, caller.encode(), callee.encode())

    def seal(self, *fields: bytes) -> bytes:
        """A MAC of an access token."""
        return self._mac("access", *fields)

    def _mac(self, purpose: str, *fields: bytes) -> bytes:
        mac = hmac.new(self._key, purpose.encode(), "sha256")
        for field in fields:
            mac.update(len(field).to_bytes(4, "little") + field)
        return mac.digest()


def authorizer(secret: RunSecret) -> Any:
    """Lets those with the token, and nobody else, into the hash table: hivemind's protocol of signed requests
    (its issue 253), with access tokens that everybody who knows the secret makes for itself."""
    library = hivemind()
    base: Any = library.TokenAuthorizerBase

    class Authorizer(base):  # type: ignore[misc]
        async def get_token(self) -> Any:
            token = library.AccessToken(
                username="node",
                public_key=self.local_public_key.to_bytes(),
                expiration_time=repr(library.now() + _TOKEN_SECONDS),
            )
            token.signature = _sealed(secret, token)
            return token

        def is_token_valid(self, access_token: Any) -> bool:
            if not hmac.compare_digest(access_token.signature, _sealed(secret, access_token)):
                return False
            return bool(_expiry(access_token) > library.now())

        def does_token_need_refreshing(self, access_token: Any) -> bool:
            return bool(_expiry(access_token) < library.now() + _TOKEN_SECONDS / 2)

    return Authorizer()  # with a key of the process


def _sealed(secret: RunSecret, token: Any) -> bytes:
    return secret.seal(token.username.encode(), token.public_key, token.expiration_time.encode())


def _expiry(token: Any) -> float:
    try:
        return float(token.expiration_time)
    except ValueError:
        return 0.0
