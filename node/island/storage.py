"""The files of a checkpoint: one ``safetensors`` file a rank, and an index in JSON that says what is where.

Storage of ``torch.distributed.checkpoint`` whose files contain no pickled objects. The index lists every
file with its length and xxh3 digest, so that a missing, cut or altered file is found before anything of it is
used. A checkpoint is written under another name and renamed at the end: a folder of the given name is
complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

INDEX: Final = "index.json"
FORMAT: Final = 1
_PIECE: Final = 16 << 20
_DTYPES: Final = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the text names the file or tensor."""


class Stored(NamedTuple):
    """Length in bytes and xxh3_128 of one file."""

    bytes: int
    digest: str


class Place(NamedTuple):
    """Where one box of a tensor lies."""

    file: str
    key: str


@dataclass(frozen=True)
class Index:
    """What ``index.json`` says.

    Attributes:
        tensors: dtype, global shape and boxes by name.
        places: file and key of every box, by name and offset.
        files: all files.
        notes: of the writer, for people.
    """

    tensors: dict[str, TensorStorageMetadata]
    places: dict[tuple[str, tuple[int, ...]], Place]
    files: dict[str, Stored]
    notes: dict[str, str]

    def to_json(self) -> str:
        """The file's text."""
        body = {
            "format": FORMAT,
            "notes": self.notes,
            "files": {name: [*stored] for name, stored in sorted(self.files.items())},
            "tensors": {
                name: {
                    "dtype": str(meta.properties.dtype).removeprefix("torch."),
                    "shape": [*meta.size],
                    "boxes": [
                        [[*c.offsets], [*c.sizes], *self.places[name, tuple(c.offsets)]] for c in meta.chunks
                    ],
                }
                for name, meta in sorted(self.tensors.items())
            },
        }
        return json.dumps({**body, "digest": _body_digest(body)}, indent=0) + "\n"

    @staticmethod
    def read(folder: Path) -> Index:
        """Parse the index of the checkpoint in ``folder`` and see that its files are there.

        Raises:
            CheckpointError: for a missing or altered index, and for missing or cut files.
        """
        path = folder / INDEX
        try:
            body: Any = json.loads(path.read_text(encoding="utf-8"))
            digest = body.pop("digest")
            if body["format"] != FORMAT:
                raise ValueError(f"its format is {body['format']}, not {FORMAT}")
            if digest != _body_digest(body):
                raise ValueError("its contents do not have the digest that it states")
            index = Index._parse(body)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing: {folder} is not a complete checkpoint") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}): use another checkpoint") from error
        for name, stored in index.files.items():
            file = folder / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing: copy it back, or use another checkpoint")
            if (length := file.stat().st_size) != stored.bytes:
                raise CheckpointError(
                    f"{file} has {length} bytes, {path.name} says {stored.bytes}: it was cut or replaced"
                )
        return index

    @staticmethod
    def _parse(body: Any) -> Index:
        files = {str(name): Stored(int(size), str(digest)) for name, (size, digest) in body["files"].items()}
        for name in files:
            if name != os.path.basename(name) or name.startswith("."):
                raise ValueError(f"{name!r} is not the name of a file in the same folder")
        tensors: dict[str, TensorStorageMetadata] = {}
        places: dict[tuple[str, tuple[int, ...]], Place] = {}
        for name, item in body["tensors"].items():
            size, chunks = torch.Size(item["shape"]), []
            if item["dtype"] not in _DTYPES.split():
                raise ValueError(f"{name} has the unknown dtype {item['dtype']!r}")
            for offsets, lengths, file, key in item["boxes"]:
                inside = all(
                    low >= 0 and length >= 0 and low + length <= whole
                    for low, length, whole in zip(offsets, lengths, size, strict=True)
                )
                if not inside or file not in files:
                    raise ValueError(f"{name} has a box {offsets} {lengths} in {file} that cannot be")
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)))
                places[name, tuple(offsets)] = Place(file, str(key))
            if sum(math.prod(chunk.sizes) for chunk in chunks) != size.numel():
                raise ValueError(f"the boxes of {name} do not make up its shape {tuple(size)}")
            properties = TensorProperties(dtype=getattr(torch, item["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, size, chunks)
        notes = {str(key): str(value) for key, value in body["notes"].items()}
        return Index(tensors, places, files, notes)


class Writer(StorageWriter):
    """Writes a checkpoint of tensors to ``folder`` (shared by all ranks), which must not exist.

    Args:
        folder: of this checkpoint.
        notes: kept in the index.
    """

    def __init__(self, folder: Path | str, notes: Mapping[str, str] | None = None) -> None:
        self.folder = Path(folder)
        self.notes = dict(notes or {})
        self._draft = self.folder.with_name(f".{self.folder.name}.partial")
        self._made = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between uses."""

    def discard(self) -> None:
        """Remove what has been written; by the rank that made the folder, once no rank writes any more."""
        if self._made:
            shutil.rmtree(self._draft, ignore_errors=True)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The first rank makes the folder."""
        if is_coordinator:
            if self.folder.exists():
                raise CheckpointError(f"{self.folder} exists already: give each checkpoint its own folder")
            shutil.rmtree(self._draft, ignore_errors=True)
            with _writing(self._draft):
                self._draft.mkdir(parents=True)
            self._made = True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank the name of its file."""
        names = [f"rank-{rank:05d}.safetensors" for rank in range(len(plans))]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes to its file."""
        name, tensors, results = str(plan.storage_data), {}, []
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                raise CheckpointError(f"{item.index.fqn} is no tensor: checkpoints have tensors only")
            tensor = cast(Tensor, planner.resolve_data(item)).detach()
            offsets = item.index.offset if item.index.offset is not None else torch.Size()
            key = f"{item.index.fqn}@{','.join(map(str, offsets))}"
            tensors[key] = tensor.cpu().contiguous()
            results.append((item.index, tensors[key].nbytes, Place(name, key)))
        stored = Stored(0, "")
        if not self._draft.is_dir():
            raise CheckpointError(f"{self._draft} is not seen by every rank: save to storage that all share")
        if tensors:
            path = self._draft / name
            with _writing(path):
                save_file(tensors, path)
                _sync(path)
                stored = Stored(path.stat().st_size, file_digest(path))
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(index, size, (place, stored)) for index, size, place in results])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The first rank writes the index and gives the folder its name."""
        places: dict[tuple[str, tuple[int, ...]], Place] = {}
        files: dict[str, Stored] = {}
        for result in (item for rank in results for item in rank):
            place, stored = result.storage_data
            offsets = result.index.offset if result.index.offset is not None else ()
            places[result.index.fqn, tuple(offsets)] = place
            files[place.file] = stored
        tensors = cast("dict[str, TensorStorageMetadata]", metadata.state_dict_metadata)
        path = self._draft / INDEX
        with _writing(path):
            path.write_text(Index(tensors, places, files, self.notes).to_json(), encoding="utf-8")
            _sync(path)
        with _writing(self.folder):
            os.replace(self._draft, self.folder)
            _sync(self.folder.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any folder will do."""
        return True


class Reader(StorageReader):
    """Reads what :class:`Writer` wrote.

    Args:
        folder: of the checkpoint.
        index: of it, if it has been read already.
    """

    def __init__(self, folder: Path | str, index: Index | None = None) -> None:
        self.folder = Path(folder)
        self._index = index
        self._checked: set[str] = set()

    @property
    def index(self) -> Index:
        """The index; raises :class:`CheckpointError` if it cannot be used."""
        if self._index is None:
            self._index = Index.read(self.folder)
        return self._index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between uses, except which files have been checked."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index as the library wants it."""
        return Metadata(state_dict_metadata=dict(self.index.tensors), storage_data=self.index.places)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the wanted parts of boxes, file by file; each file's digest is checked first."""
        wanted: dict[str, list[tuple[Any, str]]] = {}
        for item in plan.items:
            place = self.index.places[_key(item.storage_index)]
            wanted.setdefault(place.file, []).append((item, place.key))
        for name in wanted:  # all of them, before anything is changed
            self._check(name, self.folder / name)
        for name, items in wanted.items():
            path = self.folder / name
            try:
                with safe_open(path, framework="pt") as file:
                    for item, key in items:
                        ranges = zip(item.storage_offsets, item.lengths, strict=True)
                        cuts = tuple(slice(low, low + length) for low, length in ranges)
                        source = file.get_slice(key)[cuts] if cuts else file.get_tensor(key)
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(source)
                        planner.commit_tensor(item, target)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged ({error}): use another checkpoint") from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _check(self, name: str, path: Path) -> None:
        if name in self._checked:
            return
        try:
            digest = file_digest(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error}): use another checkpoint") from error
        if digest != self.index.files[name].digest:
            raise CheckpointError(
                f"{path} is damaged: its digest is not the one in {INDEX}; copy it again, or use another"
                f" checkpoint"
            )
        self._checked.add(name)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a folder with an index."""
        return (Path(checkpoint_id) / INDEX).is_file()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be written ({error}): make room, or save elsewhere") from error


def file_digest(path: Path) -> str:
    """xxh3_128 of a file, in hex."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_PIECE):
            hasher.update(chunk)
    return hasher.hexdigest()


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset) if index.offset is not None else ()


def _body_digest(body: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
