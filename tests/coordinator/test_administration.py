"""Pausing, going on, and expelling: what the run, its nodes and the journal make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.administration import MAX_REASON, barred, host_of
from coordinator.events import NodeExpelled, NodeLeft, RoundOpened, RunPaused, RunUnpaused
from coordinator.journal import AdminRecord, ExpelledNode
from coordinator.journal_folder import SWARM_SECRET, JournalFolder
from coordinator.nodes import session_secret
from protos import atoll_pb2 as pb
from protos.digests import sha256_text
from protos.refusal import Refused
from tests.coordinator.coordinator_rig import FakeNode, Site
from tests.coordinator.journal_rig import START, Desk, open_journal


async def told(node: FakeNode) -> pb.Paused:
    message = await node.order()
    assert message is not None and message.WhichOneof("kind") == "paused", message
    return message.paused


async def test_a_pause_lets_the_round_in_flight_end_and_opens_no_other() -> None:
    site = Site(nodes=2, rounds=9)
    answer = site.run.administration.pause("new  power\nsupply")
    assert answer.done and answer.text == "the run pauses once round 1 is committed"
    assert site.run.phase == "training"
    orders = await site.opened()
    assert [(await told(node)).reason for node in site.nodes] == ["new power supply"] * 2
    for node, order in zip(site.nodes, orders, strict=True):
        node.send(order, bytes(site.table.nbytes))
        node.report(0, "state-1")
    assert (site.run.phase, site.run.reason, site.run.round) == ("paused", "new power supply", 1)
    site.idle(3 * 3600.0)
    assert (site.run.phase, site.run.active, len(site.told(RoundOpened))) == ("paused", None, 1)
    assert all(node.idle() for node in site.nodes), "nobody is told anything while nothing happens"

    assert not site.run.administration.pause().done
    assert site.run.administration.resume().done
    assert [(await told(node)).reason for node in site.nodes] == ["", ""]
    await site.play()
    assert site.run.round == 2
    assert site.told(RunPaused) == [RunPaused(0, "new power supply")]
    assert site.told(RunUnpaused) == [RunUnpaused(1)]
    assert site.run.administration.resume().text == "the run is not paused"


async def test_a_newcomer_is_told_of_a_pause_and_takes_part_after_it() -> None:
    site = Site(nodes=1, rounds=9)
    await site.play()
    site.run.administration.pause()
    orders = await site.opened()
    await told(site.nodes[0])
    site.nodes[0].send(orders[0], bytes(site.table.nbytes))
    site.nodes[0].report(1, "state-2")
    assert site.run.phase == "paused"
    late = site.add(round=2, state_digest="state-2")
    assert await told(late) == pb.Paused(reason="by the administrator", round=2)
    assert site.run.registry.roster.members == ("node-0", "node-1"), "it is a member of the round to come"
    site.run.administration.resume()
    for node in site.nodes:
        await told(node)
    await site.play()
    assert site.run.round == 3


async def test_a_restarted_coordinator_stays_paused() -> None:
    site = Site(nodes=2, rounds=9)
    await site.play()
    site.run.administration.pause("night")
    lost = site.restart()
    assert site.run.administration.paused == "night"
    back = [node.again(site.hub, round=1, state_digest="state-1") for node in lost]
    assert site.run.phase == "paused"
    assert [(await told(node)).reason for node in back] == ["night", "night"]
    site.run.administration.resume()
    assert site.run.phase == "training"


async def test_who_has_left_a_paused_run_alone_is_waited_for() -> None:
    site = Site(nodes=1, rounds=9)
    await site.play()
    site.run.administration.pause()
    orders = await site.opened()
    site.nodes[0].send(orders[0], bytes(site.table.nbytes))
    site.nodes[0].report(1, "state-2")
    site.nodes[0].die()
    assert site.run.phase == "gathering"
    site.nodes[0].again(round=2, state_digest="state-2")
    assert site.run.phase == "paused"


async def test_an_expelled_node_is_out_at_once_and_for_good() -> None:
    site = Site(nodes=3, rounds=9)
    await site.play()
    orders = await site.opened()
    for node, order in zip(site.nodes[:2], orders[:2], strict=True):
        node.send(order, bytes(site.table.nbytes))
    answer = site.run.administration.expel("node-2", "votes nonsense")
    assert answer.done and answer.text == "node-2 (host) is expelled"
    assert site.run.round == 2, "the round is not kept waiting for it"
    assert (await site.nodes[2].stopped()).reason == "expelled from this run: votes nonsense"
    site.nodes[2].leave()
    assert site.told(NodeExpelled) == [NodeExpelled("node-2", "host", "votes nonsense")]
    assert site.told(NodeLeft)[-1].reason == "expelled from this run: votes nonsense"
    with pytest.raises(Refused, match=r"node-2 \(host\) was expelled from this run: votes nonsense"):
        site.nodes[2].again(round=2, state_digest="state-2")
    with pytest.raises(Refused, match="was expelled"):
        FakeNode(site.hub)  # afresh, by the same name and from the same host
    site.add(name="another", round=2, state_digest="state-2")
    lost = site.restart()
    with pytest.raises(Refused, match="was expelled"):
        lost[2].again(site.hub, round=2, state_digest="state-2")
    lost[0].again(site.hub, round=2, state_digest="state-2")  # of the same name and host, but known


async def test_orders_that_cannot_be_carried_out() -> None:
    site = Site(nodes=1, rounds=1)
    answer = site.run.administration.expel("node-7")
    assert not answer.done and answer.text == "there is no node 'node-7' in this run now"
    await site.play()
    assert site.run.phase == "done"
    assert site.run.administration.pause().text == "the run has ended: all 1 rounds are committed"
    assert not site.run.administration.expel("node-0").done


async def test_a_reason_is_one_short_line() -> None:
    site = Site(nodes=1, rounds=1)
    site.run.administration.pause("a\x00\x1b[31m\n" + "b" * 999)
    paused = site.run.administration.paused
    assert paused.startswith("a [31m bbb") and len(paused) == MAX_REASON and paused.isprintable()


def test_who_is_barred() -> None:
    secret, other = session_secret(), session_secret()
    mark = sha256_text(secret.partition("-")[0])
    expelled = [ExpelledNode("node-3", "gpu", "192.0.2.7", mark, "why")]
    here, elsewhere = "ipv4:192.0.2.7:5000", "ipv4:192.0.2.8:5000"
    assert barred(expelled, secret, "renamed", elsewhere, known=True)
    assert barred(expelled, session_secret(secret), "renamed", elsewhere), "in a later session"
    assert barred(expelled, "", "gpu", here)
    assert not barred(expelled, "", "gpu", elsewhere)
    assert not barred(expelled, "", "another", here)
    assert barred(expelled, other, "gpu", here), "a secret that nobody knows proves nothing"
    assert not barred(expelled, other, "gpu", here, known=True)
    assert host_of("ipv6:%5B2001:db8::7%5D:5000") == "[2001:db8::7]"


def test_the_journal_keeps_orders_also_before_the_run_begins(tmp_path: Path) -> None:
    record, desk = AdminRecord("night", ()), Desk()
    journal = open_journal(tmp_path / "j", desk)
    journal.administer(record)
    journal.close()
    journal = open_journal(tmp_path / "j", desk)
    assert journal.recovered is None and journal.administration == record
    journal.begin(START)
    journal.close()
    journal = open_journal(tmp_path / "j", desk)
    assert journal.administration == record
    journal.close()


def test_orders_are_in_the_folder(tmp_path: Path) -> None:
    values = {"run_digest": "run", "table_digest": "tables", "run_toml": "[run]\n"}
    record = AdminRecord("night", (ExpelledNode("node-1", "naïve", "192.0.2.7", "ab", "why", "k"),))
    with JournalFolder.open(tmp_path / "j", **values) as folder:
        assert folder.administration == AdminRecord()
        with folder.tables.transaction(durable=True):
            folder.tables.put_administration(record)
        secret = folder.swarm_secret()
        assert len(secret) >= 32 and (folder.path / SWARM_SECRET).stat().st_mode & 0o777 == 0o600
    with JournalFolder.open(tmp_path / "j", **values) as folder:
        assert folder.administration == record
        assert folder.swarm_secret() == secret
