"""Tokens and keys over real connections: what each role may call, and what ends with a token."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from coordinator.access import Access
from coordinator.token_file import TokenFile
from protos import atoll_pb2 as pb
from protos import wire
from protos.refusal import kind_in
from tests.coordinator.coordinator_rig import eventually, join_request, soon
from tests.coordinator.server_rig import Client, Site, ended, site


@pytest.fixture
def book(tmp_path: Path) -> TokenFile:
    file = TokenFile(tmp_path)
    for name in ("node", "observer", "admin"):
        file.edit(lambda book, name=name: book.added(name, name, f"{name}-token", now=0.0))
    return file


async def refused(call: object) -> tuple[grpc.StatusCode, str]:
    """Status and kind of a call that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await soon(call)  # type: ignore[arg-type]
    return caught.value.code(), kind_in(caught.value.trailing_metadata())


async def has_stream(here: Site, node: str) -> None:
    """Wait for this node's stream at the coordinator; a client opens it without an answer."""
    await eventually(lambda: here.hub.run.registry.nodes[node].in_session, "its stream")


def status_of(client: Client) -> object:
    return client.unary("GetStatus", pb.StatusRequest(), pb.StatusReply)


async def test_roles(book: TokenFile) -> None:
    async with site(token=Access(TokenFile(book.path.parent))) as here:
        for role in ("node", "observer", "admin"):
            client = Client(here, f"{role}-token")
            await soon(status_of(client))  # type: ignore[arg-type]
            if role == "node":
                await client.join()
                assert here.hub.run.registry.nodes[client.id].key == client.key.public
            else:
                run = client.unary("GetRun", pb.GetRunRequest(protocol=wire.PROTOCOL), pb.GetRunReply)
                join = client.unary("Join", join_request(here.table), pb.JoinReply)
                for call in (run, join):
                    assert await refused(call) == (grpc.StatusCode.PERMISSION_DENIED, "wrong-role")
                code, _ = await ended(client.open_session())
                assert code is grpc.StatusCode.PERMISSION_DENIED
            await client.close()
        stranger = Client(here, "guess")
        assert await refused(status_of(stranger)) == (grpc.StatusCode.UNAUTHENTICATED, "bad-token")
        await stranger.close()


async def test_a_session_is_its_tokens(book: TokenFile) -> None:
    book.edit(lambda book: book.added("other", "node", "other-token", now=0.0))
    async with site(nodes=2, token=Access(TokenFile(book.path.parent))) as here:
        node = await Client(here, "node-token").join()
        thief = Client(here, "other-token")
        thief.session = node.session
        call = thief.exchange()
        code, text = await ended(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "another token" in text
        await thief.close()
        await node.close()


async def test_a_join_cannot_be_replayed_and_a_key_is_in_one_session(book: TokenFile) -> None:
    async with site(nodes=3, token=Access(TokenFile(book.path.parent))) as here:
        node = Client(here, "node-token")
        heard = await node.proven(join_request(here.table, state_bytes=here.state.nbytes))
        reply = await node.unary("Join", heard, pb.JoinReply)
        node.session = reply.session
        node.stream = node.open_session()
        await node.say(heartbeat=pb.Heartbeat())
        await has_stream(here, reply.node)

        listener = Client(here, "node-token")
        precondition = grpc.StatusCode.FAILED_PRECONDITION
        again = listener.unary("Join", heard, pb.JoinReply)
        assert await refused(again) == (precondition, "replayed-join")
        forged = await listener.proven(join_request(here.table, state_bytes=here.state.nbytes))
        forged.key = node.key.public
        call = listener.unary("Join", forged, pb.JoinReply)
        assert await refused(call) == (grpc.StatusCode.UNAUTHENTICATED, "bad-identity")
        listener.key = node.key  # stolen
        stolen = await listener.proven(join_request(here.table, state_bytes=here.state.nbytes))
        assert await refused(listener.unary("Join", stolen, pb.JoinReply)) == (precondition, "key-in-use")
        assert here.hub.run.registry.nodes[reply.node].in_session
        await listener.close()
        await node.close()


async def test_a_revoked_token_ends_its_sessions(book: TokenFile) -> None:
    async with site(nodes=3, token=Access(TokenFile(book.path.parent))) as here:
        node = await Client(here, "node-token").join()
        await has_stream(here, node.id)  # a stream that opens after the revocation is refused instead
        book.edit(lambda book: book.revoked("node", 1.0))
        while isinstance(await soon(node.stream.read()), bytes):
            pass
        assert here.hub.run.registry.left[-1].reason == "its token node was revoked"
        assert await refused(status_of(node)) == (grpc.StatusCode.UNAUTHENTICATED, "token-revoked")
        await node.close()
