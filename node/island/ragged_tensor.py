"""A rank's piece of a parameter, as ``torch.distributed.checkpoint`` wants to see it.

A checkpoint knows tensors by name and global shape, and their contents as axis-aligned boxes. A piece is a
range of the flattened tensor and hence a few boxes, which follow from the layout alone: neither saving nor
loading needs to ask the other ranks what they hold, and nothing in the files depends on who held what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from node.island.layout import Box, LayoutError, boxes


class RaggedTensor(Tensor):
    """Flat memory of one piece with the shape of the whole; make it with :meth:`of`.

    It is a ``Tensor`` because the checkpoint library follows its protocol for tensors only, and
    :meth:`size` is the global one because that is what the library compares with the file. It is made for the
    library: compute with the tensor that it was made of, whose memory it shares.
    """

    _global: torch.Size
    _boxes: list[Box]

    @staticmethod
    def of(local: Tensor, shape: Sequence[int], start: int) -> RaggedTensor:
        """The elements ``start … start + local.numel()`` of a tensor of global ``shape``.

        Args:
            local: contiguous, of any shape; nothing of it is copied.
            shape: of the whole tensor.
            start: first element in the flattened whole.

        Raises:
            LayoutError: for a piece that does not fit the shape, or is not contiguous.
        """
        size = torch.Size(shape)
        if start < 0 or start + local.numel() > size.numel():
            raise LayoutError(
                f"elements {start} … {start + local.numel()} are outside of a tensor of {tuple(size)}"
            )
        if not local.is_contiguous():
            raise LayoutError(f"a piece of a tensor of {tuple(size)} is not contiguous in memory")
        piece = local.detach().view(-1).as_subclass(RaggedTensor)
        piece._global, piece._boxes = size, boxes(size, start, local.numel())
        return piece

    def on_host(self) -> RaggedTensor:
        """A copy of the piece in host memory."""
        copy = self.as_subclass(Tensor).to("cpu", copy=True).as_subclass(RaggedTensor)
        copy._global, copy._boxes = self._global, self._boxes
        return copy

    def size(self, dim: int | None = None) -> Any:
        """Global size."""
        return self._global if dim is None else self._global[dim]

    def _chunk(self, box: Box) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.lengths))

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=self._chunk(box), properties=properties, size=self._global),
            )
            for box in self._boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(box) for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        flat, begin = self.as_subclass(Tensor), self._boxes[0].start if self._boxes else 0
        for box in self._boxes:
            if index.offset is not None and tuple(index.offset) == box.offsets:
                size, low = torch.Size(box.lengths), box.start - begin
                return flat[low : low + size.numel()].view(size)
        raise LayoutError(f"{index.fqn} has no box at {index.offset} on this rank")
