"""What a ring all-reduce of the same parameters would send: the yardstick for every byte count that we show.

A ring over M nodes cuts the P values into M parts. Reduce-scatter sends M - 1 parts from every node and
all-gather M - 1 more, so a node sends 2 (M - 1) / M of its values and receives as many (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). No algorithm that adds at the
nodes sends less.
"""

from __future__ import annotations

from typing import Final

FP32_BYTES: Final = 4
BF16_BYTES: Final = 2


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
