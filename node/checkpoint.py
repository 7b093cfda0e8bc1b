"""Checkpoints: everything a node needs to go on as if it had never stopped.

A folder per checkpoint, ``round-00000200`` for the state before round 200: ``model.safetensors`` (shared
state), ``local.safetensors`` (what never leaves the node: momenta, error feedback), ``run.toml`` and
``meta.json``; of a node that trains alone also ``reducer.safetensors``, if its reduction has a memory. The
ranks of an island write what they hold to files of their own (``model-00002-of-00004.safetensors``). Tensors
are whole and found by name: any number of ranks can load what any other number saved. A checkpoint is written
under another name, synced and renamed, so a folder of that name is always complete.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch

from node.checkpoint_files import Stored, reason, sync, write_tensors, write_text
from node.checkpoint_meta import (
    KINDS,
    META,
    CheckpointError,
    Contents,
    Kind,
    Meta,
    file_name,
    merged,
    repeated,
)
from node.exchange.tensor_bytes import LayoutError, check_layout, layout
from node.joint import gathered
from node.ranks import Alone, Ranks
from protos.digests import combine

__all__ = [
    "CheckpointError",
    "Meta",
    "Saving",
    "find",
    "load",
    "load_parameters",
    "load_reducer",
    "newest",
    "prepare",
    "save",
]

KEEP: Final = 2  # checkpoints of a run that stay on disk
OPTIMIZER: Final = "optimizer/"  # how the names of tensors begin that are not the model's
ALONE: Final = Alone()
_FOLDER: Final = re.compile(r"round-(\d{8,})")
_STATES: Final[Mapping[Kind, str]] = {"model": "shared state", "local": "local state"}

T = TypeVar("T")


@dataclass(frozen=True)
class Saving:
    """Where and how often checkpoints are written: every ``every`` rounds (0 = never) and at the stop."""

    folder: Path
    every: int = 0


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
    samples: int = 0,
    ranks: Ranks = ALONE,
) -> Path:
    """Write the checkpoint of the state before ``round_index`` into ``folder``; keep only the newest two.

    All ranks of the node call it. They see one folder, and no two of them hold a tensor of the same name.

    Args:
        folder: of all checkpoints of this node; made if it is not there.
        shared: the part of the shared state that this rank holds, and ``local`` likewise.
        shared_digest: of the whole shared state, from the rank that leads.
        reducer: memory of a reduction that this node makes for itself.
        samples: first global sample index behind all that the run has leased, as far as this node knows.
        ranks: of the node.

    Returns:
        The checkpoint's own folder.

    Raises:
        CheckpointError: on all ranks, if one of them could not write (disk full, no permission) or the state
            is not that of ``shared_digest``; older checkpoints are untouched.
        ExchangeError: a rank is gone.
    """
    target = folder / f"round-{round_index:08d}"
    scratch = folder / f".{target.name}.{os.getpid()}.tmp"
    leads = ranks.rank == 0

    def begin() -> tuple[None, str]:
        if leads:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".round-*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            scratch.mkdir()
        return None, scratch.name

    def write() -> tuple[None, dict[Kind, Contents]]:
        if not scratch.is_dir():
            raise CheckpointError(f"{scratch} is not there: all ranks of a node save to one folder")
        written: dict[Kind, Contents] = {}
        for kind, tensors in zip(KINDS, (shared, local, reducer or {}), strict=True):
            file = file_name(kind, ranks.rank, ranks.size)
            written[kind] = {file: write_tensors(scratch / file, tensors)} if tensors else {}
        return None, written

    def publish() -> tuple[None, None]:
        if not leads:
            return None, None
        contents = {kind: _joined([each[kind] for each in written]) for kind in KINDS}
        digest = combine(merged(contents["model"]))
        if digest != shared_digest:
            raise CheckpointError(
                f"the shared state has the digest {digest}, and should have {shared_digest}: it was changed "
                "after it had been agreed"
            )
        meta = Meta(round_index, run_name, run_digest, digest, samples, **contents)
        write_text(scratch / "run.toml", run_toml)
        write_text(scratch / META, meta.to_json())
        sync(scratch)
        replaced = folder / f".{target.name}.replaced.tmp"
        if target.exists():
            os.rename(target, replaced)
        os.rename(scratch, target)
        sync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return None, None

    try:
        _, names = _together(ranks, "the beginning of a checkpoint", begin)
        scratch = folder / names[0]
        _, written = _together(ranks, "the files of a checkpoint", write)
        _together(ranks, "the end of a checkpoint", publish)
    except CheckpointError as error:
        raise CheckpointError(
            f"the checkpoint of round {round_index} could not be written to {folder}: {error}; "
            "earlier checkpoints are untouched"
        ) from error
    finally:
        if leads:
            shutil.rmtree(scratch, ignore_errors=True)
    if leads:
        for _, old in _folders(folder)[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    return target


def _joined(parts: list[Contents]) -> Contents:
    joined = {file: digests for part in parts for file, digests in part.items()}
    if (twice := repeated(joined)) is not None:
        raise CheckpointError(f"two ranks hold {twice!r}")
    return joined


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
            f"checkpoints cannot be saved in {folder}: {reason(error)}; give --save a folder that can be "
            "written to"
        ) from error


def newest(path: Path) -> Path | None:
    """The checkpoint meant by ``path``: itself, or the newest in it; ``None`` if there is none."""
    if (path / META).is_file():
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
    ranks: Ranks = ALONE,
) -> Meta:
    """Load a checkpoint into ``shared`` and ``local``, in place.

    All ranks of the node call it; each reads the tensors that it holds, whoever wrote them. Run, names,
    dtypes and shapes are checked before anything is changed, the digest of a tensor before it is taken.
    ``loaded`` is called when ``shared`` has its values and ``local`` has not.

    Raises:
        CheckpointError: on all ranks, if for one of them it belongs to another run, does not fit, or is
            damaged.
        ExchangeError: a rank is gone.
    """
    held: dict[Kind, Mapping[str, torch.Tensor]] = {"model": shared, "local": local}
    with ExitStack() as stack:

        def check() -> tuple[tuple[Meta, dict[Kind, Stored]], dict[str, Any]]:
            meta = Meta.read(path)
            if meta.run_digest != run_digest:
                raise CheckpointError(
                    f"{path} belongs to another run: its run file has the digest {meta.run_digest}, this one "
                    f"{run_digest}; {path / 'run.toml'} shows what it was trained with"
                )
            stored = {kind: stack.enter_context(Stored(path, meta.contents(kind))) for kind in held}
            for kind, tensors in held.items():
                check_layout(stored[kind].rows(tensors), layout(tensors), f"{path}, {_STATES[kind]},")
            told: dict[str, Any] = {kind: sorted(tensors) for kind, tensors in held.items()}
            return (meta, stored), {**told, "state": [str(path), meta.round, meta.state_digest]}

        def read() -> tuple[None, None]:
            for name, tensor in shared.items():
                _copy(stored["model"].read(name), tensor)
            loaded()
            for name, tensor in local.items():
                _copy(stored["local"].read(name), tensor)
            return None, None

        (meta, stored), told = _together(ranks, "a look at the checkpoint to load", check)
        _check_same([each["state"] for each in told])
        for kind in held:
            everywhere = set(itertools.chain.from_iterable(each[kind] for each in told))
            if extra := [name for name in stored[kind].names if name not in everywhere]:
                raise CheckpointError(
                    f"{path}, {_STATES[kind]}, holds {len(extra)} tensors that this model and method do not "
                    f"have, first {extra[0]!r}"
                )
        _together(ranks, "the loading of a checkpoint", read)
    return meta


def _check_same(states: list[Any]) -> None:
    """Path, round and digest as each rank read them: a folder may get a new checkpoint between two looks."""
    for rank, (where, round_index, digest) in enumerate(states):
        if [round_index, digest] != states[0][1:]:
            raise CheckpointError(
                f"rank 0 has read {states[0][0]}, rank {rank} another state from {where}: start the node "
                "again, or name one checkpoint of the folder"
            )


def load_parameters(path: Path, parameters: Mapping[str, torch.Tensor]) -> Meta:
    """Copy a checkpoint's parameters of these names into them: the model alone, as the nodes share it.

    Raises:
        CheckpointError: they are not there, do not fit, or are damaged.
    """
    meta = Meta.read(path)
    with Stored(path, meta.model) as stored:
        try:
            check_layout(stored.rows(parameters), layout(parameters), str(path))
        except LayoutError as error:
            raise CheckpointError(str(error)) from error
        for name, parameter in parameters.items():
            _copy(stored.read(name), parameter)
    return meta


def load_reducer(path: Path, meta: Meta) -> dict[str, torch.Tensor]:
    """The memory of the reduction in the checkpoint ``path``; empty if it has none.

    Raises:
        CheckpointError: it is damaged.
    """
    with Stored(path, meta.reducer) as stored:
        return {name: stored.read(name).clone() for name in stored.names}


@torch.no_grad()
def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.detach().copy_(source)


def _together(ranks: Ranks, what: str, action: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
    """Do something on every rank: what it came to here, and what all ranks tell of it, as JSON has it.

    Raises:
        CheckpointError: on all ranks, if it failed on one; the text is that rank's.
    """
    mine: T | None = None
    told: Any = None
    failure = ""
    cause: Exception | None = None
    try:
        mine, told = action()
    except CheckpointError as error:
        failure, cause = str(error), error
    except (OSError, ValueError) as error:
        failure, cause = reason(error), error
    answers = gathered(ranks, what, [told, failure])
    for rank, (_, why) in enumerate(answers):
        if why:
            raise CheckpointError(why if ranks.size == 1 else f"rank {rank}: {why}") from cause
    return cast(T, mine), [told for told, _ in answers]


def _folders(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first."""
    found = []
    for entry in folder.iterdir():
        match = _FOLDER.fullmatch(entry.name)
        if match and (entry / META).is_file():
            found.append((int(match.group(1)), entry))
    return sorted(found)
