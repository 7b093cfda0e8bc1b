"""What goes wrong in a round whose slices travel between nodes, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from node.exchange.peers import pace, rounds
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos import wire
from tests.coordinator.contribution_rig import random_payload, voted_table
from tests.node.peers.peer_rig import DEADLINE, Coordinator, expected

TABLE = voted_table(3000)
NAMES = ["node-0", "node-1", "node-2"]
PAYLOADS = [random_payload(seed, TABLE) for seed in range(3)]

Test = Callable[[], Awaitable[None]]


def play(test: Test) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def start(run: Coordinator, voters: Sequence[int] = (0, 1, 2)) -> list[asyncio.Future[pb.Commit]]:
    order = run.open([NAMES[index] for index in voters])
    return [asyncio.ensure_future(run.nodes[NAMES[i]].reduce(order, PAYLOADS[i])) for i in voters]


def arrive(run: Coordinator, voters: Sequence[int] = (0, 1, 2)) -> None:
    result = expected(TABLE, [PAYLOADS[i] for i in voters], run.round)
    assert all(bytes(node.into) == result for node in run.nodes.values() if not node.dead)


def test_a_way_that_fails_is_followed_by_the_next_one() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES, ways=("tunnel", "direct"))
        run.plan(NAMES)
        direct = {name: node.carriers[1] for name, node in run.nodes.items()}
        direct["node-0"].unreachable.add("node-1")
        await asyncio.gather(*start(run))
        arrive(run)
        assert [name for name, _ in run.nodes["node-0"].carriers[0].opened] == ["node-1"]
        assert not run.nodes["node-2"].carriers[0].opened
        (said,) = run.nodes["node-0"].said
        assert said.startswith("node-1 is reached through the coordinator now (directly: nothing listens")
        direct["node-0"].unreachable.clear()  # the next round does not wait for that way again
        await asyncio.gather(*start(run))
        assert [name for name, _ in run.nodes["node-0"].carriers[0].opened] == ["node-1", "node-1"]
        assert not run.messages("slice_trouble")
        await run.close()

    play(test)


def test_a_stream_that_breaks_is_opened_again_another_way() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES, ways=("direct", "tunnel"))
        run.plan(NAMES)
        order = run.open(NAMES)
        nodes = list(run.nodes.values())
        first = asyncio.ensure_future(nodes[0].reduce(order, PAYLOADS[0]))
        direct, tunnel = nodes[0].carriers
        await until(lambda: len(direct.opened) == 2)
        direct.opened[0][1].cancel()
        rest = [asyncio.ensure_future(nodes[i].reduce(order, PAYLOADS[i])) for i in (1, 2)]
        await asyncio.gather(first, *rest)
        arrive(run)
        assert [name for name, _ in tunnel.opened] == [direct.opened[0][0]]
        await run.close()

    play(test)


def test_a_reducer_that_nobody_reaches_is_told_of_and_replaced() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        for name in ("node-0", "node-2"):
            run.nodes[name].carriers[0].unreachable.add("node-1")
        troubles: list[pb.SliceTrouble] = []
        run.on_trouble = troubles.append
        tasks = start(run)
        await until(lambda: len(troubles) == 2)
        assert {(t.round, t.topology, t.slice) for t in troubles} == {(0, 1, 1)}
        assert "node-1 cannot be reached (directly: nothing listens at node-1)" in troubles[0].reason
        kept = [stream for _, stream in run.nodes["node-0"].carriers[0].opened]
        run.give(1, "node-2")
        run.order_from("node-2")
        await asyncio.gather(*tasks)
        arrive(run)
        opened = [stream for _, stream in run.nodes["node-0"].carriers[0].opened]
        assert opened[:1] == kept and len(opened) == 2  # only the slice that was moved was sent anew
        assert len(troubles) == 2  # told once, though it was tried again
        await run.close()

    play(test)


@pytest.mark.parametrize("phase", ["before anything", "while sending", "before the commit", "after it"])
def test_a_reducer_may_die_at_any_moment(phase: str) -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        victim = run.nodes["node-1"]
        survivors = (0, 2)
        run.hold_back = True
        if phase == "before anything":
            victim.die()
            tasks = start(run, survivors)
        else:
            tasks = start(run)
        if phase == "while sending":
            await until(lambda: bool(victim.served))
            victim.die()
        if phase.endswith("the commit") or phase == "after it":
            await until(lambda: {"node-0", "node-2"} <= run.holding and len(run.digests) == 3)
            if phase == "after it":
                run.commit()
            victim.die()
        voters: Sequence[int] = (0, 1, 2)
        if phase in ("before anything", "while sending"):
            voters = survivors
            await until(lambda: bool(run.messages("slice_trouble")))
            run.hold_back = False
            run.slices[1] = (run.slices[1][0], "node-2")
            run.announce()
            run.expect([NAMES[i] for i in survivors])
        elif phase == "before the commit":
            run.commit()  # all that live hold the result
        done = tasks if phase == "before anything" else [tasks[0], tasks[2]]
        await asyncio.gather(*done)
        arrive(run, voters)
        for task in tasks:
            task.cancel()
        await run.close()

    play(test)


def test_results_that_are_damaged_on_their_way_are_fetched() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        node = run.nodes["node-0"]
        damaged: list[int] = []

        def spoil(message: bytes) -> bytes:
            if wire.decode_frame(message).kind == wire.CHUNK and not damaged:
                damaged.append(len(message))
                return message[:-1] + bytes([message[-1] ^ 1])
            return message

        node.carriers[0].spoil = spoil
        run.hold_back = True
        tasks = start(run)
        await until(lambda: len(run.digests) == 3 and len(run.holding) == 2 and bool(damaged))
        run.commit()
        await asyncio.gather(*tasks)
        arrive(run)
        assert damaged and any("its digest is" in said for said in node.said)
        assert node.meter.counts()["down", "result"] > sum(p.nbytes for p, r in run.slices if r != "node-0")
        await run.close()

    play(test)


def test_what_the_reducer_does_not_give_comes_from_another_holder() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, [*NAMES, "late"])
        run.plan(NAMES)
        await asyncio.gather(*start(run))
        late = run.nodes["late"]
        late.carriers[0].unreachable.update({"node-0", "node-1"})
        order = run.open(NAMES, round_index=0)
        run.round = -1
        commit = await late.reduce(order, None, reason="late")
        assert not commit.counted and bytes(late.into) == expected(TABLE, PAYLOADS)
        assert {name for name, _ in late.carriers[0].opened} == {"node-2"}
        await run.close()

    play(test)


def test_a_holder_with_other_bytes_is_passed_over() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, [*NAMES, "late"])
        run.plan(NAMES)
        await asyncio.gather(*start(run))
        late = run.nodes["late"]
        commit = pb.Commit()
        commit.CopyFrom(next(commit for commit in run.commits if not commit.counted))
        wrong = bytes(TABLE.result_nbytes)
        run.nodes["node-1"].desk.shelf.put(0, commit, wrong)
        into = memoryview(late.into)
        await late.rounds.complete(commit, into, "state")
        assert bytes(late.into) == expected(TABLE, PAYLOADS)
        counts = late.meter.counts()
        assert counts["down", "state"] > TABLE.result_nbytes and counts["down", "result"] == 0
        kept = late.desk.shelf.get(0)
        assert kept is not None and kept.payload == late.into
        await run.close()

    play(test)


def test_a_result_that_nobody_has_any_more_is_a_passing_trouble() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, [*NAMES, "late"])
        run.plan(NAMES)
        await asyncio.gather(*start(run))
        late = run.nodes["late"]
        late.carriers[0].unreachable.update(NAMES)
        with pytest.raises(Trouble, match="result of round 1 are not to be had") as caught:
            await late.rounds.complete(run.commits[-1], memoryview(late.into), "state")
        assert caught.value.passing and caught.value.kind is Kind.CUT
        await run.close()

    play(test)


def test_a_commit_whose_slices_are_not_the_result_is_refused() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        await asyncio.gather(*start(run))
        commit = pb.Commit()
        commit.CopyFrom(run.commits[0])
        del commit.slices[1]
        with pytest.raises(Trouble, match="damaged") as caught:
            await run.nodes["node-0"].rounds.complete(commit, memoryview(run.nodes["node-0"].into), "state")
        assert caught.value.kind is Kind.PROTOCOL
        await run.close()

    play(test)


def test_other_voters_void_what_came() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        run.hold_back = True
        tasks = start(run)
        await until(lambda: len(run.holding) == 3 and len(run.digests) == 3)
        told = len(run.messages("holding"))
        run.holding.clear()
        run.hold_back = False
        run.expect(NAMES[:2])
        commits = await asyncio.gather(*tasks)
        assert [commit.counted for commit in commits] == [True, True, False]
        arrive(run, (0, 1))
        assert len(run.messages("holding")) > told
        await run.close()

    play(test)


def test_a_stream_that_breaks_behind_a_whole_result_is_opened_again() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        run.hold_back = True
        tasks = start(run)
        await until(lambda: len(run.holding) == 3 and len(run.digests) == 3)
        carrier = run.nodes["node-0"].carriers[0]
        carrier.opened[0][1].cancel()
        await until(lambda: len(carrier.opened) == 3)
        run.holding.clear()
        run.hold_back = False
        run.expect(NAMES[:2])  # what it had is void, and it has to hear of that
        await asyncio.gather(*tasks)
        arrive(run, (0, 1))
        assert {"node-0", "node-1"} <= run.holding and len(carrier.opened) == 3
        await run.close()

    play(test)


def test_the_digest_that_is_held_is_that_of_the_slices() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        await asyncio.gather(*start(run))
        commit = run.commits[0]
        digests = b"".join(row.digest for row in commit.slices)
        told = run.messages("holding")
        assert {name for name, _ in told} == set(NAMES)
        assert {holding.digest for _, holding in told} == {bytes.fromhex(wire.payload_digest(digests))}
        await run.close()

    play(test)


def test_after_a_rejoin_the_coordinator_is_told_again() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        run.hold_back = True
        tasks = start(run, (0, 1))
        order = run.open(NAMES[:2], round_index=0)
        tasks.append(asyncio.ensure_future(run.nodes["node-2"].reduce(order, None, reason="no data")))
        await until(lambda: len(run.holding) == 2 and len(run.digests) == 3)
        told = len(run.heard)
        run.nodes["node-0"].rounds.rejoined()
        run.nodes["node-2"].rounds.rejoined()
        kinds = [(name, message.WhichOneof("kind")) for name, message in run.heard[told:]]
        assert kinds == [("node-0", "holding"), ("node-2", "abstention")]
        run.commit()
        await asyncio.gather(*tasks)
        arrive(run, (0, 1))
        await run.close()

    play(test)


def test_a_result_that_stands_still_is_told_and_made_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "patience", lambda took: 0.02)

    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        run.nodes["node-0"].carriers[0].silent.add("node-2")
        tasks = start(run)
        await until(lambda: bool(run.messages("slice_trouble")))
        monkeypatch.setattr(pace, "patience", lambda took: DEADLINE)
        ((name, trouble),) = run.messages("slice_trouble")
        assert (name, trouble.slice) == ("node-0", 2)
        assert trouble.reason.startswith("nothing more comes from node-2, ")
        assert "after the results of all others" in trouble.reason
        run.give(2, "node-1")
        run.order_from("node-1")
        await asyncio.gather(*tasks)
        arrive(run)
        await run.close()

    play(test)


def test_a_decided_result_that_stands_still_is_fetched_at_the_rounds_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "patience", lambda took: 0.02)
    monkeypatch.setattr(rounds, "_SILENCE_SECONDS", 0.03)

    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        run.hold_back = True
        run.nodes["node-0"].carriers[0].silent.add("node-2")
        tasks = start(run)
        await until(lambda: len(run.digests) == 3 and len(run.holding) == 2)
        run.commit()
        await asyncio.gather(*tasks)  # the stall of the limits is longer than the test may take
        arrive(run)
        await run.close()

    play(test)


def test_the_end_of_a_round_that_was_broken_off_does_not_touch_the_next_one() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        node = run.nodes["node-0"]

        def abstaining() -> asyncio.Future[pb.Commit]:
            into = memoryview(bytearray(TABLE.result_nbytes))
            return asyncio.ensure_future(node.rounds.reduce(run.open(NAMES[1:]), None, None, into, "no data"))

        former = abstaining()
        await until(lambda: len(run.messages("abstention")) == 1)
        next_one = abstaining()
        former.cancel()
        await asyncio.wait({former})
        await until(lambda: len(run.messages("abstention")) == 2)
        node.rounds.rejoined()
        assert [abstention.round for _, abstention in run.messages("abstention")] == [0, 1, 1]
        next_one.cancel()
        await asyncio.wait({next_one})
        node.rounds.rejoined()
        assert len(run.messages("abstention")) == 3, "nothing goes on"
        await run.close()

    play(test)


def test_a_call_through_the_coordinator_is_answered() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        node = run.nodes["node-0"]
        assert node.rounds.take(pb.CoordinatorMessage(tunnel=pb.Tunnel(key="k", caller="node-1")))
        assert node.called == [("k", "node-1")]
        assert not node.rounds.take(pb.CoordinatorMessage(stop=pb.Stop()))
        await run.close()
        assert all(carrier.closed for carrier in node.carriers)

    play(test)


def test_a_topology_that_cannot_be_used_is_the_end() -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        broken = run.topology("node-0")
        broken.tables[0].slices[0].reducer = "nobody"
        with pytest.raises(Trouble, match="it gives slices to nobody") as caught:
            run.nodes["node-0"].rounds.take(pb.CoordinatorMessage(topology=broken))
        assert caught.value.kind is Kind.PROTOCOL
        gap = run.topology("node-0")
        gap.tables[0].slices[1].start += 64
        with pytest.raises(Trouble, match="do not join"):
            run.nodes["node-0"].rounds.take(pb.CoordinatorMessage(topology=gap))
        await run.close()

    play(test)
