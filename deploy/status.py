"""Asking a coordinator how its run stands: one unary call, a deadline, and errors in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from protos import atoll_pb2 as pb
from protos.invite import Invite
from protos.wire import CONTROL_SERVICE, TOKEN_KEY

TIMEOUT_SECONDS = 5.0


class StatusError(RuntimeError):
    """The status could not be had; the text says from whom, why, and what to look at."""


class StatusClient:
    """A connection to one coordinator that asks for its status. Also a context manager."""

    def __init__(self, invite: Invite) -> None:
        self.invite = invite
        # One channel for each client: a shared subchannel would hand the backoff of an earlier failure on.
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        self._channel = grpc.insecure_channel(invite.address, options=options)
        self._call = self._channel.unary_unary(
            f"/{CONTROL_SERVICE}/GetStatus",
            request_serializer=pb.StatusRequest.SerializeToString,
            response_deserializer=pb.StatusReply.FromString,
        )

    def fetch(self, timeout: float = TIMEOUT_SECONDS) -> pb.StatusReply:
        """The current status, within ``timeout`` seconds.

        Raises:
            StatusError: no coordinator there, a wrong token, or no answer in time.
        """
        try:
            reply: pb.StatusReply = self._call(
                pb.StatusRequest(), timeout=timeout, metadata=((TOKEN_KEY, self.invite.token),)
            )
            return reply
        except grpc.RpcError as error:
            raise StatusError(self._explain(error, timeout)) from error

    def _explain(self, error: grpc.RpcError, timeout: float) -> str:
        code, details = error.code(), error.details() or ""
        where = self.invite.address
        if code == grpc.StatusCode.UNAVAILABLE:
            return (
                f"no coordinator answers at {where}: {details}. "
                "Is it running, and is the port open on the way there?"
            )
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the coordinator at {where} did not answer within {timeout:g} s"
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return f"the coordinator at {where} refuses: {details}"
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return f"what listens at {where} is not an Atoll coordinator of this version: {details}"
        return f"the coordinator at {where} refuses the status ({code.name.lower()}): {details}"

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON values: every field present, integers as numbers, NaN and infinities as ``None``."""
    return {field.name: _value(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _value(value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, int, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _value(item) for key, item in sorted(value.items())}
    return [_value(item) for item in value]
