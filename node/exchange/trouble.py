"""Trouble: what a failed call means, in words for people, and whether trying again can help."""

from __future__ import annotations

import enum

import grpc

from node.exchange.base import ExchangeError
from protos import wire


class Kind(enum.Enum):
    """Why a call failed."""

    NOBODY_LISTENS = "nothing listens there"
    NAME = "the host name does not resolve"
    UNREACHABLE = "no route, or packets are dropped"
    SILENT = "connected or not, no answer in time"
    BROKEN = "an established connection ended"
    CUT = "a stream ended before its last frame"
    HIDDEN = "the coordinator ended a stream that was still being written to, and gRPC lost its words"
    STRANGER = "something else than a coordinator answers"
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
    )
)


class Trouble(ExchangeError):
    """A failed call, told apart by :attr:`kind`; the text stands alone."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind

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


def diagnose(code: grpc.StatusCode, details: str | None, address: str, *, seconds: float = 0.0) -> Trouble:
    """Read gRPC's status as a person would.

    Args:
        code: status of the call.
        details: its text: the coordinator's own words, or gRPC's for a connection that failed.
        address: HOST:PORT, for the text.
        seconds: the call's deadline, for the text.
    """
    words = (details or "").strip()
    if code is grpc.StatusCode.UNAVAILABLE:
        return _connection(words, address)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        cause = "a firewall may be dropping packets, or the coordinator is overloaded"
        if words.lower() != "deadline exceeded":  # not gRPC's own, but the coordinator's words
            return Trouble(Kind.SILENT, f"the coordinator at {address} ended the call: {words}")
        return Trouble(Kind.SILENT, f"no answer from {address} within {seconds:.3g} s: {cause}")
    if code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED):
        return Trouble(
            Kind.BROKEN, f"the coordinator at {address} ended the call ({words or 'no reason given'})"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        # Two secrets travel with a call: the session's, which a coordinator forgets, and the invite's.
        kind = Kind.SESSION_UNKNOWN if words.startswith(wire.SESSION_UNKNOWN) else Kind.TOKEN
        said = words.removeprefix(wire.SESSION_UNKNOWN)
        return Trouble(kind, f"the coordinator at {address} refused this node: {said}")
    if code is grpc.StatusCode.ALREADY_EXISTS:
        return Trouble(
            Kind.SESSION_BUSY, f"the coordinator at {address} still holds the previous connection: {words}"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Trouble(
            Kind.STRANGER,
            f"what answers at {address} is not an Atoll coordinator of this version ({words}); check the "
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
        return Trouble(
            Kind.REFUSED, words or f"the coordinator at {address} refused without a reason ({code.name})"
        )
    if code is grpc.StatusCode.INTERNAL and words.startswith("Internal error from Core"):
        # grpc issue 36066: a write that fails because the peer has ended the stream hides the peer's status.
        return Trouble(
            Kind.HIDDEN, f"the coordinator at {address} ended the stream while this node was sending"
        )
    return Trouble(Kind.FAULT, f"the coordinator at {address} failed: {words or code.name}; see its log")


def _connection(words: str, address: str) -> Trouble:
    """UNAVAILABLE: gRPC tells the causes apart in its text only."""
    lower = words.lower()
    host = address.rpartition(":")[0].strip("[]")
    cause = words.rpartition("last error: ")[2].rpartition("to remote host: ")[2]
    if "connection refused" in lower:
        return Trouble(Kind.NOBODY_LISTENS, f"nothing listens at {address}: connection refused")
    if "resolving" in lower or "dns" in lower or "name lookup" in lower or "hostname lookup" in lower:
        return Trouble(
            Kind.NAME, f"the host name {host!r} does not resolve: check its spelling and this host's DNS"
        )
    if "http/2" in lower or "settings frame as the first" in lower:
        return Trouble(
            Kind.STRANGER, f"what answers at {address} does not speak gRPC ({cause}); check the port"
        )
    if "before receiving settings" in lower:
        return Trouble(
            Kind.SILENT, f"{address} accepts connections and stays silent: check that the port is right"
        )
    if "timed out" in lower or "timeout" in lower or "deadline" in lower:
        return Trouble(
            Kind.UNREACHABLE, f"{address} cannot be reached: connecting timed out, a firewall may drop it"
        )
    if "no route" in lower or "unreachable" in lower:
        return Trouble(Kind.UNREACHABLE, f"{address} cannot be reached: {cause}")
    return Trouble(
        Kind.BROKEN, f"the connection to the coordinator at {address} broke ({cause or 'no reason given'})"
    )
