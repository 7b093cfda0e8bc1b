"""What the gRPC server refuses, and that nobody else is held up by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from coordinator.rounds import Policy
from protos import atoll_pb2 as pb
from protos import wire
from protos.grpc_options import CHANNEL_OPTIONS
from tests.coordinator.contribution_rig import (
    Download,
    abstain_frames,
    contribution_frames,
    random_payload,
    schedule,
)
from tests.coordinator.coordinator_rig import eventually, join_request, soon
from tests.coordinator.server_rig import LARGE, TOKEN, Client, code_of, ended, site

BAD: dict[str, tuple[Callable[[list[bytes]], list[bytes]], dict[str, Any], str, str]] = {
    "garbage": (lambda f: [b"\xff" * 99], {}, "bad-frame", "INVALID_ARGUMENT"),
    "no header": (lambda f: f[1:], {}, "bad-frame", "INVALID_ARGUMENT"),
    "truncated": (lambda f: f[:2], {}, "truncated", "INVALID_ARGUMENT"),
    "nothing": (lambda f: [], {}, "truncated", "INVALID_ARGUMENT"),
    "too long": (
        lambda f: [*f[:-1], wire.encode_frame(wire.CHUNK, b"x", offset=128)],
        {},
        "oversized",
        "INVALID_ARGUMENT",
    ),
    "announced too long": (lambda f: f, {"nbytes": 2**40}, "oversized", "INVALID_ARGUMENT"),
    "out of order": (lambda f: [f[0], f[2], f[1]], {}, "out-of-order", "INVALID_ARGUMENT"),
    "bad digest": (lambda f: [*f[:-1], wire.encode_frame(wire.END)], {}, "bad-digest", "INVALID_ARGUMENT"),
    "wrong table": (lambda f: f, {"table_digest": "x"}, "wrong-table", "FAILED_PRECONDITION"),
    "future round": (lambda f: f, {"round": 999}, "wrong-round", "FAILED_PRECONDITION"),
    "bad weight": (lambda f: f, {"weight": 9}, "bad-weight", "INVALID_ARGUMENT"),
}


async def test_bad_contributions_are_refused_and_every_round_commits() -> None:
    async with site(nodes=3, rounds=99) as here:
        clients = await here.clients(3)
        for count, (case, (change, header, kind, code)) in enumerate(BAD.items(), 1):
            orders = [await client.opened() for client in clients]
            call = clients[2].exchange()
            frames = contribution_frames(
                orders[2], here.table, random_payload(2, here.table), chunk=64, **header
            )
            reading = asyncio.ensure_future(ended(call))
            for frame in change(frames):
                try:
                    await soon(call.write(frame))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    break  # refused already
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await soon(call.done_writing())
            status, text = await reading
            if not text.startswith("Internal error from Core"):  # gRPC may lose the words of a status
                assert (case, status.name) == (case, code)
                assert text
            assert sum(here.hub.run.counters.values()) == count, case
            assert here.hub.run.counters[kind] >= 1, case
            fetch = clients[2].exchange()
            await clients[2].write(fetch, abstain_frames(orders[2], "it was refused"))
            downloads = await asyncio.gather(
                clients[0].contribute(orders[0], random_payload(0, here.table)),
                clients[1].contribute(orders[1], random_payload(1, here.table)),
                clients[2].read(fetch),
            )
            for download, counted in zip(downloads, (True, True, False), strict=True):
                assert download.commit is not None and download.commit.counted is counted, case
                assert list(download.commit.voters) == ["node-0", "node-1"], case
                assert "refused: node-2" in download.commit.reason
        for client in clients:
            await client.close()


async def test_a_late_contribution_that_is_still_coming_gets_the_result() -> None:
    async with site(LARGE, nodes=3, rounds=9, policy=Policy(0.2, 5.0, 0.6)) as here:
        clients = await here.clients(3)
        order = await clients[2].opened()
        frames = contribution_frames(order, LARGE, random_payload(2, LARGE))
        call = clients[2].exchange()
        await clients[2].write(call, frames[:2])
        on_time = (await here.play(clients[:2]))[0]
        download = Download(LARGE.nbytes)
        while download.commit is None:
            download.add(await soon(call.read()))
        await clients[2].write(call, frames[2:])  # raises if the call has been ended
        assert await soon(call.read()) is grpc.aio.EOF
        assert await soon(call.code()) is grpc.StatusCode.OK
        assert not download.commit.counted and download.payload == on_time.payload
        assert here.hub.run.counters["broken-stream"] == 0
        for client in clients:
            await client.close()


LATE_REFUSALS: dict[str, tuple[int, dict[str, Any], Callable[[list[bytes]], list[bytes]], str, str]] = {
    "wrong-table": (1, {"table_digest": "x"}, lambda f: f, "FAILED_PRECONDITION", "laid out by table x"),
    "out-of-order": (3, {}, lambda f: [*f[:2], *f[3:4], *f[2:3], *f[4:]], "INVALID_ARGUMENT", "expected"),
    "bad-frame": (3, {}, lambda f: [*f[:2], b"?" * 99, *f[2:]], "INVALID_ARGUMENT", ""),
    "bad-digest": (5, {}, lambda f: [*f[:-1], wire.encode_frame(wire.END)], "INVALID_ARGUMENT", "announces"),
}


@pytest.mark.parametrize("kind", LATE_REFUSALS)
async def test_a_refusal_reaches_a_node_that_is_still_sending(kind: str) -> None:
    """``first`` frames are enough for the refusal; the others are sent after it."""
    first, header, change, code, words = LATE_REFUSALS[kind]
    async with site(LARGE, nodes=1, rounds=9) as here:
        client = await Client(here).join()
        order = await client.opened()
        frames = change(contribution_frames(order, LARGE, random_payload(0, LARGE), **header))
        call = client.exchange()
        reading = asyncio.ensure_future(ended(call))
        await client.write(call, frames[:first])
        await eventually(lambda: here.hub.run.counters[kind] == 1, "the refusal")
        await client.write(call, frames[first:])
        status, text = await reading
        assert (status.name, words in text) == (code, True), text
        assert sum(here.hub.run.counters.values()) == 1
        await client.close()


async def test_an_upload_without_end_is_cut_after_its_answer() -> None:
    """By time if the node falls silent, by bytes if it sends on and on, and when it opens another call."""
    async with site(nodes=1, rounds=9, drain=0.05) as here:
        client = await Client(here).join()
        order = await client.opened()
        bad = contribution_frames(order, here.table, random_payload(0, here.table), table_digest="x")
        call = client.exchange()
        await client.write(call, bad[:1])
        assert (await ended(call))[0] is grpc.StatusCode.FAILED_PRECONDITION
        await client.close()
    async with site(nodes=2, rounds=9, drain=3600.0) as here:  # the other one keeps the round open
        client, other = await here.clients(2)
        order = await client.opened()
        call = client.exchange()
        reading = asyncio.ensure_future(ended(call))
        before = here.hub.bytes_in
        await client.write(call, bad[:1])
        chunk = wire.encode_frame(wire.CHUNK, bytes(wire.CHUNK_BYTES))

        async def send_for_ever() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while True:
                    await call.write(chunk)

        await soon(send_for_ever())
        await reading
        assert here.hub.bytes_in - before < 8 * wire.MAX_MESSAGE_BYTES
        silent = other.exchange()
        await other.write(silent, bad[:1])
        await eventually(lambda: here.hub.run.counters["wrong-table"] == 2, "the refusal")
        fetch = other.exchange()
        await other.write(fetch, abstain_frames(order, "it was refused"))
        assert (await ended(silent))[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert (await other.read(fetch)).commit is not None
        await client.close()
        await other.close()


async def test_an_ignored_contribution_has_a_size_too() -> None:
    async with site(nodes=2, rounds=9) as here:
        clients = await here.clients(2)
        order = await clients[1].opened()
        call = clients[1].exchange()
        reading = asyncio.ensure_future(ended(call))
        await clients[1].write(call, abstain_frames(order)[:1])
        chunk = wire.encode_frame(wire.CHUNK, bytes(wire.CHUNK_BYTES))
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(64):
                await soon(call.write(chunk))
        await reading
        assert here.hub.run.counters["oversized"] == 1
        for client in clients:
            await client.close()


async def test_messages_over_the_limit() -> None:
    async with site(nodes=2, rounds=9) as here:
        clients = await here.clients(2)
        options = [pair for pair in CHANNEL_OPTIONS if pair[0] != "grpc.max_send_message_length"]
        wide = grpc.aio.insecure_channel(str(here.server.address), options=options)
        # Somewhat too long: refused in words, and the round goes on. Far too long: gRPC ends the stream.
        for size, kind, code in (
            (wire.MAX_MESSAGE_BYTES + 1, "oversized", grpc.StatusCode.INVALID_ARGUMENT),
            (5 * wire.MAX_MESSAGE_BYTES, "broken-stream", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            orders = [await client.opened() for client in clients]
            call = wide.stream_stream(f"/{wire.BULK_SERVICE}/Exchange")(metadata=clients[1].metadata())
            reading = asyncio.ensure_future(ended(call))
            await soon(call.write(bytes(size)))
            assert (await reading)[0] is code
            await eventually(lambda kind=kind: here.hub.run.counters[kind] == 1, kind)  # type: ignore[misc]
            good = asyncio.ensure_future(clients[0].contribute(orders[0], random_payload(0, here.table)))
            if kind == "broken-stream":  # which may be tried again
                await clients[1].contribute(orders[1], random_payload(1, here.table))
            commit = (await soon(good)).commit
            assert commit is not None
            assert len(commit.voters) == (1 if kind == "oversized" else 2)
            if kind == "oversized":
                fetch = clients[1].exchange()
                await clients[1].write(fetch, abstain_frames(orders[1], "it was refused"))
                await clients[1].read(fetch)
        asked = wide.unary_stream(f"/{wire.BULK_SERVICE}/GetResults")
        code, text = await ended(asked(bytes(2 << 20), metadata=clients[0].metadata()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "cannot be read" in text
        await soon(wide.close(None))
        for client in clients:
            await client.close()


async def test_without_the_token_nothing_works() -> None:
    async with site() as here:
        for token in ("", "wrong", TOKEN + "x", TOKEN[:-1]):
            client = Client(here, token)
            calls: list[Awaitable[Any]] = [
                client.unary("GetRun", pb.GetRunRequest(protocol=wire.PROTOCOL), pb.GetRunReply),
                client.unary("Join", join_request(here.table), pb.JoinReply),
                client.unary("GetStatus", pb.StatusRequest(), pb.StatusReply),
                client.open_session().read(),
                client.exchange().read(),
            ]
            for call in calls:
                code, text = await code_of(call)
                assert code is grpc.StatusCode.UNAUTHENTICATED
                assert text == "the invite's token is not this run's: ask for a new invite"
            await client.close()
        assert here.hub.run.counters["bad-token"] == 20
        assert not here.hub.run.registry.nodes


async def test_without_a_session_there_is_no_exchange() -> None:
    async with site() as here:
        client = Client(here)
        client.session = "made up"
        for call in (client.exchange().read(), client.open_session().read()):
            code, text = await code_of(call)
            assert code is grpc.StatusCode.UNAUTHENTICATED and "session" in text
        await client.close()


async def test_a_second_session_is_refused_and_the_first_lives() -> None:
    async with site(nodes=1) as here:
        client = await Client(here).join()
        code, text = await code_of(client.open_session().read())
        assert code is grpc.StatusCode.ALREADY_EXISTS and "has a session already" in text
        assert (await client.opened()).round == 0
        await client.close()


async def test_join_refusals_name_both_values() -> None:
    async with site() as here:
        client = Client(here)
        request = join_request(here.table, table_digest="mine")
        code, text = await code_of(client.unary("Join", await client.proven(request), pb.JoinReply))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "mine" in text and schedule(here.table).digest in text
        code, _ = await code_of(
            client.channel.unary_unary(f"/{wire.CONTROL_SERVICE}/Join")(
                b"\xff\xff", metadata=client.metadata()
            )
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        await client.close()
