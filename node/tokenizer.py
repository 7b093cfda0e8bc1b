"""From text to token ids and back: bytes, or the ``tokenizer.json`` of Hugging Face's ``tokenizers``."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from node.corpus import Corpus, Document
from node.tokens import DataError, TokenArray
from protos import extras

PIECE = 1 << 20  # bytes of text tokenised at a time; part of what a tokenised corpus is


class Tokenizer(Protocol):
    """What the data needs of a tokenizer."""

    @property
    def digest(self) -> str:
        """``"bytes"``, or the sha256 of the tokenizer's file."""

    @property
    def vocab(self) -> int:
        """Number of token ids."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of ``text``, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; what is not text becomes U+FFFD."""


class ByteTokenizer:
    """The bytes of UTF-8 are the tokens."""

    digest = "bytes"
    vocab = 256

    def encode(self, text: str) -> Sequence[int]:
        """The UTF-8 bytes of ``text``."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are not UTF-8, and ids above 255, become U+FFFD."""
        return bytes(i if 0 <= i < 256 else 0xFF for i in ids).decode("utf-8", "replace")


class FileTokenizer:
    """A ``tokenizer.json``, read by the ``tokenizers`` library (extra ``tokenizers``)."""

    def __init__(self, path: Path) -> None:
        try:
            library: Any = importlib.import_module("tokenizers")
        except ImportError as error:
            raise DataError(
                f"the tokenizer {path} needs the tokenizers library, which cannot be imported ({error}); "
                f"install it with: {extras.hint('tokenizers')}"
            ) from error
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"cannot read the tokenizer {path}: {error}; [data] tokenizer is 'bytes' or a tokenizer.json"
            ) from error
        try:
            self._inner = library.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception for any content it does not know
            raise DataError(f"{path} is not a tokenizer.json: {error}") from error
        self._inner.no_padding()
        self._inner.no_truncation()
        self.digest = hashlib.sha256(content).hexdigest()
        self.vocab = int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of ``text``, without special tokens."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=False)
        return text


def open_tokenizer(name: str) -> Tokenizer:
    """``"bytes"``, or the path of a ``tokenizer.json``; :class:`DataError` if it cannot be used."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name).expanduser())


def tokenize(
    corpus: Corpus, tokenizer: Tokenizer, progress: Callable[[int], None] = lambda done: None
) -> Iterator[TokenArray]:
    """Token ids of the whole corpus, piece by piece: int64 arrays. ``progress`` is told the bytes behind it.

    A document is cut into pieces of at most 1 MiB, after the last newline within, so that a text of any size
    is tokenised in little memory and always to the same ids. Raises :class:`DataError` where a document is
    not UTF-8.
    """
    for document in corpus.documents:
        for start, stop in _pieces(corpus, document):
            raw = corpus.store.read(start, stop).tobytes()
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{document.name} is not UTF-8 at byte {start - document.start + error.start:,} "
                    f"(0x{raw[error.start]:02x}); convert it (iconv -t utf-8), or set [data] tokenizer to "
                    "'bytes', which reads anything"
                ) from error
            yield np.asarray(tokenizer.encode(text), dtype=np.int64)
            progress(stop)


def _pieces(corpus: Corpus, document: Document) -> Iterator[tuple[int, int]]:
    """Where a document is cut: after a newline if its piece has one, else between two characters."""
    start = document.start
    while start < document.stop:
        stop = min(start + PIECE, document.stop)
        if stop < document.stop:
            newline = corpus.store.read(start, stop).tobytes().rfind(b"\n")
            if newline >= 0:
                stop = start + newline + 1
            else:
                for _ in range(3):  # bytes 10xxxxxx continue a character, which has at most three of them
                    if int(corpus.store.read(stop, stop + 1)[0]) & 0xC0 != 0x80:
                        break
                    stop -= 1
        yield start, stop
        start = stop
