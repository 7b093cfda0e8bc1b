"""Snapshots on a virtual clock, and a state for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.fuzzing.streams import InlinePool
from coordinator.chunk_store import ChunkStore, MemoryChunkStore
from coordinator.partial_snapshot import Upload
from coordinator.snapshots import Snapshot, Snapshots
from protos import atoll_pb2 as pb
from tests.coordinator.coordinator_rig import VirtualTimer, soon
from tests.coordinator.state_rig import SharedState, StateDownload

STALL = 60.0
STATE = SharedState.of(nbytes=3_600_078)  # four chunks


@dataclass
class Case:
    """Snapshots on a virtual clock."""

    store: ChunkStore = field(default_factory=MemoryChunkStore)
    pool: Any = field(default_factory=InlinePool)
    agreed: dict[int, str] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.timer = VirtualTimer()
        self.ended: list[tuple[Snapshot | None, str]] = []
        self.snapshots = self.open()

    def open(self) -> Snapshots:
        return Snapshots(
            self.store,
            pool=self.pool,
            now=self.timer.now,
            stall=STALL,
            agreed=lambda round_index: self.agreed.get(round_index, STATE.digest),
            on_end=lambda snapshot, reason: self.ended.append((snapshot, reason)),
            moved_at=lambda node: self.moved.get(node, float("-inf")),
        )

    def begin(
        self, round_index: int = 5, donors: Sequence[str] = ("x", "y"), state: SharedState = STATE
    ) -> Any:
        return dict(self.snapshots.begin(round_index, state.nbytes, donors))

    async def feed(self, node: str, frames: Sequence[bytes]) -> tuple[Upload, bool]:
        upload = self.snapshots.upload(node, frames[0])
        done = False
        for frame in frames:
            done = await soon(upload.feed(frame))
        return upload, done

    async def make(
        self, round_index: int, state: SharedState = STATE, donors: Sequence[str] = ("x",)
    ) -> Snapshot:
        for node, order in self.begin(round_index, donors, state).items():
            await self.feed(node, state.frames(order))
        snapshot, _ = self.ended[-1]
        assert snapshot is not None
        return snapshot

    async def fails(self, reason: str) -> None:
        """The snapshot has failed and nothing is left of it."""
        ((snapshot, why),) = self.ended
        assert snapshot is None and reason in why, why
        assert self.snapshots.gathering is None and not self.snapshots.kept
        assert not self.store.kept()


async def read(snapshots: Snapshots, name: str, first: int = 0, count: int = 0) -> tuple[pb.Manifest, bytes]:
    download = StateDownload(first)
    async for message in snapshots.read(pb.ChunksRequest(snapshot=name, first=first, count=count)):
        download.add(message)
    assert download.complete and download.manifest is not None
    return download.manifest, bytes(download.data)
