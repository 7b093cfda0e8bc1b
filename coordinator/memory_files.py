"""What the reducer carries from round to round, as safetensors files: the last two are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from coordinator.segments import sync, sync_folder
from optim.mean import F32
from protos.digests import combine, tensor_digest

_SUFFIX: Final = ".safetensors"
_PARTIAL: Final = ".partial"


class MemoryFiles:
    """The files of a folder, one for each round that has been stored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def store(self, round_index: int, memory: Mapping[str, F32]) -> str:
        """Write the memory after a round; when this returns it is on the disk. Returns its digest.

        Raises:
            OSError: it could not be written.
        """
        arrays = {key: np.ascontiguousarray(array, np.float32) for key, array in memory.items()}
        path = self._path(round_index)
        partial = path.with_suffix(_PARTIAL)
        try:
            save_file(arrays, partial)
        except SafetensorError as error:  # its way to tell of the system's errors
            raise OSError(str(error)) from error
        with open(partial, "rb+") as file:
            sync(file.fileno())
        os.replace(partial, path)
        sync_folder(self.folder)
        return _digest(arrays)

    def load(self, round_index: int, digest: str) -> dict[str, F32] | None:
        """Read a memory back; ``None`` if it is not what was stored."""
        try:
            arrays: dict[str, F32] = load_file(self._path(round_index))
        except (OSError, SafetensorError):
            return None
        if any(array.dtype != np.float32 for array in arrays.values()) or _digest(arrays) != digest:
            return None
        return arrays

    def keep(self, rounds: frozenset[int]) -> None:
        """Remove all but those of ``rounds``."""
        names = {self._path(round_index).name for round_index in rounds}
        for path in list(self.folder.iterdir()):
            if path.suffix in (_SUFFIX, _PARTIAL) and path.name not in names:
                with suppress(FileNotFoundError):
                    path.unlink()

    def _path(self, round_index: int) -> Path:
        return self.folder / f"{round_index:08d}{_SUFFIX}"


def _digest(arrays: Mapping[str, F32]) -> str:
    return combine(
        {
            key: tensor_digest(key, "float32", array.shape, array.reshape(-1).view(np.uint8).data)
            for key, array in arrays.items()
        }
    )
