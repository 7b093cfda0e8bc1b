from __future__ import annotations

import ipaddress
import string
from base64 import urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.address import Address
from protos.invite import EXAMPLE, Invite, InviteError, new_token

_TOKENS = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=128)
_LABELS = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,4})?", fullmatch=True)
_NAMES = st.lists(_LABELS, min_size=1, max_size=4).map(".".join)
_HOSTS = st.one_of(_NAMES, st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str))
_PORTS = st.integers(1, 65535)
_PINS = st.one_of(
    st.just(""), st.binary(min_size=32, max_size=32).map(lambda b: urlsafe_b64encode(b).decode()[:43])
)
PIN = "A" * 43


@given(_TOKENS, _HOSTS, _PORTS, _PINS)
def test_str_and_parse_are_inverse(token: str, host: str, port: int, pin: str) -> None:
    invite = Invite(token, host, port, pin)
    assert str(invite).startswith("atoll+insecure://" if invite.insecure else "atoll://")
    assert Invite.parse(str(invite)) == invite
    assert Invite.parse(f"  {invite}\n") == invite
    assert Address.parse(invite.address) == Address(host, port)


@given(st.text())
def test_parse_gives_an_invite_or_an_invite_error(text: str) -> None:
    try:
        invite = Invite.parse(text)
    except InviteError as error:
        assert EXAMPLE in str(error)
    else:
        assert Invite.parse(str(invite)) == invite


@given(st.ip_addresses(v=6), _PORTS)
def test_ipv6_stands_in_brackets(address: ipaddress.IPv6Address, port: int) -> None:
    invite = Invite("t", str(address), port)
    assert invite.address == f"[{address}]:{port}"
    assert f"@[{address}]:{port}" in str(invite)


def test_an_ipv6_zone_is_kept() -> None:
    assert Invite.parse(f"atoll://t@[fe80::1%eth0]:4600/{PIN}").host == "fe80::1%eth0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("abc@host:1", "starts with atoll://"),
        ("http://abc@host:1", "scheme is 'http'"),
        ("atoll://host:4600", "no token"),
        ("atoll://@host:4600", "token is empty"),
        ("atoll://a b@host:4600", "token has 1 to 128"),
        ("atoll://" + "x" * 129 + "@host:4600", "token has 1 to 128"),
        ("atoll://abc@host", "has no port"),
        ("atoll://abc@host:", "not ''"),
        ("atoll://abc@host:0", "port 0 cannot"),
        ("atoll://abc@host:65536", "not '65536'"),
        ("atoll://abc@host:46oo", "not '46oo'"),
        ("atoll://abc@host:4600", "no pin behind the port"),
        ("atoll://abc@host:4600/", "no pin behind the port"),
        ("atoll://abc@host:4600/path", "the pin 'path' is not 43 characters"),
        (f"atoll://abc@host:4600/{PIN}/", "is not 43 characters"),
        (f"atoll://abc@host:4600/{PIN[:-1]}B", "is not 43 characters"),
        (f"atoll+insecure://abc@host:4600/{PIN}", "ends with the port"),
        ("atoll://abc@:4600", "neither an IPv4"),
        ("atoll://abc@2001:db8::7:4600", "in brackets"),
        ("atoll://abc@[2001:db8::7:4600", "has no port"),
        ("atoll://abc@[2001:db8::7]", "has no port"),
        ("atoll://abc@[2001:db8::zz]:4600", "not an IPv6 address"),
        ("atoll://abc@[host]:4600", "not an IPv6 address"),
        ("atoll://abc@300.1.1.1:4600", "neither an IPv4 address nor"),
        ("atoll://abc@ho st:4600", "neither an IPv4 address nor"),
        ("atoll://abc@-host:4600", "neither an IPv4 address nor"),
    ],
)
def test_errors_name_the_part_and_show_a_proper_invite(text: str, expected: str) -> None:
    with pytest.raises(InviteError) as caught:
        Invite.parse(text)
    assert expected in str(caught.value)
    assert "atoll://TOKEN@HOST:PORT/PIN" in str(caught.value)


def test_the_token_is_shown_by_str_only() -> None:
    invite = Invite.create("host.example", 4600)
    assert invite.token in str(invite)
    assert invite.token not in repr(invite)
    with pytest.raises(InviteError) as caught:
        Invite.parse(f"atoll://{invite.token}@host.example")
    assert invite.token not in str(caught.value)
    with pytest.raises(InviteError) as caught:
        Invite.parse(f"atoll://{invite.token}!@host.example:4600")
    assert invite.token not in str(caught.value)


@pytest.mark.parametrize("host", ["[::1]", "fe80::1%a@b", "", "a b"])
def test_a_host_that_no_invite_can_carry(host: str) -> None:
    with pytest.raises(InviteError):
        Invite("t", host, 4600)


def test_tokens_differ_and_fit() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(Invite(token, "h", 1).token == token for token in tokens)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", "this machine only"),
        ("127.0.0.1", "this machine only"),
        ("127.8.0.1", "this machine only"),
        ("::1", "this machine only"),
        ("0.0.0.0", "every address"),
        ("::", "every address"),
        ("192.0.2.7", ""),
        ("2001:db8::7", ""),
        ("coordinator.example", ""),
    ],
)
def test_reach_says_who_cannot_dial_it(host: str, expected: str) -> None:
    reach = Invite("t", host, 4600).reach
    assert expected in reach
    assert bool(reach) == bool(expected)
