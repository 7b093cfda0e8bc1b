"""Results while they are made, and the ring of the last ones."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.refusal import Refused
from coordinator.result import Result, ResultRing
from protos.atoll_pb2 import Commit
from protos.wire import COMMIT, decode_frame
from tests.coordinator.coordinator_rig import soon


def committed(round_index: int, size: int = 10) -> Result:
    result = Result(round_index, 1)
    result.extend([b"x" * size])
    result.commit(
        ["a", "b"], [1, 2], casting=1, nbytes=size, digest="d", reason="in", agreement={"a": 0.5, "b": 1.0}
    )
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
    with pytest.raises(RuntimeError, match="round 3 is not committed"):
        Result(3, 1).commit_frame("a")


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
        lambda: result.commit([], [], casting=0, nbytes=0, digest="", reason="", agreement={}),
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
