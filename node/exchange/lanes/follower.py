"""Rounds whose slices travel between nodes, as a rank takes part in them that does not lead its island: the
leader has its lane of the contribution, and gives it its lane of the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from google.protobuf.message import DecodeError

from node.exchange.base import RoundOrder
from node.exchange.filling import Filling
from node.exchange.lanes.place import LeaderPlace
from node.exchange.link import Limits
from node.exchange.meter import Kind as Counted
from node.exchange.peers.base import Peer, PeerStream
from node.exchange.peers.direct import DirectCarrier
from node.exchange.peers.upload import Contribution, SliceUpload
from node.exchange.retry import within
from node.exchange.trouble import Kind, Trouble
from optim.slices import Slice
from protos import atoll_pb2 as pb
from protos import wire
from protos.refusal import BROKEN, WRONG_ROUND, Refused

_NOTHING = memoryview(b"")


class FollowerRounds:
    """Implements :class:`node.exchange.between.Between`. Used in the network thread.

    Args:
        leader: where that is.
        rank: of this process, from 1 on.
        limits: deadlines.
    """

    def __init__(self, leader: LeaderPlace, rank: int, limits: Limits) -> None:
        self._leader, self._rank, self._limits = leader, rank, limits
        self._carrier = DirectCarrier(_nobody, leader.run_digest)
        self._round = -1  # in flight

    async def reduce(
        self,
        order: RoundOrder,
        payload: memoryview | None,
        filling: Filling | None,
        into: memoryview,
        reason: str,
        on_sent: Callable[[], None] = lambda: None,
    ) -> pb.Commit:
        """See :class:`node.exchange.between.Between`. The bytes are those of this rank's lane, and the
        leader tells its own reason for an abstention."""
        hello = self._hello()
        hello.slice.round, hello.slice.nbytes = order.round, len(payload or _NOTHING)
        hello.slice.lease.start, hello.slice.lease.count = order.lease_start, order.lease_count
        given = Contribution(_NOTHING) if payload is None else Contribution(payload, filling)
        self._round = order.round
        try:
            asked = self._ask(hello, given, into, on_sent)
            return await within(self._limits.round, f"the commit of round {order.round + 1}", asked)
        finally:
            self._round = -1

    async def complete(self, commit: pb.Commit, into: memoryview, counted: Counted) -> None:
        """See :class:`node.exchange.between.Between`."""
        hello = self._hello()
        hello.fetch.round, hello.fetch.out_end = commit.round, len(into)
        asked = self._ask(hello, Contribution(_NOTHING), into, lambda: None)
        await within(self._limits.transfer, f"the result of round {commit.round + 1}", asked)

    def decided(self, round_index: int) -> bool:
        """See :class:`node.exchange.between.Between`: the leader knows when it is, and has the result."""
        return round_index == self._round

    def rejoined(self) -> None:
        """See :class:`node.exchange.between.Between`: the leader tells the coordinator all that there is to
        tell."""

    async def close(self) -> None:
        """End all streams."""
        await self._carrier.close()

    def _hello(self) -> pb.PeerHello:
        leader = self._leader
        return pb.PeerHello(
            protocol=wire.PROTOCOL,
            run_digest=leader.run_digest,
            sender=str(self._rank),
            token=bytes.fromhex(leader.token),
        )

    async def _ask(
        self, hello: pb.PeerHello, given: Contribution, into: memoryview, on_sent: Callable[[], None]
    ) -> pb.Commit:
        """One stream: the lane of a contribution goes up, that of the result comes down.

        Raises:
            Trouble: the stream broke, or the leader has no result at present.
            Withdrawn: there will be no contribution.
        """
        leader = Peer("the leader of this node", direct=self._leader.address)
        stream = _Announced(await self._carrier.open(leader))
        told = False

        def changed() -> None:
            nonlocal told
            if upload.sent and not told:
                told = True
                on_sent()

        part = Slice(0, len(given.payload), 0, len(into))
        upload = SliceUpload(stream, hello, given, part, into, self._limits.stall, changed)
        stream.void = upload.deafen
        try:
            await upload.run()
        except Refused as refusal:
            passing = refusal.kind in (BROKEN, WRONG_ROUND)
            raise Trouble(Kind.BROKEN if passing else Kind.REFUSED, refusal.text) from None
        if stream.commit is None:
            raise Trouble(Kind.CUT, "the leader of this node ended a stream without a commit")
        return stream.commit


class _Announced:
    """Implements :class:`node.exchange.peers.base.PeerStream`: a stream, but for the commit that comes ahead
    of the result.

    Attributes:
        commit: once it has come.
        void: called when that has no result.
    """

    def __init__(self, stream: PeerStream) -> None:
        self.commit: pb.Commit | None = None
        self.void: Callable[[], None] = lambda: None
        self.write, self.end, self.cancel = stream.write, stream.end, stream.cancel
        self._stream = stream

    async def read(self) -> wire.Message | None:
        """See the protocol."""
        message = await self._stream.read()
        with contextlib.suppress(wire.FrameError):  # whoever reads tells what is wrong
            if message is not None and (frame := wire.decode_frame(message)).kind == wire.COMMIT:
                try:
                    self.commit = pb.Commit.FromString(bytes(frame.body))
                except DecodeError as error:
                    raise Trouble(Kind.PROTOCOL, f"the leader's commit cannot be read: {error}") from error
                if not self.commit.slices:
                    self.void()
                return await self._stream.read()
        return message


async def _nobody(stream: PeerStream) -> None:
    """A rank that does not lead is called by nobody."""
    stream.cancel()
