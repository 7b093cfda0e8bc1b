"""Results that are kept for others, and ranges that are cut out of them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.peers.loopback import pair
from node.exchange.peers.shelf import Shelf, cut_out, send
from node.exchange.trouble import Trouble
from protos.atoll_pb2 import Commit, ContributionEnd
from protos.wire import CHUNK, CHUNK_BYTES, END, decode_frame, payload_digest
from tests.node.peers.desk_rig import soon


def put(shelf: Shelf, index: int, nbytes: int) -> None:
    shelf.put(index, Commit(round=index), bytes([index]) * nbytes)


def kept(shelf: Shelf) -> list[int]:
    return [index for index in range(100) if shelf.get(index) is not None]


def test_bounded_by_rounds_and_bytes_but_the_newest_stays() -> None:
    shelf = Shelf(rounds=3, nbytes=100)
    assert shelf.oldest is None
    for index in range(5):
        put(shelf, index, 10)
    assert kept(shelf) == [2, 3, 4] and shelf.oldest == 2
    put(shelf, 5, 85)
    assert kept(shelf) == [4, 5]
    put(shelf, 6, 1000)
    assert kept(shelf) == [6]
    put(shelf, 7, 1)
    assert kept(shelf) == [7]


def test_what_a_round_had_is_replaced_and_counted_once() -> None:
    shelf = Shelf(rounds=3, nbytes=100)
    for _ in range(5):
        put(shelf, 1, 60)
    put(shelf, 2, 40)
    assert kept(shelf) == [1, 2]


def test_a_copy_is_kept() -> None:
    shelf, buffer = Shelf(), bytearray(b"result")
    shelf.put(3, Commit(round=3), buffer)
    buffer[:] = b"other!"
    found = shelf.get(3)
    assert found is not None and bytes(found.payload) == b"result" and found.commit.round == 3
    with pytest.raises(ValueError, match="round 5"):
        shelf.put(3, Commit(round=4), b"")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.data())
def test_any_range_of_what_is_there(sizes: list[int], data: st.DataObject) -> None:
    whole = bytes(range(256))[: sum(sizes)] if sum(sizes) <= 256 else bytes(sum(sizes))
    stretches, place = [], 0
    for size in sizes:
        stretches.append((place, memoryview(whole)[place : place + size]))
        place += size
    start = data.draw(st.integers(0, place - 1))
    end = data.draw(st.integers(start + 1, place))
    found = cut_out(stretches, start, end)
    assert found is not None and found[0][0] == start
    assert b"".join(bytes(body) for _, body in found) == whole[start:end]
    assert all(body for _, body in found)
    assert cut_out(stretches, start, place + 1) is None
    gap = data.draw(st.integers(0, len(sizes) - 1))
    touched = any(first < end and first + len(body) > start for first, body in stretches[gap : gap + 1])
    assert (cut_out(stretches[:gap] + stretches[gap + 1 :], start, end) is None) == touched


async def test_what_is_sent_has_a_digest_at_its_end() -> None:
    mine, theirs = pair()
    payload = bytes(range(256)) * (CHUNK_BYTES // 256 * 2) + b"rest"
    await soon(send(mine, [(64, memoryview(payload))], 5.0))
    got, place = bytearray(), 64
    while (message := await theirs.read()) is not None:
        frame = decode_frame(message)
        if frame.kind == END:
            break
        assert (frame.kind, frame.offset) == (CHUNK, place)
        got += frame.body
        place += len(frame.body)
    assert ContributionEnd.FromString(bytes(frame.body)).payload_digest == payload_digest(payload)
    assert got == payload and await theirs.read() is None


async def test_a_receiver_that_takes_nothing_is_given_up() -> None:
    mine, _ = pair()
    sending = send(mine, [(index, memoryview(b"x")) for index in range(50)], 0.01)
    with pytest.raises(Trouble, match="longer than"):
        await asyncio.wait_for(sending, 20.0)
