"""Shared state: the tensors that must be bit-identical on every node, their digest, and their exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from node.exchange.tensor_bytes import Row, byte_view, check_layout, layout, total_bytes
from protos.digests import combine, tensor_digest, torch_digest


def main_dtype(rows: Iterable[Row]) -> str:
    """The dtype that most bytes have; ``"float32"`` if there are none."""
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.dtype] = sizes.get(row.dtype, 0) + row.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="float32")


class SharedState:
    """A view of live tensors, digested after every round.

    Args:
        tensors: name to tensor, as :meth:`optim.round_optimizer.RoundOptimizer.shared_tensors` gives them.
            They are updated in place by the optimizer and by :meth:`copy_from`.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {name: tensors[name].detach() for name in sorted(tensors)}
        self.rows: tuple[Row, ...] = layout(self.tensors)
        self._views: list[tuple[Row, torch.Tensor, int, memoryview | None]] = []
        for row in self.rows:
            tensor = self.tensors[row.name]
            on_host = tensor.device.type == "cpu" and tensor.is_contiguous()
            self._views.append((row, tensor, tensor.data_ptr(), byte_view(tensor) if on_host else None))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return total_bytes(self.rows)

    @property
    def dtype(self) -> str:
        """The dtype that most of the elements have, as the coordinator compares it: ``"float32"``."""
        return main_dtype(self.rows)

    def digests(self) -> dict[str, str]:
        """The digest of every tensor by name, in hex; straight from memory for tensors on the CPU.

        Raises:
            RuntimeError: a tensor was given other storage, so that this view of the state is out of date.
        """
        digests = {}
        for row, tensor, address, view in self._views:
            if tensor.data_ptr() != address:
                raise RuntimeError(
                    f"the storage of shared tensor {row.name!r} was replaced: update it in place"
                )
            if view is None:
                digests[row.name] = torch_digest(row.name, tensor)
            else:
                digests[row.name] = tensor_digest(row.name, row.dtype, row.shape, view)
        return digests

    def digest(self) -> str:
        """The digest of all tensors together, as :func:`protos.digests.state_digest` defines it."""
        return combine(self.digests())

    @torch.no_grad()
    def copy_from(self, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
        """Take all values from ``tensors``, in place.

        Raises:
            LayoutError: names, dtypes or shapes differ; nothing was taken. ``origin`` is who holds them.
        """
        check_layout(layout(tensors), self.rows, origin)
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])
