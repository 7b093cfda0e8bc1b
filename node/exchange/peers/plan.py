"""The plan: who reduces which slice, and how each node is reached, as the coordinator has said it last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from node.exchange.peers.base import Peer
from node.exchange.trouble import Kind, Trouble
from optim.slices import Slice
from protos import atoll_pb2 as pb
from protos.buckets import BucketTable


@dataclass(frozen=True)
class Share:
    """A slice and the node that reduces it; what two plans have in common goes on."""

    slice: Slice
    reducer: str


@dataclass(frozen=True)
class Plan:
    """A Topology that has been read.

    Attributes:
        number: of the topology.
        me: this node's name.
        peers: every node that it names, this one among them.
        tables: shares by digest of the table, in its order.
    """

    number: int
    me: str
    peers: Mapping[str, Peer]
    tables: Mapping[str, tuple[Share, ...]]

    @classmethod
    def of(cls, message: pb.Topology, me: str, before: Plan | None = None) -> Plan:
        """Read a message.

        Args:
            message: a whole topology, or what differs from the one before.
            me: this node's name.
            before: that one.

        Raises:
            Trouble: kind PROTOCOL: a slice is given to a node that the topology does not name, or it differs
                from another one.
        """
        peers = {node.node: _peer(node) for node in message.nodes}
        if message.since:
            if before is None or before.number != message.since:
                known = "none" if before is None else f"topology {before.number}"
                raise _broken(
                    message.number, f"it differs from topology {message.since}, this node has {known}"
                )
            gone = set(message.gone)
            peers = {name: peer for name, peer in before.peers.items() if name not in gone} | peers
            if message.same_tables:
                return cls(message.number, me, peers, before.tables)
        tables = {
            table.table_digest: tuple(
                Share(Slice(part.start, part.end, part.out_start, part.out_end), part.reducer)
                for part in table.slices
            )
            for table in message.tables
        }
        if strangers := {share.reducer for shares in tables.values() for share in shares} - peers.keys():
            raise _broken(message.number, f"it gives slices to {', '.join(sorted(strangers))}, unknown to it")
        return cls(message.number, me, peers, tables)

    def shares(self, table: BucketTable) -> tuple[Share, ...]:
        """The slices of a round with ``table``; none if such rounds go by the coordinator now.

        Raises:
            Trouble: kind PROTOCOL: they do not cover its contribution and its result.
        """
        shares = self.tables.get(table.digest)
        if shares is None:
            return ()
        end = out_end = 0
        for share in shares:
            part = share.slice
            if (part.start, part.out_start) != (end, out_end) or part.end < end or part.out_end < out_end:
                raise _broken(self.number, f"its slices do not join at byte {end}")
            end, out_end = part.end, part.out_end
        if (end, out_end) != (table.nbytes, table.result_nbytes):
            raise _broken(
                self.number,
                f"its slices cover {end} bytes of contributions of {table.nbytes}, and {out_end} of results "
                f"of {table.result_nbytes}",
            )
        return shares


def _peer(node: pb.PeerNode) -> Peer:
    return Peer(
        node.node,
        node.direct,
        node.certificate,
        node.swarm,
        tuple(node.swarm_addresses),
        node.call_token,
        node.accept_token,
    )


def _broken(number: int, what: str) -> Trouble:
    return Trouble(
        Kind.PROTOCOL,
        f"topology {number} of the coordinator cannot be used: {what}; install the same version of Atoll on "
        "the coordinator and on all nodes",
    )
