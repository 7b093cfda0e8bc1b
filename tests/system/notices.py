"""What the nodes of a test bed have told people."""

from __future__ import annotations

from bench.bed import Bed


def told(bed: Bed, name: str) -> list[str]:
    """The sentences of a node so far."""
    return [event["text"] for event in bed.events(name, "Notice")]


def swarm_address(bed: Bed, name: str) -> str:
    """Where a node is in the swarm, as it says when it is ready; waits for that."""
    found: list[str] = []

    def says() -> bool:
        found[:] = [word for text in told(bed, name) for word in text.split() if "/p2p/" in word]
        return bool(found)

    bed.until(says, f"the address of {name}", watch=bed.nodes[name])
    return found[0]
