"""Certificates: a server's key pair that proves, by the digest in an invite, that it is the one meant.

There is no authority to ask: whoever listens signs its own certificate, and callers accept that one and no
other, by the SHA-256 of its DER form (its *pin*; RFC 7469 pins the key alone, which would do as well).
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NAME: Final = "atoll.invalid"  # of every certificate that is made here; such a name never resolves (RFC 2606)
MAX_BYTES: Final = 2048  # of a certificate in a message; one that is made here has some 340
_MAX_FILE: Final = 64 << 10
_YEARS: Final = 30  # an invite is to outlast the run, and nothing renews the certificate
_DAY: Final = datetime.timedelta(days=1)


class CertificateError(ValueError):
    """A certificate or a key that cannot be used; the text names the file and what to do."""


@dataclass(frozen=True)
class Credential:
    """A certificate with its private key, both PEM; ``client_ca`` (PEM) asks callers for a certificate that
    this authority has signed, empty: for none."""

    chain: bytes
    key: bytes = field(repr=False)
    client_ca: bytes = b""

    @cached_property
    def der(self) -> bytes:
        """The certificate itself, without those that have signed it."""
        return first_der(self.chain)

    @cached_property
    def pin(self) -> str:
        """See :func:`pin_of`."""
        return pin_of(self.der)


def pin_of(der: bytes) -> str:
    """The pin of a certificate in DER form: base64url of its SHA-256, 43 characters."""
    return base64.urlsafe_b64encode(hashlib.sha256(der).digest()).decode().rstrip("=")


def pem_of(der: bytes) -> bytes:
    """DER as PEM."""
    return ssl.DER_cert_to_PEM_cert(der).encode()


def first_der(chain: bytes) -> bytes:
    """The first certificate of a PEM chain as DER.

    Raises:
        CertificateError: there is none.
    """
    try:
        return x509.load_pem_x509_certificate(chain).public_bytes(serialization.Encoding.DER)
    except ValueError as error:
        raise CertificateError(f"this is no certificate in PEM form: {error}") from None


def name_in(der: bytes) -> str:
    """A name that the certificate is for, which gRPC compares also where the certificate itself is known.

    Raises:
        CertificateError: it cannot be read, or is for nobody.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise CertificateError(f"the certificate names no host (subjectAltName): {error}") from None
    hosts = names.get_values_for_type(x509.DNSName)
    found = [*hosts, *map(str, names.get_values_for_type(x509.IPAddress))]
    if not found:
        raise CertificateError("the certificate names no host (subjectAltName)")
    return found[0].replace("*", NAME.partition(".")[0], 1)


def made(now: datetime.datetime | None = None) -> Credential:
    """A new key (ECDSA, P-256) with a certificate that it has signed itself, valid from yesterday on: clocks
    differ.

    Args:
        now: the time, UTC.
    """
    now = now or datetime.datetime.now(datetime.timezone.utc)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + 365 * _YEARS * _DAY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Credential(certificate.public_bytes(serialization.Encoding.PEM), private)


def kept(path: Path) -> Credential:
    """The credential in a file, made the first time; the file holds key and certificate, for its owner alone,
    and appears whole.

    Raises:
        CertificateError: the file holds something else.
        OSError: it cannot be read or written.
    """
    if not path.exists():
        new, scratch = made(), path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()
        try:
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(new.key + new.chain)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
    return loaded(path, path, "remove it for a new one, with which all invites become invalid")


def loaded(
    certificate: Path, key: Path, cure: str = "give files in PEM form, the key without a passphrase"
) -> Credential:
    """A credential that somebody else has made: a certificate (with those in between, if it has any) and its
    key.

    Raises:
        CertificateError: they cannot be used, or do not belong together; ``cure`` says what to do.
        OSError: they cannot be read.
    """
    pem, chain = contents(key), contents(certificate)
    try:
        private = serialization.load_pem_private_key(pem, None)
        public = x509.load_pem_x509_certificate(chain).public_key()
    except (ValueError, TypeError) as error:
        raise CertificateError(f"{certificate}, {key}: no certificate with a key ({error}): {cure}") from None
    if private.public_key() != public:
        raise CertificateError(f"{certificate}: the key in {key} is not this certificate's: {cure}")
    return Credential(chain, pem)


def authority(path: Path) -> bytes:
    """The certificate of an authority, PEM.

    Raises:
        CertificateError: the file holds none.
        OSError: it cannot be read.
    """
    pem = contents(path)
    try:
        first_der(pem)
    except CertificateError as error:
        raise CertificateError(f"{path}: {error}") from None
    return pem


def contents(path: Path) -> bytes:
    """A small file.

    Raises:
        CertificateError: it is far too big.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_FILE + 1)
    if len(data) > _MAX_FILE:
        raise CertificateError(f"{path} is no certificate: it has more than {_MAX_FILE} bytes")
    return data
