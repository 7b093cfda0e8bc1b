"""Results while they are made, and the ring of the last ones."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.delivery import Delivery
from coordinator.journal import Kept, RoundRecord
from coordinator.result import Result, ResultRing
from protos.atoll_pb2 import Commit
from protos.lane_layout import LaneLayout
from protos.refusal import Refused
from protos.wire import CHUNK, CHUNK_BYTES, COMMIT, decode_frame, encode_frame
from tests.coordinator.contribution_rig import voted_table
from tests.coordinator.coordinator_rig import soon


def committed(round_index: int, size: int = 10) -> Result:
    result = Result(round_index, 1)
    result.extend([b"x" * size])
    result.settle(
        ["a", "b"], [1, 2], casting=1, nbytes=size, digest="d", reason="in", agreement={"a": 0.5, "b": 1.0}
    )
    result.commit()
    return result


def test_each_receiver_has_its_own_commit() -> None:
    result = committed(7)
    frame = decode_frame(result.commit_frame("a"))
    commit = Commit.FromString(bytes(frame.body))
    assert frame.kind == COMMIT
    assert (commit.round, commit.epoch, list(commit.voters), list(commit.weights)) == (
        7,
        1,
        ["a", "b"],
        [1, 2],
    )
    assert (commit.casting, commit.nbytes, commit.payload_digest, commit.reason) == (1, 10, "d", "in")
    assert (commit.counted, commit.agreement) == (True, 0.5)
    other = Commit.FromString(bytes(decode_frame(result.commit_frame("z")).body))
    assert not other.counted and other.agreement != other.agreement


def test_no_commit_frame_before_the_commit() -> None:
    with pytest.raises(RuntimeError, match="round 3 is not settled"):
        Result(3, 1).commit_frame("a")


def test_what_is_settled_is_valid_only_once_it_is_committed() -> None:
    result = Result(3, 1)
    result.commit()
    assert not result.committed, "there is nothing to commit yet"
    result.extend([encode_frame(CHUNK, b"x" * 10)])
    result.settle(["a"], [1], casting=0, nbytes=10, digest="d", reason="in", agreement={"a": 1.0})
    delivery = Delivery(result, LaneLayout(voted_table()), "a")
    assert result.settled and not result.committed
    assert delivery.next() == result.frames[0] and delivery.next() is None and not delivery.served
    result.commit()
    assert delivery.next() == result.commit_frame("a") and delivery.served


def test_a_result_out_of_the_journal_is_the_one_that_was_put_in() -> None:
    payload = bytes(range(256)) * 5000  # more than one frame
    record = RoundRecord(
        7, 2, ("a", "b"), (1, 3), 1, len(payload), "d", "all in", (0.5, 0.75), (("a", 0, 4),), 8, ((4, 4),)
    )
    result = Result.of(Kept(record, payload))
    assert result.committed and (result.round, result.epoch, result.voters) == (7, 2, ("a", "b"))
    assert b"".join(result.payload) == payload and len(result.frames) == 2
    assert [decode_frame(frame).offset for frame in result.frames] == [0, CHUNK_BYTES]
    commit = Commit.FromString(bytes(decode_frame(result.commit_frame("b")).body))
    assert (commit.casting, commit.nbytes, commit.payload_digest, commit.reason) == (
        1,
        len(payload),
        "d",
        "all in",
    )
    assert (list(commit.weights), commit.counted, commit.agreement) == ([1, 3], True, 0.75)


def test_restarts_void_frames_and_only_then_count() -> None:
    result = Result(0, 1)
    result.restart()
    assert result.attempt == 0
    result.extend([b"old"])
    result.restart()
    assert (result.attempt, result.frames) == (1, [])


async def test_everybody_who_waits_is_woken() -> None:
    result = Result(0, 1)
    for change in (
        lambda: result.extend([b"x"]),
        lambda: result.restart(),
        lambda: result.commit(),
        lambda: result.fail(Refused("", "over")),
    ):
        waiters = [result.changed() for _ in range(3)]
        waiters[1].cancel()  # its stream broke
        change()
        await soon(asyncio.gather(waiters[0], waiters[2]))


def test_the_ring_is_bounded_by_number() -> None:
    ring = ResultRing(rounds=3, nbytes=1000)
    assert ring.oldest is None
    for index in range(5):
        ring.put(committed(index))
    assert [index for index in range(5) if ring.get(index)] == [2, 3, 4]
    assert ring.oldest == 2


def test_the_ring_is_bounded_by_bytes_but_keeps_the_newest() -> None:
    ring = ResultRing(rounds=16, nbytes=100)
    for index in range(4):
        ring.put(committed(index, 40))
    assert [index for index in range(4) if ring.get(index)] == [2, 3]
    ring.put(committed(4, 500))
    assert ring.oldest == 4
    ring.put(committed(5, 10))
    assert ring.oldest == 5


def test_a_result_out_of_the_journal_never_drives_out_a_newer_one() -> None:
    ring = ResultRing(rounds=2, nbytes=1000)
    for index in (5, 3, 4):
        ring.put(committed(index))
    assert [index for index in range(6) if ring.get(index)] == [4, 5]
    assert ring.oldest == 4
