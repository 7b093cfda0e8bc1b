"""A made-up shared state: its digest, the frames of its uploads, and nodes that donate and load it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from protos import atoll_pb2 as pb
from protos.digests import combine, tensor_digest
from protos.snapshots import chunk_range
from protos.wire import CHUNK, CHUNK_BYTES, END, HEADER, decode_frame, encode_frame
from tests.coordinator.coordinator_rig import STATE_BYTES, FakeNode, Site, soon

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8}
_SMALL = 70 + 8  # bytes of the tensors of fixed size


@dataclass
class SharedState:
    """A shared state as its nodes hold it: named tensors, end to end."""

    tensors: list[tuple[str, str, tuple[int, ...]]]
    data: bytes

    @classmethod
    def of(cls, seed: int = 0, nbytes: int = STATE_BYTES) -> SharedState:
        """float32, bfloat16[5, 7], a scalar and an empty tensor, of about ``nbytes``."""
        rows = (nbytes - _SMALL) // 4
        tensors: list[tuple[str, str, tuple[int, ...]]] = [
            ("a", "float32", (rows,)),
            ("b", "bfloat16", (5, 7)),
            ("c", "int64", ()),
            ("d", "float32", (0, 3)),
        ]
        size = 4 * rows + _SMALL
        return cls(tensors, (bytes([seed % 256]) + bytes(range(256)) * (size // 256 + 1))[:size])

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def digest(self) -> str:
        digests, place = {}, 0
        for name, dtype, shape in self.tensors:
            size = _ITEM_BYTES[dtype]
            for extent in shape:
                size *= extent
            digests[name] = tensor_digest(name, dtype, shape, self.data[place : place + size])
            place += size
        return combine(digests)

    def header(self, order: pb.Donate, **changes: Any) -> bytes:
        """The first frame of an upload; ``changes`` are fields of it."""
        rows = [pb.StateTensor(name=name, dtype=dtype, shape=shape) for name, dtype, shape in self.tensors]
        values: dict[str, Any] = {
            "snapshot": order.snapshot,
            "round": order.round,
            "state_digest": self.digest,
            "nbytes": self.nbytes,
            "tensors": rows,
            "first": order.first,
            "count": order.count,
        }
        return encode_frame(HEADER, pb.ChunksHeader(**{**values, **changes}).SerializeToString())

    def chunk_digests(self, first: int, count: int) -> list[bytes]:
        chunks = [self.data[slice(*chunk_range(self.nbytes, first + index, 1))] for index in range(count)]
        return [xxhash.xxh3_128_digest(chunk) for chunk in chunks]

    def frames(self, order: pb.Donate, size: int = CHUNK_BYTES, **changes: Any) -> list[bytes]:
        """HEADER, CHUNKs of ``size``, END."""
        start, stop = chunk_range(self.nbytes, order.first, order.count)
        return [
            self.header(order, **changes),
            *(
                encode_frame(CHUNK, self.data[at : min(at + size, stop)], offset=at)
                for at in range(start, stop, size)
            ),
            chunks_end(self.chunk_digests(order.first, order.count)),
        ]


def chunks_end(digests: Sequence[bytes]) -> bytes:
    return encode_frame(END, pb.ChunksEnd(digests=digests).SerializeToString())


class StateDownload:
    """A state, or the chunks of it from ``first`` on, put together from the frames of GetChunks."""

    def __init__(self, first: int = 0) -> None:
        self.manifest: pb.Manifest | None = None
        self.data = bytearray()
        self.complete = False
        self._first = first

    def add(self, message: bytes) -> None:
        frame = decode_frame(message)
        assert not self.complete
        if self.manifest is None:
            assert frame.kind == HEADER
            self.manifest = pb.Manifest.FromString(bytes(frame.body))
        elif frame.kind == CHUNK:
            assert frame.offset == chunk_range(self.manifest.nbytes, self._first, 1)[0] + len(self.data)
            self.data += frame.body
        else:
            assert frame.kind == END
            self.complete = True


async def donate(
    site: Site, donor: FakeNode, state: SharedState, *, until: int | None = None, **changes: Any
) -> pb.Donate:
    """Carry out a Donate order, as far as the first ``until`` frames go."""
    message = await donor.order()
    assert message is not None and message.WhichOneof("kind") == "donate", message
    frames = state.frames(message.donate, **changes)
    upload = site.hub.upload(donor.node, frames[0])
    for frame in frames[:until]:
        await soon(upload.feed(frame))
    return message.donate


async def load(site: Site, joiner: FakeNode) -> tuple[pb.LoadState, bytes]:
    """Carry out a LoadState order, but for the Ready."""
    message = await joiner.order()
    assert message is not None and message.WhichOneof("kind") == "load_state", message
    order, download = message.load_state, StateDownload()
    async for frame in site.hub.chunks(joiner.node, pb.ChunksRequest(snapshot=order.snapshot)):
        download.add(frame)
    assert download.complete
    return order, bytes(download.data)
