"""The phases in which a node gets into the swarm, and the errors that name them."""

from __future__ import annotations

from typing import Literal

from node.exchange.trouble import Kind, Trouble

Phase = Literal["identity", "daemon", "listen", "bootstrap", "relay"]


class SwarmTrouble(Trouble):
    """A node did not get into the swarm; the text says in which phase, why, and what to do.

    Attributes:
        phase: ``identity``: the key file; ``daemon``: libp2p's process; ``listen``: the ports; ``bootstrap``:
            the peers to begin with; ``relay``: being reachable through another peer.
    """

    def __init__(self, phase: Phase, text: str, kind: Kind = Kind.UNREACHABLE) -> None:
        super().__init__(kind, f"the swarm, phase {phase}: {text}")
        self.phase = phase
