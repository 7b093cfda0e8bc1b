"""What a ring all-reduce of the same parameters would send: the yardstick for every byte count that we show.

A ring over M nodes cuts the P values into M parts. Reduce-scatter sends M - 1 parts from every node and
all-gather M - 1 more, so a node sends 2 (M - 1) / M of its values and receives as many (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). No algorithm that adds at the
nodes sends less.
"""

from __future__ import annotations

from dataclasses import dataclass

FP32_BYTES = 4
BF16_BYTES = 2


def ring_bytes(parameters: int, nodes: int, *, element_bytes: int = FP32_BYTES) -> float:
    """Bytes that each of ``nodes`` nodes sends, and receives, in one all-reduce of ``parameters`` values.

    ``2 (M - 1) / M * P * element_bytes``: with fp32 ``8 P (M - 1) / M``. 0 for one node.

    Raises:
        ValueError: a negative number of parameters, or no node.
    """
    if parameters < 0 or nodes < 1 or element_bytes < 1:
        raise ValueError(
            f"a ring needs parameters >= 0, nodes >= 1 and element bytes >= 1, "
            f"not {parameters}, {nodes} and {element_bytes}"
        )
    return 2 * (nodes - 1) * parameters * element_bytes / nodes


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
