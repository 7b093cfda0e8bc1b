"""The stream of a slice, from the side that contributes."""

from __future__ import annotations

import asyncio

import pytest
import xxhash

from node.exchange.peers.base import PeerStream
from node.exchange.peers.loopback import pair
from node.exchange.peers.upload import Contribution, SliceUpload
from node.exchange.retry import within
from node.exchange.trouble import Trouble
from optim.slices import Slice
from protos import atoll_pb2 as pb
from protos import wire
from protos.upload import end_frame

SECONDS = 30.0
RESULT = bytes(range(64))


def upload(stream: PeerStream, into: bytearray) -> SliceUpload:
    payload = bytes(128)
    hello = pb.PeerHello(slice=pb.SliceUp(round=3, nbytes=len(payload)))
    part = Slice(0, len(payload), 0, len(into))
    return SliceUpload(
        stream, hello, Contribution(memoryview(payload)), part, memoryview(into), SECONDS, lambda: None
    )


async def taken(stream: PeerStream) -> None:
    """Read a contribution to its end."""
    while (message := await stream.read()) is not None and wire.decode_frame(message).kind != wire.END:
        pass


async def test_a_reducer_that_is_through_first_sees_a_proper_end() -> None:
    """An abort would cost the carrier the raw stream below, which can carry the next one."""
    here, there = pair()
    into = bytearray(len(RESULT))
    running = asyncio.ensure_future(upload(here, into).run())
    await taken(there)
    await there.write(wire.encode_frame(wire.CHUNK, RESULT, offset=0))
    await there.write(end_frame(xxhash.xxh3_128(RESULT).hexdigest()))
    await there.end()
    await within(SECONDS, "the upload", running)
    assert bytes(into) == RESULT
    assert await within(SECONDS, "its end", there.read()) is None


async def test_a_reducer_that_ends_without_a_result_sees_a_break() -> None:
    here, there = pair()
    running = asyncio.ensure_future(upload(here, bytearray(len(RESULT))).run())
    await taken(there)
    await there.end()
    with pytest.raises(Trouble, match="before bytes 0 to 64 of the result of round 4 had come whole"):
        await within(SECONDS, "the upload", running)
    with pytest.raises(Trouble):
        await there.read()
