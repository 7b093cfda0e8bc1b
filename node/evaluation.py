"""Evaluation: the validation loss of a model on the run's fixed windows of text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol, SupportsFloat

import torch

from node.joint import gathered
from node.ranks import Alone, Ranks

_BATCH: Final = 32  # windows a forward pass


class Loss(Protocol):
    """What training needs of a loss, as of ``torch.Tensor``."""

    def backward(self) -> object:
        """Make the gradients."""
        ...

    def detach(self) -> SupportsFloat:
        """The value; known once the gradients have been made."""
        ...

    def __mul__(self, share: float, /) -> Loss: ...


class Model(Protocol):
    """What training and evaluation need of a model."""

    def loss(self, tokens: torch.Tensor) -> Loss:
        """Mean nats per token of ``int64[B, T + 1]``."""
        ...

    def train(self, mode: bool = True) -> object:
        """As of ``torch.nn.Module``."""
        ...


class Data(Protocol):
    """What they need of the data; see :class:`node.data.Dataset`."""

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text behind a token; NaN where that is not known."""
        ...

    def batch(self, start: int, count: int, seed: int) -> torch.Tensor:
        """Training samples ``start`` to ``start + count - 1``: ``int64[count, T + 1]``."""
        ...

    def validation(self, count: int) -> torch.Tensor:
        """At most ``count`` fixed windows: ``int64[n, T + 1]``."""
        ...


@dataclass(frozen=True)
class Validation:
    """A measured loss: nats per token, and the same in bits per byte of text."""

    loss: float
    bits_per_byte: float


class Evaluator:
    """Measures a model on ``windows`` validation windows, which are read at the first measurement.

    The ranks of a node take turns at the batches and add up all losses in the order of the batches: the
    result does not depend on how many they are.
    """

    def __init__(
        self, model: Model, data: Data, windows: int, device: torch.device, ranks: Ranks | None = None
    ) -> None:
        self._model = model
        self._data = data
        self._count = windows
        self._device = device
        self._ranks = ranks or Alone()
        self._windows: torch.Tensor | None = None

    @torch.no_grad()
    def measure(self) -> Validation:
        """The mean over all windows, in batches; the model is left in training mode. All ranks call it."""
        if self._windows is None:
            self._windows = self._data.validation(self._count)
        batches = torch.split(self._windows, _BATCH)
        rank, size = self._ranks.rank, self._ranks.size
        sums: list[float] = []
        self._model.train(False)
        for first in range(0, len(batches), size):  # who has none left goes along with the others
            batch = batches[min(first + rank, len(batches) - 1)]
            sums.append(float(self._model.loss(batch.to(self._device)).detach()) * len(batch))
        self._model.train()
        turns = zip(*gathered(self._ranks, "the validation losses", sums), strict=True)
        total = 0.0
        for value in [value for turn in turns for value in turn][: len(batches)]:
            total += value
        loss = total / len(self._windows)
        return Validation(loss, loss / math.log(2) / self._data.bytes_per_token)
