"""Token files, corpora and tokenizers: what is read, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import node.cache
import node.tokenizer
from node.cache import cache_folder, replacing
from node.corpus import EMBEDDED, Corpus, Document, open_corpus, open_embedded
from node.tokenizer import ByteTokenizer, FileTokenizer, tokenize
from node.tokens import (
    ArrayTokens,
    DataError,
    FileBytes,
    open_npy,
    open_token_file,
    read_header,
    sidecar,
    write_tokens,
)


def whole(store: ArrayTokens | FileBytes) -> list[int]:
    return store.read(0, len(store)).tolist()


# ------------------------------------------------------------------ token files


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_token_file_round_trip(tmp_path: Path, vocab: int, dtype: str) -> None:
    path = tmp_path / "t.bin"
    written = write_tokens(
        path, [[0, vocab - 1], np.arange(5), []], vocab=vocab, text_bytes=30, tokenizer="abc"
    )
    store, header = open_token_file(path)
    assert header == written and header.dtype == dtype and header.tokens == 7
    assert (header.text_bytes, header.tokenizer) == (30, "abc")
    assert whole(store) == [0, vocab - 1, 0, 1, 2, 3, 4]
    assert path.read_bytes() == np.array(whole(store), dtype=f"<u{store.dtype.itemsize}").tobytes()


@pytest.mark.parametrize("piece", [[1, 300], [-1], [[1, 2]], [0.5]])
def test_unfit_tokens_are_not_written(tmp_path: Path, piece: list[object]) -> None:
    path = tmp_path / "t.bin"
    with pytest.raises(DataError):
        write_tokens(path, [[1, 2], piece], vocab=300)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "not a token header"),
        ({"version": 2}, "not a token header"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"tokens": 5}, "cut short or the header"),
        ({"tokens": 10**15}, "cut short or the header"),
        ({"tokens": -4}, "tokens is -4"),
        ({"tokens": True}, "tokens is True"),
        ({"vocab": "many"}, "vocab is 'many'"),
        ({"sha256": 3}, "sha256 is 3"),
    ],
)
def test_wrong_headers_are_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, [[1, 2, 3, 4]], vocab=300)
    fields = json.loads(sidecar(path).read_text())
    sidecar(path).write_text(json.dumps({**fields, **change}))
    with pytest.raises(DataError, match=words):
        open_token_file(path)


@pytest.mark.parametrize("text", ["[1]", "{", "\xff", "null"])
def test_broken_headers_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(b"\1\0")
    sidecar(path).write_bytes(text.encode("latin1"))
    with pytest.raises(DataError, match=r"t\.bin\.json"):
        read_header(path)


def test_a_bare_bin_file_asks_for_its_header(tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(b"\1\0" * 9)
    with pytest.raises(DataError, match=r"has no t\.bin\.json"):
        read_header(tmp_path / "t.bin")


def test_npy_arrays(tmp_path: Path) -> None:
    path = tmp_path / "t.npy"
    np.save(path, np.array([5, 9, 1], dtype=np.uint16))
    assert whole(open_npy(path)) == [5, 9, 1]
    for array, words in (
        (np.zeros((2, 2), dtype=np.uint8), "one-dimensional"),
        (np.zeros(3), "float64"),
        (np.zeros(3, dtype=">u2"), "big-endian"),
        (np.array([{}], dtype=object), "NumPy can map"),
    ):
        np.save(path, array, allow_pickle=True)
        with pytest.raises(DataError, match=words):
            open_npy(path)
    path.write_bytes(b"not an array")
    with pytest.raises(DataError, match="NumPy can map"):
        open_npy(path)


@given(parts=st.lists(st.binary(max_size=9), min_size=1, max_size=6), data=st.data())
@settings(deadline=None, max_examples=40)
def test_files_read_back_to_back(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    paths = [folder / str(index) for index in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part)
    store, text = FileBytes(paths), b"".join(parts)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    assert len(store) == len(text)
    assert store.read(start, stop).tobytes() == text[start:stop]


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"x" * 100)
    store = FileBytes([path])
    path.write_bytes(b"x")
    with pytest.raises(DataError, match="cannot read 100 items"):
        store.read(0, 10)


# ------------------------------------------------------------------ cache


def test_cache_folder_follows_xdg(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "atoll"
    assert (
        cache_folder({"XDG_CACHE_HOME": "relative"}) == cache_folder({}) == Path.home() / ".cache" / "atoll"
    )


def test_replacing_leaves_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    with replacing(path) as file:
        file.write(b"first")
        assert not path.exists()
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"second")
        raise KeyError
    assert path.read_bytes() == b"first" and [p.name for p in path.parent.iterdir()] == ["file"]


# ------------------------------------------------------------------ corpora


def test_embedded_corpus_is_unpacked_once_and_checked(tmp_path: Path) -> None:
    entry = EMBEDDED["shakespeare"]
    store = open_embedded("shakespeare", tmp_path)
    assert len(store) == entry.nbytes and store.dtype == np.uint8
    (copy,) = tmp_path.iterdir()
    stamp = copy.stat().st_mtime_ns
    open_embedded("shakespeare", tmp_path)
    assert copy.stat().st_mtime_ns == stamp, "an intact copy is used as it is"
    text = copy.read_bytes()
    raw = bytearray(text)
    raw[1000] ^= 1
    copy.write_bytes(raw)
    again = open_embedded("shakespeare", tmp_path)
    assert again.read(0, len(again)).tobytes() == text
    assert copy.read_bytes() == text, "a damaged copy is replaced"


def test_embedded_corpus_works_without_a_writable_cache(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    store = open_embedded("shakespeare", blocked)
    assert len(store) == EMBEDDED["shakespeare"].nbytes


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"b/z.txt": "2", "a.txt": "1", "c.md": "3", ".hidden": "x", ".git/y": "x"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bb.txt").write_text("")
    corpus = open_corpus(str(tmp_path), tmp_path)
    assert corpus.store.read(0, 3).tobytes() == b"123"
    assert [(Path(d.name).name, d.start, d.stop) for d in corpus.documents] == [
        ("a.txt", 0, 1),
        ("z.txt", 1, 2),
        ("bb.txt", 2, 2),
        ("c.md", 2, 3),
    ]


def test_sources_that_hold_no_text_are_refused(tmp_path: Path) -> None:
    empty, binary, folder = tmp_path / "empty.txt", tmp_path / "mixed" / "x.png", tmp_path / "none"
    empty.touch()
    folder.mkdir()
    binary.parent.mkdir()
    binary.write_bytes(b"PNG\0\1")
    for source, words in (
        (str(tmp_path / "absent.txt"), "neither a file nor a folder"),
        ("shakespear", "did you mean the embedded corpus 'shakespeare'"),
        (str(empty), "is empty"),
        (str(folder), "has no files"),
        (str(binary.parent), "does not look like text"),
        ("hf:", "not of the form"),
        ("hf:a#", "not of the form"),
    ):
        with pytest.raises(DataError, match=words):
            open_corpus(source, tmp_path)


class FakeTable:
    """Rows as the datasets library hands them out."""

    def __init__(self, columns: dict[str, list[object]]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def iter(self, batch_size: int) -> Sequence[dict[str, list[object]]]:
        cuts = (slice(0, 1), slice(1, None))
        return [{name: rows[cut] for name, rows in self.columns.items()} for cut in cuts]


@pytest.fixture
def fake_datasets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    calls: list[tuple[object, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str) -> FakeTable:
        calls.append((name, config, split))
        if name == "gone":
            raise FileNotFoundError("Dataset 'gone' doesn't exist on the Hub")
        return FakeTable({"text": ["one", "zwei é"], "number": [1, 2], "none": []})

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


@pytest.mark.parametrize("writable", [True, False])
def test_hub_datasets_are_rows_with_newlines(
    tmp_path: Path, fake_datasets: list[tuple[object, ...]], writable: bool
) -> None:
    cache = tmp_path / "cache"
    if not writable:
        cache.write_text("not a folder")
    corpus = open_corpus("hf:owner/name@small:test#text", cache)
    assert corpus.store.read(0, len(corpus.store)).tobytes() == "one\nzwei é\n".encode()
    open_corpus("hf:owner/name", cache)
    assert fake_datasets == [("owner/name", "small", "test"), ("owner/name", None, "train")]
    assert not writable or list(cache.iterdir()) == []


@pytest.mark.usefixtures("fake_datasets")
def test_hub_datasets_that_cannot_be_used(tmp_path: Path) -> None:
    for source, words in (
        ("hf:gone", "cannot load 'hf:gone': Dataset 'gone' doesn't exist"),
        ("hf:x#body", "no column 'body'; its columns are text, number, none"),
        ("hf:x#number", "holds int, not text"),
        ("hf:x#none", "is empty"),
    ):
        with pytest.raises(DataError, match=words):
            open_corpus(source, tmp_path)


def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'PATH\[hf\]'"):
        open_corpus("hf:owner/name", tmp_path)
    with pytest.raises(DataError, match=r"pip install 'PATH\[tokenizers\]'"):
        FileTokenizer(tmp_path / "tokenizer.json")


def test_the_real_datasets_library_reads_a_local_folder(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "first"}\n{"text": "second"}\n')
    corpus = open_corpus(f"hf:{folder}", tmp_path / "cache")
    assert corpus.store.read(0, len(corpus.store)).tobytes() == b"first\nsecond\n"


# ------------------------------------------------------------------ tokenizers


def test_bytes_go_to_text_and_back() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("né ♞")) == "né ♞"
    assert tokenizer.decode([0xC3, 999, 65]) == "\ufffd\ufffdA"


def corpus_of(*texts: bytes) -> Corpus:
    documents, start = [], 0
    for index, text in enumerate(texts):
        documents.append(Document(f"doc{index}", start, start + len(text)))
        start += len(text)
    return Corpus("corpus", ArrayTokens(np.frombuffer(b"".join(texts), np.uint8)), tuple(documents))


class Pieces(ByteTokenizer):
    """Remembers the texts it was given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> Sequence[int]:
        self.texts.append(text)
        return super().encode(text)


@given(texts=st.lists(st.text(st.sampled_from("aé♞😀\n"), max_size=60), min_size=1, max_size=3))
@settings(deadline=None, max_examples=80)
def test_texts_are_cut_between_lines_or_characters(texts: list[str]) -> None:
    raw, tokenizer = [text.encode() for text in texts], Pieces()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.tokenizer, "PIECE", 16)
        ids = [int(i) for piece in tokenize(corpus_of(*raw), tokenizer) for i in piece]
    assert bytes(ids) == b"".join(raw)
    assert all(0 < len(text.encode()) <= 16 for text in tokenizer.texts)
    ends = set(np.cumsum([len(text) for text in raw]).tolist())
    position = 0
    for text in tokenizer.texts:
        position += len(text.encode())
        assert position in ends or text.endswith("\n") or "\n" not in text


def test_text_that_is_not_utf8_says_where() -> None:
    with pytest.raises(DataError, match=r"doc1 is not UTF-8 at byte 2 \(0xff\)"):
        list(tokenize(corpus_of(b"fine", b"ab\xff"), ByteTokenizer()))


def test_real_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(["to be or not to be"] * 50, trainer)
    inner.save(str(path))
    tokenizer = FileTokenizer(path)
    ids = tokenizer.encode("to be or not, é")
    assert tokenizer.decode(ids) == "to be or not, é" and len(ids) < 14
    assert max(ids) < tokenizer.vocab == inner.get_vocab_size()
    path.write_text("{}")
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        FileTokenizer(path)
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        FileTokenizer(tmp_path / "absent.json")
