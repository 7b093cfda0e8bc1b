"""Bytes that went between this process and others: by the other end, the direction, and what they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from protos.buckets import BucketTable

Direction = Literal["sent", "received"]
Content = Literal["contribution", "result", "state", "control", "relay"]

COORDINATOR: Final = "coordinator"
OTHERS: Final = "others"  # callers that are no nodes, and the nodes beyond the first MAX_PEERS
MAX_PEERS: Final = 1024
PREFIX_BYTES: Final = 5  # that gRPC puts before every message


class Traffic:
    """Totals since the process started. One thread adds; any thread may read.

    Contributions and results hold votes and means, and each message a part of both: their bytes are split
    as those of the whole payload are.
    """

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, Direction, Content], list[float]] = {}  # of votes, and of all else
        self._peers: set[str] = set()
        self._table: BucketTable | None = None
        self._votes: dict[Content, float] = {}  # the share of votes

    def compose(self, table: BucketTable) -> None:
        """The contributions and results that travel from now on are laid out like this."""
        if table is not self._table:
            self._table = table
            voted = [bucket for bucket in table.buckets if bucket.reduce == "majority"]
            self._votes = {
                "contribution": sum(bucket.nbytes for bucket in voted) / max(1, table.nbytes),
                "result": sum(bucket.result_nbytes for bucket in voted) / max(1, table.result_nbytes),
            }

    def add(self, peer: str, direction: Direction, content: Content, nbytes: int) -> None:
        """Count a message and its prefix."""
        self.count(peer, direction, content, nbytes + PREFIX_BYTES)

    def count(self, peer: str, direction: Direction, content: Content, nbytes: int) -> None:
        """Count messages whose prefixes are counted already."""
        cell = self._bytes.get((peer, direction, content))
        if cell is None:
            cell = self._cell(peer, direction, content)
        votes = self._votes.get(content, 0.0) * nbytes
        cell[0] += votes
        cell[1] += nbytes - votes

    def _cell(self, peer: str, direction: Direction, content: Content) -> list[float]:
        if peer not in self._peers and len(self._peers) >= MAX_PEERS:
            peer = OTHERS
        self._peers.add(peer)
        return self._bytes.setdefault((peer, direction, content), [0.0, 0.0])

    def counts(self) -> Iterator[tuple[str, Direction, str, float]]:
        """The other end, the direction, the kind (``vote``, ``mean``, ``state``, ``control`` or ``relay``)
        and the bytes, of all that is not 0."""
        totals: dict[tuple[str, Direction, str], float] = {}
        for (peer, direction, content), (votes, rest) in list(self._bytes.items()):
            other = "mean" if content in ("contribution", "result") else str(content)
            for name, nbytes in (("vote", votes), (other, rest)):
                if nbytes:
                    key = peer, direction, name
                    totals[key] = totals.get(key, 0.0) + nbytes
        for (peer, direction, kind), nbytes in totals.items():
            yield peer, direction, kind, nbytes
