"""The model of a simulated run: one voted tensor, so small that a schedule takes milliseconds."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from protos.buckets import Bucket, BucketTable, TableSchedule
from protos.digests import combine, tensor_digest

RUN_DIGEST: Final = "simulated-run"
BATCH: Final = 4  # samples of a node in a round
NAME: Final = "w"
SHAPE: Final = (32, 32)
STEP: Final = np.float32(0.0078)
DECAY: Final = np.float32(0.9993)

TABLE: Final = BucketTable((Bucket.of(NAME, "majority", [(NAME, SHAPE)]),))
TABLES: Final = TableSchedule((TABLE,), (0,))


class Replica:
    """A copy of the shared state: fp32, and the round that it is the state before."""

    def __init__(self) -> None:
        self.round = 0
        self.tensor = torch.zeros(SHAPE)
        self._values = self.tensor.numpy()
        self._values[:] = np.linspace(-1.0, 1.0, self._values.size, dtype=np.float32).reshape(SHAPE)
        self.digest = self._digest()

    def apply(self, payload: bytes | None) -> None:
        """Take the next result; ``None``: a round without voters. Multiply and add are rounded each."""
        if payload is not None:
            bits = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
            signs = bits[: self._values.size].astype(np.float32) * np.float32(2) - np.float32(1)
            np.multiply(self._values, DECAY, out=self._values)
            np.subtract(self._values, (signs * STEP).reshape(SHAPE), out=self._values)
        self.round += 1
        self.digest = self._digest()

    def loaded(self, round_index: int) -> None:
        """The tensor has been written from outside: it is the state before ``round_index``."""
        self.round = round_index
        self.digest = self._digest()

    def flip(self) -> None:
        """A bit of the memory goes wrong."""
        self._values.view(np.uint32)[0, 0] ^= 1
        self.digest = self._digest()

    def saved(self) -> tuple[int, bytes]:
        """For a checkpoint."""
        return self.round, self._values.tobytes()

    def restore(self, saved: tuple[int, bytes]) -> None:
        """What :meth:`saved` gave."""
        self._values[:] = np.frombuffer(saved[1], np.float32).reshape(SHAPE)
        self.loaded(saved[0])

    def _digest(self) -> str:
        data = self._values.tobytes()
        return combine({NAME: tensor_digest(NAME, "float32", SHAPE, data)})
