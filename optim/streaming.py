"""Contributions of which the beginning is written while gradients for the end are still being computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from optim.layout import Pack
from protos.buckets import BucketTable

OnReady = Callable[[int], None]  # is told how many bytes, from the first, are final


class Ready:
    """Follows which buckets of a lane have been written, in any order, and tells how many bytes from the
    first are final.

    Args:
        lane: the table.
        tell: called whenever they have become more; ``None`` to tell nobody.
    """

    def __init__(self, lane: BucketTable, tell: OnReady | None) -> None:
        self._lane = lane
        self._tell = tell
        self._written = {bucket.name for bucket in lane.buckets if not bucket.nbytes}
        self._next = self._nbytes = 0

    def add(self, names: Iterable[str]) -> None:
        """These buckets have been written, with their padding."""
        self._written.update(names)
        before, buckets = self._nbytes, self._lane.buckets
        while self._next < len(buckets) and buckets[self._next].name in self._written:
            self._nbytes += buckets[self._next].nbytes
            self._next += 1
        if self._tell is not None and self._nbytes > before:
            self._tell(self._nbytes)


class Stream:
    """A contribution whose buckets are written as their gradients come.

    Args:
        round_index: number of the round.
        out: where it is written.
        stacks: buckets that are written together, in the order of the lane.
        ready: is told of them.

    Attributes:
        round, out, ready: as given.
        left: the stacks of which gradients are missing.
        usable: whether all gradients so far are; nothing is written any more if not.
    """

    def __init__(self, round_index: int, out: Tensor, stacks: Sequence[list[Pack]], ready: Ready) -> None:
        self.left = dict(enumerate(stacks))
        self.usable = True
        self.ready = ready
        self.round, self.out = round_index, out
        parameters = [[item.parameter for pack in stack for item in pack.items] for stack in stacks]
        self._missing = [len(row) for row in parameters]
        self._stack_of = {parameter: index for index, row in enumerate(parameters) for parameter in row}

    def serves(self, round_index: int, out: Tensor) -> bool:
        """Whether it is of this round, and written to ``out``."""
        return self.round == round_index and self.out.data_ptr() == out.data_ptr()

    def completes(self, parameter: Tensor) -> bool:
        """Whether this is the last gradient of a stack that is missing."""
        index = self._stack_of.get(parameter)
        return index is not None and self._missing[index] == 1

    def arrived(self, parameter: Tensor) -> list[Pack] | None:
        """The stack of which this was the last gradient; ``None`` if others are missing, or it is known."""
        index = self._stack_of.pop(parameter, None)
        if index is None:
            return None
        self._missing[index] -= 1
        return None if self._missing[index] else self.left.pop(index)
