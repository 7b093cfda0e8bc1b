"""Access: tokens and keys of calls, single use of joins, and who is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.access import ADMIN, ANYBODY, LOOK_SECONDS, MAX_HOSTS, NODE, TELL_SECONDS, Access
from coordinator.events import AccessRefused, Event, TokenAdded, TokenEnded, TokenUsed
from coordinator.nonces import NONCE_BYTES, SECONDS, Nonces
from coordinator.token_file import TokenFile
from protos.atoll_pb2 import JoinRequest
from protos.identity import NodeKey, fingerprint, signed
from protos.refusal import (
    BAD_IDENTITY,
    BAD_TOKEN,
    REPLAYED_JOIN,
    TOKEN_EXPIRED,
    TOKEN_REVOKED,
    WRONG_ROLE,
    Refused,
)

FROM = "ipv4:192.0.2.7:5000"
KEY = NodeKey(bytes(range(32)))


class Rig:
    """An access with clocks of its own, and what it has told."""

    def __init__(self, folder: Path) -> None:
        self.wall, self.time = 1000.0, 0.0
        self.events: list[Event] = []
        self.kinds: list[str] = []
        self.file = TokenFile(folder)
        self.access = self.opened(folder)

    def opened(self, folder: Path) -> Access:
        return Access(
            TokenFile(folder),
            wall=lambda: self.wall,
            now=lambda: self.time,
            tell=self.events.append,
            count=self.kinds.append,
        )

    def refused(self, secret: str, address: str = FROM, roles: frozenset = NODE) -> str:  # type: ignore[type-arg]
        with pytest.raises(Refused) as caught:
            self.access.check(secret, roles, address)
        return caught.value.kind

    def told(self) -> list[Event]:
        events, self.events = self.events, []
        self.access.tell = self.events.append
        return events


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_token_from_its_making_to_its_end(rig: Rig) -> None:
    assert rig.refused("secret") == BAD_TOKEN
    rig.file.edit(lambda book: book.added("a", "node", "secret", now=rig.wall, seconds=60.0))
    token = rig.access.check("secret", NODE, FROM)  # without waiting for the next look
    assert (token.name, rig.access.name(token.digest), rig.access.standing(token.digest)) == ("a", "a", "")
    rig.access.check("secret", ANYBODY, FROM)
    assert not rig.access.look()
    refused, used, added = rig.told()
    assert isinstance(refused, AccessRefused) and (refused.kind, refused.host) == (BAD_TOKEN, "192.0.2.7")
    assert (used, added) == (TokenUsed("a", "node", "192.0.2.7"), TokenAdded("a", "node", rig.wall + 60.0))
    rig.wall += 60.0
    assert rig.access.look() and not rig.access.look()
    assert rig.refused("secret") == TOKEN_EXPIRED
    assert rig.access.standing(token.digest) == "its token a has expired"
    rig.file.edit(lambda book: book.revoked("a", rig.wall))
    assert rig.refused("secret") == TOKEN_REVOKED
    assert rig.told()[0] == TokenEnded("a", "node", "expired")
    assert rig.kinds == [BAD_TOKEN, TOKEN_EXPIRED, TOKEN_REVOKED]


def test_revoked_and_replaced_tokens_end(rig: Rig, tmp_path: Path) -> None:
    rig.file.edit(
        lambda book: book.given("default", "node", "one", now=0.0).added("b", "node", "two", now=0.0)
    )
    rig.access = rig.opened(tmp_path)
    one, two = (rig.access.check(secret, NODE, FROM).digest for secret in ("one", "two"))
    rig.told()
    rig.file.edit(lambda book: book.given("default", "node", "three", now=0.0).revoked("b", 1.0))
    assert rig.access.look()
    assert set(rig.told()) == {
        TokenAdded("default", "node"),
        TokenEnded("b", "node", "revoked"),
        TokenEnded("default", "node", "replaced"),
    }
    assert rig.access.standing(one) == "its token was replaced"
    assert rig.access.standing(two) == "its token b was revoked"


def test_roles(rig: Rig) -> None:
    for role in ("node", "observer", "admin"):
        rig.file.edit(lambda book, role=role: book.added(role, role, f"secret of {role}", now=0.0))
    for role in ("node", "observer", "admin"):
        secret = f"secret of {role}"
        assert rig.access.check(secret, ANYBODY, FROM).role == role
        for roles in (NODE, ADMIN):
            if role not in roles:
                assert rig.refused(secret, roles=roles) == WRONG_ROLE
        assert rig.access.admin(secret) == ("admin" if role == "admin" else "")
    assert rig.access.still_admin("admin") and not rig.access.still_admin("node")
    rig.file.edit(lambda book: book.revoked("admin", 0.0))
    rig.access.look()
    assert not rig.access.admin("secret of admin") and not rig.access.still_admin("admin")
    assert rig.access.check(rig.access.own, ANYBODY, FROM).role == "observer"
    assert rig.refused(rig.access.own) == WRONG_ROLE


def test_a_book_that_cannot_be_read_holds_as_it_was(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.file.edit(lambda book: book.added("a", "node", "secret", now=0.0))
    rig.access.look()
    rig.file.path.write_text("{")
    for _ in range(3):
        rig.access.look()
        assert rig.access.check("secret", NODE, FROM).name == "a"
    assert len(caplog.records) == 1 and "what was read before holds" in caplog.text
    assert LOOK_SECONDS <= 1.0


def test_the_same_refusal_is_told_once_a_minute_and_counted_always(rig: Rig) -> None:
    for _ in range(5):
        rig.refused("guess")
    rig.refused("guess", "ipv4:192.0.2.8:5000")
    rig.time += TELL_SECONDS
    rig.refused("guess")
    told = [(event.host, event.times) for event in rig.told() if isinstance(event, AccessRefused)]
    assert told == [("192.0.2.7", 1), ("192.0.2.8", 1), ("192.0.2.7", 5)] and len(rig.kinds) == 7
    for index in range(2 * MAX_HOSTS):
        rig.refused("guess", f"host-{index}")
    assert len(rig.access._told) == MAX_HOSTS


# ------------------------------------------------------------------------------------------------- joins


def _join(access: Access, **other: bytes) -> JoinRequest:
    nonce = access.nonce()
    values = {"nonce": nonce, "key": KEY.public, "signature": KEY.sign(nonce, "run")}
    return JoinRequest(run_digest="run", **{**values, **other})


def test_a_join_is_good_for_once(rig: Rig, tmp_path: Path) -> None:
    request = _join(rig.access)
    rig.access.check_key(request, FROM, "a")
    for access, code in ((rig.access, "FAILED_PRECONDITION"), (rig.opened(tmp_path), "ABORTED")):
        with pytest.raises(Refused) as caught:
            access.check_key(request, FROM, "a")
        assert (caught.value.kind, caught.value.code) == (REPLAYED_JOIN, code)
    late = _join(rig.access)
    rig.time += SECONDS + 0.1
    with pytest.raises(Refused, match="too old"):
        rig.access.check_key(late, FROM, "a")
    rig.access.check_key(_join(rig.access), FROM, "a")


def test_a_key_cannot_be_borrowed(rig: Rig) -> None:
    other = NodeKey.new()
    nonce = rig.access.nonce()
    for request in (
        _join(rig.access, key=other.public),
        _join(rig.access, signature=b""),
        _join(rig.access, nonce=nonce),
        _join(rig.access, key=b""),
        JoinRequest(run_digest="else", nonce=nonce, key=KEY.public, signature=KEY.sign(nonce, "run")),
    ):
        with pytest.raises(Refused) as caught:
            rig.access.check_key(request, FROM, "a")
        assert caught.value.kind == BAD_IDENTITY
    rig.access.check_key(_join(rig.access, nonce=nonce, signature=KEY.sign(nonce, "run")), FROM, "a")


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=48), st.binary(max_size=80), st.binary(max_size=48))
def test_nothing_else_is_a_signature(key: bytes, signature: bytes, nonce: bytes) -> None:
    assert not signed(key, signature, nonce, "run")
    assert not signed(KEY.public, signature, nonce, "run")


def test_keys_are_kept_as_others_do() -> None:
    again = NodeKey.from_pem(KEY.to_pem())
    assert again.public == KEY.public and again.sign(b"n", "r") == KEY.sign(b"n", "r")
    assert KEY.to_pem().startswith(b"-----BEGIN PRIVATE KEY-----\n")
    assert len(fingerprint(KEY.public)) == 16 and fingerprint(b"") == ""
    # RFC 8032, section 7.1, test 1
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    assert NodeKey(seed).public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["make", "spend", "wait"]) | st.binary(min_size=1, max_size=50), max_size=40))
def test_nonces_are_fresh_once_and_forgotten(steps: list[str | bytes]) -> None:
    clock, count = [0.0], [0]

    def random(size: int) -> bytes:
        count[0] += 1
        return count[0].to_bytes(size, "big")

    nonces, made, spent = Nonces(b"secret", lambda: clock[0], random), [], set()
    for index, step in enumerate(steps):
        if step == "make":
            made.append((clock[0], nonces.make()))
            assert len(made[-1][1]) == NONCE_BYTES
        elif step == "wait":
            clock[0] += SECONDS / 3
        elif isinstance(step, bytes):
            assert nonces.spend(step) == "strange"
        elif made:
            at, nonce = made[index % len(made)]
            verdict = nonces.spend(nonce)
            if nonce in spent:
                assert verdict in ("spent", "old")
            elif clock[0] - at > SECONDS:
                assert verdict == "old"
            else:
                assert verdict == "fresh"
                spent.add(nonce)
    clock[0] += 10 * SECONDS
    nonces.spend(nonces.make())
    assert len(nonces._spent) == 1
