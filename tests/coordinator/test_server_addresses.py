"""Where the gRPC server listens, and what its end frees."""

from __future__ import annotations

import socket

import grpc
import pytest

from protos.listening import ListenError
from tests.coordinator.contribution_rig import contribution_frames, random_payload
from tests.coordinator.coordinator_rig import soon
from tests.coordinator.server_rig import Client, ended, site


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_port_0_is_a_real_port() -> None:
    async with site() as one, site() as two:
        assert one.server.address.port not in (0, two.server.address.port)
        assert one.server.address.host == "127.0.0.1"


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
async def test_ipv6() -> None:
    async with site(listen="[::1]:0", nodes=1, rounds=1) as here:
        assert str(here.server.address).startswith("[::1]:")
        client = await Client(here).join()
        await here.play([client])
        await client.close()


async def test_a_busy_port_is_named() -> None:
    async with site() as here:
        with pytest.raises(ListenError, match=f"port {here.server.address.port} is in use") as error:
            async with site(listen=str(here.server.address)):
                pass
        assert "port 0 takes a free one" in str(error.value)


async def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(ListenError, match=r"cannot listen on 192\.0\.2\.1:0: .*; choose another address"):
        async with site(listen="192.0.2.1:0"):
            pass
    with pytest.raises(ListenError, match="cannot be resolved"):
        async with site(listen="no-such-host.invalid:0"):
            pass


async def test_stopping_ends_open_calls_and_frees_the_port() -> None:
    async with site(nodes=2, rounds=9) as here:
        clients = await here.clients(2)
        order = await clients[0].opened()
        call = clients[0].exchange()
        await clients[0].write(call, contribution_frames(order, here.table, random_payload(0, here.table)))
        here.hub.stop("maintenance")
        stop = await clients[0].ordered("stop")
        assert stop.reason == "maintenance"
        code, text = await ended(call)
        assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the run has ended: maintenance")
        await soon(here.server.stop(0.2))
        with socket.socket() as probe:
            assert probe.connect_ex((here.server.address.host, here.server.address.port)) != 0
        for client in clients:
            await client.close()
