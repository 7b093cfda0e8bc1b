"""Nodes show lines of a round that the coordinator asks for: what they have sent, received, and been sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from node.exchange.base import RoundOrder
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos.buckets import LINE_BYTES, BucketTable
from protos.digests import slices_digest
from protos.wire import payload_digest
from tests.coordinator.contribution_rig import coded_table, random_payload, voted_table
from tests.node.peers.peer_rig import DEADLINE, Coordinator, expected

TABLE = voted_table(300)
NAMES = ["node-0", "node-1", "node-2"]


def play(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE))


def begun(
    table: BucketTable, payloads: Sequence[bytes], reducers: Sequence[str] = NAMES
) -> tuple[Coordinator, RoundOrder, list[asyncio.Future[Any]]]:
    """A round that is not committed before its test says so, to which the first nodes contribute."""
    run = Coordinator(table, NAMES)
    run.plan(reducers)
    run.hold_back = True
    order, nodes = run.open(NAMES), list(run.nodes.values())[: len(payloads)]
    reducing = (node.reduce(order, payload) for node, payload in zip(nodes, payloads, strict=True))
    return run, order, [asyncio.ensure_future(work) for work in reducing]


def cut(data: bytes, lines: Sequence[int]) -> bytes:
    return b"".join(data[LINE_BYTES * line : LINE_BYTES * (line + 1)] for line in lines)


def question(run: Coordinator, lines: Sequence[int], **fields: Any) -> pb.CoordinatorMessage:
    digest = slices_digest(run.digests[index] for index in sorted(run.digests))
    order = pb.Retally(round=run.round, question=7, digest=digest, lines=lines, out_lines=lines)
    order.MergeFrom(pb.Retally(**fields))
    return pb.CoordinatorMessage(retally=order)


def test_voters_and_reducers_show_what_they_have() -> None:
    async def test() -> None:
        payloads = [random_payload(seed, TABLE) for seed in range(3)]
        run, _, works = begun(TABLE, payloads)
        nodes = list(run.nodes.values())
        while len(run.holding) < 3:
            await asyncio.sleep(0)
        lines, result = [0, 3, 170, 299], expected(TABLE, payloads)
        for node in nodes:
            run.say(node, question(run, lines))
        for name, payload in zip(NAMES, payloads, strict=True):
            own, whole = [shown for node, shown in run.messages("shown") if node == name]
            assert own.contribution == cut(payload, lines) and not own.result and own.question == 7
            assert whole.result == cut(result, lines) and not whole.contribution
        part = run.slices[1][0]
        own_lines = [part.start // LINE_BYTES, part.end // LINE_BYTES - 1]
        run.say(nodes[1], question(run, own_lines, received=True))
        _, shown = run.messages("shown")[-1]
        assert list(shown.received) == [cut(payload, own_lines) for payload in payloads]
        assert shown.result == cut(result, own_lines)
        before = len(run.messages("shown"))
        run.say(nodes[0], question(run, own_lines, received=True))  # another one reduces them
        run.say(nodes[1], question(run, [*own_lines, 0], received=True))
        for line in (0, TABLE.nbytes):  # in another table there may be that one
            other = pb.Retally(round=5, lines=[line], out_lines=[line])
            run.say(nodes[1], pb.CoordinatorMessage(retally=other))
        assert len(run.messages("shown")) == before
        run.commit()
        await asyncio.gather(*works)
        run.say(nodes[1], question(run, own_lines))  # it is over
        run.say(nodes[1], question(run, own_lines, received=True))
        assert len(run.messages("shown")) == before
        await run.close()

    play(test)


@pytest.mark.parametrize("meant", [False, True])
def test_a_result_is_shown_once_it_is_the_one_that_is_meant(meant: bool) -> None:
    """And to the coordinator that has asked for it, not to one that was started since."""

    async def test() -> None:
        payloads = [random_payload(seed, TABLE) for seed in range(3)]
        run, order, works = begun(TABLE, payloads[:2])
        nodes = list(run.nodes.values())
        while not nodes[0].carriers[0].opened:
            await asyncio.sleep(0)
        digests = [bytes([index]) * 16 for index in range(3)]
        if meant:
            result = expected(TABLE, payloads)
            parts = [result[part.out_start : part.out_end] for part, _ in run.slices]
            digests = [bytes.fromhex(payload_digest(part)) for part in parts]
        early = pb.Retally(question=3, lines=[1], out_lines=[1], digest=slices_digest(digests))
        run.say(nodes[0], pb.CoordinatorMessage(retally=early))
        if meant:
            nodes[0].rounds.rejoined()
        works.append(asyncio.ensure_future(nodes[2].reduce(order, payloads[2])))
        while len(run.holding) < 3:
            await asyncio.sleep(0)
        ((_, shown),) = run.messages("shown")
        assert shown.contribution == cut(payloads[0], [1]), "another result or session has come since"
        run.commit()
        await asyncio.gather(*works)
        await run.close()

    play(test)


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize(
    ("lines", "out_lines"),
    [([], []), ([0], []), ([300], [0]), ([0], [300]), (list(range(257)), list(range(257)))],
)
def test_lines_that_are_not_there_are_no_question(
    lines: list[int], out_lines: list[int], received: bool
) -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        order = run.open(NAMES)
        node = run.nodes["node-0"]
        work = asyncio.ensure_future(node.reduce(order, random_payload(0, TABLE)))
        while not node.carriers[0].opened:
            await asyncio.sleep(0)
        asked = pb.Retally(lines=lines, out_lines=out_lines, received=received)
        with pytest.raises(Trouble, match="which has no such lines") as caught:
            node.rounds.take(pb.CoordinatorMessage(retally=asked))
        assert caught.value.kind is Kind.PROTOCOL and not run.messages("shown")
        work.cancel()
        await run.close()

    play(test)


def test_lines_of_results_that_are_shorter_than_contributions() -> None:
    table = coded_table()
    assert table.nbytes != table.result_nbytes

    async def test() -> None:
        payloads = [random_payload(seed, table) for seed in range(3)]
        run, _, works = begun(table, payloads, NAMES[:1])
        nodes = list(run.nodes.values())
        while len(run.holding) < 3:
            await asyncio.sleep(0)
        start, out_start = table.offsets[4], table.result_offsets[4]
        lines, out_lines = [start // LINE_BYTES], [out_start // LINE_BYTES]
        asked = pb.Retally(lines=lines, out_lines=out_lines, received=True)
        run.say(nodes[0], pb.CoordinatorMessage(retally=asked))
        ((_, shown),) = run.messages("shown")
        assert list(shown.received) == [cut(payload, lines) for payload in payloads]
        assert shown.result == cut(expected(table, payloads), out_lines)
        run.commit()
        await asyncio.gather(*works)
        await run.close()

    play(test)
