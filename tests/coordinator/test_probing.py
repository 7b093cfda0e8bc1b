"""What a machine without a session may ask: how it looks from here, and what the link carries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest

from coordinator.dialing import reach
from coordinator.pacing import Pacer
from coordinator.probing import MAX_DIALS, MeasureLimits, Probing
from node.exchange.peers.direct import DirectCarrier
from node.exchange.probing import Probe, Rate
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos import wire
from protos.address import Address
from protos.invite import Invite
from protos.refusal import BAD_FRAME, BAD_MESSAGE, OVERLOADED, OVERSIZED, STALLED, Refused
from tests.coordinator.coordinator_rig import DEADLINE, soon
from tests.coordinator.server_rig import TOKEN, Site, code_of, site
from tests.waiting import free_port

RUN = "run-digest"
HERE = "ipv4:127.0.0.1:4711"


@contextlib.asynccontextmanager
async def probing(made: Site, token: str = TOKEN) -> AsyncIterator[Probe]:
    probe = Probe(Invite(token, "127.0.0.1", made.server.address.port), DEADLINE)
    probe.open()
    try:
        yield probe
    finally:
        await soon(probe.close())


async def test_how_a_machine_looks_from_here() -> None:
    async with site() as made, probing(made) as probe:
        made.hub.run.wall = lambda: 12.5
        reply = await soon(probe.ask())
        assert (reply.host, reply.time, reply.run_digest) == ("127.0.0.1", 12.5, RUN)
        assert (reply.protocol, reply.transport, reply.why_not) == (wire.PROTOCOL, "hub", "")
        assert not made.hub.run.registry.nodes, "nobody has joined"


async def test_a_listener_is_tried_where_it_calls_from() -> None:
    async with site() as made, probing(made) as probe:
        made.hub.run.mesh.dial = lambda address, certificate: reach(address, RUN, certificate=certificate)
        carrier = DirectCarrier(_unused, RUN)
        where = await carrier.listen(Address("127.0.0.1", 0))
        try:
            assert (await soon(probe.ask(where.port))).why_not == ""
        finally:
            await soon(carrier.close())
        port = free_port()
        assert f"nothing listens at 127.0.0.1:{port}" in (await soon(probe.ask(port))).why_not


async def _unused(stream: object) -> None:
    raise AssertionError("nobody opens a stream")


async def test_only_the_caller_and_only_a_few_at_a_time_are_tried() -> None:
    asked: list[str] = []
    going = asyncio.Event()

    async def dial(address: str, certificate: bytes) -> str:
        asked.append(address)
        await going.wait()
        return ""

    async with site() as made:
        made.hub.run.mesh.dial = dial
        answers = made.hub.probing
        request = pb.ProbeRequest(port=4600)
        running = [
            asyncio.ensure_future(answers.probe(request, f"ipv6:%5B2001:db8::{i}%5D:99")) for i in range(4)
        ]
        assert len(running) == MAX_DIALS
        await asyncio.sleep(0)
        assert "ask again" in (await answers.probe(request, HERE)).why_not
        going.set()
        replies = await soon(asyncio.gather(*running))
        assert asked == [f"[2001:db8::{i}]:4600" for i in range(4)] and replies[1].host == "2001:db8::1"
        assert "tries no addresses" in (await answers.probe(request, "unix:/tmp/x")).why_not
        with pytest.raises(Refused) as refused:
            await answers.probe(pb.ProbeRequest(port=65536), HERE)
        assert refused.value.kind == BAD_MESSAGE and len(asked) == 4


async def test_the_link_is_measured() -> None:
    async with site() as made, probing(made) as probe:
        before = made.hub.bytes_in + made.hub.bytes_out
        up, down = await soon(probe.measure(DEADLINE))
        assert up.per_second > 0 and down.per_second > 0 and not up.held and not down.held
        moved = made.hub.bytes_in + made.hub.bytes_out - before
        assert up.nbytes + down.nbytes < moved < 2 * (8 << 20) * 1.01


async def test_a_caller_hears_that_somebody_else_measures() -> None:
    async with site() as made, probing(made) as probe:
        made.hub.probing._measuring = True
        with pytest.raises(Trouble, match="measures the link of another machine") as trouble:
            await soon(probe.measure(DEADLINE))
        assert trouble.value.kind is Kind.REFUSED and made.hub.run.counters[OVERLOADED] == 1


def test_few_bytes_tell_nothing() -> None:
    assert Rate(4096, 0.0001).per_second == 0 and Rate().per_second == 0
    assert Rate(4096, 1.0).per_second == 4096 and Rate(1 << 20, 0.125).per_second == 8 << 20


async def test_a_wrong_token_tells_nothing() -> None:
    async with site() as made, probing(made, "another") as probe:
        for call in (probe.ask(), probe.measure(DEADLINE)):
            with pytest.raises(Trouble) as trouble:
                await soon(call)
            assert trouble.value.kind is Kind.TOKEN
        assert made.hub.run.counters["bad-token"] == 2


# ------------------------------------------------------------------------------------------- measuring


class Clock:
    """Time that passes with every message."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def quiet(clock: Clock, *, busy: bool = False) -> Pacer:
    return Pacer(now=clock.now, exchanging=lambda: busy, moved=lambda: 0, members=lambda: 2, patience=3600.0)


def chunk(nbytes: int = 1000) -> bytes:
    return wire.encode_frame(wire.CHUNK, bytes(nbytes))


END = wire.encode_frame(wire.END)


async def measured(
    messages: Sequence[bytes | None], *, step: float = 0.5, limits: MeasureLimits | None = None
) -> list[wire.Frame]:
    """The answer to ``messages``; each way, one takes ``step`` seconds."""
    clock, left, sent = Clock(), list(messages), list[bytes]()

    async def read() -> bytes | None:
        clock.time += step
        return left.pop(0)

    async def write(message: bytes) -> None:
        clock.time += step
        sent.append(message)

    run: Any = None  # only a probe asks for it
    await soon(Probing(run, quiet(clock), limits).measure(read, write))
    go_ahead, *frames = [wire.decode_frame(message) for message in sent]
    assert go_ahead.kind == wire.HEADER and not go_ahead.body
    return frames


async def test_what_is_told_of_an_upload() -> None:
    header, *chunks, last = await measured([chunk(), chunk(), chunk(500), END])
    assert header.kind == wire.HEADER and last.kind == wire.END
    told = pb.MeasureReply.FromString(bytes(header.body))
    assert (told.nbytes, told.seconds, told.held) == (1500, 1.0, False)
    assert [frame.kind for frame in chunks] == [wire.CHUNK] * 3, "1.5 s"


async def test_a_download_has_a_size() -> None:
    limits = MeasureLimits(nbytes=100 << 10)
    _, *chunks, _ = await measured([END], step=0.0, limits=limits)
    assert sum(len(frame.body) for frame in chunks) == 100 << 10


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([b"short"], BAD_FRAME),
        ([wire.encode_frame(wire.HEADER, b"x")], BAD_FRAME),
        ([wire.encode_frame(wire.CHUNK)], BAD_FRAME),
        ([chunk(600), chunk(600)], OVERSIZED),
    ],
)
async def test_what_is_refused(messages: Sequence[bytes], kind: str) -> None:
    with pytest.raises(Refused) as refused:
        await measured(messages, limits=MeasureLimits(nbytes=1000))
    assert refused.value.kind == kind


async def test_an_upload_that_does_not_end_is_answered_all_the_same() -> None:
    hanging = asyncio.Event()

    async def read() -> bytes | None:
        await hanging.wait()
        return None

    sent: list[bytes] = []
    await measure_with(read, sent, limits=MeasureLimits(seconds=0.01))
    assert pb.MeasureReply.FromString(bytes(wire.decode_frame(sent[1]).body)).nbytes == 0


async def measure_with(
    read: Callable[[], Awaitable[bytes | None]],
    sent: list[bytes],
    *,
    limits: MeasureLimits,
    busy: bool = False,
    clock: Clock | None = None,
) -> None:
    time = clock or Clock()

    async def write(message: bytes) -> None:
        time.time += 0.5
        sent.append(message)

    run: Any = None
    await soon(Probing(run, quiet(time, busy=busy), limits).measure(read, write))


async def test_one_at_a_time_and_nobody_for_ever() -> None:
    run: Any = None
    answers = Probing(run, quiet(Clock()), MeasureLimits(seconds=0.01, whole=0.2))
    reading, never = asyncio.Event(), asyncio.Event()

    async def read() -> bytes | None:
        reading.set()
        await never.wait()
        return None

    async def write(message: bytes) -> None:
        if wire.decode_frame(message).body:  # all but the go-ahead
            await never.wait()

    first = asyncio.ensure_future(answers.measure(read, write))
    await soon(reading.wait())
    with pytest.raises(Refused) as refused:
        await answers.measure(read, write)
    assert refused.value.kind == OVERLOADED
    with pytest.raises(Refused) as refused:
        await soon(first)
    assert refused.value.kind == STALLED
    with pytest.raises(Refused) as refused:
        await soon(answers.measure(read, write))
    assert refused.value.kind == STALLED, "the place is free again"


async def test_rounds_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, left = Clock(), [chunk(), chunk(), END]

    async def nap(seconds: float) -> None:
        clock.time += seconds

    async def read() -> bytes | None:
        return left.pop(0)

    monkeypatch.setattr("coordinator.probing.asyncio.sleep", nap)
    sent: list[bytes] = []
    limits = MeasureLimits(seconds=5000.0, nbytes=8000)
    await measure_with(read, sent, limits=limits, busy=True, clock=clock)
    frames = [wire.decode_frame(message) for message in sent]
    assert pb.MeasureReply.FromString(bytes(frames[1].body)).held
    assert pb.MeasureReply.FromString(bytes(frames[-1].body)).held
    assert clock.time > 2 * 3600, "a message of each direction every `patience`"


async def test_a_call_that_is_no_measurement() -> None:
    async with site() as made, probing(made) as probe:
        call = probe._frames("Measure", "", ("state", "state"), DEADLINE)
        await soon(call.write(b"short"))
        code, text = await code_of(_whole(call))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "at least 16 bytes" in text
        assert made.hub.run.counters[BAD_FRAME] == 1


async def _whole(call: Any) -> None:
    while isinstance(await call.read(), bytes):
        pass
