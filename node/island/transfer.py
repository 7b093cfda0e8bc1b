"""A collective under way in stages, and the error that names it when the transport fails."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from node.island.deadline import cause
from node.island.streams import Inline, Side

_HINT = "A rank may have died, or the ranks run different units: the log of the first to fail tells."

# their names since torch 2.13, which warns of the old ones
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Stages = Generator[list[dist.Work], None, Tensor]


class IslandError(RuntimeError):
    """The ranks of an island lost each other or disagree; the text says at what, and on which rank."""


@contextmanager
def guarded(what: str, where: str, others: Callable[[str], str] = lambda said: "") -> Iterator[None]:
    """Turn a failure of the transport into an :class:`IslandError`.

    Args:
        what: failed.
        where: this rank, and the group.
        others: told what failed here, says what the other ranks say.
    """
    try:
        yield
    except (IslandError, torch.cuda.OutOfMemoryError):
        raise
    except RuntimeError as error:
        first = cause(error)
        word = others(f"{what}: {first}")
        raise IslandError(
            f"{what} failed on {where}: {first}. {f'{word}. ' if word else ''}{_HINT}"
        ) from error


@dataclass
class Counters:
    """What one rank did since the start: transfers by kind, and bytes of payload without headers."""

    gathers: int = 0
    reduces: int = 0
    scalars: int = 0
    gathered_bytes: int = 0  # received
    reduced_bytes: int = 0  # sent


class Transfer:
    """A gather or reduce that goes on one stage at a time.

    Args:
        what: named in errors.
        stages: issues one stage whenever it is resumed, and returns the tensor that was asked for.
        count: number of stages.
        guard: wraps the calls of the transport.
        side: where the stages run.
        watch: told when the program, or the stream that it computes on, waits for the end.
    """

    def __init__(
        self,
        what: str,
        stages: Stages,
        count: int,
        guard: Callable[[str], AbstractContextManager[None]],
        side: Side | None = None,
        watch: Callable[[str, Side], None] = lambda what, side: None,
    ) -> None:
        self.what, self._stages, self._left, self._guard = what, stages, count, guard
        self._count, self._side, self._watch = count, side or Inline(), watch
        self._works: list[dist.Work] = []
        self._result: Tensor | None = None
        self._failure: Exception | None = None

    def _finish_stage(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    @contextmanager
    def _stage(self) -> Iterator[None]:
        """Wraps every use of the transport: what failed once is not gone on with."""
        if self._failure is not None:
            raise IslandError(f"{self.what} failed before: {self._failure}") from self._failure
        try:
            with self._guard(self.what), self._side.turn():
                yield
        except Exception as error:
            self._failure, self._left = error, 0
            self._stages.close()
            raise

    def advance(self) -> None:
        """Wait for the stage that has been issued and issue the next, if there is another."""
        if self._left:
            self._left -= 1
            with self._stage():
                self._finish_stage()
                self._works = next(self._stages)

    def progress(self) -> None:
        """Advance, unless nothing is left to issue."""
        if 0 < self._left < self._count:
            self.advance()

    def wait(self) -> Tensor:
        """Run to the end."""
        while self._left:
            self.advance()
        if self._result is None:
            with self._stage():
                self._finish_stage()
                try:
                    next(self._stages)
                except StopIteration as end:
                    self._side.join()
                    self._watch(self.what, self._side)
                    self._result = cast(Tensor, end.value)
        assert self._result is not None, f"{self.what} has more stages than it was said to have"
        return self._result

    def abandon(self) -> None:
        """Wait for the stage that has been issued, if it has not failed, and leave the rest."""
        if self._failure is None:
            with self._stage():
                self._finish_stage()
                self._side.join()  # before the buffers are given back
        self._left = 0
        self._stages.close()
