from __future__ import annotations

import ipaddress
import socket
import stat
from pathlib import Path

import pytest

from deploy.errors import UserError
from deploy.invitation import advertised_host, given, handed_over, outgoing_address
from protos.address import Address
from protos.invite import Invite, InviteError

ROUTES = {socket.AF_INET: "198.51.100.7", socket.AF_INET6: "2001:db8::7"}


@pytest.mark.parametrize(
    ("listen", "wanted", "expected"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("::1", None, "::1"),
        ("0.0.0.0", None, "198.51.100.7"),
        ("::", None, "198.51.100.7"),
        ("0.0.0.0", "coordinator.example", "coordinator.example"),
        ("::", "[2001:db8::9]", "2001:db8::9"),
        ("127.0.0.1", "2001:db8::9", "2001:db8::9"),
    ],
)
def test_the_host_that_an_invite_names(listen: str, wanted: str | None, expected: str) -> None:
    host = advertised_host(Address(listen, 4600), wanted, ROUTES.__getitem__)
    assert host == expected
    assert Invite.parse(str(Invite("t", host, 4600))).host == expected


def test_with_ipv6_alone_it_is_that() -> None:
    routes = {**ROUTES, socket.AF_INET: ""}
    assert advertised_host(Address("::", 4600), None, routes.__getitem__) == "2001:db8::7"


def test_without_any_route_it_is_the_name() -> None:
    assert advertised_host(Address("0.0.0.0", 1), None, lambda family: "") == socket.gethostname()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_an_outgoing_address_is_one_or_empty(family: socket.AddressFamily) -> None:
    address = outgoing_address(family)
    assert address == "" or ipaddress.ip_address(address.partition("%")[0])


def test_the_file_is_private_and_goes_with_the_block(tmp_path: Path) -> None:
    invite, path = Invite.create("192.0.2.7", 4600), tmp_path / "deep" / "invite"
    with handed_over(invite, path):
        assert Invite.parse(path.read_text()) == invite
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [entry.name for entry in path.parent.iterdir()] == ["invite"]
    assert not path.exists()


def test_without_a_file_nothing_is_written() -> None:
    with handed_over(Invite.create("192.0.2.7", 4600), None):
        pass


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    handing = handed_over(Invite.create("192.0.2.7", 4600), tmp_path / "file" / "invite")
    with pytest.raises(UserError, match="cannot be written"), handing:
        pass


def test_an_invite_is_given_as_it_is_or_in_a_file(tmp_path: Path) -> None:
    invite, path = Invite.create("192.0.2.7", 4600), tmp_path / "invite"
    assert given(str(invite)) == invite
    with handed_over(invite, path):
        assert given(f"@{path}") == invite


def test_a_file_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    invite, path = Invite.create("192.0.2.7", 4600), tmp_path / "invite"
    clock = iter(range(10))

    def sleep(seconds: float) -> None:
        if next(clock) == 3:
            path.write_text(f"{invite}\n")

    assert given(f"@{path}", 60.0, lambda: 0.0, sleep) == invite


def test_a_file_that_does_not_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = iter([0.0, 1.0, 2.0, 3.0])
    naps: list[float] = []
    with pytest.raises(UserError, match=r"no invite in .*absent after 2 s"):
        given(f"@{tmp_path / 'absent'}", 2.0, lambda: next(clock), naps.append)
    assert len(naps) == 1
    assert len(caplog.messages) == 1 and "absent yet; waiting 2 s" in caplog.text
    with pytest.raises(UserError, match=r"no invite in .*absent;"):
        given(f"@{tmp_path / 'absent'}")


def test_a_file_without_an_invite_or_unreadable(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(InviteError, match="the invite is empty"):
        given(f"@{tmp_path / 'empty'}")
    with pytest.raises(UserError, match="cannot be read"):
        given(f"@{tmp_path}")


def test_a_file_without_its_mark() -> None:
    with pytest.raises(InviteError, match=f"write @{__file__}"):
        given(__file__)
    with pytest.raises(InviteError, match="starts with atoll"):
        given("x" * 5000)
