"""Multiaddresses: their binary form, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.swarm.multiaddress import Multiaddress, ip_part, is_peer_id, parse_with_peer

PEER = "QmVvbzNhJvkVWD3uTNHUGo6JrqmfYQbGVSRTdZxpBwdvyU"
ED25519 = "12D3KooWRfQpnCYHx5ep4ffFyuWtG1e5c8NUikA12qiraHTZxKpY"


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("/ip4/127.0.0.1/tcp/4601", "047f0000010611f9"),
        ("/ip6/::1/udp/4/quic-v1", "29" + "00" * 15 + "01" + "91020004cd03"),
        ("/dns4/example.org/tcp/4", "360b6578616d706c652e6f7267060004"),
        (
            "/p2p/" + ED25519,
            "a5032600240801122" + "0eb6fc435f24fd22aef9ee61bfa386eee0c8af79ba3b53457946752dbbae74ba5",
        ),
        ("/p2p-circuit", "a202"),
    ],
)
def test_the_binary_form(text: str, data: str) -> None:
    address = Multiaddress.parse(text)
    assert str(address) == text
    assert address.to_bytes().hex() == data


def test_a_relayed_address() -> None:
    text = f"/ip4/10.0.0.1/tcp/4601/p2p/{ED25519}/p2p-circuit/p2p/{PEER}"
    address = parse_with_peer(text)
    assert address.relayed and address.peer == PEER and address.host == "10.0.0.1"
    assert str(address.without_peer()) == text.removesuffix(f"/p2p/{PEER}")
    assert address.value("tcp") == "4601" and address.value("udp") == ""
    assert [ip_part(host) for host in ("10.0.0.1", "::1", "a.b")] == ["/ip4/10.0.0.1", "/ip6/::1", "/dns/a.b"]
    assert is_peer_id(PEER) and is_peer_id(ED25519)


@pytest.mark.parametrize(
    "text",
    [
        "", "/", "ip4/1.2.3.4", "/ip4/1.2.3", "/ip4", "/tcp/65536", "/tcp/-1", "/tcp/²", "/unix/etc/passwd",
        "/dns/a b", "/dns/..", "/p2p/" + PEER[:-1], "/p2p/" + PEER.replace("Q", "0"), "/http", "/tcp/1/",
        "/p2p-circuit" * 40,
    ],
)  # fmt: skip
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Multiaddress.parse(text)


@given(st.text(alphabet="/ip46tcpudpns-qv123.:QmKoo", max_size=80))
def test_any_text_is_an_address_or_a_value_error(text: str) -> None:
    try:
        address = Multiaddress.parse(text)
    except ValueError:
        return
    assert Multiaddress.parse(str(address)) == address
