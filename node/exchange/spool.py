"""Spools: bytes of a shared state in a temporary file without a name, on their way to or from others."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from node.exchange.tensor_bytes import Row, spans, total_bytes
from node.exchange.trouble import TransferError
from protos.digests import combine, pieces_digest
from protos.snapshots import chunk_range, chunks

_PIECE_BYTES: Final = 1 << 20  # read at a time


class Spool:
    """Some chunks of a state, on disk.

    The file has no name: the system takes its room back when it is closed, or when the process ends, however
    that happens. It lies where the system keeps temporary files; ``TMPDIR`` names another folder, and one in
    memory will do. Offsets count bytes of the whole state. Safe to use in several threads.

    Args:
        rows: of the whole state, in order.
        first, count: the chunks that there is room for.
        state_digest: of the whole state, if it is known already.

    Attributes:
        rows, first, count, state_digest: see above.
        start, stop: bytes of the whole state that the chunks are.

    Raises:
        ValueError: the state does not have these chunks.
        TransferError: there is no room for them.
    """

    def __init__(self, rows: Sequence[Row], first: int, count: int, state_digest: str = "") -> None:
        nbytes = total_bytes(rows)
        if not 0 <= first <= first + count <= chunks(nbytes):
            raise ValueError(
                f"a state of {nbytes} bytes has {chunks(nbytes)} chunks, not {count} from {first} on"
            )
        self.rows, self.first, self.count, self.state_digest = tuple(rows), first, count, state_digest
        self.start, self.stop = chunk_range(nbytes, first, count)
        self._lock = threading.Lock()
        self._folder = ""
        try:
            self._folder = tempfile.gettempdir()
            free = shutil.disk_usage(self._folder).free
            if free < self.nbytes:
                raise self._trouble(f"{free / 1e6:.0f} MB are free")
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115
        except OSError as error:
            raise self._trouble(str(error)) from error

    @property
    def nbytes(self) -> int:
        """Bytes of its chunks."""
        return self.stop - self.start

    def write(self, offset: int, data: memoryview) -> None:
        """Keep ``data``, the bytes from ``offset`` on.

        Raises:
            ValueError: they are not in its chunks, or it has been closed.
            TransferError: the disk is full or broken.
        """
        self._check(offset, len(data))
        with self._lock:
            try:
                self._file.seek(offset - self.start)
                while len(data):
                    data = data[self._file.write(data) :]
            except OSError as error:
                raise self._trouble(str(error)) from error

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on.

        Raises:
            ValueError: they are not in its chunks, or it has been closed.
            TransferError: nothing was written there, or the disk is broken.
        """
        self._check(offset, len(into))
        with self._lock:
            try:
                self._file.seek(offset - self.start)
                while len(into):
                    count = self._file.readinto(into)
                    if not count:
                        raise self._trouble(f"{len(into)} bytes were never written to it")
                    into = into[count:]
            except OSError as error:
                raise self._trouble(str(error)) from error

    def digest(self) -> str:
        """The digest of the state that it holds, which must be a whole one; see
        :func:`protos.digests.state_digest`.

        Raises:
            TransferError: a part was never written, or the disk is broken.
        """
        digests, offset = {}, 0
        for row in self.rows:
            pieces = self._pieces(offset, offset + row.nbytes)
            digests[row.name] = pieces_digest(row.name, row.dtype, row.shape, pieces)
            offset += row.nbytes
        return combine(digests)

    def close(self) -> None:
        """Give the room back; harmless twice."""
        with self._lock:
            self._file.close()

    def _pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(_PIECE_BYTES, stop - start)))
        for offset, end in spans(start, stop, _PIECE_BYTES):
            piece = buffer[: end - offset]
            self.read(offset, piece)
            yield piece

    def _check(self, offset: int, nbytes: int) -> None:
        if not self.start <= offset <= offset + nbytes <= self.stop:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} are not in a spool of {self.start} to {self.stop}"
            )

    def _trouble(self, why: str) -> TransferError:
        return TransferError(
            f"{self.nbytes} bytes of the shared state cannot be kept in the folder of temporary files "
            f"{self._folder!r}: {why}; set TMPDIR to a folder with room for them"
        )
