"""The hub exchange against a scripted coordinator: chunks of snapshots up, in the background, and down."""

from __future__ import annotations

import asyncio
import queue
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch

from node.exchange.base import DonateOrder, RoundOrder
from node.exchange.chunks_up import FRAME_BYTES
from node.exchange.hub import HubExchange
from node.exchange.spool import Spool
from node.exchange.trouble import TransferError
from protos import atoll_pb2 as pb
from protos import wire
from tests.node.fake_hub import DEADLINE, ExchangeStream, FakeHub
from tests.node.hub_rig import LIMITS, Make, next_message, pattern, take_part
from tests.node.snapshot_rig import ORDER, Store, content

MEBIBYTE = wire.CHUNK_BYTES


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Of 3 chunks and a bit."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(771, 1025, generator=generator),
        "a/small": torch.randn(3, generator=generator),
        "step": torch.tensor(seed),
        "empty": torch.empty(0, 4),
    }


STORE = Store(tensors(1))


# ------------------------------------------------------------------------------------------------------ down


class Server:
    """Serves a snapshot, and in stream number n only what ``cuts[n]`` makes of its frames."""

    def __init__(self, hub: FakeHub, store: Store = STORE) -> None:
        self.cuts: dict[int, Any] = {}
        self.asked: list[int] = []  # first chunk of each request
        self.sent = 0  # bytes of chunks
        self._store = store
        hub.get_chunks = self._serve

    async def _serve(self, request: pb.ChunksRequest, context: Any) -> None:
        assert (request.snapshot, request.count) == (ORDER.snapshot, 0)
        cut = self.cuts.get(len(self.asked), lambda frames: frames)
        self.asked.append(request.first)
        for frame in cut(self._store.frames(request.first, 300_000)):
            if isinstance(frame, grpc.StatusCode):
                await context.abort(frame, "because it is so")
            self.sent += len(frame) if frame[0] == wire.CHUNK else 0
            await context.write(frame)


def test_a_snapshot_comes_down(hub: FakeHub, make: Make) -> None:
    server = Server(hub)
    exchange = make()
    spool = exchange.download(ORDER, STORE.rows)
    assert content(spool) == STORE.data and spool.state_digest == STORE.digest
    spool.close()
    assert server.asked == [0]
    assert exchange.meter.counts()["down", "state"] > len(STORE.data)
    exchange.ready(9, STORE.digest)
    ready = next_message(hub, "ready").ready
    assert (ready.round, ready.state_digest) == (9, STORE.digest)


def flipped(frames: list[bytes]) -> list[bytes]:
    """The last byte of the last chunk is another one."""
    *others, last, end = frames
    return [*others, last[:-1] + bytes([last[-1] ^ 1]), end]


def test_what_has_come_is_not_fetched_again(hub: FakeHub, make: Make) -> None:
    said: list[str] = []
    server = Server(hub)
    server.cuts = {
        0: lambda frames: frames[:6],  # 5 frames: one chunk and a part of the next
        1: lambda frames: [*frames[:5], grpc.StatusCode.UNAVAILABLE],
        2: lambda frames: [*frames[:2], frames[1]],
        3: flipped,
    }
    spool = make(say=said.append).download(ORDER, STORE.rows)
    assert content(spool) == STORE.data
    spool.close()
    assert server.asked == [0, 1, 2, 2, 3]
    assert server.sent < len(STORE.data) + 4 * MEBIBYTE + 300_000 * 4
    beginning = "waiting for the end of the download of round 9's state: "
    assert len(said) == 3 and all(text.startswith(beginning) for text in said)  # in stream 2 nothing has come
    assert "the stream ended before its last frame" in said[0]
    assert "because it is so" in said[1] and "chunk 3 is damaged" in said[2]


def test_a_download_that_makes_no_progress_ends(hub: FakeHub, make: Make) -> None:
    server = Server(hub)
    server.cuts = dict.fromkeys(range(1000), lambda frames: frames[:2])
    exchange = make()
    exchange.limits = replace(LIMITS, reconnect=0.2)
    with pytest.raises(TransferError, match=r"the download of round 9's state failed: gave up on .* tried"):
        exchange.download(ORDER, STORE.rows)
    assert set(server.asked) == {0}


@pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION])
def test_a_snapshot_that_is_unknown_is_given_up_at_once(
    hub: FakeHub, make: Make, code: grpc.StatusCode
) -> None:
    server = Server(hub)
    server.cuts = {0: lambda frames: [*frames[:5], grpc.StatusCode.UNAVAILABLE], 1: lambda frames: [code]}
    with pytest.raises(TransferError, match="round 9's state failed: because it is so"):
        make().download(ORDER, STORE.rows)
    assert server.asked == [0, 1]


def test_a_snapshot_of_another_model_is_given_up_at_once(hub: FakeHub, make: Make) -> None:
    server = Server(hub)
    with pytest.raises(TransferError, match="holds 'step' as int64"):
        make().download(ORDER, Store({**tensors(2), "step": torch.tensor(2.0)}).rows)
    assert server.asked == [0]


def test_the_download_goes_on_when_the_session_has_been_joined_again(hub: FakeHub, make: Make) -> None:
    server = Server(hub)
    exchange = make()

    def forget(frames: list[bytes]) -> list[bytes]:
        hub.known.clear()
        assert hub.break_session is not None
        hub.break_session.set()
        return frames[:5]

    server.cuts = {0: forget}
    spool = exchange.download(ORDER, STORE.rows)
    assert content(spool) == STORE.data
    spool.close()
    assert server.asked == [0, 1] and hub.joins.qsize() == 2


def test_a_stop_ends_the_download(hub: FakeHub, make: Make) -> None:
    under_way, over = threading.Event(), threading.Event()

    async def hang(request: pb.ChunksRequest, context: Any) -> None:
        under_way.set()
        try:
            await asyncio.Event().wait()
        finally:
            over.set()

    hub.get_chunks = hang
    exchange = make()

    def stop() -> None:
        assert under_way.wait(DEADLINE)
        hub.send(pb.CoordinatorMessage(stop=pb.Stop(done=False, reason="the run was given up")))

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(TransferError, match="told to stop"):
        exchange.download(ORDER, STORE.rows)
    thread.join(DEADLINE)
    assert over.wait(DEADLINE)


def test_download_is_not_cancelled_before_the_coordinator_has_ended_it(hub: FakeHub, make: Make) -> None:
    ended: list[str] = []
    over = threading.Event()

    async def play_and_linger(request: pb.ChunksRequest, context: Any) -> None:
        try:
            for frame in STORE.frames():
                await context.write(frame)
            await asyncio.sleep(0.2)  # the call ends a little after its last frame
            ended.append("whole")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        finally:
            over.set()

    hub.get_chunks = play_and_linger
    make().download(ORDER, STORE.rows).close()
    assert over.wait(DEADLINE)
    assert ended == ["whole"]


# -------------------------------------------------------------------------------------------------------- up


class Receiver:
    """Keeps the frames of uploads."""

    def __init__(self, hub: FakeHub) -> None:
        self.uploads: list[list[wire.Frame]] = []
        self.cut_after = 0  # frames, of the first upload; 0: none
        self.kept: int | None = None  # chunks it says; None: as announced
        hub.put_chunks = self._receive

    async def _receive(self, context: Any) -> bytes:
        frames: list[wire.Frame] = []
        self.uploads.append(frames)
        while isinstance(message := await context.read(), bytes):
            frames.append(wire.decode_frame(message))
            if len(self.uploads) == 1 and len(frames) == self.cut_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        header = pb.ChunksHeader.FromString(bytes(frames[0].body))
        return pb.ChunksReceipt(count=header.count if self.kept is None else self.kept).SerializeToString()


def spooled(first: int, count: int) -> Spool:
    spool = Spool(STORE.rows, first, count, STORE.digest)
    spool.write(spool.start, memoryview(STORE.data)[spool.start : spool.stop])
    return spool


def donate(exchange: HubExchange, first: int = 1, count: int = 2) -> queue.Queue[str]:
    """What ``done`` is told."""
    told: queue.Queue[str] = queue.Queue()
    exchange.donate(DonateOrder("s1", 9, first, count), spooled(first, count), told.put)
    return told


def test_chunks_go_up_while_the_node_does_something_else(hub: FakeHub, make: Make) -> None:
    receiver = Receiver(hub)
    exchange = make()
    spool = spooled(1, 3)
    told: queue.Queue[str] = queue.Queue()
    exchange.donate(DonateOrder("s1", 9, 1, 3), spool, told.put)
    assert told.get(timeout=DEADLINE) == ""
    (frames,) = receiver.uploads
    header = pb.ChunksHeader.FromString(bytes(frames[0].body))
    assert header.tensors == STORE.manifest.tensors
    assert (header.snapshot, header.round, header.state_digest) == ("s1", 9, STORE.digest)
    assert (header.nbytes, header.first, header.count) == (len(STORE.data), 1, 3)
    assert [frame.offset for frame in frames[1:-1]] == list(range(MEBIBYTE, len(STORE.data), FRAME_BYTES))
    assert b"".join(bytes(frame.body) for frame in frames[1:-1]) == STORE.data[MEBIBYTE:]
    assert pb.ChunksEnd.FromString(bytes(frames[-1].body)).digests == STORE.manifest.digests[1:]
    with pytest.raises(ValueError, match="closed file"):
        spool.read(spool.start, memoryview(bytearray(1)))


def test_a_broken_upload_is_sent_again_as_a_whole(hub: FakeHub, make: Make) -> None:
    receiver = Receiver(hub)
    receiver.cut_after = 4
    assert donate(make()).get(timeout=DEADLINE) == ""
    broken, whole = receiver.uploads
    assert len(broken) == 4 and whole[:3] == broken[:3]
    assert sum(len(frame.body) for frame in whole[1:-1]) == 2 * MEBIBYTE


def test_chunks_that_are_not_kept_are_sent_again_until_the_patience_ends(hub: FakeHub, make: Make) -> None:
    receiver = Receiver(hub)
    receiver.kept = 1
    exchange = make()
    exchange.limits = replace(LIMITS, reconnect=0.2)
    reason = donate(exchange).get(timeout=DEADLINE)
    assert "the upload of a part of round 9's state failed: gave up on" in reason
    assert "1 of 2 donated chunks were kept" in reason
    assert len(receiver.uploads) > 1


def test_a_donor_that_is_not_wanted_trains_on(hub: FakeHub, make: Make) -> None:
    async def refuse(context: Any) -> bytes:
        await context.read()
        await context.abort(grpc.StatusCode.NOT_FOUND, "snapshot 's1' is unknown")
        return b""

    hub.put_chunks = refuse
    exchange = make()
    reason = donate(exchange).get(timeout=DEADLINE)
    # gRPC may lose the words of a coordinator that ends a stream while this end is writing.
    assert reason.startswith("the upload of a part of round 9's state failed: ")
    assert "snapshot 's1' is unknown" in reason or "it does not want it" in reason
    hub.open_round(3)
    assert isinstance(exchange.next_order(), RoundOrder)


def hanging(hub: FakeHub, ends: threading.Semaphore, under_way: threading.Semaphore) -> None:
    async def hang(context: Any) -> bytes:
        await context.read()
        under_way.release()
        try:
            await asyncio.Event().wait()
        finally:
            ends.release()
        return b""

    hub.put_chunks = hang


def test_a_newer_order_replaces_the_upload_before_it(hub: FakeHub, make: Make) -> None:
    ends, under_way = threading.Semaphore(0), threading.Semaphore(0)
    hanging(hub, ends, under_way)
    exchange = make()
    first = donate(exchange)
    assert under_way.acquire(timeout=DEADLINE)
    receiver = Receiver(hub)
    assert donate(exchange).get(timeout=DEADLINE) == ""
    assert "was broken off: another one was ordered, or this node leaves" in first.get(timeout=DEADLINE)
    assert ends.acquire(timeout=DEADLINE)
    assert len(receiver.uploads) == 1


def test_leaving_ends_the_upload(hub: FakeHub, make: Make) -> None:
    ends, under_way = threading.Semaphore(0), threading.Semaphore(0)
    hanging(hub, ends, under_way)
    exchange = make()
    told = donate(exchange)
    assert under_way.acquire(timeout=DEADLINE)
    exchange.close("interrupted")
    assert "broken off" in told.get(timeout=DEADLINE)
    assert ends.acquire(timeout=DEADLINE)


def test_the_contribution_goes_first(hub: FakeHub, make: Make) -> None:
    """While a contribution is being sent, an upload sends a frame now and then, and then goes on."""
    size, frames = 32 * MEBIBYTE, 0
    twice, stuck = asyncio.Event(), threading.Event()

    async def count(context: Any) -> bytes:
        nonlocal frames
        while isinstance(message := await context.read(), bytes):
            frames += wire.decode_frame(message).kind == wire.CHUNK
            if frames == 2:
                twice.set()
        return pb.ChunksReceipt(count=2).SerializeToString()

    during: list[int] = []

    async def exchange_round(stream: ExchangeStream) -> None:
        header = await stream.header()  # and nothing more is read: the payload is stuck
        stuck.set()
        await asyncio.wait_for(twice.wait(), DEADLINE)  # the upload does not starve
        during.append(frames)
        while wire.decode_frame(await stream.context.read()).kind != wire.END:
            pass
        await stream.commit(header.round, b"", voters=[], weights=[])

    hub.put_chunks, hub.exchange = count, exchange_round
    exchange = make(size)
    told: list[queue.Queue[str]] = []

    def start() -> None:
        assert stuck.wait(DEADLINE)
        told.append(donate(exchange))

    thread = threading.Thread(target=start)
    thread.start()
    take_part(hub, exchange, pattern(size))
    thread.join(DEADLINE)
    assert told[0].get(timeout=DEADLINE) == ""
    assert 2 <= during[0] < 2 * MEBIBYTE // FRAME_BYTES and frames == 2 * MEBIBYTE // FRAME_BYTES
