"""An authority of a test's own, which signs certificates of servers and of callers."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from protos.certificate import Credential, first_der


class Authority:
    """Attributes:
    pem: its certificate; ``der`` is the same.
    """

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("authority")
        self.pem = self._signed(self._name, self._key, None)
        self.der = first_der(self.pem)

    def signs(self, host: str) -> Credential:
        """A certificate for a host, with its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Credential(self._signed(_named(host), key, host), private)

    def _signed(self, name: x509.Name, key: ec.EllipticCurvePrivateKey, host: str | None) -> bytes:
        now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + 10 * day)
            .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        )
        if host is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
