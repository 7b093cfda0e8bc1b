"""The book of tokens: who may do what, until when, by a model; and its file."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from coordinator.token_file import FILE, LOCK, LOCK_SECONDS, TokenFile
from coordinator.tokens import MAX_TOKENS, ROLES, Token, TokenBook, TokenError, digest_of
from protos.refusal import BAD_TOKEN, TOKEN_EXPIRED, TOKEN_REVOKED, WRONG_ROLE


class BookMachine(RuleBasedStateMachine):
    """A book against a list of what should hold, while time passes."""

    secrets = Bundle("secrets")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.book = TokenBook()
        self.model: dict[str, dict[str, object]] = {}  # by secret

    @rule(target=secrets, role=st.sampled_from(ROLES), seconds=st.none() | st.integers(1, 20))
    def add(self, role: str, seconds: int | None) -> str:
        secret = f"secret-{len(self.model)}"
        name = self.book.free_name(role)
        self.book = self.book.added(name, role, secret, now=self.now, seconds=seconds)  # type: ignore[arg-type]
        until = None if seconds is None else self.now + seconds
        self.model[secret] = {"name": name, "role": role, "until": until, "revoked": False}
        return secret

    @rule(secret=secrets)
    def revoke(self, secret: str) -> None:
        self.book = self.book.revoked(str(self.model[secret]["name"]), self.now)
        self.model[secret]["revoked"] = True

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(secret=secrets, roles=st.sets(st.sampled_from(ROLES)))
    def show(self, secret: str, roles: set[str]) -> None:
        known = self.model[secret]
        until = known["until"]
        if known["revoked"]:
            expected = TOKEN_REVOKED
        elif isinstance(until, float) and self.now >= until:
            expected = TOKEN_EXPIRED
        else:
            expected = "" if known["role"] in roles else WRONG_ROLE
        verdict = self.book.verdict(secret, roles, self.now)  # type: ignore[arg-type]
        assert verdict.refusal == expected and bool(verdict.reason) == bool(expected)
        assert verdict.token is not None and verdict.token.name == known["name"]

    @rule(secret=st.text(max_size=20))
    def guess(self, secret: str) -> None:
        if secret not in self.model:
            assert self.book.verdict(secret, ROLES, self.now).refusal == BAD_TOKEN

    @invariant()
    def it_is_kept_without_secrets(self) -> None:
        text = json.dumps(self.book.to_json())
        assert TokenBook.from_json(json.loads(text)) == self.book
        assert not any(secret in text for secret in self.model)


BookMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestBook = BookMachine.TestCase


def test_what_the_owner_gives_takes_the_place_of_what_was_given_before() -> None:
    book = TokenBook().given("default", "node", "one", now=0.0)
    assert book.given("default", "node", "one", now=1.0) is book
    other = book.given("default", "node", "two", now=1.0)
    assert (
        other.verdict("one", ROLES, 1.0).refusal == BAD_TOKEN and not other.verdict("two", ROLES, 1.0).refusal
    )
    with pytest.raises(TokenError, match="of role node, not admin"):
        other.given("admin", "admin", "two", now=1.0)
    with pytest.raises(TokenError, match="was revoked: give another one"):
        other.revoked("default", 2.0).given("default", "node", "two", now=3.0)
    assert [one.name for one in other.given("admin", "admin", "three", now=1.0).tokens] == [
        "default",
        "admin",
    ]


def test_names_and_limits() -> None:
    book = TokenBook().added("a", "node", "one", now=0.0)
    for problem, change in {
        "already": lambda: book.added("a", "node", "two", now=0.0),
        "1 to 64 characters": lambda: book.added("a b", "node", "two", now=0.0),
        "for some time": lambda: book.added("b", "node", "two", now=0.0, seconds=0.0),
        "same name or secret": lambda: book.added("b", "node", "one", now=0.0),
        "there is no token 'b'; there are: a": lambda: book.revoked("b", 0.0),
    }.items():
        with pytest.raises(TokenError, match=problem):
            change()
    assert book.free_name("a") == "a-2" and book.free_name("b") == "b"


def test_a_full_book_forgets_the_oldest_that_is_void() -> None:
    one = Token("t0", "node", digest_of("0"), 0.0)
    full = TokenBook(replace(one, name=f"t{i}", digest=digest_of(str(i))) for i in range(MAX_TOKENS))
    with pytest.raises(TokenError, match="revoke one first"):
        full.added("new", "node", "new", now=1.0)
    book = full.revoked("t7", 1.0).added("new", "node", "new", now=1.0)
    assert book.named("t7") is None and book.named("new") is not None and len(book.tokens) == MAX_TOKENS


WORDS = ("format", "tokens", "name", "role", "digest", "created", "expires", "revoked")
LEAVES = st.none() | st.booleans() | st.floats() | st.text() | st.just(1)


@given(st.recursive(LEAVES, lambda s: st.lists(s) | st.dictionaries(st.sampled_from(WORDS), s)))
def test_anything_else_is_no_book(values: object) -> None:
    try:
        book = TokenBook.from_json(values)
    except TokenError:
        return
    assert isinstance(values, dict) and book.to_json() == values


# ---------------------------------------------------------------------------------------------- the file


def test_a_change_is_seen_by_whoever_looks_again(tmp_path: Path) -> None:
    owner, coordinator = TokenFile(tmp_path), TokenFile(tmp_path)
    assert coordinator.book == TokenBook() and not coordinator.look()
    owner.edit(lambda book: book.added("a", "node", "secret", now=5.0))
    assert coordinator.look() and not coordinator.look()
    assert coordinator.book == owner.book == TokenFile(tmp_path).book
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    coordinator.edit(lambda book: book.added("b", "node", "other", now=5.0))
    owner.edit(lambda book: book.revoked("a", 6.0))
    assert [one.name for one in owner.book.tokens] == ["a", "b"]
    (tmp_path / FILE).unlink()
    assert coordinator.look() and coordinator.book == TokenBook()


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    file = TokenFile(tmp_path)
    book = file.edit(lambda book: book.added("a", "node", "secret", now=5.0))
    path = tmp_path / FILE
    whole = path.read_text()
    for damage in (whole[:-9], "[]", '{"format": 2, "tokens": []}', whole.replace("node", "king"), "\x00"):
        path.write_text(damage)
        with pytest.raises(TokenError, match="cannot be read"):
            file.look()
        assert file.book == book
        with pytest.raises(TokenError):
            file.edit(lambda book: book)
    path.write_text(whole)
    os.chmod(path, 0o622)
    with pytest.raises(TokenError, match="chmod 600"):
        TokenFile(tmp_path)


def test_two_who_change_it_at_once_wait_for_each_other_but_not_for_ever(tmp_path: Path) -> None:
    file, clock, pauses = TokenFile(tmp_path), [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += LOCK_SECONDS / 4

    with open(tmp_path / LOCK, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TokenError, match="somebody else changes"):
            file.edit(
                lambda book: book.added("a", "node", "secret", now=5.0), now=lambda: clock[0], sleep=sleep
            )
    assert len(pauses) == 4 and file.book == TokenBook()
