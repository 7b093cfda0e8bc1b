"""The first bytes of a raw stream, from whoever sends them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.swarm import opening as module
from node.exchange.swarm.multiaddress import MAX_TEXT
from node.exchange.swarm.opening import CARRIED, LOOK, MESSAGES, ONWARD, Opening, answer, opening
from node.exchange.swarm.secret import RunSecret
from node.exchange.trouble import Kind, Trouble

SECRET = RunSecret("token")
CALLER = "QmVvbzNhJvkVWD3uTNHUGo6JrqmfYQbGVSRTdZxpBwdvyU"
CALLEE = "QmVGDM4MHpyB8Yy4QxZSXtUQ6cti3aKcyyegjLSjhva4ef"
OTHER = "QmbGv75kfATFfPtxrssKSPZFQ7yueLoBmQBNTFS4XgjqMZ"


def reader(data: bytes) -> asyncio.StreamReader:
    """One that has ``data``, and then the end."""
    made = asyncio.StreamReader()
    made.feed_data(data)
    made.feed_eof()
    return made


async def heard(data: bytes, *, secret: RunSecret = SECRET, carried: bool = False) -> Opening:
    return await module.read_opening(reader(data), secret, CALLER, CALLEE, carried=carried)


@pytest.mark.parametrize("purpose", [MESSAGES, LOOK, ONWARD, CARRIED])
async def test_what_a_caller_wants_is_heard(purpose: bytes) -> None:
    other = OTHER if purpose in (ONWARD, CARRIED) else ""
    assert await heard(opening(SECRET, CALLER, CALLEE, purpose, other)) == Opening(purpose, other)


async def test_a_caller_by_a_relay_asks_for_messages_only() -> None:
    assert not (await heard(opening(SECRET, CALLER, CALLEE, MESSAGES), carried=True)).problem
    for purpose in (LOOK, ONWARD, CARRIED):
        data = opening(SECRET, CALLER, CALLEE, purpose, OTHER)
        assert (await heard(data, carried=True)).problem == "it has another version of Atoll"


@pytest.mark.parametrize(
    "data",
    [
        opening(SECRET, CALLEE, CALLER, MESSAGES),  # of the other direction
        opening(SECRET, OTHER, CALLEE, MESSAGES),  # of another pair
        opening(SECRET, CALLER, CALLEE, LOOK).replace(b"S1l", b"S1m"),  # for another purpose
        opening(RunSecret("another"), CALLER, CALLEE, MESSAGES),
    ],
)
async def test_a_proof_holds_for_its_pair_and_purpose_alone(data: bytes) -> None:
    assert "does not have the token" in (await heard(data)).problem


@pytest.mark.parametrize("other", ["", "Qm../../etc", "\x7f" * 40])
async def test_a_third_peer_has_a_peer_id(other: str) -> None:
    head = opening(SECRET, CALLER, CALLEE, ONWARD)
    data = head + bytes((len(other),)) + other.encode()
    assert (await heard(data)).problem == "a third peer without a peer id"


@given(st.binary(max_size=100), st.booleans())
def test_no_bytes_of_a_stranger_are_welcome_or_break_anything(data: bytes, carried: bool) -> None:
    try:
        assert asyncio.run(heard(data, carried=carried)).problem
    except EOFError:
        assert len(data) < 40


async def answered(data: bytes) -> str:
    return await module.read_answer(reader(data), CALLEE)


@given(st.text(max_size=2 * MAX_TEXT))
def test_the_words_of_an_answer_arrive(text: str) -> None:
    said = asyncio.run(answered(answer(text, welcome=True)))
    assert text.startswith(said.rstrip("\N{REPLACEMENT CHARACTER}")) or "\N{REPLACEMENT CHARACTER}" in text
    with pytest.raises(Trouble, match=f"the peer {CALLEE} refused: ") as caught:
        asyncio.run(answered(answer(text, welcome=False)))
    assert caught.value.kind is (Kind.TOKEN if "invite" in text[:MAX_TEXT] else Kind.REFUSED)


@given(st.binary(max_size=600))
def test_no_answer_breaks_anything(data: bytes) -> None:
    with contextlib.suppress(EOFError, Trouble):
        asyncio.run(answered(data))
