"""A coordinator with TLS: what a caller gets that has not got the invite, or does not speak TLS."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import warnings
from collections.abc import Sequence

import grpc
import pytest

from node.exchange.link import Limits, Link
from node.exchange.meter import Meter
from node.exchange.trouble import Kind, Trouble
from protos import wire
from protos.address import Address
from protos.certificate import Credential, made, pem_of, pin_of
from protos.invite import Invite
from tests.authority import Authority
from tests.coordinator.coordinator_rig import DEADLINE, soon
from tests.coordinator.server_rig import TOKEN, Client, Site, code_of, site

OURS = made()
_SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 4, 6, 7, 8  # frames of HTTP/2


def link(made: Site, pin: str, token: str = TOKEN) -> Link:
    where = made.server.address
    opened = Link(Invite(token, where.host, where.port, pin), Meter(), Limits(call=DEADLINE))
    opened.open()
    return opened


async def trouble(made: Site, pin: str, token: str = TOKEN) -> Trouble:
    """What a node meets that has another invite."""
    calling = link(made, pin, token)
    try:
        with pytest.raises(Trouble) as caught:
            await soon(calling.get_run())
        return caught.value
    finally:
        await calling.close()


async def shielded(
    where: Address, protocols: Sequence[str] = ("h2",), **versions: ssl.TLSVersion
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with TLS, as ``openssl s_client`` makes one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # or this side would refuse old versions itself
    if protocols:
        context.set_alpn_protocols(list(protocols))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, version in versions.items():
            setattr(context, name, version)
    return await soon(asyncio.open_connection(where.host, where.port, ssl=context))


async def test_the_pin_of_the_invite_opens_it() -> None:
    async with site(credential=OURS) as here:
        calling = link(here, OURS.pin)
        try:
            assert calling.secure and (await soon(calling.get_run())).protocol == wire.PROTOCOL
            assert calling.elsewhere("127.0.0.1:1").secure, "also where the coordinator has gone"
        finally:
            await calling.close()


async def test_every_other_invite_is_told_apart() -> None:
    other = made()
    async with site(credential=OURS) as here, site() as open_:
        wrong = await trouble(here, other.pin)
        assert wrong.kind is Kind.CERTIFICATE and not wrong.passing and wrong.refusal == "wrong-pin"
        assert other.pin in str(wrong) and OURS.pin in str(wrong)
        insecure = await trouble(here, "")
        assert insecure.kind is Kind.ENCRYPTED and not insecure.passing
        assert insecure.refusal == "tls-refused" and "atoll+insecure://" in str(insecure)
        downgraded = await trouble(open_, OURS.pin)
        assert downgraded.kind is Kind.PLAINTEXT and not downgraded.passing
        assert downgraded.refusal == "tls-downgraded" and "--insecure" in str(downgraded)
        token = await trouble(here, OURS.pin, "another")
        assert token.kind is Kind.TOKEN


async def test_a_certificate_that_is_known_is_compared_at_every_connection() -> None:
    async with site(credential=OURS) as here, site(credential=made()) as usurper:
        calling = link(here, OURS.pin)
        try:
            await soon(calling.get_run())
            calling.move(str(usurper.server.address))
            with pytest.raises(Trouble, match="another certificate") as caught:
                await soon(calling.get_run())
            assert caught.value.kind is Kind.CERTIFICATE
        finally:
            await calling.close()


async def test_a_certificate_is_asked_of_nodes_where_an_authority_is_given() -> None:
    authority = Authority()
    signed = authority.signs("localhost")
    async with site(credential=Credential(signed.chain, signed.key, authority.pem)) as here:
        refused = await trouble(here, signed.pin)
        assert refused.kind is Kind.HANDSHAKE and "--tls-cert" in str(refused)


async def test_without_tls_nothing_is_said() -> None:
    async with site(credential=OURS) as here:
        client = Client(here)  # speaks gRPC, and has the token
        call = client.channel.unary_unary(f"/{wire.CONTROL_SERVICE}/GetStatus")
        code, _ = await code_of(call(b"", metadata=client.metadata(), timeout=DEADLINE))
        assert code is grpc.StatusCode.UNAVAILABLE
        await client.channel.close()
        where = here.server.address
        reader, writer = await soon(asyncio.open_connection(where.host, where.port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in await soon(reader.read())
        writer.close()


@pytest.mark.parametrize("protocols", [[], ["h2"]])
@pytest.mark.parametrize("word", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 64])
async def test_tls_alone_opens_nothing(word: bytes, protocols: list[str]) -> None:
    """Everybody is shown the certificate, and nothing beside it but what every HTTP/2 begins with."""
    async with site(credential=OURS) as here:
        reader, writer = await shielded(here.server.address, protocols)
        assert pin_of(writer.get_extra_info("ssl_object").getpeercert(True)) == OURS.pin
        assert writer.get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")
        said = b""
        with contextlib.suppress(ConnectionError):  # it may have hung up already
            writer.write(word)
            await soon(writer.drain())
            said = await soon(reader.read())
        assert set(_kinds(said)) <= {_SETTINGS, _WINDOW_UPDATE, _PING, _GOAWAY}
        writer.transport.abort()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
async def test_old_tls_is_refused(version: ssl.TLSVersion) -> None:
    async with site(credential=OURS) as here:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await shielded(here.server.address, minimum_version=version, maximum_version=version)
        _, writer = await shielded(here.server.address, maximum_version=ssl.TLSVersion.TLSv1_2)
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.2"
        writer.transport.abort()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
async def test_openssl_s_client_sees_the_certificate_and_no_more() -> None:
    async with site(credential=OURS) as here:
        process = await asyncio.create_subprocess_exec(
            *("openssl", "s_client", "-connect", str(here.server.address), "-alpn", "h2", "-showcerts"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            said, _ = await soon(process.communicate(b"GET /atoll.v1.Coordinator/GetStatus HTTP/1.1\r\n\r\n"))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert pem_of(OURS.der).strip() in said
    assert not any(word in said for word in (b"HTTP/1.1 2", b"gathering", b"run-digest"))


def _kinds(data: bytes) -> list[int]:
    """Of frames of HTTP/2."""
    kinds = []
    while len(data) >= 9:
        length = int.from_bytes(data[:3], "big")
        kinds.append(data[3])
        data = data[9 + length :]
    return kinds
