"""The training data of a run: opened from its configuration, split, shuffled and dealt out by sample index.

Every node opens the same data from its own disk and compares digests with the others; which samples it reads
is leased to it as ranges of one global index.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from node.cache import cache_folder
from node.corpus import Corpus, open_corpus
from node.shuffle import ROUNDS, draw, permute
from node.split import RULE, Split
from node.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer, tokenize
from node.tokens import (
    DTYPES,
    ArrayTokens,
    DataError,
    TokenArray,
    TokenHeader,
    TokenStore,
    dtype_for,
    open_npy,
    open_token_file,
    sidecar,
    write_tokens,
)

__all__ = ["DataConfig", "DataError", "DataSource", "Dataset", "open_data"]

_SCAN = 1 << 22  # tokens hashed at a time

Progress = Callable[[str, int, int], None]  # what is done, how far, out of how much


class DataConfig(Protocol):
    """The ``[data]`` section of a run file, as far as it says what is read."""

    @property
    def source(self) -> str:
        """``"shakespeare"``, a file or folder of text, ``.bin`` or ``.npy`` tokens, or ``"hf:NAME…"``."""

    @property
    def tokenizer(self) -> str:
        """``"bytes"``, or the path of a ``tokenizer.json``."""


@dataclass(frozen=True)
class DataSource:
    """A :class:`DataConfig` made by hand."""

    source: str = "shakespeare"
    tokenizer: str = "bytes"


class Dataset:
    """Tokens, split into training and validation, as windows of ``context + 1`` tokens.

    Attributes:
        digest: sha256, in hex, over the tokens, the tokenizer and the split rule.
        vocab: number of token ids.
        bytes_per_token: mean bytes of text behind a token; NaN where a token file does not tell.
        train_windows: training samples in an epoch.
        tokens: tokens in all, validation included.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        context: int,
        vocab: int,
        digest: str,
        bytes_per_token: float,
        name: str,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Use :func:`open_data`. Raises :class:`DataError` if the data is too short for one window."""
        if context < 1:
            raise DataError(f"[model] context is {context}; it is at least 1")
        self.vocab, self.digest, self.bytes_per_token, self.name = vocab, digest, bytes_per_token, name
        self.tokens, self.context = len(store), context
        self._store, self._tokenizer = store, tokenizer
        if self.tokens < 11 * (context + 1):
            raise DataError(
                f"{name} has {self.tokens:,} tokens; with context {context} it takes at least "
                f"{11 * (context + 1):,} for one window of training and one of validation: give more text, "
                "or lower context in the [model] section"
            )
        self._split = Split(self.tokens)
        # Windows may start up to context - 1 tokens late, so as many must be spare.
        self.train_windows = (self._split.train_tokens - context) // context
        self._shuffle = lru_cache(maxsize=4)(self._epoch)

    def batch(self, start: int, count: int, seed: int) -> Tensor:
        """Training samples ``start`` … ``start + count - 1`` of the run: ``int64[count, context + 1]``.

        Sample i is window i % train_windows of epoch i // train_windows. Within an epoch every window comes
        once, in an order of that epoch; the next epoch has another order and other window boundaries. The
        same numbers give the same tokens on every node. Raises ``ValueError`` for start < 0, count < 1 or
        seed < 0.
        """
        if start < 0 or count < 1 or seed < 0:
            raise ValueError(f"no batch of {count} samples from sample {start} with seed {seed}")
        out = np.empty((count, self.context + 1), dtype=np.int64)
        row = 0
        while row < count:
            epoch, first = divmod(start + row, self.train_windows)
            here = min(count - row, self.train_windows - first)
            keys, offset = self._shuffle(seed, epoch)
            for window in permute(np.arange(first, first + here), self.train_windows, keys).tolist():
                position = offset + window * self.context
                self._read(self._split.train_ranges(position, self.context + 1), out[row])
                row += 1
        return torch.from_numpy(out)

    def validation(self, count: int) -> Tensor:
        """At most ``count`` fixed windows, spread evenly over the validation data: ``int64[n, context + 1]``.

        They do not share a predicted token; fewer come where the data has no more. Raises ``ValueError`` for
        count < 1.
        """
        if count < 1:
            raise ValueError(f"no {count} windows of validation: ask for at least 1")
        room = self._split.validation_tokens - 1 - self.context
        count = min(count, room // self.context + 1)
        out = np.empty((count, self.context + 1), dtype=np.int64)
        for row in range(count):
            position = row * room // (count - 1) if count > 1 else 0
            self._read(self._split.validation_ranges(position, self.context + 1), out[row])
        return torch.from_numpy(out)

    def encode(self, text: str) -> Tensor:
        """Token ids of ``text``: ``int64[n]``. :class:`DataError` for tokens of an unknown tokenizer."""
        return torch.tensor(list(self._known_tokenizer().encode(text)), dtype=torch.int64)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Text of token ids. :class:`DataError` for tokens of an unknown tokenizer."""
        return self._known_tokenizer().decode([int(i) for i in ids])

    def _known_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise DataError(
                f"{self.name} holds tokens without text; name their tokenizer.json in the [data] section"
            )
        return self._tokenizer

    def _epoch(self, seed: int, epoch: int) -> tuple[list[int], int]:
        """Keys of the epoch's order, and how many tokens late its first window starts."""
        *keys, late = draw(ROUNDS + 1, seed, epoch)
        return keys, late % self.context

    def _read(self, ranges: Iterable[tuple[int, int]], out: np.ndarray) -> None:
        done = 0
        for start, stop in ranges:
            out[done : done + stop - start] = self._store.read(start, stop)
            done += stop - start


def open_data(
    config: DataConfig, context: int, *, cache: Path | None = None, progress: Progress | None = None
) -> Dataset:
    """Open the data of a run, for windows of ``context`` tokens.

    All of it is read once, for the digest; ``progress`` is told of that, and of tokenising a text, as
    ``(what, done, total)``. Unpacked or tokenised copies
    go to ``cache`` (default: the user's cache folder), or stay in memory where that cannot be written. Raises
    :class:`DataError` for data that is missing, empty, too short, damaged, or of another tokenizer.
    """
    cache = cache_folder() if cache is None else cache
    source = Path(config.source).expanduser()
    if source.suffix in (".bin", ".npy") and source.is_file():
        return _open_tokens(source, config.tokenizer, context, progress)
    tokenizer = open_tokenizer(config.tokenizer)
    corpus = open_corpus(config.source, cache)
    store, text_bytes = corpus.store, len(corpus.store)
    if not isinstance(tokenizer, ByteTokenizer):
        store = _tokenized(corpus, tokenizer, cache, progress)
        if len(store) == 0:
            raise DataError(f"{corpus.name} gives no tokens at all with the tokenizer {config.tokenizer}")
    scan = _scan(store, "hashing tokens", progress)
    return Dataset(
        store,
        context=context,
        vocab=tokenizer.vocab,
        digest=_digest(scan, store, tokenizer.vocab, tokenizer.digest),
        bytes_per_token=text_bytes / len(store),
        name=corpus.name,
        tokenizer=tokenizer,
    )


def _open_tokens(path: Path, tokenizer_name: str, context: int, progress: Progress | None) -> Dataset:
    """Data that is tokens already."""
    named = None if tokenizer_name == "bytes" else open_tokenizer(tokenizer_name)
    header: TokenHeader | None
    store, header = (open_npy(path), None) if path.suffix == ".npy" else open_token_file(path)
    if len(store) == 0:
        raise DataError(f"{path} holds no tokens; there is nothing to train on")
    made_with = header.tokenizer if header is not None else None
    if named is not None and made_with not in (None, named.digest):
        raise DataError(
            f"{path} was made with the tokenizer {made_with}, but {tokenizer_name} has the sha256 "
            f"{named.digest}; name the right one in the [data] section, or leave it out"
        )
    scan = _scan(store, "hashing tokens", progress)
    if header is not None and header.sha256 not in (None, scan.sha256):
        raise DataError(
            f"{path} is damaged: its sha256 is {scan.sha256}, {sidecar(path).name} says {header.sha256}; "
            "copy it again"
        )
    vocab = named.vocab if named is not None else header.vocab if header is not None else scan.highest + 1
    if scan.lowest < 0 or scan.highest >= vocab:
        raise DataError(
            f"{path} holds token ids {scan.lowest} … {scan.highest}, but its vocabulary is 0 … {vocab - 1}; "
            "the file belongs to another tokenizer or is damaged"
        )
    tokenizer = ByteTokenizer() if named is None and made_with == "bytes" else named
    text_bytes = header.text_bytes if header is not None else None
    return Dataset(
        store,
        context=context,
        vocab=vocab,
        digest=_digest(scan, store, vocab, tokenizer.digest if tokenizer is not None else made_with),
        bytes_per_token=math.nan if text_bytes is None else text_bytes / len(store),
        name=str(path),
        tokenizer=tokenizer,
    )


def _tokenized(corpus: Corpus, tokenizer: Tokenizer, cache: Path, progress: Progress | None) -> TokenStore:
    """The corpus as tokens: from the cache, where an intact copy is, else made now."""
    cuts = [document.stop for document in corpus.documents]
    key = json.dumps(["1", _scan(corpus.store, "hashing text", progress).sha256, cuts, tokenizer.digest])
    path = cache / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:32]}.bin"
    if path.exists():
        try:
            store, header = open_token_file(path)
            if header.sha256 == _scan(store, "checking the tokenised copy", progress).sha256:
                return store
        except DataError:
            pass  # a damaged copy is made again

    def pieces() -> Iterator[TokenArray]:
        total = len(corpus.store)
        return tokenize(
            corpus, tokenizer, lambda done: progress("tokenising", done, total) if progress else None
        )

    try:
        header = write_tokens(
            path, pieces(), vocab=tokenizer.vocab, text_bytes=len(corpus.store), tokenizer=tokenizer.digest
        )
        return open_token_file(path)[0] if header.tokens else ArrayTokens(np.empty(0, np.uint8))
    except OSError:
        dtype = DTYPES[dtype_for(tokenizer.vocab)]
        return ArrayTokens(np.concatenate([ids.astype(dtype) for ids in pieces()]))


@dataclass(frozen=True)
class _Scan:
    """What reading all tokens tells: sha256 of their bytes, smallest and largest id."""

    sha256: str
    lowest: int
    highest: int


def _scan(store: TokenStore, what: str, progress: Progress | None) -> _Scan:
    digest, lowest, highest = hashlib.sha256(), [], []
    for start in range(0, len(store), _SCAN):
        piece = np.ascontiguousarray(store.read(start, min(start + _SCAN, len(store))))
        digest.update(piece.data)
        lowest.append(int(piece.min()))
        highest.append(int(piece.max()))
        if progress is not None:
            progress(what, start + len(piece), len(store))
    return _Scan(digest.hexdigest(), min(lowest), max(highest))


def _digest(scan: _Scan, store: TokenStore, vocab: int, tokenizer: str | None) -> str:
    facts = {
        "format": "atoll data 1",
        "dtype": store.dtype.name,
        "tokens": len(store),
        "sha256": scan.sha256,
        "vocab": vocab,
        "tokenizer": tokenizer,
        "split": RULE,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
