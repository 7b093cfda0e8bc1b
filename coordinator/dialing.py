"""Dialing: whether a node can be reached where it says that it listens for the others."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from protos.address import Address, AddressError
from protos.atoll_pb2 import PeerHello
from protos.connecting import failed_connection
from protos.grpc_options import DIAL_OPTIONS
from protos.wire import PEER_SERVICE, PROTOCOL

DIAL_SECONDS: Final = 5.0
MAX_SEEN: Final = 64  # characters of an address
_NONCE_BYTES: Final = 16


@dataclass(frozen=True)
class Met:
    """Who answers at an address: a node of the run, unless ``why_not`` says otherwise in words; ``seen`` is
    the address, HOST:PORT, from which it was called."""

    why_not: str = ""
    seen: str = ""


async def reach(address: str, run_digest: str, seconds: float = DIAL_SECONDS) -> str:
    """Ask whoever listens at ``address`` (HOST:PORT) to prove that it is a node of the run; an empty string,
    or in words why it is not within ``seconds``."""
    return (await meet(address, run_digest, seconds)).why_not


async def meet(address: str, run_digest: str, seconds: float = DIAL_SECONDS) -> Met:
    """As :func:`reach`, and what it says of the call."""
    try:
        where = Address.parse(address)
    except AddressError as error:
        return Met(str(error))
    if where.is_unspecified or not where.port:
        return Met(f"{where} is an address to listen on, not one to call")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hello = PeerHello(protocol=PROTOCOL, token=nonce).SerializeToString()
    async with grpc.aio.insecure_channel(str(where), options=DIAL_OPTIONS) as channel:
        try:
            call = channel.unary_unary(
                f"/{PEER_SERVICE}/Reach", request_serializer=bytes, response_deserializer=bytes
            )
            answer = await call(hello, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            return Met(_why_not(error, where, seconds))
    return _read(answer, nonce, run_digest, where)


def _why_not(error: grpc.aio.AioRpcError, where: Address, seconds: float) -> str:
    code, words = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return failed_connection(words, str(where), "the node").text
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer from {where} within {seconds:.3g} s: a firewall or a NAT may be dropping packets"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"what answers at {where} is not an Atoll node of this version"
    return f"what answers at {where} says {code.name}: {words}"


def _read(answer: bytes, nonce: bytes, run_digest: str, where: Address) -> Met:
    try:
        told = PeerHello.FromString(answer)
    except DecodeError:
        return Met(f"what answers at {where} is not an Atoll node")
    return Met(_problem(told, nonce, run_digest, where), told.seen[:MAX_SEEN])


def _problem(told: PeerHello, nonce: bytes, run_digest: str, where: Address) -> str:
    if not hmac.compare_digest(told.token, nonce):
        return f"what answers at {where} did not repeat what it was sent: something stands in between"
    if told.protocol != PROTOCOL:
        return f"the node at {where} speaks protocol {told.protocol}, the coordinator {PROTOCOL}"
    if told.run_digest != run_digest:
        return f"the node at {where} takes part in another run"
    return ""
