"""A script's own data, as far as a run knows of them: how many samples there are, and which are read when."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

import numpy as np
import torch

from node.shuffle import ROUNDS, draw, permute


@dataclass(frozen=True)
class OwnSamples:
    """Samples 0 to ``samples - 1`` of the user's data, in an order of each epoch.

    Rows stand for them: the index, and the epoch. What is read at an index is the script's affair.

    Attributes:
        samples: how many there are.
        name: which data they are, and which edition of them; nodes with another are refused.
    """

    samples: int
    name: str = ""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"there is nothing to read: the data has {self.samples} samples")

    @property
    def digest(self) -> str:
        """sha256 of what all nodes have to agree on, in hex."""
        facts = {"format": "atoll own data 1", "samples": self.samples, "name": self.name}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @property
    def bytes_per_token(self) -> float:
        """There is no text."""
        return math.nan

    def batch(self, start: int, count: int, seed: int) -> torch.Tensor:
        """Samples ``start`` to ``start + count - 1`` of the run as rows: ``int64[count, 2]``.

        Within an epoch every sample comes once, in an order that follows from seed and epoch.
        """
        rows = np.empty((count, 2), dtype=np.int64)
        done = 0
        while done < count:
            epoch, first = divmod(start + done, self.samples)
            here = min(count - done, self.samples - first)
            keys = draw(ROUNDS, seed, epoch)
            rows[done : done + here, 0] = permute(np.arange(first, first + here), self.samples, keys)
            rows[done : done + here, 1] = epoch
            done += here
        return torch.from_numpy(rows)

    def validation(self, count: int) -> torch.Tensor:
        """One row: the script measures in its own way."""
        return torch.zeros(1, 2, dtype=torch.int64)
