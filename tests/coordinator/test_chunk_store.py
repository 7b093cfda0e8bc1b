"""Stores of snapshots: what is kept outlasts the process, what is not leaves nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.chunk_store import ChunkStore, ChunkStoreError, FileChunkStore, MemoryChunkStore


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkStore:
    return MemoryChunkStore() if request.param == "memory" else FileChunkStore(tmp_path / "snapshots")


def test_written_in_any_order_and_kept(store: ChunkStore) -> None:
    state = store.create("a", 1000)
    data = os.urandom(1000)
    for start in (300, 0, 600, 900):
        state.write(start, memoryview(data)[start : start + 300])
    assert store.kept() == []
    state.keep(b"manifest")
    ((kept, manifest),) = store.kept()
    assert (kept.snapshot, kept.nbytes, manifest) == ("a", 1000, b"manifest")
    assert kept.read(0, 1000) == state.read(0, 1000) == data
    assert kept.read(299, 2) == data[299:301]
    kept.drop()
    assert store.kept() == []
    kept.drop()  # harmless


def test_a_name_is_free_again(store: ChunkStore) -> None:
    state = store.create("a", 10)
    state.write(0, b"0123456789")
    state.drop()
    again = store.create("a", 5)
    again.write(0, b"abcde")
    again.keep(b"")
    assert [kept.read(0, kept.nbytes) for kept, _ in store.kept()] == [b"abcde"]


@settings(max_examples=40)
@given(
    writes=st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=20)), max_size=20), nbytes=st.just(80)
)
def test_both_stores_hold_the_same(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, bytes]], nbytes: int
) -> None:
    states = [
        MemoryChunkStore().create("a", nbytes),
        FileChunkStore(tmp_path_factory.mktemp("s")).create("a", nbytes),
    ]
    for state in states:
        for offset, data in writes:
            state.write(offset, data)
    assert states[0].read(0, nbytes) == states[1].read(0, nbytes)
    states[1].drop()


def test_opening_removes_the_unfinished_and_keeps_the_rest(tmp_path: Path) -> None:
    store = FileChunkStore(tmp_path)
    whole, part = store.create("whole", 4), store.create("part", 4)
    whole.write(0, b"1234")
    whole.keep(b"m")
    part.write(0, b"12")
    (tmp_path / "part" / "manifest.partial").write_bytes(b"half")
    again = FileChunkStore(tmp_path)
    assert [(state.snapshot, state.read(0, 4)) for state, _ in again.kept()] == [("whole", b"1234")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]
    part.drop()


def test_the_data_is_on_the_disk_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(file: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{file}')).name}")
        fsync(file)

    def replaced(old: Any, new: Any) -> None:
        events.append(f"rename {Path(new).name}")
        replace(old, new)

    state = FileChunkStore(tmp_path).create("a", 4)
    state.write(0, b"1234")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    state.keep(b"m")
    assert events == ["sync data", "sync manifest.partial", "rename manifest", "sync a"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileChunkStore(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ChunkStoreError, match=r"a: No space left on device; free space there"):
            store.create("a", 4)
    assert list(tmp_path.iterdir()) == []
    state = store.create("a", 4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ChunkStoreError, match="No space left"):
            state.write(0, b"1234")
    state.drop()
    assert list(tmp_path.iterdir()) == []


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = FileChunkStore(tmp_path)
    for index in range(20):
        state = store.create(f"s{index}", 100)
        state.write(0, bytes(100))
        if index % 2:
            state.keep(b"m")
            state.read(0, 100)
        else:
            state.drop()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ChunkStoreError, match=r"cannot use the snapshot in .*file"):
        FileChunkStore(tmp_path / "file")


def test_a_data_file_that_was_cut(tmp_path: Path) -> None:
    state = FileChunkStore(tmp_path).create("a", 100)
    state.keep(b"m")
    os.truncate(tmp_path / "a" / "data", 50)
    with pytest.raises(ChunkStoreError, match="data ends at byte 50"):
        state.read(0, 100)
    ((kept, _),) = FileChunkStore(tmp_path).kept()
    assert kept.nbytes == 50
