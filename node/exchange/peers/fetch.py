"""What is missing of a committed result: from the nodes that have it, checked against what was committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import xxhash

from node.exchange.link import STATUS_SECONDS
from node.exchange.meter import Kind as Counted
from node.exchange.peers.plan import Plan
from node.exchange.peers.upload import SliceAssembly
from node.exchange.peers.ways import Ways
from node.exchange.retry import within
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos import wire
from protos.refusal import Refused

_AT_ONCE = 4  # streams; a holder serves no more than twice as many to one node


class Fetching:
    """Fetches results.

    Args:
        ways: to the other nodes.
    """

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def complete(
        self, commit: pb.Commit, into: memoryview, plan: Plan, counted: Counted, stall: float
    ) -> None:
        """Fetch those slices of a result that ``into`` does not hold already.

        Args:
            commit: of the round.
            into: the whole result.
            plan: how the holders are reached.
            counted: what kind of bytes these are.
            stall: seconds that a holder may send nothing; then another one is asked.

        Raises:
            Trouble: kind PROTOCOL: the commit's slices are not those of the result. Another kind: a slice
                is not to be had at present; those that were are in place.
        """
        check_slices(commit, len(into))
        missing = [row for row in commit.slices if not holds(into, row)]
        work = [
            asyncio.ensure_future(self._slice(commit, row, into, plan, counted, stall)) for row in missing
        ]
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()

    async def _slice(
        self,
        commit: pb.Commit,
        row: pb.SliceDigest,
        into: memoryview,
        plan: Plan,
        counted: Counted,
        stall: float,
    ) -> None:
        async with self._slots:
            reasons = []
            for holder in _holders(commit, row, plan):
                avoid: set[str] = set()
                try:
                    while not await self._from(holder, commit.round, row, into, plan, counted, stall, avoid):
                        pass
                    return
                except (Trouble, Refused) as error:
                    reasons.append(f"{holder}: {error}")
        because = "; ".join(reasons) or "none of its holders is in the run"
        raise Trouble(
            Kind.CUT,
            f"bytes {row.out_start} to {row.out_end} of the result of round {commit.round + 1} are not to be "
            f"had ({because})",
        )

    async def _from(
        self,
        holder: str,
        round_index: int,
        row: pb.SliceDigest,
        into: memoryview,
        plan: Plan,
        counted: Counted,
        stall: float,
        avoid: set[str],
    ) -> bool:
        """Try one way to a holder; ``False``: it broke, another one may be tried.

        Raises:
            Trouble: no way is left, or what it has is not what was committed.
            Refused: it does not have it.
        """
        peer = plan.peers[holder]
        way, stream = await self._ways.open(peer, plan.me, counted, counted, avoid=avoid)
        hello = self._ways.hello(peer, plan.me)
        wanted = pb.FetchResult(round=round_index, out_start=row.out_start, out_end=row.out_end)
        hello.fetch.CopyFrom(wanted)
        what = f"bytes {row.out_start} to {row.out_end} of the result of round {round_index + 1}"
        assembly = SliceAssembly(into[row.out_start : row.out_end], what, base=row.out_start)
        try:
            await within(stall, "a request", stream.write(_header(hello)))
            await within(stall, "a request", stream.end())
            while not assembly.whole:
                message = await within(stall, f"a part of {what}", stream.read())
                if message is None:
                    raise Trouble(Kind.CUT, f"{holder} ended the stream before {what} had come whole")
                assembly.add(message)
            with suppress(Trouble):
                await within(STATUS_SECONDS, "the end of a fetch", stream.read())
        except Trouble as trouble:
            if trouble.kind is Kind.PROTOCOL or peer.node == plan.me:
                raise
            self._ways.failed(peer, way)
            avoid.add(way)
            return False
        finally:
            stream.cancel()
        if not holds(into, row):
            raise Trouble(Kind.CUT, f"what it has of {what} is not what was committed")
        return True


def holds(into: memoryview, row: pb.SliceDigest) -> bool:
    """Whether a committed slice is in its place."""
    return xxhash.xxh3_128_digest(into[row.out_start : row.out_end]) == row.digest


def check_slices(commit: pb.Commit, nbytes: int) -> None:
    """Raises Trouble of kind PROTOCOL unless the commit's slices make a result of ``nbytes`` bytes."""
    end = 0
    for row in commit.slices:
        if row.out_start != end or row.out_end < end:
            break
        end = row.out_end
    if end != nbytes or len(commit.voters) != len(commit.weights):
        raise Trouble(
            Kind.PROTOCOL,
            f"the commit of round {commit.round + 1} is damaged: its slices do not make {nbytes} bytes, or "
            f"its {len(commit.voters)} voters have {len(commit.weights)} weights. Nothing is lost: "
            "start this node again, and install the same version of Atoll as the coordinator's",
        )


def _holders(commit: pb.Commit, row: pb.SliceDigest, plan: Plan) -> Sequence[str]:
    """The reducer, then the others, each node beginning with another one of them."""
    others = [node for node in commit.holders if node not in (row.reducer, plan.me)]
    if others:
        turn = xxhash.xxh3_64_intdigest(plan.me.encode()) % len(others)
        others = others[turn:] + others[:turn]
    return [node for node in (row.reducer, *others) if node in plan.peers]


def _header(hello: pb.PeerHello) -> bytes:
    return wire.encode_frame(wire.HEADER, hello.SerializeToString())
