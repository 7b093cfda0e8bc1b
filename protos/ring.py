"""What is kept of the last rounds: bounded by number and bytes, the newest always."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, Protocol, TypeVar

RING_ROUNDS: Final = 32
RING_BYTES: Final = 256 << 20


class OfARound(Protocol):
    """Something that belongs to a round and takes memory."""

    @property
    def round(self) -> int:
        """Whose it is."""
        ...

    @property
    def nbytes(self) -> int:
        """Its memory; the same as long as it is kept."""
        ...


T = TypeVar("T", bound=OfARound)


class RoundRing(Generic[T]):
    """One thing for each of the last rounds."""

    def __init__(self, rounds: int = RING_ROUNDS, nbytes: int = RING_BYTES) -> None:
        self._rounds = rounds
        self._limit = nbytes
        self._held = 0
        self._kept: OrderedDict[int, T] = OrderedDict()

    def put(self, item: T) -> None:
        """Keep it, in place of what its round had, and drop the oldest beyond the bounds."""
        newest = next(reversed(self._kept), -1)
        before = self._kept.pop(item.round, None)
        self._held += item.nbytes - (before.nbytes if before is not None else 0)
        self._kept[item.round] = item
        if item.round < newest:
            self._kept = OrderedDict(sorted(self._kept.items()))
        while len(self._kept) > 1 and (len(self._kept) > self._rounds or self._held > self._limit):
            _, oldest = self._kept.popitem(last=False)
            self._held -= oldest.nbytes

    def get(self, round_index: int) -> T | None:
        """What a round has, if it is still kept."""
        return self._kept.get(round_index)

    @property
    def oldest(self) -> int | None:
        """The first round of which something is kept."""
        return next(iter(self._kept), None)
