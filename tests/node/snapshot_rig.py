"""What the tests of snapshots share: states of many layouts, small chunks, and a store that serves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import strategies as st

from node.exchange import tensor_bytes
from node.exchange.base import LoadOrder
from node.exchange.spool import Spool
from node.exchange.tensor_bytes import layout, spans, total_bytes
from protos import atoll_pb2 as pb
from protos import snapshots, wire
from protos.digests import state_digest
from protos.snapshots import chunk_bytes, chunk_range, chunks

ORDER = LoadOrder("s1", 9)

_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
_SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
LAYOUTS = st.lists(st.tuples(_DTYPES, _SHAPES, st.booleans()), min_size=1, max_size=6)


def state(rows: list[tuple[torch.dtype, tuple[int, ...], bool]], seed: int) -> dict[str, torch.Tensor]:
    """Tensors of these dtypes and shapes, some of them not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index, (dtype, shape, strided) in enumerate(rows):
        values = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)
        tensors[f"t{index}"] = values.transpose(0, -1) if strided and len(shape) > 1 else values
    return tensors


def stream_of(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The state as one stream of bytes, the short way."""
    return b"".join(
        tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name in sorted(tensors)
    )


@contextmanager
def small(chunk: int, piece: int = 7) -> Iterator[None]:
    """Chunks and pieces of a few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "CHUNK_BYTES", chunk)
        patch.setattr(tensor_bytes, "PIECE_BYTES", piece)
        yield


class Store:
    """A snapshot, as a coordinator keeps it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], order: LoadOrder = ORDER) -> None:
        self.rows, self.data = layout(tensors), stream_of(tensors)
        self.digest = state_digest(tensors)
        self.total = chunks(len(self.data))
        self.manifest = pb.Manifest(
            snapshot=order.snapshot,
            round=order.round,
            state_digest=self.digest,
            nbytes=total_bytes(self.rows),
            tensors=[pb.StateTensor(name=row.name, dtype=row.dtype, shape=row.shape) for row in self.rows],
            digests=[
                xxhash.xxh3_128_digest(self.data[slice(*chunk_range(len(self.data), index, 1))])
                for index in range(self.total)
            ],
        )

    def frames(self, first: int = 0, size: int | None = None, **changes: Any) -> list[bytes]:
        """A stream from chunk ``first`` on, in frames of ``size`` bytes; ``changes`` are the manifest's."""
        start = chunk_range(len(self.data), first, 0)[0]
        manifest = pb.Manifest.FromString(self.manifest.SerializeToString())
        for name, value in changes.items():
            setattr(manifest, name, value)
        return [
            wire.encode_frame(wire.HEADER, manifest.SerializeToString()),
            *(
                wire.encode_frame(wire.CHUNK, self.data[offset:end], offset=offset)
                for offset, end in spans(start, len(self.data), size or chunk_bytes(len(self.data)))
            ),
            wire.encode_frame(wire.END),
        ]


def content(spool: Spool) -> bytes:
    """All that is in a spool."""
    data = bytearray(spool.nbytes)
    spool.read(spool.start, memoryview(data))
    return bytes(data)
