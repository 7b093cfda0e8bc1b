"""A script and a node's worker that take turns: the worker's loop asks for gradients, the script makes them.

The worker runs in a thread of its own, as it does for ``atoll join``: rounds, catching up, checkpoints and
leaving are its business. Where it would compute a loss and its gradients, it hands over a batch and waits
until the script has called ``optimizer.step()``. Only one of the two threads runs at any moment.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import torch

from node.events import Summary
from node.training import BrokenOff
from node.worker import Worker
from optim.round_optimizer import RoundOptimizer
from protos.runfile import RunFile

LEAVE_SECONDS: Final = 30.0  # for the worker's thread to save, take leave and end
_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Parts:
    """What a script brings to its run; ``validate`` measures the validation loss."""

    model: torch.nn.Module
    optimizer: RoundOptimizer
    samples: int
    data: str
    validate: Callable[[], float] | None


@dataclass(frozen=True)
class Made:
    """The script has made the gradients of a batch, whose mean loss was this; NaN where it did not say."""

    loss: float


@dataclass(frozen=True)
class End:
    """The worker's thread is at its end: with a summary, or an error."""

    summary: Summary | None = None
    error: BaseException | None = None


class ScriptLeft(Exception):
    """The script left its run before it had brought a model; the text is its reason."""


class Turns:
    """The hand-over between both threads.

    Attributes:
        worker: once there is one.
    """

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self._ended: End | None = None
        self._to_script: SimpleQueue[RunFile | torch.Tensor | End] = SimpleQueue()
        self._to_worker: SimpleQueue[Parts | Made | str] = SimpleQueue()  # a text: why the script leaves

    # ------------------------------------------------------------------ in the worker's thread

    def begins(self, worker: Worker) -> None:
        """The worker is about to run."""
        self.worker = worker

    def parts(self, runfile: RunFile) -> Parts:
        """Tell the script what run it is, and wait for what it brings.

        Raises:
            ScriptLeft: it leaves instead.
        """
        self._to_script.put(runfile)
        said = self._to_worker.get()
        if isinstance(said, Parts):
            return said
        raise ScriptLeft(str(said))

    def gradients(self, rows: torch.Tensor) -> float:
        """Let the script make the gradients of the batch ``rows``; returns its loss.

        Raises:
            BrokenOff: it leaves instead.
        """
        self._to_script.put(rows)
        said = self._to_worker.get()
        if isinstance(said, Made):
            return said.loss
        assert self.worker is not None, "it is the worker that asks"
        self.worker.interrupt(str(said))
        raise BrokenOff

    def end(self, end: End) -> None:
        """The last that this thread says."""
        self._ended = end
        self._to_script.put(end)

    # ------------------------------------------------------------------ in the script's thread

    def wait(self) -> RunFile | torch.Tensor | End:
        """What the worker's thread says next. It says :class:`End` at the latest when its own deadlines have
        passed, and nothing else from then on."""
        said = self._to_script.get()
        if isinstance(said, End):
            self._to_script.put(said)
        return said

    def say(self, what: Parts | Made) -> None:
        """Give the turn back."""
        self._to_worker.put(what)

    def give_up(self, reason: str) -> None:
        """Leave the run as soon as the other thread asks, and wait for nothing."""
        self._to_worker.put(reason)

    def leave(self, thread: threading.Thread, reason: str) -> End | None:
        """Leave the run and wait for the end of the worker's thread; ``None`` if that did not come."""
        self.give_up(reason)
        for _ in range(round(LEAVE_SECONDS / _LOOK_SECONDS)):
            if self.worker is not None:
                self.worker.leave(reason)
            thread.join(_LOOK_SECONDS)
            if not thread.is_alive():
                break
        return self._ended


class Turn:
    """A loss of which the script makes the gradients; see :class:`node.evaluation.Loss`."""

    def __init__(self, turns: Turns, rows: torch.Tensor) -> None:
        self._turns, self._rows, self._value = turns, rows, math.nan

    def backward(self) -> None:
        """It is the script's turn."""
        self._value = self._turns.gradients(self._rows)

    def detach(self) -> float:
        """What the script said of it."""
        return self._value

    def __mul__(self, share: float) -> Turn:
        raise AssertionError("a batch of a script is read in one pass, by one rank")


class OwnModel:
    """A script's model as a worker sees it: see :class:`node.evaluation.Model`."""

    def __init__(self, parts: Parts, turns: Turns) -> None:
        self._parts, self._turns, self._measuring = parts, turns, False

    def loss(self, rows: torch.Tensor) -> Turn | torch.Tensor:
        """Of a batch, or the validation loss, whatever the rows."""
        if self._measuring:
            assert self._parts.validate is not None, "only what can be measured is"
            return torch.tensor(float(self._parts.validate()))
        return Turn(self._turns, rows)

    def train(self, mode: bool = True) -> object:
        """As of ``torch.nn.Module``."""
        self._measuring = not mode
        return self._parts.model.train(mode)
