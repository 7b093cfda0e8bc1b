"""Trouble: what a failed call means, in words for people, and whether trying again can help."""

from __future__ import annotations

import enum
from typing import Final

import grpc

from node.exchange.base import ExchangeError
from protos import wire
from protos.connecting import failed_connection


class Kind(enum.Enum):
    """Why a call failed."""

    NOBODY_LISTENS = "nothing listens there"
    NAME = "the host name does not resolve"
    UNREACHABLE = "no route, or packets are dropped"
    SILENT = "connected or not, no answer in time"
    BROKEN = "an established connection ended"
    CUT = "a stream ended before its last frame"
    HIDDEN = "the other side ended a stream that was still being written to, and gRPC lost its words"
    STRANGER = "something else than a coordinator answers"
    CERTIFICATE = "another certificate than the one that is expected"
    PLAINTEXT = "TLS is expected, and what listens there does not speak it"
    ENCRYPTED = "no TLS is expected, and what listens there speaks it"
    HANDSHAKE = "both sides speak TLS and do not come to terms"
    TOKEN = "the invite's token was not accepted"
    SESSION_UNKNOWN = "the coordinator does not know this session"
    SESSION_BUSY = "another stream of this session still lives"
    REFUSED = "the coordinator refused, with its reason"
    FAULT = "the coordinator failed inside"
    PROTOCOL = "what the coordinator sent breaks the protocol"


_PASSING = frozenset(
    (
        Kind.NOBODY_LISTENS,
        Kind.NAME,
        Kind.UNREACHABLE,
        Kind.SILENT,
        Kind.BROKEN,
        Kind.CUT,
        Kind.HIDDEN,
        Kind.SESSION_BUSY,
        Kind.HANDSHAKE,
    )
)

_REFUSALS: Final = {
    Kind.CERTIFICATE: "wrong-pin",
    Kind.PLAINTEXT: "tls-downgraded",
    Kind.ENCRYPTED: "tls-refused",
    Kind.HANDSHAKE: "tls-refused",
}


class Trouble(ExchangeError):
    """A failed call, told apart by :attr:`kind`; the text stands alone.

    Attributes:
        refusal: by which :mod:`deploy.errors` finds its exit code; empty: an ordinary one.
    """

    def __init__(self, kind: Kind, text: str, refusal: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.refusal = refusal or _REFUSALS.get(kind, "")

    def of_a_bulk_call(self) -> Trouble:
        """The same, but passing if the session is unknown: that finds out by itself, and is joined again."""
        return Trouble(Kind.BROKEN, str(self)) if self.kind is Kind.SESSION_UNKNOWN else self

    @property
    def passing(self) -> bool:
        """Whether the same call may succeed later."""
        return self.kind in _PASSING


class TransferError(ExchangeError):
    """A transfer of shared state broke off; the coordinator may order another one."""


class RoundLost(ExchangeError):
    """A round was decided without this node, which holds its place in the run: ask for the next order."""


COORDINATOR: Final = "the coordinator"


def diagnose(
    code: grpc.StatusCode,
    details: str | None,
    address: str,
    *,
    seconds: float = 0.0,
    who: str = COORDINATOR,
    refusal: str = "",
) -> Trouble:
    """Read gRPC's status as a person would.

    Args:
        code: status of the call.
        details: its text: the other side's own words, or gRPC's for a connection that failed.
        address: HOST:PORT, for the text.
        seconds: the call's deadline, for the text.
        who: was called: the coordinator, or another node by its name.
        refusal: the kind that came with the status, of protos/refusal.py; empty: none.
    """
    words = (details or "").strip()
    there = f"{who} at {address}"
    if code is grpc.StatusCode.UNAVAILABLE:
        failed = failed_connection(words, address, who)
        return Trouble(Kind[failed.cause], failed.text)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        if words.lower() != "deadline exceeded":  # not gRPC's own, but the other side's words
            return Trouble(Kind.SILENT, f"{there} ended the call: {words}")
        cause = f"a firewall may be dropping packets, or {who} is overloaded"
        return Trouble(Kind.SILENT, f"no answer from {address} within {seconds:.3g} s: {cause}")
    if code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED):
        return Trouble(Kind.BROKEN, f"{there} ended the call ({words or 'no reason given'})")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        # Two secrets travel with a call: the session's, which a coordinator forgets, and the invite's.
        kind = Kind.SESSION_UNKNOWN if words.startswith(wire.SESSION_UNKNOWN) else Kind.TOKEN
        said = words.removeprefix(wire.SESSION_UNKNOWN)
        return Trouble(kind, f"{there} refused this node: {said}", refusal)
    if code is grpc.StatusCode.ALREADY_EXISTS:
        return Trouble(Kind.SESSION_BUSY, f"{there} still holds the previous connection: {words}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        expected = "coordinator" if who == COORDINATOR else "node"
        return Trouble(
            Kind.STRANGER,
            f"what answers at {address} is not an Atoll {expected} of this version ({words}); check the "
            "port, and whether a proxy (environment variable http_proxy) stands in between",
        )
    if code in (
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.NOT_FOUND,
    ):
        return Trouble(Kind.REFUSED, words or f"{there} refused without a reason ({code.name})", refusal)
    if code is grpc.StatusCode.INTERNAL and words.startswith("Internal error from Core"):
        # grpc issue 36066: a write that fails because the peer has ended the stream hides the peer's status.
        return Trouble(Kind.HIDDEN, f"{there} ended the stream while this node was sending")
    return Trouble(Kind.FAULT, f"{there} failed: {words or code.name}; see its log")
