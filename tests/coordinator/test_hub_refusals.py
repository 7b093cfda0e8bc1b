"""What the hub refuses or counts, without harm to the round."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from protos import atoll_pb2 as pb
from protos import wire
from protos.refusal import Refused
from tests.coordinator.contribution_rig import abstain_frames, contribution_frames, random_payload, slow_tally
from tests.coordinator.coordinator_rig import Site, drain

REFUSALS: dict[str, Any] = {
    "garbage": (lambda f: [b"\xff" * 40], "bad-frame"),
    "empty": (lambda f: [b""], "bad-frame"),
    "no header": (lambda f: f[1:], "bad-frame"),
    "two headers": (lambda f: [f[0], f[0]], "bad-frame"),
    "frame after the end": (lambda f: [*f[:1], f[1], f[1]], "out-of-order"),
    "out of order": (lambda f: [f[0], f[2], f[1], f[3]], "out-of-order"),
    "oversized": (lambda f: [*f[:3], wire.encode_frame(wire.CHUNK, b"x", offset=128)], "oversized"),
    "no end": (lambda f: f[:3], "truncated"),
    "end too soon": (lambda f: [f[0], f[1], f[3]], "truncated"),
    "only a header": (lambda f: f[:1], "truncated"),
    "nothing": (lambda f: [], "truncated"),
    "bad digest": (lambda f: [*f[:3], wire.encode_frame(wire.END, b"")], "bad-digest"),
}


@pytest.mark.parametrize("case", list(REFUSALS))
async def test_a_bad_contribution_is_refused_and_the_round_commits(case: str) -> None:
    change, kind = REFUSALS[case]
    site = Site()
    orders = await site.opened()
    good = site.nodes[0].send(orders[0], random_payload(0, site.table))
    frames = contribution_frames(orders[1], site.table, random_payload(1, site.table), chunk=64)
    bad = site.nodes[1].feed(*change(frames))
    bad.ended()
    assert bad.refusal is not None and bad.refusal.kind == kind
    assert site.run.counters == {kind: 1}
    if bad.result is not None:
        with pytest.raises(Refused):
            await drain(bad)
    site.nodes[2].send(orders[2], random_payload(2, site.table))
    commit = (await site.nodes[0].receive(good)).commit
    assert commit is not None and list(commit.voters) == ["node-0", "node-2"]
    assert "refused: node-1" in commit.reason
    # The refused node fetches the result and takes part in the next round.
    fetch = site.nodes[1].feed(*abstain_frames(orders[1], "it was refused"))
    assert (await site.nodes[1].receive(fetch)).commit == commit_for(commit, False)
    await site.play()
    assert site.run.results.get(1).voters == ("node-0", "node-1", "node-2")  # type: ignore[union-attr]


def commit_for(commit: pb.Commit, counted: bool) -> pb.Commit:
    other = pb.Commit()
    other.CopyFrom(commit)
    other.counted = counted
    other.agreement = math.nan
    return other


HEADERS: dict[str, Any] = {
    "wrong-table": {"table_digest": "other"},
    "oversized": {"nbytes": 2**50},
    "truncated": {"nbytes": 64},
    "bad-weight": {"weight": 2},
    "wrong-round": {"round": 9},
    "wrong epoch": {"epoch": 9},
}


@pytest.mark.parametrize("case", list(HEADERS))
async def test_a_bad_header_is_refused_and_the_round_commits(case: str) -> None:
    site = Site()
    orders = await site.opened()
    bad = site.nodes[1].send(orders[1], random_payload(1, site.table), **HEADERS[case])
    assert bad.refusal is not None
    assert site.run.counters == {case.replace(" epoch", "-round"): 1}
    for i in (0, 2):
        site.nodes[i].send(orders[i], random_payload(i, site.table))
    assert site.run.results.get(0).voters == ("node-0", "node-2")  # type: ignore[union-attr]


async def test_a_duplicate_is_ignored_and_served() -> None:
    site = Site()
    orders = await site.opened()
    first = site.nodes[0].send(orders[0], random_payload(0, site.table))
    second = site.nodes[0].send(orders[0], random_payload(7, site.table))
    assert first.refusal is not None and first.refusal.code == "ABORTED"
    assert site.run.counters == {"replaced-stream": 1, "duplicate": 1}
    for i in (1, 2):
        site.nodes[i].send(orders[i], random_payload(i, site.table))
    download = await site.nodes[0].receive(second)
    assert download.commit is not None and download.commit.counted
    votes = [np.frombuffer(random_payload(i, site.table), np.uint8) for i in range(3)]
    assert bytes(download.payload) == slow_tally(votes, casting=0).tobytes()
    # And after the commit, from the ring.
    third = site.nodes[0].send(orders[0], random_payload(7, site.table))
    assert (await site.nodes[0].receive(third)).commit == download.commit
    assert site.run.counters["duplicate"] == 2


async def test_an_open_stream_is_replaced_by_a_new_one() -> None:
    site = Site()
    orders = await site.opened()
    frames = contribution_frames(orders[0], site.table, random_payload(0, site.table), chunk=64)
    old = site.nodes[0].feed(*frames[:2])
    new = site.nodes[0].send(orders[0], random_payload(5, site.table))
    old.feed(frames[2])  # still under way
    old.broke()
    assert site.nodes[0].node.exchanges == [new]
    for i in (1, 2):
        site.nodes[i].send(orders[i], random_payload(i, site.table))
    assert (await site.nodes[0].receive(new)).commit.counted  # type: ignore[union-attr]


async def test_a_stranger_to_the_round_is_refused() -> None:
    site = Site()
    orders = await site.opened()
    newcomer = site.add()
    exchange = newcomer.send(orders[0], random_payload(0, site.table))
    assert exchange.refusal is not None and exchange.refusal.kind == "not-a-member"
    site.nodes.remove(newcomer)
    for node, order in zip(site.nodes, orders, strict=True):
        node.send(order, random_payload(0, site.table))
    assert site.run.round == 1


async def test_messages_that_make_no_sense_are_counted() -> None:
    site = Site()
    await site.play()
    for message in (
        b"\xff\xff",
        pb.NodeMessage(leave=pb.Leave(reason="x" * (65 << 10))).SerializeToString(),
        b"",
        pb.NodeMessage(report=pb.Report(round=7)).SerializeToString(),
        pb.NodeMessage(report=pb.Report(round=0, tokens=2**63)).SerializeToString(),
        pb.NodeMessage(report=pb.Report(round=0, state_digest="x" * 129)).SerializeToString(),
    ):
        site.hub.message(site.nodes[0].node, message)
    assert site.run.counters["bad-message"] == 6
    site.nodes[0].ready(0, "")  # of a member: an answer that came too late
    assert site.run.counters["bad-message"] == 6
    assert len(site.run.registry.nodes) == 3
