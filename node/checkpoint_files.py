"""The files of a checkpoint: written tensor by tensor, and read by the names of tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from node.checkpoint_meta import CheckpointError, Contents
from node.exchange.tensor_bytes import Row
from node.tensor_file import DTYPES, Entry, FileLayout
from protos.digests import torch_digest


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write and sync one file; one tensor at a time is in host memory. Returns the digest of each.

    Raises:
        OSError: it cannot be written.
        ValueError: a dtype that it cannot hold.
    """
    plan = FileLayout(Entry.of(name, tensor) for name, tensor in tensors.items())
    digests = {}
    with path.open("xb") as file:
        plan.begin(file)
        for name in plan.entries:
            tensor = tensors[name].detach().cpu()
            digests[name] = torch_digest(name, tensor)
            plan.write(file, name, tensor)
    sync(path)
    return digests


def write_text(path: Path, text: str) -> None:
    """Write and sync one file of text."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # folders cannot be opened on Windows
        if path.is_dir():
            return
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: Exception) -> str:
    """What went wrong, with the file if the system names one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)


class Stored:
    """Tensors of a checkpoint's files, by name. To be used in a ``with`` statement; opens files when it must.

    Args:
        folder: of the checkpoint.
        contents: what lies in which file, from its :class:`~node.checkpoint_meta.Meta`.

    Every method raises :class:`CheckpointError` if the file of a tensor is missing or damaged, naming it.
    """

    def __init__(self, folder: Path, contents: Contents) -> None:
        self._folder = folder
        self._places = {
            name: (file, digest) for file, digests in contents.items() for name, digest in digests.items()
        }
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Stored:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """All tensors, sorted."""
        return sorted(self._places)

    def rows(self, names: Iterable[str]) -> list[Row]:
        """Dtype and shape of those of ``names`` that are there, sorted; no values are read."""
        rows = []
        for name in sorted(set(names) & self._places.keys()):
            part = self._file_of(name).get_slice(name)
            code = str(part.get_dtype())
            dtype = str(DTYPES.get(code, code)).removeprefix("torch.")
            rows.append(Row(name, dtype, tuple(part.get_shape())))
        return rows

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, its digest checked. Pages of the file: to be copied, not kept."""
        place, digest = self._places[name]
        try:
            tensor: torch.Tensor = self._file_of(name).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise self._damage(place, reason(error)) from error
        found = torch_digest(name, tensor)
        if found != digest:
            raise self._damage(place, f"the digest of {name!r} is {found}, meta.json says {digest}")
        return tensor

    def _file_of(self, name: str) -> Any:
        """The open file of a tensor that ``meta.json`` lists; it is known to hold it."""
        place, _ = self._places[name]
        file = self._open.get(place)
        if file is None:
            path = self._folder / place
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                held = set(file.keys())
            except FileNotFoundError:
                raise CheckpointError(
                    f"{path} is missing: bring the checkpoint's files back together, or use an earlier one"
                ) from None
            except (OSError, SafetensorError) as error:
                raise self._damage(place, reason(error)) from error
            if lacking := sorted(
                each for each, (at, _) in self._places.items() if at == place and each not in held
            ):
                raise self._damage(place, f"it lacks {lacking[0]!r}, which meta.json lists")
            self._open[place] = file
        return file

    def _damage(self, place: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._folder / place} is damaged: {why}; use an earlier checkpoint")
