from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from deploy.status import StatusClient, StatusError
from protos import atoll_pb2 as pb
from protos.invite import Invite
from protos.wire import CONTROL_SERVICE, TOKEN_KEY


def _status(request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
    metadata = dict(context.invocation_metadata())
    if metadata.get(TOKEN_KEY) != "right":
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the invite's token is not this run's")
    return pb.StatusReply(run="r", round=7)


def _serve(method: str) -> tuple[grpc.Server, int]:
    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(
        _status,
        request_deserializer=pb.StatusRequest.FromString,
        response_serializer=pb.StatusReply.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(CONTROL_SERVICE, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


@pytest.fixture
def port() -> Iterator[int]:
    server, port = _serve("GetStatus")
    yield port
    server.stop(None).wait(5)


def test_the_token_opens_the_status(port: int) -> None:
    with StatusClient(Invite("right", "127.0.0.1", port)) as client:
        assert client.fetch().round == 7
        assert client.fetch().run == "r"


def test_a_wrong_token_is_said_so(port: int) -> None:
    with (
        StatusClient(Invite("wrong", "127.0.0.1", port)) as client,
        pytest.raises(StatusError, match="token is not this run's") as caught,
    ):
        client.fetch()
    assert str(caught.value).count("invite") == 1
    assert f"127.0.0.1:{port}" in str(caught.value) and "wrong" not in str(caught.value)


def test_nobody_there() -> None:
    server, port = _serve("GetStatus")
    server.stop(None).wait(5)
    with (
        StatusClient(Invite("right", "127.0.0.1", port)) as client,
        pytest.raises(StatusError, match=f"no coordinator answers at 127.0.0.1:{port}"),
    ):
        client.fetch()


def test_somebody_else_there() -> None:
    server, port = _serve("Other")
    try:
        with (
            StatusClient(Invite("right", "127.0.0.1", port)) as client,
            pytest.raises(StatusError, match="not an Atoll coordinator"),
        ):
            client.fetch()
    finally:
        server.stop(None).wait(5)
