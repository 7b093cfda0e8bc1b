"""Rounds whose slices travel between nodes, as the leader of an island takes part in them for all its ranks.

The other ranks send it their lanes; the whole goes out, and the result comes in, as those of a node of one
rank do, and each rank gets its lane of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from node.exchange.base import RoundOrder
from node.exchange.filling import Filling, Withdrawn
from node.exchange.lanes.place import LeaderPlace, listening_for
from node.exchange.lanes.whole import LaneUpload, Whole
from node.exchange.link import Limits
from node.exchange.meter import Kind as Counted
from node.exchange.peers.base import PeerStream
from node.exchange.peers.direct import DirectCarrier
from node.exchange.peers.hello import read_hello
from node.exchange.peers.places import Places
from node.exchange.peers.rounds import PeerRounds
from node.exchange.peers.shelf import Kept, send
from node.exchange.peers.upload import Contribution
from node.exchange.replay import held_buckets
from node.exchange.retry import ended, within
from node.exchange.trouble import Trouble
from protos import atoll_pb2 as pb
from protos import wire
from protos.address import Address
from protos.buckets import BucketTable, TableSchedule
from protos.lane_layout import LaneLayout
from protos.refusal import BAD_FRAME, BAD_LANE, BAD_TOKEN, BROKEN, TRUNCATED, WRONG_ROUND, Refused
from protos.upload import LEAST_BYTES

log = logging.getLogger(__name__)

_HELLO_SECONDS: Final = 10.0  # for a stream's first message
_STRANGERS: Final = 64  # streams whose callers have not shown yet that they are ranks of this island
_STEP_BYTES: Final = 8 << 20  # of the leader's own lane, that are copied at a time
_RECENT: Final = 2  # results
_LINGER_SECONDS: Final = 5.0  # for the words that turn a stream away

Key = tuple[int, int, int]  # a round, and the samples that are read in it: the first, and how many


class LeaderRounds:
    """Implements :class:`node.exchange.between.Between` for the lane of rank 0. Used in the network thread.

    Args:
        limits: deadlines.
        run_digest: of the run.
    """

    def __init__(self, limits: Limits, run_digest: str) -> None:
        self._limits, self._run_digest = limits, run_digest
        self._carrier = DirectCarrier(self._serve, run_digest)
        self._strangers = Places(_STRANGERS)
        self._place = LeaderPlace("", run_digest)
        self._between: PeerRounds | None = None
        self._tables: TableSchedule | None = None
        self._layouts: dict[str, tuple[LaneLayout, ...]] = {}  # by the table's digest, then by rank
        self._payload = self._result = memoryview(b"")
        self._key: Key | None = None
        self._whole: Whole | None = None  # of the round that the key names
        self._given: tuple[memoryview | None, Filling | None] = (None, None)  # the leader's lane in it
        self._recent: OrderedDict[int, Kept] = OrderedDict()  # a rank may lag behind by one
        self._failures, self._failure = 0, ""
        self._changed = asyncio.Event()  # replaced whenever it is set

    async def listen(self, host: str) -> LeaderPlace:
        """Take streams of ranks that know this machine as ``host``.

        Raises:
            ListenError: there is no port for that.
        """
        where = await self._carrier.listen(listening_for(host), "MASTER_ADDR, where the ranks meet")
        address = str(Address(host, where.port))
        self._place = LeaderPlace(address, self._run_digest)
        return self._place

    def begin(self, between: PeerRounds, tables: TableSchedule, lanes: Sequence[TableSchedule]) -> None:
        """Take part by ``between`` in rounds of ``tables``, of which each rank carries its lane."""
        self._between, self._tables = between, tables
        self._layouts = {
            table.digest: tuple(LaneLayout(table, held_buckets(table, lane.tables[index])) for lane in lanes)
            for index, table in enumerate(tables.tables)
        }
        # Not zeroed: a page costs memory once something is written there.
        self._payload = np.empty(tables.nbytes, np.uint8).data
        self._result = np.empty(tables.result_nbytes, np.uint8).data

    async def close(self) -> None:
        """End all streams and stop listening."""
        await self._carrier.close()

    # ------------------------------------------------------------------------------------------- own lane

    async def reduce(
        self,
        order: RoundOrder,
        payload: memoryview | None,
        filling: Filling | None,
        into: memoryview,
        reason: str,
        on_sent: Callable[[], None] = lambda: None,
    ) -> pb.Commit:
        """See :class:`node.exchange.between.Between`."""
        table, between = self._table(order.round), self._rounds()
        key = order.round, order.lease_start, order.lease_count
        again = self._key == key and self._given[0] is payload and self._given[1] is filling
        if self._whole is None or not again:  # or it was computed anew, by all ranks
            if self._whole is not None:
                self._whole.retired = True
            self._key, self._whole = key, Whole(self._payload[: table.nbytes], self._layouts[table.digest])
            self._given = payload, filling
            self._wake()
        whole, result = self._whole, self._result[: table.result_nbytes]
        own = asyncio.ensure_future(_own_lane(whole, payload, filling, reason))
        given = None if payload is None else whole.payload
        try:
            commit = await between.reduce(order, given, whole.filling, result, reason, on_sent)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            await ended(own)
        self._whole, self._given = None, (None, None)
        self._keep(between.kept(commit.round) if commit.slices else Kept(commit, memoryview(b"")))
        if commit.slices:
            self._cut(commit.round, 0, result, into)
        return commit

    async def complete(self, commit: pb.Commit, into: memoryview, counted: Counted) -> None:
        """See :class:`node.exchange.between.Between`."""
        table, between = self._table(commit.round), self._rounds()
        kept = between.kept(commit.round)
        if kept is None:
            of_this_round = self._key is not None and self._key[0] == commit.round
            nbytes = table.result_nbytes
            whole = self._result[:nbytes] if of_this_round else memoryview(bytearray(nbytes))
            try:
                await between.complete(commit, whole, counted)
            except BaseException as error:
                self._fail(error)
                raise
            kept = between.kept(commit.round) or Kept(commit, whole)
        self._keep(kept)
        self._cut(commit.round, 0, kept.payload, into)

    def decided(self, round_index: int) -> bool:
        """See :class:`node.exchange.between.Between`."""
        return self._rounds().decided(round_index)

    def rejoined(self) -> None:
        """See :class:`node.exchange.between.Between`."""
        self._rounds().rejoined()

    def _cut(self, round_index: int, rank: int, result: memoryview, into: memoryview) -> None:
        """A lane of a result."""
        start = 0
        for first, last in self._layouts[self._table(round_index).digest][rank].down.bounds:
            into[start : start + last - first] = result[first:last]
            start += last - first

    # ------------------------------------------------------------------------------------------ other lanes

    async def _serve(self, stream: PeerStream) -> None:
        """A stream of another rank, until it is over; see :data:`node.exchange.peers.base.Handler`."""
        try:
            found = await self._strangers.hold(self._introduced(stream))
            if found is None:
                stream.cancel()
                return
            hello, rank = found
            if hello.WhichOneof("kind") == "slice":
                kept = await self._contribution(stream, rank, hello.slice)
            else:
                kept = await self._kept(hello.fetch.round)
            await self._give(stream, rank, kept)
        except Refused as refusal:
            body = pb.Refusal(kind=refusal.kind, text=refusal.text).SerializeToString()
            frame = wire.encode_frame(wire.REFUSAL, body)
            with contextlib.suppress(Trouble):
                await within(_LINGER_SECONDS, "telling a rank why it is refused", stream.write(frame))

    async def _introduced(self, stream: PeerStream) -> tuple[pb.PeerHello, int]:
        """What a stream is for, and of which rank, once it is certain that it comes from one."""
        try:
            message = await within(_HELLO_SECONDS, "the first message of a lane", stream.read())
        except Trouble as trouble:
            raise Refused(TRUNCATED, str(trouble)) from None
        hello = read_hello(message, self._run_digest)
        if not hmac.compare_digest(hello.token, bytes.fromhex(self._place.token)):
            raise Refused(BAD_TOKEN, "the token of a stream is not that of this island", "UNAUTHENTICATED")
        if self._tables is None:
            raise Refused(WRONG_ROUND, "the leader of this island is in no run yet")
        ranks = len(self._layouts[self._tables.tables[0].digest])
        if not hello.sender.isdecimal() or not 0 < int(hello.sender) < ranks:
            raise Refused(BAD_LANE, f"rank {hello.sender[:20]!r} of {ranks} sends no lane to the leader")
        return hello, int(hello.sender)

    async def _contribution(self, stream: PeerStream, rank: int, wanted: pb.SliceUp) -> Kept:
        """Take a rank's lane until the round has its result, be the lane in it or not.

        Raises:
            Refused: it is no such lane; or it is needed once more.
        """
        coming = asyncio.ensure_future(self._receive(stream, rank, wanted))
        result = asyncio.ensure_future(self._kept(wanted.round))
        try:
            await asyncio.wait({coming, result}, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                coming.result()
            return await result
        finally:
            await ended(coming)  # what it writes to belongs to the next round then
            await ended(result)

    async def _receive(self, stream: PeerStream, rank: int, wanted: pb.SliceUp) -> None:
        """A lane, from its first frame to its last; does not return."""
        layout = self._layouts[self._table(wanted.round).digest][rank]
        whole = await self._awaited((wanted.round, wanted.lease.start, wanted.lease.count))
        withdrawn = layout.up.nbytes > 0 and not wanted.nbytes
        if withdrawn:
            whole.withdraw(f"rank {rank} of this node has nothing to contribute")
        elif wanted.nbytes != layout.up.nbytes:
            text = f"the lane of rank {rank} has {layout.up.nbytes} bytes, this one announces {wanted.nbytes}"
            raise Refused(BAD_LANE, text)
        upload = LaneUpload(whole, rank, layout)
        while not (withdrawn or upload.complete or whole.retired):
            message = await stream.read()
            if message is None:
                raise Refused(TRUNCATED, f"the lane of rank {rank} ended after {upload.received} bytes")
            try:
                upload.feed(wire.decode_frame(message))
            except wire.FrameError as error:
                raise Refused(BAD_FRAME, f"a frame of the lane of rank {rank}: {error}") from error
        if upload.complete:
            whole.complete(rank)
        while not whole.retired:
            await self._changed.wait()
        raise Refused(BROKEN, "the leader of this node begins the round anew", "UNAVAILABLE")

    async def _awaited(self, key: Key) -> Whole:
        """The contribution for this order, once the leader has it too."""
        while self._key != key or self._whole is None:
            await self._changed.wait()
        return self._whole

    async def _kept(self, round_index: int) -> Kept:
        """The result of a round, once it is here.

        Raises:
            Refused: the leader has failed to get it, for now or for good.
        """
        failures = self._failures
        while True:
            if (kept := self._recent.get(round_index) or self._rounds().kept(round_index)) is not None:
                return kept
            if self._failures > failures:
                raise Refused(BROKEN, self._failure, "UNAVAILABLE")
            if self._key is not None and self._key[0] > round_index:
                raise Refused(BROKEN, f"round {round_index + 1} is over, its result is not here")
            await self._changed.wait()

    async def _give(self, stream: PeerStream, rank: int, kept: Kept) -> None:
        """A rank's lane of a result, behind what all are told of it."""
        frame = wire.encode_frame(wire.COMMIT, kept.commit.SerializeToString())
        await within(self._limits.stall, "the commit of a round", stream.write(frame))
        if not kept.commit.slices:
            return
        layout = self._layouts[self._table(kept.round).digest][rank]
        lane = memoryview(bytearray(layout.down.nbytes))
        self._cut(kept.round, rank, kept.payload, lane)
        await send(stream, [(0, lane)], self._limits.stall)

    def _keep(self, kept: Kept | None) -> None:
        """A result is here, for all ranks."""
        assert kept is not None, "the shelf keeps the newest result"
        self._recent[kept.round] = kept
        while len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        self._wake()

    def _fail(self, error: BaseException) -> None:
        """Whoever waits for the result is told; it will ask again."""
        self._failures += 1
        self._failure = f"the leader of this node is not in the round: {error or type(error).__name__}"
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _rounds(self) -> PeerRounds:
        assert self._between is not None, "begin comes first"
        return self._between

    def _table(self, round_index: int) -> BucketTable:
        assert self._tables is not None, "begin comes first"
        return self._tables.of(round_index)


async def _own_lane(whole: Whole, payload: memoryview | None, filling: Filling | None, reason: str) -> None:
    """The leader's lane goes into the whole as it becomes final."""
    if payload is None:
        whole.withdraw(reason)
        return
    contribution, start = Contribution(payload, filling), 0
    try:
        while start < len(payload):
            final = await contribution.final(min(start + LEAST_BYTES, len(payload)))
            stop = min(final, start + _STEP_BYTES)
            whole.take(0, start, payload[start:stop])
            start = stop
            await asyncio.sleep(0)  # streams go on meanwhile
        await contribution.final(len(payload) + 1)
    except Withdrawn as withdrawn:
        whole.withdraw(str(withdrawn))
    except Exception as error:
        log.exception("the leader's lane")
        whole.withdraw(f"the leader's own lane could not be taken: {error!r}")
    else:
        whole.complete(0)
