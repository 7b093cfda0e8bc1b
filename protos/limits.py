"""Limits: what strangers and nodes may take of a coordinator before it says no. Plain data.

They are counted for each network address, an IPv6 address by its first 64 bits. Many volunteers may share one
address behind a NAT: the defaults leave room for several hundred of them, all back at once after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Limits:
    """What may be taken. Of what is counted by the minute, a minute's worth may come at once.

    Attributes:
        connections: TCP connections in all; the next ones are closed as they come.
        connections_per_address: of those from one address; the newest ones beyond them are cut.
        handshake_seconds: for the handshakes of TLS and HTTP/2 of a connection.
        first_call_seconds: until a connection has shown a right token, and until the first message of a call
            is there whole.
        wrong_tokens: a minute from an address; beyond that, its connections without a right one are cut.
        joins: a minute from an address.
        questions: a minute from an address: of what the run is, how it stands, how the caller looks.
        contributions: streams a minute for each rank of a node.
        messages: a minute on a node's session; faster ones wait to be read.
        state: bytes that the first node may say the shared state has; 0: see :func:`state_limit`.
    """

    connections: int = 4096
    connections_per_address: int = 1024
    handshake_seconds: float = 10.0
    first_call_seconds: float = 20.0
    wrong_tokens: int = 60
    joins: int = 1200
    questions: int = 2400
    contributions: int = 60_000
    messages: int = 120_000
    state: int = 0


LIMITS: Final = Limits()

STATE_BYTES_A_PARAMETER: Final = 64  # shared state at most, optimizer's included: fp32 weights take 4
STATE_BYTES_SPARE: Final = 64 << 20


def state_limit(parameters: int) -> int:
    """How many bytes the shared state of a run with that many parameters may have: room on the disk is taken
    for as many as the first node says."""
    return parameters * STATE_BYTES_A_PARAMETER + STATE_BYTES_SPARE
