"""What a snapshot is made of: the tensors that donors announce, checked, and the digest of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from google.protobuf.message import DecodeError

from protos.atoll_pb2 import ChunksHeader, Manifest
from protos.digests import combine, pieces_digest, tensor_nbytes
from protos.refusal import BAD_TRANSFER, OVERSIZED, Refused
from protos.snapshots import chunks
from protos.wire import CHUNK_BYTES, HEADER, MAX_HEADER_BYTES, Frame

CHECK_BYTES: Final = 16 << 20  # of a state are digested at a time, or one tensor
MAX_DIMENSIONS: Final = 16  # of a tensor
_DIGEST_ROW: Final = 18  # bytes of a chunk's digest in a manifest


def parse_chunks_header(frame: Frame) -> ChunksHeader:
    """The body of the first frame of PutChunks; raises :class:`Refused` on anything else."""
    if frame.kind != HEADER:
        raise Refused(BAD_TRANSFER, f"chunks begin with a HEADER frame, not with kind {frame.kind}")
    try:
        return ChunksHeader.FromString(bytes(frame.body))
    except DecodeError as error:
        raise Refused(BAD_TRANSFER, "the header of the chunks cannot be read") from error


def manifest_of(header: ChunksHeader) -> Manifest:
    """The manifest that a donor announces; digests of chunks are still to come."""
    return Manifest(
        snapshot=header.snapshot,
        round=header.round,
        state_digest=header.state_digest,
        nbytes=header.nbytes,
        tensors=header.tensors,
    )


def check_manifest(manifest: Manifest) -> None:
    """Check that it names a digest, and tensors, sorted, that make up its bytes.

    Raises:
        Refused: it does not, or cannot be sent in one frame.
    """
    if not manifest.state_digest:
        raise Refused(BAD_TRANSFER, "the header of a snapshot must name the digest of the state")
    if manifest.ByteSize() + chunks(manifest.nbytes) * _DIGEST_ROW > MAX_HEADER_BYTES:
        raise Refused(
            OVERSIZED, f"{len(manifest.tensors)} tensors do not fit into a manifest: their names are too long"
        )
    nbytes, previous = 0, ""
    for tensor in manifest.tensors:
        name = tensor.name[:64]
        if tensor.name <= previous:
            raise Refused(BAD_TRANSFER, f"tensor {name!r} comes behind {previous[:64]!r}: sort by name")
        if len(tensor.shape) > MAX_DIMENSIONS:
            raise Refused(BAD_TRANSFER, f"tensor {name!r} has {len(tensor.shape)} dimensions")
        try:
            nbytes += tensor_nbytes(name, tensor.dtype[:64], tensor.shape)
        except ValueError as error:
            raise Refused(BAD_TRANSFER, str(error)) from error
        previous = tensor.name
    if nbytes != manifest.nbytes:
        raise Refused(BAD_TRANSFER, f"the tensors have {nbytes} bytes, the state has {manifest.nbytes}")


def digesting(manifest: Manifest, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
    """The digest of a stored state, in hex; empty strings, after every :data:`CHECK_BYTES` or one tensor,
    before that."""
    digests: dict[str, str] = {}
    place = work = 0
    for tensor in manifest.tensors:
        if work >= CHECK_BYTES:
            work = 0
            yield b""
        nbytes = tensor_nbytes(tensor.name, tensor.dtype, tensor.shape)
        pieces = (
            read(offset, min(CHUNK_BYTES, place + nbytes - offset))
            for offset in range(place, place + nbytes, CHUNK_BYTES)
        )
        digests[tensor.name] = pieces_digest(tensor.name, tensor.dtype, tensor.shape, pieces)
        place, work = place + nbytes, work + nbytes
    yield combine(digests).encode()
