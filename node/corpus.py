"""Where text comes from: the embedded corpus, files, folders, Hugging Face datasets; all of it as bytes."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.resources
import io
import lzma
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from node.cache import replacing
from node.tokens import ArrayTokens, DataError, FileBytes, TokenStore, map_bytes
from protos import extras

HF_PREFIX = "hf:"


@dataclass(frozen=True)
class Embedded:
    """A text that ships with the package: its file, unpacked length in bytes, and sha256 when unpacked."""

    file: str
    nbytes: int
    sha256: str


EMBEDDED = {
    "shakespeare": Embedded(
        "shakespeare.txt.xz", 5_057_320, "c171bed0a40253b62f52490b3851c36ecec05099ddb48f71d421cfbd8a2b18c5"
    )
}


@dataclass(frozen=True)
class Document:
    """One file of a corpus: its name for messages, and the place of its bytes in the corpus."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Corpus:
    """The bytes of a text, and the documents that they are made of, in order and without gaps."""

    name: str
    store: TokenStore
    documents: tuple[Document, ...]

    @classmethod
    def single(cls, name: str, store: TokenStore) -> Corpus:
        """A corpus of one document."""
        return cls(name, store, (Document(name, 0, len(store)),))


def open_corpus(source: str, cache: Path) -> Corpus:
    """Open ``"shakespeare"``, a text file, a folder of them, or ``"hf:NAME[@config][:split][#column]"``.

    ``cache`` is the folder for unpacked copies; where it cannot be written they are kept in memory. Raises
    :class:`DataError` for a source that is missing, empty, or not text.
    """
    if source in EMBEDDED:
        return Corpus.single(source, open_embedded(source, cache))
    if source.startswith(HF_PREFIX):
        return _open_hub(source, cache)
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        close = difflib.get_close_matches(source, EMBEDDED, n=1)
        hint = f"did you mean the embedded corpus {close[0]!r}?" if close else ""
        raise DataError(
            f"no data at {source!r}: it is neither a file nor a folder under {Path.cwd()}. "
            + (hint or f"Give a path, 'hf:' and a dataset, or an embedded corpus: {', '.join(EMBEDDED)}")
        )
    return Corpus.single(str(path), _open_files(path, [path]))


def open_embedded(name: str, cache: Path) -> TokenStore:
    """The embedded corpus ``name``, mapped from ``cache`` (unpacked there once) or in memory.

    A cached copy is used only if its sha256 is right; another is replaced.
    """
    entry = EMBEDDED[name]
    path = cache / f"{name}-{entry.sha256[:16]}.txt"
    if path.is_file() and path.stat().st_size == entry.nbytes:
        mapped = map_bytes(path, "<u1", entry.nbytes)
        if hashlib.sha256(mapped.data).hexdigest() == entry.sha256:
            return ArrayTokens(mapped)
    packed = (importlib.resources.files("node") / "assets" / entry.file).read_bytes()
    text = lzma.decompress(packed)
    if hashlib.sha256(text).hexdigest() != entry.sha256:
        raise DataError(f"the embedded corpus {name!r} is damaged; install the package again")
    try:
        with replacing(path) as file:
            file.write(text)
        return ArrayTokens(map_bytes(path, "<u1", entry.nbytes))
    except OSError:
        return ArrayTokens(np.frombuffer(text, "<u1"))


def _open_folder(path: Path) -> Corpus:
    inside = (
        p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts)
    )
    paths = sorted((p for p in inside if p.is_file()), key=lambda p: p.relative_to(path).as_posix())
    if not paths:
        raise DataError(f"the folder {path} has no files (hidden ones are not read)")
    for file in paths:
        with file.open("rb") as handle:
            if b"\0" in handle.read(4096):
                raise DataError(
                    f"{file} does not look like text (it holds zero bytes); a folder is read whole, so move "
                    "the file away or name the text files' own folder"
                )
    store = _open_files(path, paths)
    documents, start = [], 0
    for file in paths:
        stop = start + file.stat().st_size
        documents.append(Document(str(file), start, stop))
        start = stop
    return Corpus(str(path), store, tuple(documents))


def _open_files(name: Path, paths: list[Path]) -> FileBytes:
    try:
        store = FileBytes(paths)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error}") from error
    if len(store) == 0:
        raise DataError(f"{name} is empty; there is nothing to train on")
    return store


_HUB = re.compile(r"hf:(?P<name>[^@:#]+)(@(?P<config>[^:#]+))?(:(?P<split>[^#]+))?(#(?P<column>.+))?")


def _open_hub(source: str, cache: Path) -> Corpus:
    """A Hugging Face dataset's column, row by row, each followed by a newline."""
    match = _HUB.fullmatch(source)
    if match is None:
        raise DataError(f"data source {source!r} is not of the form hf:NAME[@config][:split][#column]")
    column = match["column"] or "text"
    rows = _rows(source, match["name"], match["config"], match["split"] or "train", column)
    with _spool(cache) as file:
        file.writelines(rows)
        if file.tell() == 0:
            raise DataError(f"column {column!r} of {source!r} is empty; there is nothing to train on")
        file.flush()
        if isinstance(file, io.BytesIO):
            return Corpus.single(source, ArrayTokens(np.frombuffer(file.getvalue(), "<u1")))
        # The mapping keeps the file's pages after it is closed; it has no name that would need cleaning up.
        return Corpus.single(source, ArrayTokens(np.memmap(file, "<u1", "r").view(np.ndarray)))


def _spool(cache: Path) -> IO[bytes]:
    """A file without a name in ``cache``, or memory where that cannot be written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=cache)
    except OSError:
        return io.BytesIO()


def _rows(source: str, name: str, config: str | None, split: str, column: str) -> Iterator[bytes]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"data source {source!r} needs the datasets library, which cannot be imported ({error}); install "
            f"it with: {extras.hint('hf')}"
        ) from error
    try:
        table = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise DataError(f"cannot load {source!r}: {reason[0] if reason else type(error).__name__}") from error
    names = list(table.column_names or [])
    if column not in names:
        raise DataError(
            f"{source!r} has no column {column!r}; its columns are {', '.join(names)}: append '#' "
            "and one of them"
        )
    for batch in table.iter(batch_size=1000):
        for row in batch[column]:
            if not isinstance(row, str):
                raise DataError(f"column {column!r} of {source!r} holds {type(row).__name__}, not text")
            yield row.encode() + b"\n"
