"""Replay: the results of rounds that were committed without this node, one after the other.

One is received while the one before is applied, and no more than that. A stream that breaks is taken up again
at the first result that has not come whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar

import torch
from grpc import aio

from node.exchange.base import ExchangeError, ReplayOrder, RoundResult
from node.exchange.between import Between
from node.exchange.link import STATUS_SECONDS, Link, seen_out
from node.exchange.result import ResultAssembly, round_result
from node.exchange.retry import Patience, Say, Timing, within
from node.exchange.standing import Standing
from node.exchange.tensor_bytes import byte_view
from node.exchange.trouble import Kind, TransferError, Trouble
from protos import atoll_pb2 as pb
from protos.buckets import BucketTable, TableSchedule

T = TypeVar("T")


class Replay:
    """Used in the network thread, but for the construction.

    Args:
        order: which rounds.
        link: opened.
        session: in whose name.
        tables: of the run.
        lane: the part of them that this rank carries; ``None``: all.
        counted: tells of a commit whether a contribution of this process is in it.
        timing: clock, sleep and randomness of retries.
        say: receives what is waited for.
        peers: fetches results that nodes have, and not the coordinator.
    """

    def __init__(
        self,
        order: ReplayOrder,
        link: Link,
        session: Standing,
        *,
        tables: TableSchedule,
        lane: TableSchedule | None,
        counted: Callable[[pb.Commit], bool],
        timing: Timing,
        say: Say,
        peers: Between | None = None,
    ) -> None:
        self._link, self._session, self._counted, self._peers = link, session, counted, peers
        self._tables, self._lane = tables, lane
        self._next, self._end = order.first, order.first + order.count
        nbytes = (lane or tables).result_nbytes
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(min(2, order.count))]
        self._patience = Patience("the results that are missing here", link.limits.reconnect, timing, say)
        self._call: aio.UnaryStreamCall[bytes, bytes] | None = None
        self._ahead: asyncio.Future[RoundResult] | None = None

    async def next(self) -> RoundResult | None:
        """The next result, ``None`` after the last. The one before is not valid any more.

        Raises:
            TransferError: it is not to be had.
            Trouble: kind PROTOCOL: it is damaged.
        """
        if self._next == self._end:
            await self._hang_up()
            return None
        work: asyncio.Future[RoundResult] = self._ahead or asyncio.ensure_future(self._fetch(self._next))
        halt: asyncio.Future[Any] = asyncio.ensure_future(self._session.halted.wait())
        try:
            await asyncio.wait({work, halt}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise TransferError(
                    f"the replay of round {self._next + 1} was broken off: this node has to stop"
                )
            result = work.result()
        finally:
            work.cancel()
            halt.cancel()
        self._next += 1
        if self._next < self._end:
            self._ahead = asyncio.ensure_future(self._fetch(self._next))
        return result

    async def close(self) -> None:
        """End what still goes on."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
        self._drop()

    async def _fetch(self, round_index: int) -> RoundResult:
        part = (self._lane or self._tables).of(round_index)
        buffer = self._buffers[round_index % len(self._buffers)][: part.result_nbytes]
        while True:
            try:
                commit = await self._read(round_index, byte_view(buffer))
                if commit.slices and self._peers is not None:
                    await self._peers.complete(commit, byte_view(buffer), "state")
                break
            except Trouble as trouble:
                self._drop()
                await self._endure(round_index, trouble)
        self._patience.reset()
        return round_result(commit, buffer, counted=self._counted(commit))

    async def _read(self, round_index: int, into: memoryview) -> pb.Commit:
        """One result of the present stream, or of a new one that begins with it."""
        limits, assembly = self._link.limits, ResultAssembly(into, round_index)
        what = f"a part of the result of round {round_index + 1}"
        call = self._call = self._call or self._link.get_results(
            self._session.secret, self._request(round_index)
        )
        try:
            while isinstance(message := await within(limits.stall, what, call.read()), bytes):
                if (commit := assembly.add(message)) is not None:
                    return commit
        except aio.AioRpcError as error:
            raise self._link.trouble(error, limits.transfer) from None
        raise Trouble(Kind.CUT, f"the stream ended before {what}")

    async def _endure(self, round_index: int, trouble: Trouble) -> None:
        if trouble.kind is Kind.PROTOCOL:
            raise trouble
        try:
            await self._patience.endure(trouble.of_a_bulk_call())
        except Trouble as final:
            raise TransferError(f"the result of round {round_index + 1} is not to be had: {final}") from None

    def _request(self, first: int) -> pb.ResultsRequest:
        request = pb.ResultsRequest(first=first, count=self._end - first, part=self._lane is not None)
        if self._lane is not None:
            for table, part in zip(self._tables.tables, self._lane.tables, strict=True):
                request.lanes.append(
                    pb.LaneBuckets(table_digest=table.digest, buckets=held_buckets(table, part))
                )
        return request

    async def _hang_up(self) -> None:
        if self._call is not None:
            await seen_out(self._call)
        self._drop()

    def _drop(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


class Run(Protocol):
    """Carries out a coroutine in the network thread and waits for it, for so long; the text names it."""

    def __call__(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T: ...


def results(replay: Replay, run: Run, seconds: float) -> Generator[RoundResult, None, None]:
    """What ``replay`` receives, for the thread that applies it; each waits ``seconds`` at most."""
    try:
        while (result := run(replay.next(), seconds, "a replay of rounds")) is not None:
            yield result
    finally:
        with contextlib.suppress(ExchangeError):  # if the exchange has been closed, so has the stream
            run(replay.close(), STATUS_SECONDS, "the end of a replay")


def held_buckets(table: BucketTable, part: BucketTable) -> list[int]:
    """Indices in ``table`` of the buckets of a lane."""
    names = {bucket.name for bucket in part.buckets}
    return [index for index, bucket in enumerate(table.buckets) if bucket.name in names]
