"""The memory of one group: this rank's segment, the whole buffer while needed, and gradients on the way.

Every parameter of a group exists twice. The *sharded* one is a view of the resident segment: the whole matrix
on its owner, ``(0, …)`` elsewhere; optimizers and checkpoints see it. The *unsharded* one is a view of the
whole buffer, made once and used by forward and backward.

The whole buffer is **pinned**: autograd saves views of it (``F.linear`` saves ``W.t()``), and a view follows
the storage object, not an address. So between uses the storage is shrunk to no bytes and grown again, never
replaced, shared or handed to another group; views that were saved in forward are then valid in backward.
Two rules follow, which the tests demonstrate:

* parameters are never given another storage (``.data`` swaps keep the old weights alive, or lose them);
* the buffer is filled through an alias that has its own version counter, so that autograd does not take a
  gather for a modification of saved weights, whenever the transport's thread gets to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor, nn

from node.island.layout import GroupLayout, LayoutError, Piece


def local_shape(shape: Sequence[int], piece: Piece | None) -> tuple[int, ...]:
    """Shape of what a rank holds of a tensor of ``shape``: the tensor's own where it is whole, whole rows
    where the piece has only those, else flat; no rows where it holds nothing."""
    shape = tuple(shape)
    if piece is None:
        return (0, *shape[1:])
    row = prod(shape[1:]) if len(shape) > 1 else 1
    if piece.numel == prod(shape):
        return shape
    if piece.start % row == 0 and piece.numel % row == 0:
        return (piece.numel // row, *shape[1:])
    return (piece.numel,)


class DBuffer:
    """Memory of a group on one rank.

    Args:
        layout: offsets and cuts.
        rank: this rank in the shard group.
        dtype: of the resident segment (the master weights), of sharded gradients and optimizer state.
        compute_dtype: of the whole buffer and of unsharded gradients.
        device: where all of it lives; ``meta`` until :meth:`move`.
        requires_grad: of all parameters in the group.

    Attributes:
        arrived: called with each sharded parameter whose gradient is in place, see :meth:`accept`.
    """

    def __init__(
        self,
        layout: GroupLayout,
        rank: int,
        *,
        dtype: torch.dtype,
        compute_dtype: torch.dtype | None = None,
        device: torch.device,
        requires_grad: bool = True,
    ) -> None:
        self.layout, self.rank = layout, rank
        self.dtype, self.compute_dtype = dtype, compute_dtype or dtype
        self.pieces = [layout.piece(index, rank) for index in range(len(layout.tensors))]
        self.low, self.high = layout.cuts[rank], layout.cuts[rank + 1]
        self.shard = torch.zeros(layout.resident(rank), dtype=dtype, device=device)
        self.sharded = [
            nn.Parameter(self.shard_view(index), requires_grad=requires_grad)
            for index in range(len(layout.tensors))
        ]
        self.arrived: Callable[[nn.Parameter], None] | None = None
        self._make_full()

    def _make_full(self) -> None:
        self.full = torch.empty(self.layout.total, dtype=self.compute_dtype, device=self.shard.device)
        self.storage = self.full.untyped_storage()
        self._nbytes = self.storage.nbytes()
        # the alias has the buffer's storage and its own version counter
        self._alias = torch.empty(0, dtype=self.compute_dtype, device=self.shard.device)
        self._alias.set_(self.storage, 0, (self.layout.total,), (1,))
        self.unsharded = [
            nn.Parameter(self._full_view(self.full, index), requires_grad=sharded.requires_grad)
            for index, sharded in enumerate(self.sharded)
        ]
        self.release()

    def _full_view(self, buffer: Tensor, index: int) -> Tensor:
        meta, offset = self.layout.tensors[index], self.layout.offsets[index]
        return buffer[offset : offset + meta.numel].view(meta.shape)

    def shard_view(self, index: int, segment: Tensor | None = None) -> Tensor:
        """What this rank holds of tensor ``index``: a view of ``segment`` (by default the resident one)."""
        segment = self.shard if segment is None else segment
        piece = self.pieces[index]
        offset, numel = (piece.offset, piece.numel) if piece is not None else (0, 0)
        return segment[offset : offset + numel].view(local_shape(self.layout.tensors[index].shape, piece))

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.shard.device

    @property
    def resident_bytes(self) -> int:
        """Bytes of the segment."""
        return self.shard.numel() * self.shard.element_size()

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole buffer at the moment: all or none."""
        return self.storage.nbytes()

    @torch.no_grad()
    def fill(self, index: int, tensor: Tensor) -> None:
        """Copy this rank's part out of the whole ``tensor``.

        Raises:
            LayoutError: for another shape than the layout's.
        """
        meta, piece = self.layout.tensors[index], self.pieces[index]
        if tuple(tensor.shape) != meta.shape:
            raise LayoutError(f"{meta.name} has shape {meta.shape}, not {tuple(tensor.shape)}")
        if piece is not None:
            source = tensor.reshape(-1)[piece.start : piece.start + piece.numel]
            self.shard[piece.offset : piece.offset + piece.numel].copy_(source)

    @torch.no_grad()
    def segment(self) -> Tensor:
        """This rank's segment in the compute dtype, cast in one operation: what a gather sends."""
        return self.shard.to(self.compute_dtype)

    def allocate(self) -> Tensor:
        """Give the buffer its bytes, on a GPU from the current stream's pool: a transfer calls this where the
        program computes (:mod:`node.island.streams`). Returns the flat alias through which it is filled."""
        self.storage.resize_(self._nbytes)
        return self._alias

    def release(self) -> None:
        """Take the buffer's bytes away; the storage, and the views that autograd saved, stay."""
        if self.device.type != "meta":
            self.storage.resize_(0)

    @torch.no_grad()
    def pack(self, into: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Move the unsharded gradients to a flat buffer of ``dtype`` (adding to ``into``, if given).

        Missing gradients count as zeros, and so does padding.
        """
        fresh = into is None
        if into is None:
            into = torch.zeros(self.layout.total, dtype=dtype, device=self.device)
        for index, parameter in enumerate(self.unsharded):
            if parameter.grad is not None:
                view = self._full_view(into, index)
                if fresh:
                    view.copy_(parameter.grad)
                else:
                    view.add_(parameter.grad)
                parameter.grad = None
        return into

    @torch.no_grad()
    def accept(self, segment: Tensor, scale: float) -> list[bool]:
        """Scale a reduced segment in one operation and make its views the sharded gradients (added to those
        that are there). A parameter that is frozen, or of which this rank holds nothing, gets none.

        Returns:
            Which sharded parameters had no gradient before.
        """
        segment = segment.to(self.dtype)
        if scale != 1.0:
            segment.mul_(scale)
        fresh = [parameter.grad is None for parameter in self.sharded]
        for index, parameter in enumerate(self.sharded):
            if self.pieces[index] is None or not parameter.requires_grad:
                continue
            view = self.shard_view(index, segment)
            if parameter.grad is None:
                parameter.grad = view
            else:
                parameter.grad.add_(view)
            if self.arrived is not None:
                self.arrived(parameter)
        return fresh

    @torch.no_grad()
    def scale_(self, factor: float | Tensor) -> None:
        """Multiply the resident weights, all at once."""
        self.shard.mul_(factor)

    @torch.no_grad()
    def zero_(self) -> None:
        """Set the resident weights to zero, all at once."""
        self.shard.zero_()

    @torch.no_grad()
    def move(self, values: Sequence[nn.Parameter]) -> None:
        """Rebuild the memory around sharded parameters that something else has converted (``Module.to``,
        ``to_empty``): same shapes, perhaps another device or dtype.

        ``values`` become the sharded parameters; their contents are kept. The unsharded parameters are new.

        Raises:
            LayoutError: if a shape has changed, or devices and dtypes are mixed.
        """
        kinds = {(value.device, value.dtype) for value in values}
        for index, value in enumerate(values):
            expected = local_shape(self.layout.tensors[index].shape, self.pieces[index])
            if tuple(value.shape) != expected or len(kinds) != 1:
                raise LayoutError(
                    f"{self.layout.tensors[index].name} was replaced by a tensor of shape"
                    f" {tuple(value.shape)}, {value.dtype} on {value.device}: this rank holds {expected},"
                    f" and a group has one dtype and device; convert whole modules"
                )
        device, dtype = next(iter(kinds))
        if self.compute_dtype == self.dtype:
            self.compute_dtype = dtype
        self.dtype = dtype
        self.shard = torch.zeros(self.layout.resident(self.rank), dtype=dtype, device=device)
        for index, value in enumerate(values):
            view = self.shard_view(index)
            if device.type != "meta":
                view.copy_(value)
            value.data = view
        self.sharded = list(values)
        self._make_full()
