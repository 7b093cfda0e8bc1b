"""TLS of a server and its callers: pins, authorities, and everything that is not as it was said."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import pytest

from protos import tls
from protos.address import Address
from protos.certificate import Credential, made, pin_of
from protos.connecting import failed_connection
from protos.grpc_options import DIAL_OPTIONS, SERVER_OPTIONS
from protos.tls import ClientTls, ConnectError
from tests.authority import Authority

DEADLINE = 60.0
HOST = "127.0.0.1"
OURS, OTHER = made(), made()


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_known", {})


@contextlib.asynccontextmanager
async def server(credential: Credential | None) -> AsyncIterator[Address]:
    """Answers a call with what it was sent."""
    made = grpc.aio.server(options=SERVER_OPTIONS)

    async def echo(request: bytes, context: object) -> bytes:
        return request

    methods = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
    port = tls.bind(made, credential)(f"{HOST}:0")
    await made.start()
    try:
        yield Address(HOST, port)
    finally:
        await made.stop(None)


async def call(where: Address, way: tls.Channel) -> bytes:
    async with way.open_aio(str(where), DIAL_OPTIONS) as channel:
        answer: bytes = await channel.unary_unary("/test/Echo")(b"hello", timeout=DEADLINE)
        return answer


async def refused(where: Address, way: tls.Channel) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(where, way)
    return failed_connection(caught.value.details() or "", str(where), "the coordinator").cause


async def fetched(where: Address, pin: str, client: ClientTls = tls.PINNED) -> None:
    await asyncio.wait_for(tls.aside(tls.fetch, where, pin, client, DEADLINE), DEADLINE)


@contextlib.contextmanager
def listener(greet: Callable[[socket.socket], None]) -> Iterator[Address]:
    """Something else than gRPC: ``greet`` is called with its first connection."""
    with socket.create_server((HOST, 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    greet(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address(HOST, listening.getsockname()[1])
    thread.join(DEADLINE)


async def test_a_pin_is_enough_to_call() -> None:
    async with server(OURS) as where:
        assert tls.channel_by(OURS.pin) is None, "nothing is known yet"
        await fetched(where, OURS.pin)
        way = tls.channel_by(OURS.pin)
        assert way is not None and await call(where, way) == b"hello"
        assert await refused(where, tls.channel_to(OTHER.der)) == "CERTIFICATE"
        assert await refused(where, tls.PLAINTEXT) == "BROKEN"
        assert await tls.aside(tls.expects_tls, where, DEADLINE)
        with way.open(str(where), DIAL_OPTIONS) as channel:
            sent = channel.unary_unary("/test/Echo").future(b"from a thread", timeout=DEADLINE)
            assert await asyncio.to_thread(sent.result) == b"from a thread"


async def test_another_certificate_is_named_with_both_pins() -> None:
    async with server(OTHER) as where:
        with pytest.raises(tls.WrongCertificate) as caught:
            await fetched(where, OURS.pin)
        assert OURS.pin in str(caught.value) and OTHER.pin in str(caught.value)
        assert caught.value.refusal == "wrong-pin"
        assert tls.channel_by(OURS.pin) is None and tls.channel_by(OTHER.pin) is None


async def test_without_tls_there() -> None:
    async with server(None) as where:
        assert await call(where, tls.PLAINTEXT) == b"hello"
        with pytest.raises(tls.NotEncrypted, match="does not speak TLS"):
            await fetched(where, OURS.pin)
        assert not await tls.aside(tls.expects_tls, where, DEADLINE)
        assert await refused(where, tls.channel_to(OURS.der)) == "PLAINTEXT"


async def test_an_authority_for_both_sides() -> None:
    authority, strangers = Authority(), Authority()
    signed, node = authority.signs("localhost"), authority.signs("node")
    asking = Credential(signed.chain, signed.key, authority.pem)
    async with server(asking) as where:
        here = Address("localhost", where.port)
        known = tls.channel_by("any", ClientTls(authority.pem, node))
        assert known is not None and await call(here, known) == b"hello"
        pinned = ClientTls(own=node)
        await fetched(where, signed.pin, pinned)
        by_pin = tls.channel_by(signed.pin, pinned)
        assert by_pin is not None and await call(where, by_pin) == b"hello", "a pin will do as well"
        with pytest.raises(tls.HandshakeFailed, match="--tls-cert"):
            await fetched(where, signed.pin)
        for own in (None, strangers.signs("node")):
            way = tls.channel_by("any", ClientTls(authority.pem, own))
            assert way is not None and await refused(here, way) == "BROKEN"
        other = tls.channel_by("any", ClientTls(strangers.pem, node))
        assert other is not None and await refused(here, other) == "CERTIFICATE"
        elsewhere = tls.channel_by("any", ClientTls(authority.pem, node))
        assert elsewhere is not None and await refused(where, elsewhere) == "CERTIFICATE", "not for this host"


@pytest.mark.parametrize(
    ("greeting", "cause"), [(b"", "BROKEN"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "PLAINTEXT")]
)
async def test_something_else_is_there(greeting: bytes, cause: str) -> None:
    def greet(connection: socket.socket) -> None:
        connection.recv(1)
        connection.sendall(greeting)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass

    with listener(greet) as where, pytest.raises(ConnectError) as caught:
        await fetched(where, OURS.pin)
    assert caught.value.cause == cause and str(where) in str(caught.value)


async def test_nobody_is_there_or_says_a_word() -> None:
    done = threading.Event()
    with listener(lambda connection: done.wait(DEADLINE) and None) as where:
        with pytest.raises(ConnectError, match="stays silent") as silent:
            await tls.aside(tls.fetch, where, OURS.pin, tls.PINNED, 0.05)
        done.set()
    with pytest.raises(ConnectError, match="nothing listens") as nobody:
        await fetched(Address(HOST, 1), OURS.pin)
    with pytest.raises(ConnectError, match="does not resolve") as nowhere:
        await fetched(Address("no-such-host.invalid", 1), OURS.pin)
    causes = [caught.value.cause for caught in (silent, nobody, nowhere)]
    assert causes == ["SILENT", "NOBODY_LISTENS", "NAME"]


def test_what_is_known_has_a_bound() -> None:
    for number in range(tls._MAX_KNOWN + 2):
        tls.remember(b"%d" % number)
    assert len(tls._known) == tls._MAX_KNOWN and tls._known[pin_of(b"%d" % number)] == b"%d" % number
