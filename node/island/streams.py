"""Where transfers run: on a GPU on a stream beside the compute stream, elsewhere in the program's own order.

Copies in, launches and sums of a transfer go to a *side* stream, so that what is launched after them on the
compute stream runs at the same time. Only these rules make it safe with the caching allocator, which gives a
freed block at once to the next allocation on the stream that the block was allocated on:

* Whenever a transfer goes on, the side stream first waits for all that the compute stream has been given so
  far (:meth:`Side.turn`). So its inputs are there, and whoever used the blocks that it is about to allocate,
  a whole buffer that was released or gradients that were dropped, has been launched before it.
* Memory that outlives the transfer (a whole buffer) is allocated on the compute stream
  (:meth:`Side.on_compute`): it is used there, and goes back to where activations are taken from.
* Before the program uses a result, or gives back memory that the side stream has read or written, the compute
  stream waits for the side stream (:meth:`Side.join`).

``record_stream`` is not needed, which would make frees depend on when the GPU gets there, and so the peak.
The waits are events between streams: no call here blocks the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

Purpose = Literal["gather", "reduce"]


class Side(Protocol):
    """What a transfer asks of the place where it runs."""

    def turn(self) -> AbstractContextManager[None]:
        """Within it, work goes to the side, after all that has been computed so far."""

    def on_compute(self, make: Callable[[], Tensor]) -> Tensor:
        """Within a turn: a tensor that is allocated, and used later, where the program computes."""

    def join(self) -> None:
        """What is computed from now on comes after all that the side has been given so far."""

    def mark(self) -> Callable[[], bool] | None:
        """Tells later whether the side has done all that it has been given so far; None where the program
        itself waits for transfers."""


class Inline:
    """The side of a CPU: one order for everything."""

    def turn(self) -> AbstractContextManager[None]:
        """Nothing to order."""
        return nullcontext()

    def on_compute(self, make: Callable[[], Tensor]) -> Tensor:
        """``make()``."""
        return make()

    def join(self) -> None:
        """Nothing to order."""

    def mark(self) -> None:
        """The program waits."""


class SideStream:
    """A stream beside the one that is current whenever a transfer goes on.

    Args:
        stream: of the side.
        cuda: gives ``current_stream(device)`` and the context ``stream(s)``, as ``torch.cuda`` does.
    """

    def __init__(self, stream: Any, cuda: Any = torch.cuda) -> None:
        self._stream, self._cuda = stream, cuda
        self._compute = cuda.current_stream(stream.device)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """See :class:`Side`; the stream that is current now is the compute stream until the next turn."""
        self._compute = self._cuda.current_stream(self._stream.device)
        self._stream.wait_stream(self._compute)
        with self._cuda.stream(self._stream):
            yield

    def on_compute(self, make: Callable[[], Tensor]) -> Tensor:
        """See :class:`Side`; the side waits, as ``make`` may have launched something."""
        with self._cuda.stream(self._compute):
            made = make()
        self._stream.wait_stream(self._compute)
        return made

    def join(self) -> None:
        """See :class:`Side`."""
        self._compute.wait_stream(self._stream)

    def mark(self) -> Callable[[], bool]:
        """See :class:`Side`."""
        return cast(Callable[[], bool], self._stream.record_event().query)


@cache
def side_of(device: torch.device, purpose: Purpose) -> Side:
    """The one side of a device for all transfers of a kind.

    Gathers and reduces have a stream each: a gather must not stand behind the sum over replicas, which goes
    by another process group and often by a thinner link. Their priority is high, so that a copy in is not
    held up by the kernels of the layer that it is to run beside.
    """
    if device.type != "cuda":
        return Inline()
    return SideStream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
