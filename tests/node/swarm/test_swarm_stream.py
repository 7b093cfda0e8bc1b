"""The records of a stream, over a socket pair: what a peer may send, and what it may not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from node.exchange.retry import within
from node.exchange.swarm import stream as records
from node.exchange.swarm.stream import Heartbeat, SwarmStream
from node.exchange.trouble import Kind, Trouble
from protos.wire import MAX_MESSAGE_BYTES

SECONDS = 60.0


class Ends:
    """A stream, and the bytes at its other end."""

    def __init__(
        self, stream: SwarmStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.stream, self.reader, self.writer = stream, reader, writer

    def send(self, *heads: int, body: bytes = b"") -> None:
        for head in heads:
            self.writer.write(head.to_bytes(4, "little"))
        self.writer.write(body)

    async def next_head(self) -> int:
        data = await within(SECONDS, "a record", self.reader.readexactly(4))
        return int.from_bytes(data, "little")

    async def trouble(self) -> Trouble:
        with pytest.raises(Trouble) as caught:
            while await within(SECONDS, "the trouble", self.stream.read()) is not None:
                pass
        return caught.value


@pytest.fixture
async def ends():
    here, there = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=here)
    other_reader, other_writer = await asyncio.open_connection(sock=there)
    clock = [0.0]
    stream = SwarmStream(reader, writer, "peer", lambda: clock[0], Heartbeat(every=3, silence=15))
    ends = Ends(stream, other_reader, other_writer)
    ends.clock = clock  # type: ignore[attr-defined]
    yield ends
    stream.cancel()
    other_writer.close()


@pytest.mark.parametrize(
    ("send", "kind", "text"),
    [
        (lambda e: e.writer.close(), Kind.CUT, "before its last record"),
        (lambda e: (e.send(5, body=b"abc"), e.writer.close()), Kind.CUT, "before its last record"),
        (lambda e: e.send(MAX_MESSAGE_BYTES + 1), Kind.PROTOCOL, f"a message of {MAX_MESSAGE_BYTES + 1}"),
        (lambda e: e.send(0xFFFFFFF0), Kind.PROTOCOL, "a message of"),
        (lambda e: e.send(records.BYE), Kind.PROTOCOL, "took its leave before the end"),
    ],
)
async def test_what_breaks_the_rules_or_off_is_trouble(
    ends: Ends, send: Callable[[Ends], object], kind: Kind, text: str
) -> None:
    ends.send(3, body=b"abc")
    assert await within(SECONDS, "a message", ends.stream.read()) == b"abc"
    send(ends)
    trouble = await ends.trouble()
    assert trouble.kind is kind and text in str(trouble)
    with pytest.raises(Trouble):
        await ends.stream.write(b"x")


async def test_a_message_after_the_end_is_trouble_for_who_writes(ends: Ends) -> None:
    ends.send(records.END, 1, body=b"x")
    await within(SECONDS, "the failure", ends.stream.closed.wait())
    with pytest.raises(Trouble, match="after its last"):
        await ends.stream.write(b"x")


async def test_nobody_closes_before_the_others_leave(ends: Ends) -> None:
    await ends.stream.write(b"abc")
    await ends.stream.end()
    await ends.stream.end()
    assert [await ends.next_head(), await ends.reader.readexactly(3)] == [3, b"abc"]
    assert await ends.next_head() == records.END
    with pytest.raises(Trouble, match="has ended its messages"):
        await ends.stream.write(b"x")
    ends.send(2, body=b"de")
    ends.send(records.END)
    assert await ends.stream.read() == b"de"
    assert await ends.stream.read() is None
    assert await ends.next_head() == records.BYE
    assert not ends.stream.closed.is_set()
    ends.send(records.BYE)
    await within(SECONDS, "the close", ends.stream.closed.wait())
    assert await within(SECONDS, "the end", ends.reader.read(1)) == b""
    assert await ends.stream.read() is None


async def test_nobody_writes_to_who_is_gone(ends: Ends) -> None:
    ends.send(records.END, records.GONE)
    assert await within(SECONDS, "the end", ends.stream.read()) is None
    while not ends.stream._peer_gone:
        await asyncio.sleep(0)
    with pytest.raises(Trouble, match="has ended the stream"):
        await ends.stream.write(b"x")
    await ends.stream.end()
    assert [await ends.next_head(), await ends.next_head()] == [records.END, records.BYE]


async def test_life_is_shown_and_expected(ends: Ends) -> None:
    clock = ends.clock  # type: ignore[attr-defined]
    ends.stream.beat(True)
    clock[0] = 3.0
    ends.stream.beat(True)
    ends.stream.beat(True)  # not twice
    await ends.stream.write(b"a")
    assert [await ends.next_head(), await ends.next_head()] == [records.ALIVE, 1]
    clock[0] = 15.0
    ends.stream.beat(True)
    clock[0] = 15.1
    ends.stream.beat(False)  # this side was held up itself
    reading: Awaitable[bytes | None] = asyncio.ensure_future(ends.stream.read())
    ends.stream.beat(True)
    with pytest.raises(Trouble, match="frozen or cut off"):
        await within(SECONDS, "the reader", reading)


async def test_life_is_not_expected_while_nobody_reads_here(ends: Ends) -> None:
    clock = ends.clock  # type: ignore[attr-defined]
    ends.send(1, body=b"a")
    ends.send(1, body=b"b")
    ends.send(1, body=b"c")
    while not ends.stream._stalled:
        await asyncio.sleep(0)
    clock[0] = 100.0
    ends.stream.beat(True)
    assert [await ends.stream.read() for _ in range(3)] == [b"a", b"b", b"c"]
    with pytest.raises(Trouble, match="at most"):
        await ends.stream.write(bytes(MAX_MESSAGE_BYTES + 1))
