"""Checkpoints: everything a node needs to go on as if it had never stopped.

A folder per checkpoint, ``round-00000200`` for the state before round 200: ``model.safetensors`` (shared
state), ``local.safetensors`` (what never leaves the node: momenta, error feedback), ``run.toml`` and
``meta.json``; of a node that trains alone also ``reducer.safetensors``, if its reduction has a memory. It is
written under another name, synced and renamed, so a folder of that name is always complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from node.exchange.tensor_bytes import LayoutError, Row, check_layout, layout
from protos.digests import state_digest

FORMAT: Final = 1
KEEP: Final = 2  # checkpoints of a run that stay on disk
_FOLDER: Final = re.compile(r"round-(\d{8,})")
_MAX_META_BYTES: Final = 1 << 20
_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the text names the file and what to do."""


@dataclass(frozen=True)
class Saving:
    """Where and how often checkpoints are written: every ``every`` rounds (0 = never) and at the stop."""

    folder: Path
    every: int = 0


@dataclass(frozen=True)
class Meta:
    """What ``meta.json`` says."""

    round: int  # the next to be trained
    run: str
    run_digest: str
    state_digest: str  # of the shared state
    local_digest: str
    reducer_digest: str = ""  # empty: there is no such file

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": FORMAT, **self.__dict__}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Meta:
        """Parse a ``meta.json``.

        Raises:
            CheckpointError: missing, unreadable, or not of this format.
        """
        try:
            if path.stat().st_size > _MAX_META_BYTES:
                raise ValueError(f"it has more than {_MAX_META_BYTES} bytes")
            raw: Any = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(raw, dict) or raw.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            given = {field.name for field in fields(cls) if field.default is MISSING or field.name in raw}
            meta = cls(**{name: raw[name] for name in given})
            if not isinstance(meta.round, int) or isinstance(meta.round, bool) or meta.round < 0:
                raise ValueError(f"round is {meta.round!r}")
            if not all(isinstance(value, str) for name, value in meta.__dict__.items() if name != "round"):
                raise ValueError("a digest is not a text")
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} is not the description of a checkpoint ({error}): use another checkpoint"
            ) from error
        return meta


def save(
    folder: Path,
    *,
    round_index: int,
    run_name: str,
    run_toml: str,
    run_digest: str,
    shared: Mapping[str, torch.Tensor],
    shared_digest: str,
    local: Mapping[str, torch.Tensor],
    reducer: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write the checkpoint of the state before ``round_index`` into ``folder``; keep only the newest two.

    Args:
        folder: of all checkpoints of this node; made if it is not there.
        shared_digest: of ``shared``.
        reducer: memory of a reduction that this node makes for itself.

    Returns:
        The checkpoint's own folder.

    Raises:
        CheckpointError: it could not be written (disk full, no permission); older checkpoints are untouched.
    """
    target = folder / f"round-{round_index:08d}"
    scratch = folder / f".{target.name}.{os.getpid()}.tmp"
    reducer_digest = state_digest(reducer) if reducer else ""
    meta = Meta(round_index, run_name, run_digest, shared_digest, state_digest(local), reducer_digest)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".round-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch.mkdir()
        _write_tensors(scratch / "model.safetensors", shared)
        _write_tensors(scratch / "local.safetensors", local)
        if reducer:
            _write_tensors(scratch / "reducer.safetensors", reducer)
        _write_text(scratch / "run.toml", run_toml)
        _write_text(scratch / "meta.json", meta.to_json())
        _sync(scratch)
        replaced = folder / f".{target.name}.replaced.tmp"
        if target.exists():
            os.rename(target, replaced)
        os.rename(scratch, target)
        _sync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of round {round_index} could not be written to {folder}: {_reason(error)}; "
            "earlier checkpoints are untouched"
        ) from error
    for _, old in _folders(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def prepare(folder: Path) -> None:
    """Make ``folder`` and try to write there.

    Raises:
        CheckpointError: no checkpoint could be saved there.
    """
    trial = folder / f".trial.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be saved in {folder}: {_reason(error)}; give --save a folder that can be "
            "written to"
        ) from error


def newest(path: Path) -> Path | None:
    """The checkpoint meant by ``path``: itself, or the newest in it; ``None`` if there is none."""
    if (path / "meta.json").is_file():
        return path
    folders = _folders(path) if path.is_dir() else []
    return folders[-1][1] if folders else None


def find(path: Path) -> Path:
    """As :func:`newest`.

    Raises:
        CheckpointError: there is none.
    """
    found = newest(path)
    if found is None:
        raise CheckpointError(
            f"there is no checkpoint in {path}: name the folder that --save wrote to; a node saves every "
            "--save-every rounds and when it stops, so one that was killed before has saved nothing"
        )
    return found


def load(
    path: Path,
    *,
    run_digest: str,
    shared: Mapping[str, torch.Tensor],
    local: Mapping[str, torch.Tensor],
    loaded: Callable[[], None] = lambda: None,
) -> Meta:
    """Load a checkpoint into ``shared`` and ``local``, in place.

    Run, names, dtypes and shapes are checked before anything is changed, digests afterwards. ``loaded`` is
    called when ``shared`` has its values and ``local`` has not.

    Raises:
        CheckpointError: it belongs to another run, does not fit, or is damaged.
    """
    meta = Meta.read(path / "meta.json")
    if meta.run_digest != run_digest:
        raise CheckpointError(
            f"{path} belongs to another run: its run file has the digest {meta.run_digest}, this one "
            f"{run_digest}; {path / 'run.toml'} shows what it was trained with"
        )
    files = (
        (path / "model.safetensors", shared, meta.state_digest, loaded),
        (path / "local.safetensors", local, meta.local_digest, lambda: None),
    )
    try:
        for file, tensors, _, _ in files:
            check_layout(_rows(file), layout(tensors), str(file))
        for file, tensors, digest, then in files:
            _read_tensors(file, tensors)
            _check_digest(file, tensors, digest)
            then()
    except (OSError, SafetensorError, LayoutError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {_reason(error)}") from error
    return meta


def load_reducer(path: Path, meta: Meta) -> dict[str, torch.Tensor]:
    """The memory of the reduction in the checkpoint ``path``; empty if it has none.

    Raises:
        CheckpointError: it is damaged.
    """
    if not meta.reducer_digest:
        return {}
    file = path / "reducer.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {_reason(error)}") from error
    _check_digest(file, tensors, meta.reducer_digest)
    return tensors


def _check_digest(file: Path, tensors: Mapping[str, torch.Tensor], digest: str) -> None:
    if (found := state_digest(tensors)) != digest:
        raise CheckpointError(
            f"{file} is damaged: its digest is {found}, meta.json says {digest}; use an earlier one"
        )


def _folders(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first."""
    found = []
    for entry in folder.iterdir():
        match = _FOLDER.fullmatch(entry.name)
        if match and (entry / "meta.json").is_file():
            found.append((int(match.group(1)), entry))
    return sorted(found)


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    _sync(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
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


def _rows(file: Path) -> list[Row]:
    with safe_open(file, framework="pt") as reader:
        rows = []
        for name in sorted(reader.keys()):
            part = reader.get_slice(name)
            dtype = str(part.get_dtype())
            rows.append(Row(name, _DTYPES.get(dtype, dtype), tuple(part.get_shape())))
        return rows


@torch.no_grad()
def _read_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with safe_open(file, framework="pt") as reader:
        for name, tensor in tensors.items():
            tensor.detach().copy_(reader.get_tensor(name))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)
