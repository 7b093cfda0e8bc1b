"""Runs whose contributions are means of every kind, through a hub without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.hub import Hub
from coordinator.plan import RunPlan
from coordinator.run import Run
from optim.aggregate import ReducerMemory
from optim.bits import tally
from optim.reduce import reduce_payloads
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import Bucket, BucketTable, MeanRule, TableSchedule
from protos.runfile import RunFile
from tests.coordinator.contribution_rig import coded_table, random_payload, schedule, voted_table
from tests.coordinator.coordinator_rig import FakeNode, InlinePool, VirtualTimer, make_plan, soon


def fragments() -> TableSchedule:
    """Three rounds, of unlike sizes, that come round again."""
    return schedule(
        BucketTable((Bucket.of("a", "mean", [("a", (30, 30))], codec="int4"),)),
        BucketTable((Bucket.of("b", "mean", [("b", (9, 70))], codec="2bit", result="int8"),)),
        BucketTable((Bucket.of("c", "majority", [("c", (2000,))]), Bucket.of("d", "mean", [("d", (5,))]))),
    )


class Site:
    """A hub, its nodes, and the memory that its reducer should have."""

    def __init__(self, tables: TableSchedule, weights: Sequence[int] = (1, 1, 1), **plan: Any) -> None:
        self.tables = tables
        self.timer = VirtualTimer()
        planned = make_plan(nodes=len(weights), **plan)
        self.hub = Hub(Run(planned, tables, timer=self.timer, pool=InlinePool(), tally=tally))
        self.nodes = [FakeNode(self.hub, weight=weight) for weight in weights]
        self.memory = ReducerMemory()

    async def opened(self) -> list[pb.RoundOpen]:
        return [await node.opened() for node in self.nodes]

    def payload(self, round_index: int, index: int) -> bytes:
        return random_payload(100 * round_index + index, self.tables.of(round_index))

    def expected(self, orders: dict[int, pb.RoundOpen]) -> bytes:
        """The result of the contributions of the nodes with ``orders``, which is committed."""
        round_index = next(iter(orders.values())).round
        payloads = [
            torch.frombuffer(bytearray(self.payload(round_index, i)), dtype=torch.uint8) for i in orders
        ]
        result = reduce_payloads(
            self.tables.of(round_index),
            payloads,
            round_index=round_index,
            weights=[self.nodes[i].weight for i in orders],
            mean_weights=[self.nodes[i].weight * order.lease_count for i, order in orders.items()],
            memory=self.memory,
        )
        assert result is not None
        return result.numpy().tobytes()

    async def play(self) -> tuple[bytes, list[pb.Commit]]:
        """One round of all nodes."""
        orders = await self.opened()
        index = orders[0].round
        exchanges = [
            node.send(order, self.payload(index, i))
            for i, (node, order) in enumerate(zip(self.nodes, orders, strict=True))
        ]
        downloads = [await n.receive(x) for n, x in zip(self.nodes, exchanges, strict=True)]
        results = {bytes(download.payload[: download.received]) for download in downloads}
        assert results == {self.expected(dict(enumerate(orders)))}
        for node in self.nodes:
            node.report(index, f"state-{index}")
        commits = [download.commit for download in downloads]
        return results.pop(), [commit for commit in commits if commit is not None]


@pytest.mark.parametrize("codec", ["int4", "2bit", "lowrank:2+int8", "fp32"])
@pytest.mark.parametrize("rule", [MeanRule(), MeanRule(clip=1.5, trim=1)])
async def test_a_whole_run(codec: str, rule: MeanRule) -> None:
    """Votes, encoded means, bases and exact means; residuals are carried from round to round."""
    table = coded_table(codec, rule)
    site = Site(schedule(table), rounds=4)
    for index in range(4):
        result, commits = await site.play()
        assert all(commit.counted and commit.nbytes == table.result_nbytes for commit in commits)
        assert all(commit.casting == index % 3 for commit in commits)
        assert all(0 < commit.agreement < 1 for commit in commits)  # of the votes
        assert commits[0].payload_digest == wire.payload_digest(result)
    for node in site.nodes:
        assert (await node.stopped()).done
        node.leave()
    await soon(site.hub.run.finished.wait())
    assert not site.hub.run.counters


async def test_fragments_take_turns() -> None:
    tables = fragments()
    site = Site(tables, rounds=7, method="diloco", local_steps=6, fragments=3, batch=4)
    for index in range(7):
        result, commits = await site.play()
        assert len(result) == tables.of(index).result_nbytes
        assert np.isnan(commits[0].agreement) == (index % 3 != 2)  # nothing is voted in the others
    status = site.hub.status()
    assert (status.payload_bytes, status.result_bytes) == tuple(round(b) for b in tables.mean_nbytes)
    assert status.parameters == 900 + 630 + 2000 + 5
    assert site.hub.run.leases.trained == 7 * 3 * 4 * 2
    assert [point.agreement > 0 for point in status.curve] == [index % 3 == 2 for index in range(7)]


async def test_the_fragment_of_another_round_is_refused() -> None:
    tables = fragments()
    site = Site(tables)
    orders = await site.opened()
    other = tables.tables[1]
    bad = site.nodes[1].send(orders[1], random_payload(0, other), table_digest=other.digest)
    assert bad.refusal is not None
    assert other.digest in str(bad.refusal) and tables.tables[0].digest in str(bad.refusal)
    for i in (0, 2):
        site.nodes[i].send(orders[i], site.payload(0, i))
    assert site.hub.run.results.get(0).voters == ("node-0", "node-2")  # type: ignore[union-attr]


async def test_a_node_joins_with_the_digest_of_the_whole_schedule() -> None:
    tables = fragments()
    site = Site(tables)
    reply = site.hub.get_run(pb.GetRunRequest(protocol=wire.PROTOCOL))
    assert reply.table_digest == tables.digest
    assert tables.digest not in {table.digest for table in tables.tables}


@pytest.mark.parametrize("spoil", ["scale", "value"])
async def test_bad_bytes_are_refused_and_the_round_goes_on(spoil: str) -> None:
    """The rest of the nodes had delivered and were reduced up to the bad bucket: an attempt without it."""
    table = coded_table()
    site = Site(schedule(table), rounds=2)
    orders = await site.opened()
    payload = bytearray(site.payload(0, 1))
    at = table.offsets[1] if spoil == "scale" else table.offsets[4] + 8
    payload[at : at + 4] = np.array([np.nan], "<f4").tobytes()
    good = {i: site.nodes[i].send(orders[i], site.payload(0, i)) for i in (0, 2)}
    bad = site.nodes[1].send(orders[1], bytes(payload))
    assert bad.refusal is not None and bad.refusal.kind == ("bad-code" if spoil == "scale" else "not-finite")
    assert site.hub.run.counters == {bad.refusal.kind: 1}
    expected = site.expected({i: orders[i] for i in (0, 2)})
    for i, exchange in good.items():
        download = await site.nodes[i].receive(exchange)
        assert bytes(download.payload) == expected
        assert download.commit is not None and list(download.commit.voters) == ["node-0", "node-2"]
    assert site.hub.run.leases.trained == 2 * 4


async def test_means_are_weighted_by_the_samples_behind_them() -> None:
    """A lease that another member has left over is shorter, and its mean counts for less."""
    site = Site(schedule(coded_table()), rounds=3, method="lordo", local_steps=8, batch=4)
    orders = await site.opened()
    exchanges = [site.nodes[i].send(orders[i], site.payload(0, i)) for i in (0, 1)]
    exchanges.append(site.nodes[2].abstain(orders[2]))
    expected = site.expected({i: orders[i] for i in (0, 1)})
    for node, exchange in zip(site.nodes, exchanges, strict=True):
        assert bytes((await node.receive(exchange)).payload) == expected
    orders = await site.opened()
    assert [order.lease_count for order in orders] == [4, 32, 32]
    exchanges = [site.nodes[i].send(orders[i], site.payload(1, i)) for i in range(3)]
    expected = site.expected(dict(enumerate(orders)))
    for node, exchange in zip(site.nodes, exchanges, strict=True):
        assert bytes((await node.receive(exchange)).payload) == expected


async def test_a_vote_and_a_mean_of_a_heavier_node() -> None:
    site = Site(schedule(coded_table()), weights=(1, 3), rounds=1)
    result, commits = await site.play()
    assert list(commits[0].weights) == [1, 3]
    assert result


async def test_leases_are_as_long_as_a_round() -> None:
    """Round 0 of LoRDO prepares the first basis from one batch."""
    site = Site(schedule(voted_table()), weights=(1, 1), rounds=3, method="lordo", local_steps=16, batch=4)
    counts = []
    for _ in range(3):
        orders = await site.opened()
        counts.append([order.lease_count for order in orders])
        exchanges = [
            n.send(o, site.payload(o.round, i))
            for i, (n, o) in enumerate(zip(site.nodes, orders, strict=True))
        ]
        for node, exchange in zip(site.nodes, exchanges, strict=True):
            await node.receive(exchange)
    assert counts == [[4, 4], [64, 64], [64, 64]]
    assert site.hub.run.leases.trained == 2 * (4 + 64 + 64)


def test_the_plan_knows_the_micro_steps() -> None:
    run_file = RunFile.parse(
        '[method]\nname = "diloco"\nlocal_steps = 24\nfragments = 3\n[data]\nbatch = 5\n'
    )
    plan = RunPlan.of(run_file)
    assert (plan.method, plan.local_steps, plan.fragments) == ("diloco", 24, 3)
    assert [plan.samples(index) for index in range(3)] == [40, 40, 40]
    assert RunPlan.of(RunFile()).samples(0) == RunFile().data.batch
