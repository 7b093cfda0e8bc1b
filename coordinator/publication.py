"""Topologies as nodes are told of them: all of it to who comes anew, to the others what has changed.

Every node has tokens of its own in its message, so that a whole topology for everybody has the size of the
square of their number; what one node changes is one entry for each of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from coordinator.topology import Assigned
from protos.atoll_pb2 import PeerNode, SliceOf, TableSlices, Topology

TOKEN_BYTES: Final = 16


class Publication:
    """The topology that holds, and how it differs from the one before.

    Args:
        secret: from which the tokens follow that nodes show each other.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._number = self._since = 0
        self._nodes: dict[str, PeerNode] = {}  # without tokens
        self._tables: list[TableSlices] = []
        self._changed: list[PeerNode] = []
        self._gone: list[str] = []
        self._same_tables = False

    def revise(
        self, number: int, nodes: Iterable[PeerNode], assigned: Mapping[str, Sequence[Assigned]]
    ) -> None:
        """Another topology holds.

        Args:
            number: of it.
            nodes: that it names, and the ways to them.
            assigned: who reduces what, by the digest of the table.
        """
        before, tables = self._nodes, [_table(digest, rows) for digest, rows in assigned.items()]
        self._since, self._number = self._number, number
        self._nodes = {node.node: node for node in nodes}
        self._changed = [node for node in self._nodes.values() if before.get(node.node) != node]
        self._gone = [name for name in before if name not in self._nodes]
        self._same_tables, self._tables = tables == self._tables, tables

    def message(self, receiver: str, told: int) -> Topology:
        """The topology for one node.

        Args:
            receiver: whose tokens are in it.
            told: the number of the one that it was told last, in its present session; 0: of none.
        """
        if not told or told != self._since:
            nodes = [self._for(receiver, node) for node in self._nodes.values()]
            return Topology(number=self._number, nodes=nodes, tables=self._tables)
        return Topology(
            number=self._number,
            since=self._since,
            nodes=[self._for(receiver, node) for node in self._changed],
            gone=self._gone,
            same_tables=self._same_tables,
            tables=[] if self._same_tables else self._tables,
        )

    def _for(self, receiver: str, node: PeerNode) -> PeerNode:
        peer = PeerNode()
        peer.CopyFrom(node)
        if node.node != receiver:
            peer.call_token, peer.accept_token = (
                self._token(receiver, node.node),
                self._token(node.node, receiver),
            )
        return peer

    def _token(self, caller: str, callee: str) -> bytes:
        text = f"{caller}>{callee}".encode()
        return hashlib.blake2b(text, key=self._secret, digest_size=TOKEN_BYTES).digest()


def _table(digest: str, assigned: Sequence[Assigned]) -> TableSlices:
    rows = [
        SliceOf(
            reducer=one.reducer,
            start=one.slice.start,
            end=one.slice.end,
            out_start=one.slice.out_start,
            out_end=one.slice.out_end,
        )
        for one in assigned
    ]
    return TableSlices(table_digest=digest, slices=rows)
