"""The bytes of a node's round, beside those of a ring all-reduce of the same parameters."""

from __future__ import annotations

from dataclasses import dataclass

from protos.allreduce import FP32_BYTES, ring_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes of one round at one node, one direction each way, and the ring that they stand against."""

    parameters: int
    nodes: int
    up: float
    down: float

    @property
    def bits_per_parameter(self) -> float:
        """Sent and received, together."""
        return 8 * (self.up + self.down) / self.parameters

    @property
    def ring_up(self) -> float:
        """Bytes that an fp32 ring all-reduce would send (and receive)."""
        return ring_bytes(self.parameters, self.nodes)

    @property
    def ratio(self) -> float:
        """How many times fewer bytes pass the node's link, both directions, than with the fp32 ring."""
        own = self.up + self.down
        return 2 * self.ring_up / own if own else float("inf")

    @property
    def hub_ratio(self) -> float:
        """The same against fp32 values sent to a hub and back: 8 bytes a parameter, however many nodes."""
        own = self.up + self.down
        return 2 * FP32_BYTES * self.parameters / own if own else float("inf")
