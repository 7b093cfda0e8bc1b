"""With which state a run begins: a pure choice among those that the gathered nodes hold.

Nodes that start afresh hold that of round 0, nodes that resume a checkpoint a later one. The latest is taken,
so that a run which was stopped goes on under a new coordinator with any nodes, as long as one of them has
resumed. A node that comes after the beginning never takes the others back: it loads what they have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """The shared state before ``round`` that a node holds.

    ``samples`` is the first global sample index behind all that the run had leased, as far as the node knows.
    ``work`` is what it has in hand: a round, and the first and the number of the samples on which its
    contribution to that is computed.
    """

    node: str
    round: int
    digest: str
    samples: int
    work: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Start:
    """The state before ``round``, held by ``holders``; all others load it. Leases begin with ``samples``."""

    round: int
    digest: str
    samples: int
    holders: tuple[str, ...]
    reason: str


def choose(claims: Iterable[Claim]) -> Start:
    """Begin with the latest state; where nodes hold two of the same round, with that of the first of them.

    ``samples`` is the largest of all claims: ranges that were leased before, and returned or read without
    being counted, are passed over rather than read twice. Before the first round nothing has been counted, so
    that it begins with sample 0, also when the nodes had leases of a first round that came to nothing.
    """
    given = list(claims)
    if not given:
        return Start(0, "", 0, (), "nobody is here")
    first = max(given, key=lambda claim: claim.round)  # the first of the equal ones
    holders = tuple(c.node for c in given if (c.round, c.digest) == (first.round, first.digest))
    samples = max(claim.samples for claim in given)
    if first.round == 0:
        return Start(0, first.digest, 0, holders, "all nodes start afresh")
    loading = len(given) - len(holders)
    others = f"; {loading} other node{'s' * (loading > 1)} will load it" if loading else ""
    reason = f"going on from the state after {first.round} rounds, held by {', '.join(holders)}{others}"
    return Start(first.round, first.digest, samples, holders, reason)


def conflict(round_index: int, digest: str, start: Start) -> str | None:
    """Why a node with this state cannot begin together with those who would begin with ``start``."""
    if not start.holders or round_index != start.round or digest == start.digest:
        return None
    if round_index == 0:
        return (
            f"the initial state of this node is {digest}, the other nodes' is {start.digest}: the same seed "
            "must give the same weights; use the same versions of atoll and torch on every node, and in a "
            "script torch.manual_seed(run.seed) before it makes its model"
        )
    return (
        f"the state after {round_index} rounds is {digest} on this node, and {start.digest} on "
        f"{start.holders[0]}: they are of different runs; resume all nodes from checkpoints of one run, or "
        "join without --resume to load the state of the others"
    )


def ahead(round_index: int, committed: int) -> str | None:
    """Why a node with the state before ``round_index`` cannot join a run that has begun without it."""
    if round_index <= committed:
        return None
    return (
        f"this node holds the state after {round_index} rounds, but the run has begun without it and has "
        f"committed {committed}: to go on from this node's state, start the coordinator again and let this "
        "node join before the others; to go on with the run as it is, join without --resume"
    )
