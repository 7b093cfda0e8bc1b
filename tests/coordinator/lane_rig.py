"""Islands in a run: what sends their lanes, receives them, and computes what they must receive."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from coordinator.exchange import Exchange
from optim.pieces import cut
from optim.reduce import reduce_payloads
from protos import atoll_pb2 as pb
from protos.buckets import BucketTable
from tests.coordinator.contribution_rig import abstain_frames, coded_table, lane_frames
from tests.coordinator.coordinator_rig import FakeNode, Site

TABLE = coded_table()
EVERYTHING = range(len(TABLE.buckets))
HALVES = ((0, 2), (1, 3, 4))


def island_site(nodes: int = 2, *, table: BucketTable = TABLE, piece: int = 0, **plan: object) -> Site:
    """Nodes of several ranks; ``piece``: reduced, and sent down, in pieces of so many bytes."""
    site = Site(nodes=nodes, present=0, table=table, **plan)
    for _ in range(nodes):
        site.add(ranks=4)
    if piece:
        site.run.training._reducing = {
            digest: dataclasses.replace(reducing, pieces=cut(reducing.table, piece))
            for digest, reducing in site.run.training._reducing.items()
        }
        active = site.run.active
        assert active is not None
        active._shared = site.run.training._reducing[table.digest]
    return site


def lane_of(result: bytes, buckets: Sequence[int], table: BucketTable = TABLE) -> bytes:
    """What of a result belongs to a lane."""
    return b"".join(result[table.result_offsets[i] :][: table.buckets[i].result_nbytes] for i in buckets)


def reduced(site: Site, orders: Sequence[pb.RoundOpen], payloads: dict[int, bytes]) -> bytes:
    """The result that the contributions of some nodes must have."""
    result = reduce_payloads(
        site.table,
        [torch.frombuffer(bytearray(payload), dtype=torch.uint8) for payload in payloads.values()],
        round_index=orders[0].round,
        mean_weights=[orders[i].lease_count for i in payloads],
    )
    assert result is not None
    return result.numpy().tobytes()


def send(node: FakeNode, order: pb.RoundOpen, payload: bytes, buckets: Sequence[int]) -> Exchange:
    """Deliver a whole lane."""
    return node.feed(*lane_frames(order, node.hub.tables.of(order.round), payload, buckets))


def fetch(node: FakeNode, order: pb.RoundOpen, buckets: Sequence[int]) -> Exchange:
    return node.feed(*abstain_frames(order, "fetching", part=True, buckets=buckets))


async def collect(node: FakeNode, exchange: Exchange) -> tuple[bytes, pb.Commit]:
    download = await node.receive(exchange)
    assert download.commit is not None
    return bytes(download.payload[: download.received]), download.commit
