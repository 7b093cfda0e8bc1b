"""Dialing: whether a node can be reached where it says that it listens for the others."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from protos.address import Address, AddressError
from protos.atoll_pb2 import PeerHello
from protos.certificate import CertificateError
from protos.connecting import failed_connection
from protos.grpc_options import DIAL_OPTIONS
from protos.tls import PLAINTEXT, channel_to
from protos.wire import PEER_SERVICE, PROTOCOL

DIAL_SECONDS: Final = 5.0
MAX_SEEN: Final = 64  # characters of an address
_NONCE_BYTES: Final = 16
_LIBP2P: Final = b"\x13/multistream/1.0.0\n"  # with which both sides of a connection of libp2p begin


@dataclass(frozen=True)
class Met:
    """Who answers at an address: a node of the run, unless ``why_not`` says otherwise in words; ``seen`` is
    the address, HOST:PORT, from which it was called."""

    why_not: str = ""
    seen: str = ""


async def reach(
    address: str, run_digest: str, seconds: float = DIAL_SECONDS, *, certificate: bytes = b""
) -> str:
    """Ask whoever listens at ``address`` (HOST:PORT) to prove that it is a node of the run; an empty string,
    or in words why it is not within ``seconds``. With a ``certificate`` (DER) it has to be the one that has
    its key; without one there is no TLS."""
    return (await meet(address, run_digest, seconds, certificate=certificate)).why_not


async def meet(
    address: str, run_digest: str, seconds: float = DIAL_SECONDS, *, certificate: bytes = b""
) -> Met:
    """As :func:`reach`, and what it says of the call."""
    try:
        where = Address.parse(address)
    except AddressError as error:
        return Met(str(error))
    if where.is_unspecified or not where.port:
        return Met(f"{where} is an address to listen on, not one to call")
    try:
        way = channel_to(certificate) if certificate else PLAINTEXT
    except CertificateError as error:
        return Met(str(error))
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hello = PeerHello(protocol=PROTOCOL, token=nonce).SerializeToString()
    async with way.open_aio(str(where), DIAL_OPTIONS) as channel:
        try:
            call = channel.unary_unary(
                f"/{PEER_SERVICE}/Reach", request_serializer=bytes, response_deserializer=bytes
            )
            answer = await call(hello, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            return Met(_why_not(error, where, seconds))
    return _read(answer, nonce, run_digest, where)


async def knock(places: Sequence[str], seconds: float = DIAL_SECONDS) -> str:
    """Whether libp2p answers at one of ``places`` (HOST:PORT): an empty string, or in words why not within
    ``seconds``. Who it is, its callers find out."""
    calls = [asyncio.ensure_future(_knock(place, seconds)) for place in places]
    try:
        reasons = []
        for call in asyncio.as_completed(calls):
            if not (reason := await call):
                return ""
            reasons.append(reason)
        return "; ".join(reasons) or "it names no address that can be tried with TCP"
    finally:
        for pending in calls:
            pending.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _knock(place: str, seconds: float) -> str:
    try:
        where = Address.parse(place)
        said = await asyncio.wait_for(_greeting(where), seconds)
    except AddressError as error:
        return str(error)
    except asyncio.TimeoutError:
        return f"no answer from {place} within {seconds:.3g} s: a firewall or a NAT may be dropping packets"
    except (OSError, EOFError) as error:
        return f"{place}: {error}"
    return "" if said == _LIBP2P else f"what answers at {place} is not libp2p"


async def _greeting(where: Address) -> bytes:
    reader, writer = await asyncio.open_connection(where.host, where.port)
    try:
        writer.write(_LIBP2P)
        return await reader.readexactly(len(_LIBP2P))
    finally:
        writer.transport.abort()


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
