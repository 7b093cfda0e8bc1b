"""A node's identity: an Ed25519 key pair, and what it signs to be admitted.

The coordinator gives a nonce; the node signs it together with the run's digest and its public key. A
signature is good for one join of one run, and of no use to whoever has only listened.
"""

from __future__ import annotations

import hashlib
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from protos.atoll_pb2 import JoinRequest

KEY_BYTES: Final = 32  # of a public key
SIGNATURE_BYTES: Final = 64
_PURPOSE: Final = b"atoll join 1"
_FINGERPRINT_DIGITS: Final = 16
_FIELD: Final = 2**255 - 19
_ORDER_8: Final = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826  # y of points of order 8


class NodeKey:
    """A key pair.

    Args:
        seed: the private key, as RFC 8032 has it: 32 random bytes.

    Attributes:
        public: the public key, 32 bytes.

    Raises:
        ValueError: ``seed`` has another length.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()

    @classmethod
    def new(cls) -> NodeKey:
        """A random one, which ends with this object unless its seed is kept."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def from_pem(cls, data: bytes) -> NodeKey:
        """Read what :meth:`to_pem` wrote.

        Raises:
            ValueError: it is something else.
        """
        key = load_pem_private_key(data, None)
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError("it is no Ed25519 key")
        return cls(key.private_bytes_raw())

    def to_pem(self) -> bytes:
        """The private key in PEM (PKCS #8), as ``openssl genpkey -algorithm ed25519`` writes one."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def prove(self, request: JoinRequest, nonce: bytes) -> None:
        """Have ``request``, complete but for this, show that it is of whoever has this key."""
        request.key, request.nonce = self.public, nonce
        request.signature = self.sign(nonce, request.run_digest)

    def sign(self, nonce: bytes, run_digest: str) -> bytes:
        """The proof that a join of the run, with the coordinator's ``nonce``, is of whoever has this key."""
        return self._key.sign(_challenge(nonce, run_digest, self.public))


def signed(key: bytes, signature: bytes, nonce: bytes, run_digest: str) -> bool:
    """Whether ``signature`` is what the owner of the public ``key`` has made by :meth:`NodeKey.sign`."""
    if len(key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES or _of_small_order(key):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _challenge(nonce, run_digest, key))
    except (InvalidSignature, ValueError):
        return False
    return True


def _of_small_order(key: bytes) -> bool:
    """Whether everybody can sign for this key, one message in eight or more: OpenSSL, like RFC 8032, takes
    points that eight times themselves are nothing."""
    y = int.from_bytes(key, "little") % (1 << 255)  # the bit above is the sign of x
    return y % _FIELD in (0, 1, _FIELD - 1, _ORDER_8, _FIELD - _ORDER_8)


def fingerprint(key: bytes) -> str:
    """A public key for people: 16 hex digits of its sha256; empty for none."""
    return hashlib.sha256(key).hexdigest()[:_FINGERPRINT_DIGITS] if key else ""


def _challenge(nonce: bytes, run_digest: str, key: bytes) -> bytes:
    fields = (_PURPOSE, nonce, run_digest.encode(), key)
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)
