"""The dataset of a run: windows, leases, digest, errors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import node.data
from node.data import DataError, Dataset, DataSource, open_data
from node.tokens import ArrayTokens, sidecar, write_tokens

SHAKESPEARE = "d7eee20437b1cc541cc18109ca5afe67a62eef04a0bcde437fe667a21a7e2141"


def counted(tokens: int, context: int) -> Dataset:
    """A dataset whose token at position p is p."""
    return Dataset(
        ArrayTokens(np.arange(tokens, dtype=np.uint32)),
        context=context,
        vocab=tokens,
        digest="",
        bytes_per_token=1.0,
        name="counted",
        tokenizer=None,
    )


def held_out(positions: torch.Tensor, data: Dataset) -> torch.Tensor:
    return positions // min(8192, data.tokens // 11) % 20 == 10


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(0, 3000)).map(lambda s: (11 * (s[0] + 1) + s[1], s[0])),
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 3),
)
@settings(deadline=None, max_examples=50)
def test_an_epoch_shows_every_window_once(shape: tuple[int, int], seed: int, epoch: int) -> None:
    tokens, context = shape
    data = counted(tokens, context)
    count = data.train_windows
    windows = data.batch(epoch * count, count, seed)
    assert windows.shape == (count, context + 1)
    assert not held_out(windows, data).any()
    order = windows[windows[:, 0].argsort()]
    assert torch.equal(order[:-1, -1], order[1:, 0]), "a window starts at the last token of the one before"
    stream = torch.arange(tokens)[~held_out(torch.arange(tokens), data)]
    read = torch.cat([order[:, :-1].flatten(), order[-1, -1:]])
    late = int((stream == read[0]).nonzero())
    assert 0 <= late < context
    assert torch.equal(read, stream[late : late + len(read)])
    assert len(stream) - late - len(read) < 2 * context, "what an epoch leaves out is less than two windows"


def test_epochs_have_other_orders_and_other_boundaries() -> None:
    data = counted(60_000, 16)
    count = data.train_windows
    first, second, other = data.batch(0, count, 0), data.batch(count, count, 0), data.batch(0, count, 1)
    assert not torch.equal(first, second) and not torch.equal(first, other)
    offsets = {int(data.batch(epoch * count, count, 0).min()) for epoch in range(12)}
    assert len(offsets) > 4


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(0, 5000))
@settings(deadline=None, max_examples=30)
def test_leases_cut_anywhere_give_the_same_samples(counts: list[int], start: int) -> None:
    mine, theirs = counted(6_000, 8), counted(6_000, 8)
    whole = mine.batch(start, sum(counts), 7)
    parts, position = [], start
    for count in counts:
        parts.append(theirs.batch(position, count, 7))
        position += count
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize(("tokens", "context"), [(400_000, 64), (400_000, 9000), (900, 32), (200, 1)])
def test_validation_is_fixed_spread_and_apart_from_training(tokens: int, context: int) -> None:
    data = counted(tokens, context)
    windows = data.validation(10**6)
    assert torch.equal(windows, counted(tokens, context).validation(10**6))
    assert held_out(windows, data).all()
    predicted = windows[:, 1:].flatten()
    assert len(predicted.unique()) == len(predicted), "no token is predicted twice"
    few = data.validation(2)
    assert few.shape[0] <= 2 and held_out(few, data).all()
    assert windows.shape[0] < 3 or few[1, 0] - few[0, 0] > (windows[-1, 0] - windows[0, 0]) * 0.8


def test_embedded_corpus_is_the_same_everywhere(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    data = open_data(DataSource(), 64, cache=tmp_path, progress=lambda *news: seen.append(news))
    again = open_data(DataSource(), 128, cache=tmp_path)
    assert data.digest == again.digest == SHAKESPEARE
    assert (data.vocab, data.tokens, data.bytes_per_token) == (256, 5_057_320, 1.0)
    assert data.train_windows == 75_051
    assert seen[-1] == ("hashing tokens", 5_057_320, 5_057_320)
    batch = data.batch(10, 3, 0)
    assert batch.dtype is torch.int64 and batch.shape == (3, 65)
    assert data.decode(batch[0]).isascii() and torch.equal(data.encode(data.decode(batch[0])), batch[0])


def test_digest_follows_the_bytes_not_the_files(tmp_path: Path) -> None:
    text = bytes(range(32, 127)) * 40
    (tmp_path / "one.txt").write_bytes(text)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "1").write_bytes(text[:1000])
    (tmp_path / "parts" / "2").write_bytes(text[1000:])
    (tmp_path / "changed.txt").write_bytes(text[:-1] + b"!")

    def digest(name: str) -> str:
        return open_data(DataSource(str(tmp_path / name)), 16).digest

    assert digest("one.txt") == digest("parts") != digest("changed.txt")


def test_a_text_just_long_enough_works(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 11 * 17)
    data = open_data(DataSource(str(path)), 16)
    assert data.train_windows > 0 and data.validation(9).shape == (1, 17)
    path.write_bytes(b"x" * (11 * 17 - 1))
    with pytest.raises(DataError, match=r"186 tokens; with context 16 it takes at least 187"):
        open_data(DataSource(str(path)), 16)


def test_token_files_carry_vocabulary_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    ids = np.random.default_rng(0).integers(0, 1000, 5000)
    write_tokens(path, [ids], vocab=1000, text_bytes=20_000, tokenizer="f" * 64)
    data = open_data(DataSource(str(path)), 32)
    assert (data.vocab, data.bytes_per_token, data.tokens) == (1000, 4.0, 5000)
    assert set(data.batch(0, data.train_windows, 0).flatten().tolist()) <= set(ids.tolist())
    with pytest.raises(DataError, match="name their tokenizer"):
        data.decode([1])
    path.write_bytes(ids[::-1].astype("<u2").tobytes())
    with pytest.raises(DataError, match="is damaged"):
        open_data(DataSource(str(path)), 32)


def test_byte_token_files_decode(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, [np.full(500, 65)], vocab=256, text_bytes=500, tokenizer="bytes")
    assert open_data(DataSource(str(path)), 16).decode([72, 105]) == "Hi"


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, [np.arange(500)], vocab=500)
    fields = json.loads(sidecar(path).read_text())
    sidecar(path).write_text(json.dumps({**fields, "vocab": 400}))
    with pytest.raises(DataError, match="token ids 0 … 499, but its vocabulary is 0 … 399"):
        open_data(DataSource(str(path)), 16)
    np.save(tmp_path / "t.npy", np.arange(-1, 500))
    with pytest.raises(DataError, match="token ids -1"):
        open_data(DataSource(str(tmp_path / "t.npy")), 16)


def test_npy_tokens_know_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t.npy"
    np.save(path, np.arange(700, dtype=np.uint16))
    data = open_data(DataSource(str(path)), 16)
    assert data.vocab == 700 and math.isnan(data.bytes_per_token)
    np.save(path, np.empty(0, dtype=np.uint16))
    with pytest.raises(DataError, match="holds no tokens"):
        open_data(DataSource(str(path)), 16)


class Pairs:
    """Two bytes a token: stands in for a tokenizer file."""

    vocab = 65536

    def __init__(self, digest: str = "pairs") -> None:
        self.digest = digest
        self.calls = 0

    def encode(self, text: str) -> Sequence[int]:
        self.calls += 1
        raw = text.encode()
        return [raw[i] * 256 + raw[i + 1] for i in range(0, len(raw) - 1, 2)]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(bytes(divmod(i, 256)) for i in ids).decode()


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Pairs:
    tokenizer = Pairs()
    monkeypatch.setattr(node.data, "open_tokenizer", lambda name: tokenizer)
    return tokenizer


def test_tokenised_text_is_kept_and_checked(tmp_path: Path, pairs: Pairs) -> None:
    path, cache = tmp_path / "t.txt", tmp_path / "cache"
    path.write_text("abcdefgh" * 300)
    source = DataSource(str(path), "pairs.json")
    seen: list[tuple[str, int, int]] = []
    first = open_data(source, 16, cache=cache, progress=lambda *news: seen.append(news))
    assert seen == [("hashing text", 2400, 2400), ("tokenising", 2400, 2400), ("hashing tokens", 1200, 1200)]
    assert (first.vocab, first.tokens, first.bytes_per_token) == (65536, 1200, 2.0)
    assert first.decode(first.validation(1)[0])[:8] in "abcdefgh" * 2
    assert pairs.calls == 1
    assert open_data(source, 16, cache=cache).digest == first.digest and pairs.calls == 1
    (kept,) = cache.glob("*.bin")
    kept.write_bytes(bytes(kept.stat().st_size))
    assert open_data(source, 16, cache=cache).digest == first.digest and pairs.calls == 2
    sidecar(kept).unlink()
    assert open_data(source, 16, cache=cache).digest == first.digest and pairs.calls == 3
    blocked = tmp_path / "file"
    blocked.touch()
    assert open_data(source, 16, cache=blocked).digest == first.digest


def test_the_tokenizer_is_part_of_the_digest(tmp_path: Path, pairs: Pairs) -> None:
    path = tmp_path / "t.txt"
    path.write_text("abcdefgh" * 300)
    source = DataSource(str(path), "pairs.json")
    digests = set()
    for pairs.digest in ("pairs", "other"):
        digests.add(open_data(source, 16, cache=tmp_path / "cache").digest)
    assert len(digests) == 2


def test_a_tokenizer_that_did_not_make_the_file_is_refused(tmp_path: Path, pairs: Pairs) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, [np.arange(900)], vocab=900, tokenizer="another")
    with pytest.raises(DataError, match="made with the tokenizer another"):
        open_data(DataSource(str(path), "pairs.json"), 16)
    write_tokens(path, [np.arange(900)], vocab=900, tokenizer="pairs")
    assert open_data(DataSource(str(path), "pairs.json"), 16).vocab == 65536


def test_a_text_without_tokens_is_refused(tmp_path: Path, pairs: Pairs) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a")
    with pytest.raises(DataError, match="no tokens at all"):
        open_data(DataSource(str(path), "pairs.json"), 16, cache=tmp_path / "cache")


def test_odd_requests_are_refused() -> None:
    data = counted(500, 4)
    for start, count, seed in ((-1, 1, 0), (0, 0, 0), (0, 1, -1)):
        with pytest.raises(ValueError, match="no batch"):
            data.batch(start, count, seed)
    with pytest.raises(ValueError, match="at least 1"):
        data.validation(0)
    with pytest.raises(DataError, match="context is 0"):
        counted(500, 0)
