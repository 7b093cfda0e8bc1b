"""What gRPC's words about a connection that failed mean: it tells the causes apart in its text only."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Cause = Literal[
    "NOBODY_LISTENS",
    "NAME",
    "UNREACHABLE",
    "SILENT",
    "STRANGER",
    "BROKEN",
    "CERTIFICATE",
    "PLAINTEXT",
    "ENCRYPTED",
    "HANDSHAKE",
]


_WRONG_CERTIFICATE: Final = (
    "certificate_verify_failed",
    "certificate signature failure",
    "hostname verification",
)


class Failed(NamedTuple):
    """A connection that failed; ``text`` stands alone."""

    cause: Cause
    text: str


def failed_connection(words: str, address: str, who: str) -> Failed:
    """Read the details of a call that ended with UNAVAILABLE.

    Args:
        words: those details.
        address: HOST:PORT of the other side.
        who: should be there, as in "the connection to {who} at {address} broke".
    """
    lower = words.lower()
    host = address.rpartition(":")[0].strip("[]")
    cause = words.rpartition("last error: ")[2].rpartition("to remote host: ")[2]
    if "connection refused" in lower:
        return Failed("NOBODY_LISTENS", f"nothing listens at {address}: connection refused")
    if "resolving" in lower or "dns" in lower or "name lookup" in lower or "hostname lookup" in lower:
        return Failed(
            "NAME", f"the host name {host!r} does not resolve: check its spelling and this host's DNS"
        )
    if any(sign in lower for sign in _WRONG_CERTIFICATE):
        return Failed(
            "CERTIFICATE",
            f"what answers at {address} is not {who}: it shows another certificate than was said of that",
        )
    if "wrong_version_number" in lower:
        return Failed("PLAINTEXT", plaintext_at(address))
    if "tls handshake failed" in lower or "ssl handshake failed" in lower:
        return Failed(
            "HANDSHAKE", f"TLS with {who} at {address} failed ({cause.rpartition(': OK')[0] or cause})"
        )
    if "http/2" in lower or "settings frame as the first" in lower:
        return Failed("STRANGER", f"what answers at {address} does not speak gRPC ({cause}); check the port")
    if "before receiving settings" in lower:
        return Failed(
            "SILENT", f"{address} accepts connections and stays silent: check that the port is right"
        )
    if "timed out" in lower or "timeout" in lower or "deadline" in lower:
        return Failed(
            "UNREACHABLE", f"{address} cannot be reached: connecting timed out, a firewall may drop it"
        )
    if "no route" in lower or "unreachable" in lower:
        return Failed("UNREACHABLE", f"{address} cannot be reached: {cause}")
    return Failed("BROKEN", f"the connection to {who} at {address} broke ({cause or 'no reason given'})")


def plaintext_at(address: str) -> str:
    """In words, that TLS was asked for at ``address`` and something else answered."""
    return (
        f"what listens at {address} does not speak TLS: check the port. A coordinator that was started with "
        "--insecure has another invite (atoll+insecure://…), which protects nothing; else somebody stands in "
        "between"
    )
