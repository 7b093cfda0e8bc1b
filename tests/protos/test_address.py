"""Addresses: host and port as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.address import Address, AddressError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:4600", "localhost", 4600),
        ("0.0.0.0:0", "0.0.0.0", 0),
        ("[::]:4600", "::", 4600),
        ("[2001:db8::7]:65535", "2001:db8::7", 65535),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("node-1.example.org:22", "node-1.example.org", 22),
    ],
)
def test_an_address_reads_and_writes_the_same(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("localhost", "has no port"),
        ("[::1]", "has no port"),
        ("::1:80", "in brackets"),
        ("[localhost]:80", "not an IPv6 address"),
        ("1.2.3:80", "neither an IPv4 address nor a host name"),
        ("256.1.1.1:80", "neither an IPv4 address nor a host name"),
        (":80", "neither an IPv4 address nor a host name"),
        ("a b:80", "neither an IPv4 address nor a host name"),
        ("host:65536", "0 to 65535"),
        ("host:-1", "0 to 65535"),
        ("host:", "0 to 65535"),
        ("host:٣", "0 to 65535"),
        ("-x:80", "neither an IPv4 address nor a host name"),
    ],
)
def test_what_is_not_an_address_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(AddressError, match=reason):
        Address.parse(text)


def test_only_the_unspecified_addresses_are_unspecified() -> None:
    assert Address.parse("0.0.0.0:1").is_unspecified
    assert Address.parse("[::]:1").is_unspecified
    assert not Address.parse("[::1]:1").is_unspecified
    assert not Address.parse("localhost:1").is_unspecified


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_address_round_trips(ip: object, port: int) -> None:
    address = Address(str(ip), port)
    assert Address.parse(str(address)) == address
