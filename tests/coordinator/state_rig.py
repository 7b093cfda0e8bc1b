"""Uploads and downloads of a made-up state, for tests of the hub."""

from __future__ import annotations

from protos import atoll_pb2 as pb
from protos import wire
from tests.coordinator.coordinator_rig import FakeNode, Site, soon


def state_frames(transfer: str, round_index: int, digest: str, nbytes: int = 200) -> list[bytes]:
    header = pb.StateHeader(transfer=transfer, round=round_index, state_digest=digest, nbytes=nbytes)
    return [
        wire.encode_frame(wire.HEADER, header.SerializeToString()),
        wire.encode_frame(wire.CHUNK, bytes(nbytes)),
        wire.encode_frame(wire.END),
    ]


async def donate(site: Site, donor: FakeNode, digest: str, *, until: int | None = None) -> pb.Donate:
    message = await donor.order()
    assert message is not None and message.WhichOneof("kind") == "donate", message
    frames = state_frames(message.donate.transfer, message.donate.round, digest)
    transfer = site.hub.upload(donor.node, frames[0])

    async def feed() -> None:
        for frame in frames[:until]:
            await transfer.feed(frame)

    await soon(feed())
    return message.donate


async def load(site: Site, joiner: FakeNode) -> list[bytes]:
    message = await joiner.order()
    assert message is not None and message.WhichOneof("kind") == "load_state", message
    request = pb.StateHeader(transfer=message.load_state.transfer, round=message.load_state.round)
    lane = site.hub.download(joiner.node, request.SerializeToString())
    received = []
    while (frame := await soon(lane.get())) is not None:
        received.append(frame)
    return received
