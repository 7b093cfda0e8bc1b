"""The desk: what a node is for other nodes. Their contributions come to the slices that it reduces, and they
fetch results that it holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from node.exchange.meter import Kind as Counted
from node.exchange.meter import Meter
from node.exchange.peers.base import PeerStream
from node.exchange.peers.desk_round import DeskRound
from node.exchange.peers.hello import read_hello, trusted
from node.exchange.peers.loopback import Loopback
from node.exchange.peers.metered import Metered
from node.exchange.peers.places import Places
from node.exchange.peers.plan import Plan
from node.exchange.peers.shelf import Shelf, Stretch, cut_out, send
from node.exchange.peers.slice_contribution import Rows
from node.exchange.peers.slice_reducer import SliceReducer, SliceWork, Submit
from node.exchange.peers.slice_stream import SliceStream
from node.exchange.peers.uplink import Uplink
from node.exchange.retry import SAY_SECONDS, Say, within
from node.exchange.trouble import Kind, Trouble
from optim.aggregate import ReducerMemory
from optim.slices import Slice
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import TableSchedule
from protos.refusal import (
    BAD_FRAME,
    BAD_TRANSFER,
    BROKEN,
    LATE,
    NOT_KEPT,
    OVERLOADED,
    REPLACED,
    TRUNCATED,
    WRONG_ROUND,
    WRONG_SLICE,
    Refused,
)
from protos.traffic import OTHERS

T = TypeVar("T")

_ROUNDS: Final = 2  # the one in flight, and the one before, from which others may still fetch
_PLANS: Final = 2  # the present topology, and the one before


@dataclass(frozen=True)
class DeskLimits:
    """What others may take of this node.

    Attributes:
        hello: seconds for a stream's first message.
        wait: seconds that a stream waits for the topology and the order that it is ahead of.
        stall: seconds for one chunk of what is fetched.
        linger: seconds for what is left of a stream that has nothing to bring any more.
        strangers: streams whose senders have not shown by a token who they are.
        streams: of one node, that are open at a time.
        fetches: of those.
    """

    hello: float = 10.0
    wait: float = 30.0
    stall: float = 60.0
    linger: float = 5.0
    strangers: int = 64
    streams: int = 1024
    fetches: int = 8


class Desk:
    """Used in the network thread, but for the arithmetic.

    Args:
        tables: of the run.
        run_digest: of the run file.
        tell: sends a message to the coordinator.
        now: seconds, for the pauses between two sentences about refusals.
        meter: counts what comes from, and goes to, other nodes.
        say: receives sentences about streams that were refused.
        submit: does CPU work off the event loop; a thread of its own if ``None``.
        limits: of streams.

    Attributes:
        shelf: of committed results; the caller puts each in once it is whole.
        memory: what the reduction carries from round to round. It stays with this node when a slice moves.
    """

    def __init__(
        self,
        tables: TableSchedule,
        run_digest: str,
        *,
        tell: Callable[[pb.NodeMessage], None],
        now: Callable[[], float],
        meter: Meter,
        say: Say,
        submit: Submit | None = None,
        limits: DeskLimits | None = None,
    ) -> None:
        self.shelf, self.uplink = Shelf(), Uplink()
        self.memory = ReducerMemory()
        self._tables, self._run_digest = tables, run_digest
        self._tell, self._now, self._meter, self._say = tell, now, meter, say
        self._limits = limits or DeskLimits()
        self._executor: ThreadPoolExecutor | None = None
        self._rows = Rows()
        self._work = {
            table.digest: SliceWork.of(
                table, memory=self.memory, rows=self._rows, submit=submit or self._in_thread
            )
            for table in tables.tables
        }
        self._me = ""
        self._plans: list[Plan] = []  # the present one first
        self._rounds: dict[int, DeskRound] = {}
        self._committed = -1
        self._closed = False
        self._strangers = Places(self._limits.strangers)
        self._open: Counter[str] = Counter()  # streams of each node
        self._streams: dict[tuple[str, int, Slice], SliceStream] = {}
        self._fetches: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._said = -SAY_SECONDS

    # ------------------------------------------------------------------------------------------ orders

    def set_topology(self, message: pb.Topology, me: str) -> Plan:
        """Who reduces what from now on; slices of the round in flight that stay here go on. Returns the plan
        that the message holds.

        Raises:
            Trouble: kind PROTOCOL: it cannot be used.
        """
        before = self._plans[0] if self._plans else None
        plan = Plan.of(message, me, before)
        parts = [share for table in self._tables.tables for share in plan.shares(table)]
        self._me = me
        self._plans = [plan, *(old for old in self._plans if old.number != plan.number)][:_PLANS]
        for state in self._rounds.values():
            state.follow(plan, anew=not message.since)
        self._rows.keep({share.slice.nbytes for share in parts if share.reducer == me})
        self._wake()
        return plan

    def reduce(self, order: pb.Reduce) -> None:
        """With whose votes the slices of a round are made; the order that came last holds."""
        newest = max(self._rounds, default=0)
        if self._closed or order.round <= self._committed or order.round < newest:
            return
        state = self._rounds.get(order.round)
        if state is None:
            for older in self._rounds.values():
                older.retire()
            work = self._work[self._tables.of(order.round).digest]
            state = self._rounds[order.round] = DeskRound(order.round, work, self._tell_news)
            self._keep_rounds()
            if self._plans:
                state.follow(self._plans[0])
        state.take(order)
        self._wake()

    def committed(self, commit: pb.Commit) -> None:
        """A round is decided: memory moves on, rows are free, streams end behind the committed result."""
        self._committed = max(self._committed, commit.round)
        for index, state in list(self._rounds.items()):
            if index < commit.round:
                self._drop(index)
            elif index == commit.round:
                state.commit(commit)
        self._wake()

    def show(self, order: pb.Retally) -> pb.Shown | None:
        """See :meth:`node.exchange.peers.desk_round.DeskRound.show`; ``None`` also once the round is over."""
        state = self._rounds.get(order.round)
        return None if state is None else state.show(order)

    def close(self) -> None:
        """End all streams and waits. Safe to call twice."""
        self._closed = True
        for index in list(self._rounds):
            self._drop(index, "this node leaves the run")
        self._wake()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _tell_news(self, news: pb.SliceNews) -> None:
        self._tell(pb.NodeMessage(slice_news=news))

    def _keep_rounds(self) -> None:
        for index in sorted(self._rounds)[:-_ROUNDS]:
            self._drop(index)

    def _drop(self, index: int, reason: str = "later rounds have been committed") -> None:
        refusal = Refused(BROKEN if self._closed else LATE, f"round {index + 1} is over: {reason}")
        self._rounds.pop(index).close(refusal)
        for (_, round_index, _), stream in list(self._streams.items()):
            if round_index == index:
                stream.close(refusal)

    def _in_thread(self, work: Callable[[], list[bytes]]) -> Awaitable[list[bytes]]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "slice-reducer")
        return asyncio.get_running_loop().run_in_executor(self._executor, work)

    # ------------------------------------------------------------------------------------------ streams

    async def serve(self, stream: PeerStream) -> None:
        """Serve another node's stream, or one of this node itself, until it is over; see
        :data:`node.exchange.peers.base.Handler`."""
        local = isinstance(stream, Loopback)
        introduction = self._introduced(stream, local)
        try:
            hello = await (introduction if local else self._strangers.hold(introduction))
            if hello is not None:
                await self._serve(stream, hello, local)
        except Refused as refusal:
            await self._turn_away(stream, refusal)
        except Trouble:
            pass  # whoever opened it notices as well, and opens another one if it has to
        finally:
            stream.cancel()

    async def _introduced(self, stream: PeerStream, local: bool) -> pb.PeerHello | None:
        """A stream's first message, once it is certain whose it is; ``None``: it has been turned away."""
        try:
            if self._closed:
                raise Refused(BROKEN, "this node leaves the run", "UNAVAILABLE")
            message = await within(self._limits.hello, "the first message of a stream", stream.read())
            hello = read_hello(message, self._run_digest)
            if not local:
                peer = hello.sender if any(hello.sender in plan.peers for plan in self._plans) else OTHERS
                self._meter.add("down", self._kind(hello), len(message or b""), peer)
            what = f"a topology with {hello.sender[:64]!r}"
            await self._once(lambda: trusted(hello, self._plans, self._me, local) or None, what)
        except Refused as refusal:
            await self._turn_away(stream, refusal)
            return None
        except Trouble as trouble:
            if trouble.kind is not Kind.SILENT:
                raise
            await self._turn_away(stream, Refused(TRUNCATED, str(trouble)))
            return None
        return hello

    async def _serve(self, stream: PeerStream, hello: pb.PeerHello, local: bool) -> None:
        sender, kind = hello.sender, self._kind(hello)
        if self._open[sender] >= self._limits.streams and not local:
            raise Refused(OVERLOADED, f"{sender} has too many streams open here", "RESOURCE_EXHAUSTED")
        fetch = hello.WhichOneof("kind") == "fetch"
        if not local:
            stream = Metered(stream, self._meter, up=kind if fetch else "result", down=kind, peer=sender)
        self._open[sender] += 1
        try:
            await (self._fetch(stream, hello) if fetch else self._contribution(stream, hello))
        finally:
            self._open[sender] -= 1
            if not self._open[sender]:
                del self._open[sender]

    async def _turn_away(self, stream: PeerStream, refusal: Refused) -> None:
        self._say_refused(refusal)
        if not isinstance(stream, Loopback):
            stream = Metered(stream, self._meter, up="result", down="contribution", peer=OTHERS)

        async def tell() -> None:
            body = pb.Refusal(kind=refusal.kind, text=refusal.text).SerializeToString()
            await stream.write(wire.encode_frame(wire.REFUSAL, body))
            await stream.end()
            while await stream.read() is not None:
                pass  # what is on its way, so that the words get through

        with contextlib.suppress(Trouble):
            await within(self._limits.linger, "telling a node why it is refused", tell())

    def _say_refused(self, refusal: Refused) -> None:
        now = self._now()
        if refusal.kind not in (LATE, REPLACED, WRONG_SLICE) and now - self._said >= SAY_SECONDS:
            self._said = now
            self._say(f"refused the stream of another node: {refusal.text}")

    async def _once(self, find: Callable[[], T | None], what: str) -> T:
        """What ``find`` returns once it returns something.

        Raises:
            Refused: by ``find``, or it took too long.
        """

        async def look() -> T:
            while (found := find()) is None:
                if self._closed:
                    raise Refused(BROKEN, "this node leaves the run", "UNAVAILABLE")
                self._changed.clear()
                await self._changed.wait()
            return found

        if (found := find()) is not None:
            return found
        try:
            return await within(self._limits.wait, f"waiting for {what}", look())
        except Trouble as trouble:
            raise Refused(WRONG_ROUND, str(trouble), "DEADLINE_EXCEEDED") from None

    def _wake(self) -> None:
        self._changed.set()

    # ------------------------------------------------------------------------------------------ contributions

    async def _contribution(self, stream: PeerStream, hello: pb.PeerHello) -> None:
        wanted = hello.slice
        what = f"topology {wanted.topology} and the order of round {wanted.round + 1}"
        reducer = await self._once(lambda: self._reducer(wanted), what)
        key = hello.sender, wanted.round, reducer.part
        if key in self._streams:
            self._streams[key].close(
                Refused(REPLACED, f"{hello.sender} has opened another stream", "ABORTED")
            )
        samples = wanted.lease.start, wanted.lease.count
        contribution = reducer.accept(hello.sender, wanted.nbytes, samples)
        served = self._streams[key] = SliceStream(
            stream,
            hello.sender,
            reducer,
            contribution,
            self._limits.linger,
            None if hello.sender == self._me else self.uplink,
        )
        try:
            await served.run()
        finally:
            if self._streams.get(key) is served:
                del self._streams[key]

    def _reducer(self, wanted: pb.SliceUp) -> SliceReducer | None:
        """Who takes a contribution; ``None`` if that is not known yet."""
        if wanted.round <= self._committed:
            raise Refused(LATE, f"round {wanted.round + 1} is committed: fetch its result")
        plan = next((plan for plan in self._plans if plan.number == wanted.topology), None)
        if plan is None and self._plans and wanted.topology < self._plans[0].number:
            raise Refused(WRONG_SLICE, f"topology {wanted.topology} holds no more: wait for the next one")
        state = self._rounds.get(wanted.round)
        if plan is None or state is None or not state.ordered:
            return None
        shares = plan.tables.get(self._tables.of(wanted.round).digest, ())
        reducer = state.reducers.get(shares[wanted.slice].slice) if wanted.slice < len(shares) else None
        if reducer is None:
            raise Refused(
                WRONG_SLICE, f"{self._me} does not reduce slice {wanted.slice} any more, or never did"
            )
        return reducer

    # ------------------------------------------------------------------------------------------ fetches

    async def _fetch(self, stream: PeerStream, hello: pb.PeerHello) -> None:
        wanted, sender = hello.fetch, hello.sender
        nbytes = self._tables.of(wanted.round).result_nbytes
        if not wanted.out_start < wanted.out_end <= nbytes:
            text = f"bytes {wanted.out_start} to {wanted.out_end} of a result of {nbytes} bytes"
            raise Refused(BAD_TRANSFER, f"there is nothing to fetch in {text}")
        if self._fetches.get(sender, 0) >= self._limits.fetches:
            raise Refused(OVERLOADED, f"{sender} fetches too much at a time", "RESOURCE_EXHAUSTED")
        found = cut_out(self._kept(wanted.round), wanted.out_start, wanted.out_end)
        if found is None:
            raise Refused(NOT_KEPT, f"{self._me} does not hold that of round {wanted.round + 1}", "NOT_FOUND")
        self._fetches[sender] = self._fetches.get(sender, 0) + 1
        try:
            await send(stream, found, self._limits.stall)
            await within(self._limits.linger, "the end of a fetch", _drained(stream))
        finally:
            self._fetches[sender] -= 1
            if not self._fetches[sender]:
                del self._fetches[sender]

    def _kept(self, round_index: int) -> list[Stretch]:
        if (kept := self.shelf.get(round_index)) is not None:
            return [(0, kept.payload)]
        state = self._rounds.get(round_index)
        return state.finished() if state is not None else []

    def _kind(self, hello: pb.PeerHello) -> Counted:
        """What a stream's bytes count as: a fetch is part of the round in flight, or of catching up."""
        if hello.WhichOneof("kind") != "fetch":
            return "contribution"
        return "result" if hello.fetch.round >= max(self._committed, *self._rounds, 0) else "state"


async def _drained(stream: PeerStream) -> None:
    while await stream.read() is not None:
        raise Refused(BAD_FRAME, "a fetch has nothing to say behind its first frame")
