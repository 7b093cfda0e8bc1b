"""The hub exchange against a scripted coordinator: shared state up and down."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest
import torch

from node.exchange.base import (
    DonateOrder,
    LoadOrder,
    RoundOrder,
)
from node.exchange.trouble import TransferError
from protos import atoll_pb2 as pb
from protos import wire
from tests.node.fake_hub import FakeHub
from tests.node.hub_rig import (
    Make,
    next_message,
)

# ------------------------------------------------------------------------------------------------ the state


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(257, 1025, generator=generator),
        "a/small": torch.randn(3, generator=generator),
        "step": torch.tensor(seed),
        "empty": torch.empty(0, 4),
    }


class Recorder:
    """Keeps the frames of an upload, and plays them back."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    async def record(self, context: Any) -> bytes:
        while isinstance(message := await context.read(), bytes):
            self.frames.append(message)
        header = pb.StateHeader.FromString(bytes(wire.decode_frame(self.frames[0]).body))
        return pb.StateReceipt(nbytes=header.nbytes).SerializeToString()

    async def play(self, request: pb.StateHeader, context: Any) -> None:
        for frame in self.frames:
            await context.write(frame)


def test_state_travels_in_chunks_from_donor_to_joiner(hub: FakeHub, make: Make) -> None:
    recorder = Recorder()
    hub.put_state, hub.get_state = recorder.record, recorder.play
    exchange = make()
    exchange.donate(DonateOrder("t1", 9), tensors(1), "digest-of-9")
    assert [wire.decode_frame(frame).kind for frame in recorder.frames] == [
        wire.HEADER,
        wire.CHUNK,
        wire.CHUNK,
        wire.END,
    ]
    loaded = tensors(2)
    addresses = {name: tensor.data_ptr() for name, tensor in loaded.items()}
    assert exchange.load(LoadOrder("t1", 9), loaded) == "digest-of-9"
    for name, tensor in tensors(1).items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].data_ptr() == addresses[name]
    exchange.ready(9, "digest-of-9")
    ready = next_message(hub, "ready").ready
    assert (ready.round, ready.state_digest) == (9, "digest-of-9")
    assert exchange.meter.counts()["up", "state"] > 4 * 257 * 1025
    assert exchange.meter.counts()["down", "state"] > 4 * 257 * 1025


def test_download_is_not_cancelled_before_the_coordinator_has_ended_it(hub: FakeHub, make: Make) -> None:
    recorder = Recorder()
    ended: list[str] = []
    over = threading.Event()

    async def play_and_linger(request: pb.StateHeader, context: Any) -> None:
        try:
            await recorder.play(request, context)
            await asyncio.sleep(0.2)  # the donor's own call ends a little after its last frame
            ended.append("whole")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        finally:
            over.set()

    hub.put_state, hub.get_state = recorder.record, play_and_linger
    exchange = make()
    exchange.donate(DonateOrder("t1", 9), tensors(1), "digest-of-9")
    exchange.load(LoadOrder("t1", 9), tensors(2))
    assert over.wait(10)
    assert ended == ["whole"]


def test_state_that_does_not_fit_is_refused_before_a_byte_is_written(hub: FakeHub, make: Make) -> None:
    recorder = Recorder()
    hub.put_state, hub.get_state = recorder.record, recorder.play
    exchange = make()
    exchange.donate(DonateOrder("t1", 9), tensors(1), "d")
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({**tensors(2), "more": torch.zeros(1)}, "lacks 1 tensors of this model, first 'more'"),
        ({"step": torch.tensor(2)}, "does not have, first 'a/small'"),
        ({**tensors(2), "step": torch.tensor(2.0)}, r"holds 'step' as int64\[\], this model as float32\[\]"),
        (
            {**tensors(2), "a/small": torch.zeros(4)},
            r"holds 'a/small' as float32\[3\], this model as float32\[4\]",
        ),
    ]
    for target, text in cases:
        before = {name: tensor.clone() for name, tensor in target.items()}
        with pytest.raises(TransferError, match=text):
            exchange.load(LoadOrder("t1", 9), target)
        assert all(torch.equal(target[name], before[name]) for name in target)
    with pytest.raises(TransferError, match="of round 9, ordered was 't1' of round 10"):
        exchange.load(LoadOrder("t1", 10), tensors(2))


def test_damaged_or_truncated_state_is_an_error(hub: FakeHub, make: Make) -> None:
    recorder = Recorder()
    hub.put_state, hub.get_state = recorder.record, recorder.play
    exchange = make()
    exchange.donate(DonateOrder("t1", 9), tensors(1), "d")
    header, first, second, end = recorder.frames
    flipped = first[:-1] + bytes([first[-1] ^ 1])
    for frames, text in (
        ([header, flipped, second, end], "is damaged: digest"),
        ([header, first], "the stream ended before its last frame"),
        ([header, second, end], "out of order"),
        ([header, first, end], "is incomplete"),
        ([header, first, second, second, end], "out of order"),
        ([first, second, end], "instead of a header"),
        ([header, first, b"\x02"], "a frame has at least"),
    ):
        recorder.frames = frames
        with pytest.raises(TransferError, match=text):
            exchange.load(LoadOrder("t1", 9), tensors(2))


def test_donor_survives_a_transfer_that_is_broken_off(hub: FakeHub, make: Make) -> None:
    async def refuse(context: Any) -> bytes:
        await context.read()
        await context.abort(grpc.StatusCode.ABORTED, "every joiner has left")
        return b""

    async def swallow(context: Any) -> bytes:
        while isinstance(await context.read(), bytes):
            pass
        return pb.StateReceipt(nbytes=1).SerializeToString()

    exchange = make()
    hub.put_state = refuse
    with pytest.raises(TransferError, match="the upload of round 9's state broke off"):
        exchange.donate(DonateOrder("t1", 9), tensors(1), "d")
    hub.put_state = swallow
    with pytest.raises(TransferError, match="is incomplete: 1 of"):
        exchange.donate(DonateOrder("t1", 9), tensors(1), "d")
    hub.open_round(3)
    assert isinstance(exchange.next_order(), RoundOrder)
