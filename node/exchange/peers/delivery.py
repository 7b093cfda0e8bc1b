"""The delivery of one slice: by whichever way works, again after each failure, until the round is decided."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from node.exchange.filling import Withdrawn
from node.exchange.link import STATUS_SECONDS
from node.exchange.peers.plan import Plan, Share
from node.exchange.peers.uplink import Uplink
from node.exchange.peers.upload import Contribution, SliceUpload
from node.exchange.peers.ways import OWN, Ways
from node.exchange.retry import Say, Timing, within
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos.refusal import (
    BAD_TOKEN,
    BROKEN,
    DUPLICATE,
    LATE,
    NOT_A_MEMBER,
    OVERLOADED,
    REPLACED,
    STALLED,
    WRONG_ROUND,
    WRONG_SLICE,
    Refused,
)

_TOO_LATE: Final = frozenset((LATE, DUPLICATE))  # the result will be committed, and fetched
_PASSING: Final = frozenset(  # the reducer's view of the run is not this node's, or it has much to do
    (BAD_TOKEN, BROKEN, NOT_A_MEMBER, OVERLOADED, REPLACED, STALLED, WRONG_ROUND, WRONG_SLICE)
)
_PATIENCE: Final = 3  # refusals in a row before the coordinator is asked for another reducer

Tell = Callable[[pb.NodeMessage], None]


@dataclass(frozen=True)
class Means:
    """What deliveries are made with: ways to other nodes, the word to the coordinator, and to people.

    ``stall`` is in seconds: how long a reducer may take nothing; ``moving`` is entered while something is
    sent to another node that waits for nothing but the link.
    """

    ways: Ways
    tell: Tell
    say: Say
    timing: Timing
    stall: float
    moving: Callable[[], AbstractContextManager[None]] = nullcontext
    uplink: Uplink = field(default_factory=Uplink)


@dataclass
class Place:
    """Where a slice is in the present plan."""

    plan: Plan
    index: int


class Delivery:
    """Starts at once.

    Args:
        share: which slice, and to whom.
        place: of it in the present plan; the owner replaces it when a new plan keeps the share.
        contribution: to round ``round_index``.
        into: the slice's part of the result.
        means: see :class:`Means`.
        on_news: called when a part of the slice, and when all of it has been handed over, and when its result
            has become whole or void.
        on_refused: called with the reason if a reducer says that the contribution is no good.
        turn: waited for before anything goes to this node itself.
    """

    def __init__(
        self,
        share: Share,
        place: Place,
        round_index: int,
        contribution: Contribution,
        into: memoryview,
        means: Means,
        on_news: Callable[[], None],
        on_refused: Callable[[str], None],
        turn: Callable[[], Awaitable[None]],
    ) -> None:
        self.share, self.place = share, place
        self._round, self._contribution, self._into, self._means = round_index, contribution, into, means
        self._on_news, self._on_refused, self._turn = on_news, on_refused, turn
        self.moved_at = means.timing.now()  # when something was sent or came last
        self._upload: SliceUpload | None = None
        self._told_of = False, False, False  # whether the present upload has begun, is sent, has its result
        self._changed = asyncio.Event()
        self._over = False  # the round is decided: nothing is begun any more
        self._told = -1  # number of the plan under which the coordinator was told of trouble
        self._failures = 0
        self._tried: set[str] = set()  # ways that have failed since the last pause
        self._task = asyncio.ensure_future(self._run())

    @property
    def own(self) -> bool:
        """Whether its reducer is this node."""
        return self.share.reducer == self.place.plan.me

    @property
    def begun(self) -> bool:
        """Whether a part of the slice has been handed over."""
        return self._upload is not None and self._upload.begun

    @property
    def sent(self) -> bool:
        """Whether the slice has been handed over whole."""
        return self._upload is not None and self._upload.sent

    @property
    def result(self) -> bytes | None:
        """xxh3_128 of the slice's result, if one is here whole; another attempt may still void it."""
        return None if self._upload is None else self._upload.digest

    async def holds(self, digest: bytes, silence: float) -> bool:
        """The result is decided: wait as long as it comes, and ``silence`` seconds longer; whether it is
        here then, with this xxh3_128."""
        self._over = True
        while True:
            upload, over = self._upload, self._task.done()
            if upload is not None and upload.digest == digest:
                return True
            if over or upload is None or not (upload.sent or upload.received):
                return False
            self._changed.clear()
            try:
                await within(silence, "a part of a result", self._changed.wait())
            except Trouble:
                return False

    def stop(self, *, politely: bool = False) -> None:
        """Nothing is written to the result any more. ``politely``: a stream whose result is here may come to
        its proper end, in the background: its reducer ends it once it knows of the commit as well."""
        self._over = True
        if self._upload is not None:
            self._upload.deafen()
        if politely and self.sent:
            asyncio.get_running_loop().call_later(STATUS_SECONDS, self._task.cancel)  # which it holds as well
        else:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while not self._over:
                if await self._try():
                    return
        finally:
            self._changed.set()

    async def _try(self) -> bool:
        """One stream; whether another would be of no use."""
        plan = self.place.plan
        peer = plan.peers[self.share.reducer]
        if self.own:
            await self._turn()
        try:
            way, stream = await self._means.ways.open(
                peer, plan.me, "contribution", "result", avoid=self._tried
            )
        except Trouble as trouble:
            await self._no_way(trouble)
            return False
        hello = self._means.ways.hello(peer, plan.me)
        part = self.share.slice
        hello.slice.round, hello.slice.topology = self._round, plan.number
        hello.slice.slice, hello.slice.nbytes = self.place.index, part.nbytes
        hello.slice.lease.start, hello.slice.lease.count = self._contribution.lease
        self._told_of = False, False, False
        upload = self._upload = SliceUpload(
            stream,
            hello,
            self._contribution,
            part,
            self._into,
            self._means.stall,
            self._news,
            nullcontext if way == OWN else self._means.moving,
            None if way == OWN else self._means.uplink,
        )
        try:
            await upload.run()
        except Withdrawn:
            return True
        except Refused as refusal:
            return await self._refused(refusal)
        except Trouble as trouble:
            if self._over:
                return True
            self._means.say(
                f"the stream of a slice of round {self._round + 1} to {self.share.reducer} failed: {trouble}"
            )
            if way == OWN:
                await self._no_way(trouble)
            else:
                self._means.ways.failed(peer, way)
                self._tried.add(way)
            return False
        return True

    def _news(self) -> None:
        self.moved_at = self._means.timing.now()
        self._changed.set()
        whole = self._upload is not None and self._upload.whole
        if self._told_of != (self.begun, self.sent, whole):
            self._told_of = self.begun, self.sent, whole
            self._on_news()

    async def _refused(self, refusal: Refused) -> bool:
        text = f"{self.share.reducer} refused a slice of round {self._round + 1}: {refusal.text}"
        if refusal.kind in _TOO_LATE:
            return True
        if refusal.kind not in _PASSING:
            self._on_refused(text)
            return True
        if self._failures >= _PATIENCE:
            await self._no_way(Trouble(Kind.REFUSED, text))
        else:
            await self._pause()
        return False

    async def _no_way(self, trouble: Trouble) -> None:
        """Tell the coordinator, and try again until it has decided the round."""
        self.in_trouble(trouble)
        self._tried.clear()
        await self._pause()

    def in_trouble(self, trouble: Trouble) -> None:
        """The coordinator may give the slice to another node; it is told once in a plan."""
        plan = self.place.plan
        if self._told != plan.number and not self._over:
            self._told = plan.number
            self._means.say(f"a slice of round {self._round + 1} is in trouble: {trouble}")
            report = pb.SliceTrouble(
                round=self._round, topology=plan.number, slice=self.place.index, reason=str(trouble)
            )
            self._means.tell(pb.NodeMessage(slice_trouble=report))

    async def _pause(self) -> None:
        self._upload = None
        self._changed.set()
        self._failures += 1
        timing = self._means.timing
        await timing.sleep(timing.backoff.pause(self._failures, timing.uniform()))
