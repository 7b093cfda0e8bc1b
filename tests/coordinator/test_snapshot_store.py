"""Snapshots that are kept: which of them, for how long, on a disk that is full or damaged."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from coordinator.chunk_store import FileChunkStore
from protos import atoll_pb2 as pb
from protos.refusal import Refused
from protos.wire import CHUNK_BYTES
from tests.coordinator.coordinator_rig import HeldPool, soon
from tests.coordinator.snapshot_rig import STATE, Case, read
from tests.coordinator.state_rig import SharedState


async def test_the_newest_two_stay_and_what_is_read() -> None:
    case = Case()
    first = await case.make(5)
    reader = case.snapshots.read(pb.ChunksRequest(snapshot=first.id))
    await reader.__anext__()
    second, third, fourth = [await case.make(index) for index in (6, 7, 8)]
    assert case.snapshots.kept == [first, third, fourth]
    with pytest.raises(Refused):
        case.snapshots.open(second.id)
    async for _ in reader:
        pass
    assert case.snapshots.kept == [third, fourth]
    assert [state.snapshot for state, _ in case.store.kept()] == [third.id, fourth.id]


async def test_a_download_that_is_given_up_lets_go() -> None:
    case = Case()
    first = await case.make(5)
    async with contextlib.aclosing(case.snapshots.read(pb.ChunksRequest(snapshot=first.id))) as reader:
        await reader.__anext__()
        for index in (6, 7):
            await case.make(index)
        assert first in case.snapshots.kept
    assert first not in case.snapshots.kept


async def test_another_process_goes_on_with_what_is_kept(tmp_path: Path) -> None:
    case = Case(FileChunkStore(tmp_path))
    names = [(await case.make(index)).id for index in (9, 10)]
    orders = case.begin(11)
    await case.feed("x", STATE.frames(orders["x"]))
    case.snapshots.stop()
    assert len(case.ended) == 2  # nobody is told of the third
    case = Case(FileChunkStore(tmp_path))
    assert [(kept.id, kept.round) for kept in case.snapshots.kept] == list(zip(names, (9, 10), strict=True))
    _, data = await read(case.snapshots, names[1])
    assert data == STATE.data
    assert (await case.make(10)).id not in names  # a name is never used twice


async def test_damage_on_the_disk_is_found(tmp_path: Path) -> None:
    case = Case(FileChunkStore(tmp_path))
    a, b, c = [await case.make(index) for index in (4, 5, 6)]
    assert not (tmp_path / a.id).exists()
    with open(tmp_path / b.id / "data", "r+b") as file:
        file.seek(CHUNK_BYTES + 17)
        file.write(b"!")
    with pytest.raises(Refused, match="chunk 1 is not as it was stored"):
        await read(case.snapshots, b.id)
    assert case.snapshots.kept == [c] and not (tmp_path / b.id).exists()
    os.truncate(tmp_path / c.id / "data", 100)
    case = Case(FileChunkStore(tmp_path))
    assert not case.snapshots.kept and not list(tmp_path.iterdir())


async def test_a_snapshot_of_another_run_is_removed() -> None:
    case = Case()
    await case.make(5)
    await case.make(6)
    case.agreed[5] = "0" * 32
    case.snapshots.sweep()
    assert [kept.round for kept in case.snapshots.kept] == [6]
    case.begin(7)
    case.snapshots.discard("the run begins anew")
    assert not case.snapshots.kept and not case.store.kept() and case.snapshots.gathering is None
    assert case.ended[-1] == (None, "the run begins anew")


async def test_a_full_disk_fails_the_snapshot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("posix_fallocate", "pwrite", "fsync"):
        case = Case(FileChunkStore(tmp_path))
        order = case.begin(donors=["x"])["x"]
        with monkeypatch.context() as patch:
            if name == "fsync":
                await case.feed("x", STATE.frames(order)[:-1])
                patch.setattr(os, name, full)
                assert case.snapshots.gathering is not None
                upload = next(iter(case.snapshots.gathering._uploads.values()))
                assert await upload.feed(STATE.frames(order)[-1])
            else:
                patch.setattr(os, name, full)
                with pytest.raises(Refused, match=r"given up: .*No space left on device"):
                    await case.feed("x", STATE.frames(order))
        await case.fails("No space left on device; free space there")
        assert not list(tmp_path.iterdir())
        await case.make(6)
        case.snapshots.discard("for the next")


async def test_a_stop_in_the_middle_of_a_write() -> None:
    pool = HeldPool()
    case = Case(pool=pool)
    order = case.begin(donors=["x"])["x"]
    upload = case.snapshots.upload("x", STATE.header(order))
    header, *frames = STATE.frames(order)
    await upload.feed(header)
    feeding = asyncio.ensure_future(upload.feed(frames[0]))
    await asyncio.sleep(0)
    case.snapshots.stop()
    pool.run()
    with pytest.raises(Refused, match="the run has ended"):
        await soon(feeding)
    assert case.ended == [] and not case.store.kept()


async def test_memory_stays_flat(tmp_path: Path) -> None:
    """24 MiB pass through; what is held is a few messages."""
    state = SharedState.of(nbytes=24 << 20)
    case = Case(FileChunkStore(tmp_path), agreed={5: state.digest})
    order = case.begin(donors=["x"], state=state)["x"]
    frames = state.frames(order)
    tracemalloc.start()
    try:
        await case.feed("x", frames)
        async for _ in case.snapshots.read(pb.ChunksRequest(snapshot=order.snapshot)):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert case.snapshots.kept and peak < 6 << 20
