"""Tokens at rest: arrays of token ids in memory or mapped from disk, and Atoll's token file.

A token file is two files. ``NAME.bin`` holds the ids back to back, little-endian unsigned integers of 1, 2 or
4 bytes, with no header, so that files of other tools can be used as they are. ``NAME.bin.json`` says what
they are::

    {"format": "atoll-tokens", "version": 1, "dtype": "uint16", "tokens": 1200000, "vocab": 50257,
     "text_bytes": 5100000, "tokenizer": "<sha256 of tokenizer.json>", "sha256": "<of NAME.bin>"}

``text_bytes`` (the length of the text that was tokenised), ``tokenizer`` and ``sha256`` may be left out or
null. A ``.npy`` file with a one-dimensional array of unsigned or non-negative integers is read as well.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from node.cache import replacing

TokenArray = npt.NDArray[np.integer[Any]]

DTYPES: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}
_MAX_VOCAB = 1 << 32


class DataError(ValueError):
    """Data that cannot be used; the text says which file, what is wrong, and what to do."""


class TokenStore(Protocol):
    """Tokens by position."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The integer type that the tokens are stored in."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> TokenArray:
        """Tokens ``start`` … ``stop - 1``; 0 <= start <= stop <= len."""


class ArrayTokens:
    """One array, in memory or mapped."""

    def __init__(self, array: TokenArray) -> None:
        self._array = array

    @property
    def dtype(self) -> np.dtype[Any]:
        """The array's own type."""
        return self._array.dtype

    def __len__(self) -> int:
        return len(self._array)

    def read(self, start: int, stop: int) -> TokenArray:
        """A view, not a copy."""
        return self._array[start:stop]


class FileBytes:
    """The bytes of several files back to back, as ``cat`` prints them; each mapped when first read."""

    dtype = np.dtype("<u1")

    def __init__(self, paths: Sequence[Path]) -> None:
        sizes = [(path, path.stat().st_size) for path in paths]
        self._paths = [path for path, size in sizes if size > 0]
        self._ends = list(accumulate(size for _, size in sizes if size > 0))
        self._map = lru_cache(maxsize=128)(self._open)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _open(self, index: int) -> TokenArray:
        start = self._ends[index - 1] if index else 0
        return map_bytes(self._paths[index], "<u1", self._ends[index] - start)

    def read(self, start: int, stop: int) -> TokenArray:
        """A view within one file, a copy across several."""
        pieces, position = [], start
        while position < stop:
            index = bisect_right(self._ends, position)
            first = self._ends[index - 1] if index else 0
            pieces.append(self._map(index)[position - first : stop - first])
            position += len(pieces[-1])
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)


def map_bytes(path: Path, dtype: str | np.dtype[Any], count: int) -> TokenArray:
    """The first ``count`` (>= 1) items of a file, mapped read-only; :class:`DataError` if it has fewer."""
    try:
        mapped = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {count:,} items of {path}: {error}") from error
    plain: TokenArray = mapped.view(np.ndarray)  # slices of a plain array cost half as much
    return plain


@dataclass(frozen=True)
class TokenHeader:
    """What the sidecar of a token file says."""

    dtype: str
    tokens: int
    vocab: int
    text_bytes: int | None = None
    tokenizer: str | None = None
    sha256: str | None = None


def dtype_for(vocab: int) -> str:
    """The narrowest of uint8, uint16 and uint32 that holds ids below ``vocab``."""
    return "uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "uint32"


def sidecar(path: Path) -> Path:
    """Where the header of the token file ``path`` stands."""
    return path.with_name(path.name + ".json")


def write_tokens(
    path: Path,
    pieces: Iterable[npt.ArrayLike],
    *,
    vocab: int,
    text_bytes: int | None = None,
    tokenizer: str | None = None,
) -> TokenHeader:
    """Write a token file and its sidecar, piece by piece; returns the header.

    ``tokenizer`` is the sha256 of the tokenizer's file. Raises :class:`DataError` for an id that is negative
    or not below ``vocab``, ``OSError`` where the folder cannot be written; neither leaves half a file.
    """
    if not 1 <= vocab <= _MAX_VOCAB:
        raise DataError(f"a vocabulary of {vocab} cannot be stored; it is 1 … 2^32")
    dtype, digest, count = dtype_for(vocab), hashlib.sha256(), 0
    with replacing(path) as file:
        for piece in pieces:
            ids = np.asarray(piece)
            if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
                raise DataError(f"tokens for {path} are {ids.dtype}{list(ids.shape)}; give rows of integers")
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
                raise DataError(f"token ids {ids.min()} … {ids.max()} for {path} exceed 0 … {vocab - 1}")
            raw = ids.astype(DTYPES[dtype]).tobytes()
            digest.update(raw)
            file.write(raw)
            count += len(ids)
    header = TokenHeader(dtype, count, vocab, text_bytes, tokenizer, digest.hexdigest())
    with replacing(sidecar(path)) as file:
        content = {"format": "atoll-tokens", "version": 1, **asdict(header)}
        file.write(json.dumps(content, indent=1).encode() + b"\n")
    return header


def read_header(path: Path) -> TokenHeader:
    """Read and check the sidecar of the token file ``path``; :class:`DataError` if it is missing or wrong."""
    beside = sidecar(path)
    try:
        fields = json.loads(beside.read_bytes())
    except FileNotFoundError as error:
        example = '{"format": "atoll-tokens", "version": 1, "dtype": "uint16", "tokens": N, "vocab": V}'
        raise DataError(
            f"{path} has no {beside.name} that says what it holds; write one: {example}"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {beside}: {error}") from error
    if not isinstance(fields, dict) or fields.get("format") != "atoll-tokens" or fields.get("version") != 1:
        raise DataError(f'{beside} is not a token header: it lacks "format": "atoll-tokens" and "version": 1')
    dtype = fields.get("dtype")
    if dtype not in DTYPES:
        raise DataError(f"{beside}: dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
    header = TokenHeader(
        dtype,
        _whole(beside, fields, "tokens", 1),
        _whole(beside, fields, "vocab", 1),
        None if fields.get("text_bytes") is None else _whole(beside, fields, "text_bytes", 1),
        _text(beside, fields, "tokenizer"),
        _text(beside, fields, "sha256"),
    )
    size, expected = path.stat().st_size, header.tokens * DTYPES[dtype].itemsize
    if size != expected:
        raise DataError(
            f"{path} has {size:,} bytes, but {beside.name} tells of {header.tokens:,} {dtype} tokens, "
            f"which are {expected:,} bytes; the file is cut short or the header belongs to another one"
        )
    return header


def _whole(path: Path, fields: dict[str, Any], name: str, least: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value < 1 << 62:
        raise DataError(f"{path}: {name} is {value!r}; it is a whole number of at least {least}")
    return value


def _text(path: Path, fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{path}: {name} is {value!r}; it is text or null")
    return value


def open_token_file(path: Path) -> tuple[ArrayTokens, TokenHeader]:
    """Map a ``.bin`` file by its sidecar. The sha256 is not checked here, because that reads all of it."""
    header = read_header(path)
    return ArrayTokens(map_bytes(path, DTYPES[header.dtype], header.tokens)), header


def open_npy(path: Path) -> ArrayTokens:
    """Map a ``.npy`` file of one-dimensional integers; :class:`DataError` for any other array."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is not an array that NumPy can map: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "ui":
        kind = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        raise DataError(f"{path} holds {kind}; tokens are a one-dimensional array of integers")
    if array.dtype.byteorder == ">":
        raise DataError(f"{path} is big-endian; save it again with array.astype('<u2') or '<u4'")
    return ArrayTokens(array)
