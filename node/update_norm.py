"""How far a round moves the weights: the norm of the change, from a sample of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

ROWS: Final = 64  # of a sample, at even distances
WIDTH: Final = 16  # elements of a row, which lie together: one line of a cache


class UpdateNorm:
    """Call :meth:`before` and :meth:`after` around a change.

    Of each tensor that has more, 1024 elements are looked at. Steps by signs change all alike, and are
    measured exactly.

    Args:
        tensors: the weights, live and contiguous; of a rank of several, its own part.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        flat = [tensor.detach().view(-1) for tensor in tensors.values()]
        large = [each for each in flat if each.numel() > ROWS * WIDTH]
        self._small = [each for each in flat if each.numel() <= ROWS * WIDTH]
        self._rows = [
            # not a multiple of a matrix's width as a rule: each row looks at other columns
            each.as_strided((ROWS, WIDTH), ((each.numel() - WIDTH) // (ROWS - 1), 1))
            for each in large
        ]
        shares = [
            each.new_full((ROWS, 1), each.numel() / (ROWS * WIDTH), dtype=torch.float32) for each in large
        ]
        self._shares = torch.cat(shares) if shares else None
        self._sample: list[Tensor] = []

    def before(self) -> None:
        """Note the present weights."""
        self._sample = self._read()

    def after(self) -> float:
        """The square of the Euclidean norm of the change since :meth:`before`, as the sample says. Those of
        several ranks add up."""
        changes = [now.sub_(then).square_() for now, then in zip(self._read(), self._sample, strict=True)]
        if self._shares is not None:
            changes[0].mul_(self._shares)
        return sum(float(change.sum()) for change in changes)

    def _read(self) -> list[Tensor]:
        """Copies, the rows of large tensors first."""
        return [torch.cat(views).float() for views in (self._rows, self._small) if views]
