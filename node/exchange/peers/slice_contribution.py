"""A contribution to a slice: each frame is checked, then copied once, into a row that rounds use in turn."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from optim.aggregate import Bytes
from optim.inspection import Inspection
from optim.reduction import Slab
from protos.upload import Upload


class Rows:
    """Memory for contributions, given back after a round and used again."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}

    def take(self, nbytes: int) -> Bytes:
        """uint8[nbytes] of undefined content, cache-line aligned."""
        free = self._free.get(nbytes)
        return free.pop() if free else Slab(nbytes).rows(1)[0]

    def give(self, rows: Collection[Bytes]) -> None:
        """They are used no more."""
        for row in rows:
            self._free.setdefault(len(row), []).append(row)

    def keep(self, sizes: Collection[int]) -> None:
        """Let go of unused rows of other sizes than these."""
        self._free = {nbytes: rows for nbytes, rows in self._free.items() if nbytes in sizes}

    @property
    def nbytes(self) -> int:
        """Of unused rows."""
        return sum(nbytes * len(rows) for nbytes, rows in self._free.items())


class SliceContribution(Upload):
    """One sender's bytes of a slice, on their way into its row."""

    def __init__(self, row: Bytes, inspection: Inspection, base: int) -> None:
        super().__init__(len(row))
        self._row: Bytes | None = row
        self._inspection = inspection
        self._base = base

    @property
    def wanted(self) -> bool:
        """Whether it is not too late for what still comes."""
        return self._row is not None

    def detach(self) -> None:
        """Write no more to the row: it is somebody else's now."""
        self._row = None

    def _take(self, offset: int, body: memoryview) -> None:
        if self._row is None:
            return
        end = offset + len(body)
        self._row[offset:end] = np.frombuffer(body, np.uint8)
        self._inspection.check(self._row, self._base + offset, self._base + end, self._base)
