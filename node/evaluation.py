"""Evaluation: the validation loss of a model on the run's fixed windows of text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

import torch

_BATCH: Final = 32  # windows a forward pass


class Model(Protocol):
    """What training and evaluation need of a model."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
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
    """Measures a model on ``windows`` validation windows, which are read at the first measurement."""

    def __init__(self, model: Model, data: Data, windows: int, device: torch.device) -> None:
        self._model = model
        self._data = data
        self._count = windows
        self._device = device
        self._windows: torch.Tensor | None = None

    @torch.no_grad()
    def measure(self) -> Validation:
        """The mean over all windows, in batches; the model is left in training mode."""
        if self._windows is None:
            self._windows = self._data.validation(self._count)
        total = 0.0
        self._model.train(False)
        for start in range(0, len(self._windows), _BATCH):
            batch = self._windows[start : start + _BATCH].to(self._device)
            total += float(self._model.loss(batch)) * len(batch)
        self._model.train()
        loss = total / len(self._windows)
        return Validation(loss, loss / math.log(2) / self._data.bytes_per_token)
