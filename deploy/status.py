"""Asking a coordinator how its run stands: one unary call, a deadline, and errors in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from protos import atoll_pb2 as pb
from protos.address import Address
from protos.connecting import Cause, Failed, failed_connection
from protos.invite import Invite
from protos.refusal import kind_in
from protos.tls import (
    PINNED,
    ClientTls,
    ConnectError,
    HandshakeFailed,
    NotEncrypted,
    WrongCertificate,
    channel_by,
    encrypted_there,
    examine,
    expects_tls,
    fetch,
)
from protos.wire import CONTROL_SERVICE, TOKEN_KEY

TIMEOUT_SECONDS = 5.0
_OF_TLS: dict[Cause, str] = {
    kind.cause: kind.refusal for kind in (WrongCertificate, NotEncrypted, HandshakeFailed)
}


class StatusError(RuntimeError):
    """The status could not be had; the text says from whom, why, and what to look at.

    Attributes:
        refusal: by which :mod:`deploy.errors` finds its exit code; empty: an ordinary one.
    """

    def __init__(self, text: str, refusal: str = "") -> None:
        super().__init__(text)
        self.refusal = refusal


class StatusClient:
    """A connection to one coordinator that asks for its status. Also a context manager."""

    def __init__(self, invite: Invite, tls: ClientTls = PINNED) -> None:
        self.invite = invite
        self._tls = tls
        self._where = Address(invite.host, invite.port)
        self._channel: grpc.Channel | None = None

    def _opened(self, timeout: float) -> grpc.Channel:
        if self._channel is None:
            way = channel_by(self.invite.pin, self._tls)
            if way is None:
                fetch(self._where, self.invite.pin, self._tls, timeout)
                way = channel_by(self.invite.pin, self._tls)
            assert way is not None
            # One channel for each client: a shared subchannel would hand an earlier failure's backoff on.
            self._channel = way.open(
                self.invite.address, (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
            )
        return self._channel

    def fetch(self, timeout: float = TIMEOUT_SECONDS) -> pb.StatusReply:
        """The current status, within ``timeout`` seconds.

        Raises:
            StatusError: no coordinator there, another one, a wrong token, or no answer in time.
        """
        try:
            call = self._opened(timeout).unary_unary(
                f"/{CONTROL_SERVICE}/GetStatus",
                request_serializer=pb.StatusRequest.SerializeToString,
                response_deserializer=pb.StatusReply.FromString,
            )
            reply: pb.StatusReply = call(
                pb.StatusRequest(), timeout=timeout, metadata=((TOKEN_KEY, self.invite.token),)
            )
            return reply
        except ConnectError as error:
            raise self._unmet(error) from error
        except grpc.RpcError as error:
            raise self._explained(error, timeout) from error

    def _unmet(self, error: ConnectError) -> StatusError:
        if error.refusal:
            return StatusError(str(error), error.refusal)
        return StatusError(_nobody(self.invite.address, str(error)))

    def _look(self, failed: Failed, timeout: float) -> None:
        """Why a connection failed: gRPC has the same words for several causes."""
        if failed.cause not in ("BROKEN", "CERTIFICATE"):
            return
        if self.invite.insecure:
            if expects_tls(self._where, timeout):
                raise encrypted_there(self.invite.address)
        elif self._tls.ca:
            examine(self._where, asked=self._tls.own is None, seconds=timeout)
        else:
            fetch(self._where, self.invite.pin, self._tls, timeout)

    def _explained(self, error: grpc.RpcError, timeout: float) -> StatusError:
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            failed = failed_connection(error.details() or "", self.invite.address, "the coordinator")
            try:
                self._look(failed, timeout)
            except ConnectError as found:
                return self._unmet(found)
            if failed.cause in _OF_TLS:
                return StatusError(failed.text, _OF_TLS[failed.cause])
        return StatusError(self._explain(error, timeout), kind_in(error.trailing_metadata()))

    def _explain(self, error: grpc.RpcError, timeout: float) -> str:
        code, details = error.code(), error.details() or ""
        where = self.invite.address
        if code == grpc.StatusCode.UNAVAILABLE:
            return _nobody(where, details)
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the coordinator at {where} did not answer within {timeout:g} s"
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return f"the coordinator at {where} refuses: {details}"
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return f"what listens at {where} is not an Atoll coordinator of this version: {details}"
        return f"the coordinator at {where} refuses the status ({code.name.lower()}): {details}"

    def close(self) -> None:
        """End the connection."""
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _nobody(where: str, why: str) -> str:
    return f"no coordinator answers at {where}: {why}. Is it running, and is the port open on the way there?"


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
