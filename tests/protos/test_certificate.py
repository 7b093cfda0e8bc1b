"""Certificates: made, kept, pinned, and files that are none."""

from __future__ import annotations

import datetime
import hashlib
import re
import stat
from base64 import urlsafe_b64decode
from pathlib import Path

import pytest
from cryptography import x509

from protos import certificate
from protos.certificate import MAX_BYTES, NAME, CertificateError, Credential, kept, loaded, made
from protos.invite import Invite
from tests.authority import Authority

NOW = datetime.datetime(2030, 1, 2, tzinfo=datetime.timezone.utc)


def test_one_is_made_for_a_long_time_and_pinned_by_its_digest() -> None:
    credential = made(NOW)
    parsed = x509.load_der_x509_certificate(credential.der)
    assert parsed.not_valid_before_utc < NOW < NOW.replace(year=2059) < parsed.not_valid_after_utc
    assert certificate.name_in(credential.der) == NAME
    assert urlsafe_b64decode(credential.pin + "=") == hashlib.sha256(credential.der).digest()
    assert Invite("t", "h", 1, credential.pin).pin == credential.pin
    assert len(credential.der) < MAX_BYTES / 2
    assert certificate.first_der(certificate.pem_of(credential.der)) == credential.der
    assert "PRIVATE" not in repr(credential) and made(NOW).pin != credential.pin


def test_it_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "certificate.pem"
    first = kept(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kept(path) == Credential(path.read_bytes(), path.read_bytes()) and kept(path).pin == first.pin
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [b"", b"junk", made(NOW).chain, made(NOW).key, b"x" * (1 << 17)])
def test_what_is_kept_may_be_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "certificate.pem"
    path.write_bytes(content)
    with pytest.raises(CertificateError, match=re.escape(str(path))):
        kept(path)
    assert path.read_bytes() == content, "a key is never thrown away unasked"


def test_files_that_somebody_gives(tmp_path: Path) -> None:
    authority, other = Authority(), Authority()
    given = authority.signs("*.example.org")
    (tmp_path / "cert").write_bytes(given.chain + authority.pem)
    (tmp_path / "key").write_bytes(given.key)
    (tmp_path / "other").write_bytes(other.signs("x").key)
    read = loaded(tmp_path / "cert", tmp_path / "key")
    assert read.pin == given.pin, "the pin is that of the first one"
    assert certificate.name_in(read.der) == "atoll.example.org"
    with pytest.raises(CertificateError, match="is not this certificate's"):
        loaded(tmp_path / "cert", tmp_path / "other")
    assert certificate.authority(tmp_path / "cert")
    with pytest.raises(CertificateError, match="no certificate in PEM form"):
        certificate.authority(tmp_path / "key")
    with pytest.raises(CertificateError, match="names no host"):
        certificate.name_in(authority.der)
    with pytest.raises(CertificateError, match="names no host"):
        certificate.name_in(b"junk")
    with pytest.raises(FileNotFoundError):
        loaded(tmp_path / "absent", tmp_path / "key")
