"""A run whose slices travel between its nodes, and nodes that talk about slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from protos import atoll_pb2 as pb
from tests.coordinator.contribution_rig import voted_table
from tests.coordinator.coordinator_rig import FakeNode, Site

TABLE = voted_table(64)

NAMES = ["node-0", "node-1", "node-2"]


class Member(FakeNode):
    """A node that talks about slices."""

    topology: pb.Topology
    reduces: pb.Reduce | None = None

    async def next(self) -> pb.CoordinatorMessage:
        """The next order that is none of the mesh's."""
        while True:
            message = await self.order()
            assert message is not None
            kind = message.WhichOneof("kind")
            if kind == "topology":
                self._revise(message.topology)
            elif kind == "reduce":
                self.reduces = message.reduce
            else:
                return message

    async def opened(self, round_index: int | None = None) -> pb.RoundOpen:
        message = await self.next()
        assert message.WhichOneof("kind") == "round_open", message
        assert round_index is None or message.round_open.round == round_index
        self.drain()
        return message.round_open

    async def committed(self) -> pb.Commit:
        message = await self.next()
        assert message.WhichOneof("kind") == "committed", message
        return message.committed

    def drain(self) -> None:
        """Take what the mesh has sent since."""
        waiting = self.outbox._messages
        while waiting and waiting[0].WhichOneof("kind") in ("topology", "reduce"):
            message = waiting.popleft()
            if message.HasField("topology"):
                self._revise(message.topology)
            else:
                self.reduces = message.reduce

    def _revise(self, message: pb.Topology) -> None:
        if message.since:
            assert message.since == self.topology.number, "it differs from what this node was told last"
            nodes = {node.node: node for node in self.topology.nodes if node.node not in message.gone}
            nodes.update((node.node, node) for node in message.nodes)
            tables = self.topology.tables if message.same_tables else message.tables
            message = pb.Topology(number=message.number, nodes=list(nodes.values()), tables=tables)
        self.topology = message

    def slices(self) -> Sequence[pb.SliceOf]:
        return self.topology.tables[0].slices if self.topology.tables else []

    def say(self, **kind: Any) -> None:
        self.hub.message(self.node, pb.NodeMessage(**kind).SerializeToString())

    def news(self, index: int, arrived: Sequence[str], *, made: bool = False, **fields: Any) -> None:
        self.drain()
        order = self.reduces
        assert order is not None
        digest, differing = (bytes([index + 1]) * 16, [index] * len(order.voters)) if made else (b"", [])
        values: dict[str, Any] = {
            "round": order.round,
            "topology": self.topology.number,
            "slice": index,
            "arrived": arrived,
            "leases": [self._lease(name) for name in arrived],
            "attempt": order.attempt,
            "digest": digest,
            "differing": differing,
            "compared": 100 if made else 0,
        }
        self.say(slice_news=pb.SliceNews(**{**values, **fields}))

    def _lease(self, name: str) -> pb.Lease:
        """What the coordinator takes a node to work on."""
        active = self.hub.run.active
        member = active.members.get(name) if active is not None else None
        if member is None or member.lease is None:
            return pb.Lease()
        return pb.Lease(start=member.lease.start, count=member.lease.count)

    def holds(self, round_index: int, slices: int) -> None:
        whole = xxhash.xxh3_128(b"".join(bytes([index + 1]) * 16 for index in range(slices))).digest()
        self.say(holding=pb.Holding(round=round_index, topology=self.topology.number, digest=whole))


class Reef(Site):
    """A run whose slices travel between its nodes."""

    nodes: list[Member]  # type: ignore[assignment]

    def __init__(self, count: int = 3, **plan: Any) -> None:
        super().__init__(count, present=0, table=TABLE, transport=plan.pop("transport", "direct"), **plan)
        for index in range(count):
            self.join(f"10.0.0.{index + 1}:4601")

    def join(self, direct: str = "", **changes: Any) -> Member:
        node = Member(self.hub, endpoint=pb.Endpoint(direct=direct), **changes)
        self.nodes.append(node)
        return node

    def by(self, name: str) -> Member:
        return next(node for node in self.nodes if node.id == name)

    async def begin(self, round_index: int = 0) -> list[pb.RoundOpen]:
        return [await node.opened(round_index) for node in self.nodes]

    def reduce(self, *, made: bool = True, voters: Sequence[str] | None = None) -> None:
        """All reducers tell that the contributions of ``voters`` are there."""
        names = [node.id for node in self.nodes] if voters is None else list(voters)
        for index, part in enumerate(self.nodes[0].slices()):
            self.by(part.reducer).news(index, names, made=made)

    async def finish(self, round_index: int) -> list[pb.Commit]:
        self.reduce()
        for node in self.nodes:
            node.holds(round_index, len(node.slices()))
        commits = [await node.committed() for node in self.nodes]
        for node in self.nodes:
            node.report(round_index, f"state-{round_index + 1}")
        return commits
