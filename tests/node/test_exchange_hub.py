"""The hub exchange against a scripted coordinator: rounds, damaged results, refusals."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import torch

from node.exchange.base import RoundOrder
from node.exchange.hub import HubExchange
from node.exchange.meter import MESSAGE_PREFIX_BYTES
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import Bucket, BucketTable, TableSchedule
from protos.invite import Invite
from protos.upload import chunk_bytes
from tests.node.fake_hub import DEADLINE, ExchangeStream, FakeHub, Upload
from tests.node.hub_rig import (
    CLAIM,
    LARGE,
    LIMITS,
    SMALL,
    TIMING,
    FakeClock,
    Make,
    pattern,
    tables,
    take_part,
)

# -------------------------------------------------------------------------------------------------- a round


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_round_sends_the_payload_and_returns_the_committed_result(
    hub: FakeHub, make: Make, nbytes: int
) -> None:
    mine, theirs = pattern(nbytes, 1), pattern(nbytes, 2)
    uploads: list[Upload] = []

    async def script(stream: ExchangeStream) -> None:
        uploads.append(await stream.upload())
        await stream.chunks(theirs.numpy().tobytes())
        await stream.commit(4, theirs.numpy().tobytes(), voters=["node-0", "node-2"], weights=[3, 1])

    hub.exchange = script
    exchange = make(nbytes)
    hub.open_round(4, epoch=7, members=["node-0", "node-2"], lease_start=40, lease_count=8, evaluate=True)
    opened = exchange.next_order()
    assert opened == RoundOrder(4, 7, ("node-0", "node-2"), 40, 8, True, False, frontier=12)
    result = exchange.reduce(opened, mine)

    (upload,) = uploads
    assert upload.payload == mine.numpy().tobytes()
    assert upload.end.payload_digest == wire.payload_digest(upload.payload)
    header = upload.header
    assert (header.round, header.epoch, header.table_digest) == (4, 7, tables(nbytes).of(4).digest)
    assert (header.nbytes, header.weight, header.abstain) == (nbytes, 3, False)
    assert result.payload is not None and torch.equal(result.payload, theirs)
    assert (result.round, result.voters, result.weights) == (4, ("node-0", "node-2"), (3, 1))
    assert (result.counted, result.agreement) == (True, 0.75)


def test_each_round_has_the_sizes_and_the_digest_of_its_own_table(hub: FakeHub) -> None:
    coarse = BucketTable((Bucket.of("a", "mean", [("a", (64,))], codec="fp32", result="int8"),))
    fine = BucketTable((Bucket.of("b", "mean", [("b", (160,))], codec="int8", result="fp32"),))
    schedule = TableSchedule((coarse, fine), (0, 1))
    assert coarse.nbytes > coarse.result_nbytes and fine.nbytes < fine.result_nbytes
    headers: list[pb.ContributionHeader] = []

    async def script(stream: ExchangeStream) -> None:
        upload = await stream.upload()
        headers.append(upload.header)
        result = pattern(schedule.of(upload.header.round).result_nbytes, upload.header.round)
        await stream.chunks(result.numpy().tobytes())
        await stream.commit(upload.header.round, result.numpy().tobytes())

    hub.exchange = script
    exchange = HubExchange(hub.invite, limits=LIMITS, timing=TIMING)
    try:
        exchange.join(CLAIM, schedule)
        hub.sessions.get(timeout=DEADLINE)
        for round_index in range(4):
            table = schedule.of(round_index)
            result = take_part(hub, exchange, pattern(table.nbytes), round_index=round_index)
            assert result.payload is not None
            assert torch.equal(result.payload, pattern(table.result_nbytes, round_index))
            header = headers[-1]
            assert (header.table_digest, header.nbytes) == (table.digest, table.nbytes)
        with pytest.raises(ValueError, match=r"of round 5 must be uint8\[256\]"):
            take_part(hub, exchange, pattern(fine.nbytes), round_index=4)
    finally:
        exchange.close("test over")


def test_meter_counts_every_byte_of_a_round(hub: FakeHub, make: Make) -> None:
    sizes: dict[str, int] = {}

    async def script(stream: ExchangeStream) -> None:
        upload = await stream.upload()
        frames = [upload.header.SerializeToString(), upload.end.SerializeToString()]
        chunks = -(-LARGE // wire.CHUNK_BYTES)
        frames_up = 2 + LARGE // chunk_bytes(LARGE)  # the small rest goes with the last chunk
        sizes["up"] = sum(map(len, frames)) + LARGE + frames_up * (wire.PREFIX_BYTES + MESSAGE_PREFIX_BYTES)
        sizes["down"] = LARGE + chunks * (wire.PREFIX_BYTES + MESSAGE_PREFIX_BYTES)
        await stream.chunks(upload.payload)
        await stream.commit(0, upload.payload, reason="")

    hub.exchange = script
    exchange = make(LARGE)
    take_part(hub, exchange, pattern(LARGE))
    counts = exchange.meter.counts()
    assert counts["up", "contribution"] == sizes["up"]
    commit_bytes = counts["down", "result"] - sizes["down"]
    assert 0 < commit_bytes < 150
    assert counts["up", "state"] == counts["down", "state"] == 0
    assert exchange.bytes_counted() == (exchange.meter.total("up"), exchange.meter.total("down"))
    assert sizes["up"] < 1.01 * LARGE


def test_abstention_sends_no_payload_and_a_round_without_voters_has_none(hub: FakeHub, make: Make) -> None:
    uploads: list[Upload] = []

    async def script(stream: ExchangeStream) -> None:
        uploads.append(await stream.upload())
        await stream.commit(0, b"", voters=[], weights=[], counted=False, reason="nobody voted")

    hub.exchange = script
    result = take_part(hub, make(), None, "the gradient is not finite")
    assert result.payload is None and not result.counted and result.reason == "nobody voted"
    assert uploads[0].header.abstain and uploads[0].header.reason == "the gradient is not finite"
    assert uploads[0].payload == b"" and uploads[0].header.nbytes == 0


def test_restart_discards_the_chunks_of_the_earlier_attempt(hub: FakeHub, make: Make) -> None:
    void, final = pattern(LARGE, 1).numpy().tobytes(), pattern(LARGE, 2).numpy().tobytes()

    async def script(stream: ExchangeStream) -> None:
        await stream.upload()
        await stream.chunks(void, until=wire.CHUNK_BYTES + 1)
        await stream.send(wire.RESTART, attempt=1)
        await stream.chunks(final, attempt=1)
        await stream.commit(0, final)

    hub.exchange = script
    result = take_part(hub, make(LARGE), pattern(LARGE))
    assert result.payload is not None and result.payload.numpy().tobytes() == final


def test_late_node_gets_the_stored_result_uncounted(hub: FakeHub, make: Make) -> None:
    stored = pattern(LARGE, 3).numpy().tobytes()

    async def script(stream: ExchangeStream) -> None:
        await stream.header()  # the rest of the contribution is not waited for
        await stream.chunks(stored, attempt=2)
        await stream.commit(0, stored, voters=["node-1"], counted=False)

    hub.exchange = script
    result = take_part(hub, make(LARGE), pattern(LARGE))
    assert not result.counted and result.voters == ("node-1",)
    assert result.payload is not None and result.payload.numpy().tobytes() == stored


def test_payload_of_another_size_is_not_sent(hub: FakeHub, make: Make) -> None:
    with pytest.raises(ValueError, match=r"of round 1 must be uint8\[192\]"):
        take_part(hub, make(), pattern(SMALL + 64))


# ------------------------------------------------------------------------------------------ damaged results


async def _after_upload(stream: ExchangeStream, payload: bytes, **commit: Any) -> None:
    await stream.upload()
    await stream.chunks(payload)
    await stream.commit(commit.pop("round", 0), payload, **commit)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"payload_digest": "0" * 32}, "the coordinator announced 00000000"),
        ({"round": 5}, "commits round 6"),
        ({"nbytes": SMALL - 64}, "the bucket table has 192"),
        ({"nbytes": 0}, "announces 0 bytes, 192 came"),
        ({"weights": [1, 2]}, "1 voters and 2 weights"),
    ],
)
def test_result_that_does_not_fit_its_commit_is_an_error(
    hub: FakeHub, make: Make, changes: dict[str, Any], text: str
) -> None:
    result = pattern(SMALL, 9).numpy().tobytes()
    hub.exchange = lambda stream: _after_upload(stream, result, **changes)
    with pytest.raises(Trouble, match=text) as caught:
        take_part(hub, make(), pattern(SMALL))
    assert caught.value.kind is Kind.PROTOCOL and "was not applied" in str(caught.value)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([(wire.CHUNK, bytes(SMALL + 64), 0, 0)], "exceeds the 192 bytes"),
        ([(wire.CHUNK, bytes(64), 0, 64)], "starts at byte 64, expected was 0"),
        (
            [(wire.CHUNK, bytes(64), 0, 0), (wire.CHUNK, bytes(64), 1, 64)],
            "chunk of attempt 1 came in attempt 0",
        ),
        ([(wire.HEADER, b"", 0, 0)], "has no place in a result"),
        ([(wire.COMMIT, b"\xff\xff", 0, 0)], "commit cannot be read"),
    ],
)
def test_frames_that_break_the_protocol_are_an_error(
    hub: FakeHub, make: Make, frames: list[tuple[int, bytes, int, int]], text: str
) -> None:
    async def script(stream: ExchangeStream) -> None:
        await stream.upload()
        for kind, body, attempt, offset in frames:
            await stream.send(kind, body, attempt=attempt, offset=offset)

    hub.exchange = script
    with pytest.raises(Trouble, match=text):
        take_part(hub, make(), pattern(SMALL))


def test_stream_that_ends_without_commit_is_tried_again_with_the_same_payload(
    hub: FakeHub, make: Make
) -> None:
    uploads: list[Upload] = []

    async def script(stream: ExchangeStream) -> None:
        uploads.append(await stream.upload())
        await stream.chunks(uploads[-1].payload, until=wire.CHUNK_BYTES if len(uploads) == 1 else None)
        if len(uploads) == 2:
            await stream.commit(0, uploads[-1].payload)

    hub.exchange = script
    said: list[str] = []
    mine = pattern(LARGE)
    result = take_part(hub, make(LARGE, say=said.append), mine)
    assert [upload.payload for upload in uploads] == [mine.numpy().tobytes()] * 2
    assert result.payload is not None and torch.equal(result.payload, mine)
    assert any("ended round 1 without a commit" in text for text in said)


def test_streams_that_always_end_early_are_given_up_after_the_stated_time(hub: FakeHub, make: Make) -> None:
    async def script(stream: ExchangeStream) -> None:
        await stream.upload()

    hub.exchange = script
    clock = FakeClock()
    exchange = make(timing=clock.timing())
    with pytest.raises(
        Trouble, match=rf"gave up on the commit of round 1 after {DEADLINE:g} s, tried \d+ times"
    ):
        take_part(hub, exchange, pattern(SMALL))
    assert sum(clock.pauses) == pytest.approx(LIMITS.reconnect)


# ------------------------------------------------------------------------------------------------- refusals


def test_refused_contribution_is_told_and_the_result_fetched_by_abstaining(hub: FakeHub, make: Make) -> None:
    stored = pattern(SMALL, 5).numpy().tobytes()

    async def script(stream: ExchangeStream) -> None:
        upload = await stream.upload()
        if not upload.header.abstain:
            await stream.abort(grpc.StatusCode.INVALID_ARGUMENT, "weight 3 is not the 1 you joined with")
        await stream.chunks(stored)
        await stream.commit(0, stored, counted=False)

    hub.exchange = script
    said: list[str] = []
    result = take_part(hub, make(say=said.append), pattern(SMALL))
    assert not result.counted
    assert result.payload is not None and result.payload.numpy().tobytes() == stored
    assert any("weight 3 is not the 1 you joined with" in text for text in said)


def test_refused_abstention_is_an_error_with_the_coordinators_words(hub: FakeHub, make: Make) -> None:
    async def script(stream: ExchangeStream) -> None:
        await stream.abort(grpc.StatusCode.FAILED_PRECONDITION, "round 0 is not open")

    hub.exchange = script
    with pytest.raises(Trouble, match="round 0 is not open") as caught:
        take_part(hub, make(), pattern(SMALL))
    assert caught.value.kind is Kind.REFUSED


def test_refused_join_shows_the_coordinators_text(hub: FakeHub) -> None:
    hub.refuse_join = "the data of this node is aaa, this run's is bbb: use the same text"
    exchange = HubExchange(hub.invite, limits=LIMITS, timing=TIMING)
    try:
        with pytest.raises(Trouble, match="this node is aaa, this run's is bbb"):
            exchange.join(CLAIM, tables(SMALL))
    finally:
        exchange.close("refused")


def test_wrong_token_says_so_and_is_not_tried_again(hub: FakeHub) -> None:
    said: list[str] = []
    exchange = HubExchange(Invite("other", hub.host, hub.port), limits=LIMITS, timing=TIMING, say=said.append)
    try:
        with pytest.raises(Trouble, match="the invite's token is not this run's") as caught:
            exchange.describe()
    finally:
        exchange.close("wrong token")
    assert caught.value.kind is Kind.TOKEN and not said


def test_other_protocol_names_both_versions(hub: FakeHub) -> None:
    hub.run = pb.GetRunReply(protocol=99)
    exchange = HubExchange(hub.invite, limits=LIMITS, timing=TIMING)
    try:
        with pytest.raises(
            Trouble, match=f"speaks protocol 99, this node {wire.PROTOCOL}: .*; this node's is the older"
        ):
            exchange.describe()
    finally:
        exchange.close("other protocol")
