"""Counting the memory of tensors: every storage that an operation has touched and that is still alive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are alive whenever an operation of this thread has run.

    Args:
        tensors: that are there already.

    Attributes:
        most: bytes so far.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, StorageWeakRef] = {}
        self.most = 0
        for tensor in tensors:
            self._note(tensor)

    def _note(self, value: object) -> None:
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, Tensor) and not value.is_meta:  # storages without memory have a size too
            reference = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
            self._seen[reference.cdata] = reference

    def now(self) -> int:
        """Bytes at the moment; storages are followed when they are resized."""
        total = 0
        for key, reference in list(self._seen.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._seen[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map(self._note, result)
        self.most = max(self.most, self.now())
        return result
