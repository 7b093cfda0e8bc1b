"""Results of past rounds, one after the other, for a node that was away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from coordinator.delivery import Delivery
from coordinator.journal import Journal, Kept
from coordinator.result import Result, ResultRing
from protos.atoll_pb2 import ContributionHeader, ResultsRequest
from protos.buckets import BucketTable, TableSchedule
from protos.lane_layout import LaneLayout, layout_of
from protos.refusal import BAD_LANE, FELL_BEHIND, WRONG_ROUND, WRONG_TABLE, Refused

AHEAD_BYTES: Final = 64 << 20  # of a result that is read from the journal while the one before is sent


def first_kept(ring: ResultRing, journal: Journal, committed: int, *, at_nodes: int = 0) -> int:
    """The first round from which on the results of all rounds before ``committed`` can be read; of a result
    that lies at nodes, what is known of it.

    Args:
        ring, journal: where they are.
        committed: the next round to commit.
        at_nodes: first round whose result somebody has, if it lies at nodes.
    """
    while (result := ring.get(committed - 1)) is not None:
        if result.facts.slices and committed <= at_nodes:
            return committed
        committed -= 1
    return journal.first_kept(committed)


def replay(
    request: ResultsRequest,
    node: str,
    *,
    tables: TableSchedule,
    ring: ResultRing,
    journal: Journal,
    committed: int,
) -> AsyncGenerator[bytes, None]:
    """The frames that answer a request: for each round those of an Exchange, up to its COMMIT.

    At most one result is read ahead of the one that is being sent.

    Args:
        request: of ``node``.
        node: who is told whether it is counted.
        tables: layout of the results.
        ring, journal: where the results are; the ring is looked at first.
        committed: the next round to commit.

    Raises:
        Refused: there are no such results, or lanes that do not fit; in the course, a result cannot be read.
    """
    first, end = request.first, request.first + request.count
    kept = first_kept(ring, journal, committed)
    if not request.count:
        raise Refused(WRONG_ROUND, "a request for results of 0 rounds")
    if end > committed:
        raise Refused(
            WRONG_ROUND,
            f"rounds {first + 1} to {end} were asked for, {committed} are committed",
            "FAILED_PRECONDITION",
        )
    if first < kept:
        raise Refused(
            FELL_BEHIND,
            f"round {first + 1} was asked for, but only the results since round {kept + 1} are kept: load a "
            "snapshot",
            "NOT_FOUND",
        )
    used = {
        table.digest: table for table in map(tables.of, range(first, min(end, first + len(tables.cycle))))
    }
    return _frames(request, node, _lanes(request, used), tables, ring, journal)


def _lanes(request: ResultsRequest, used: Mapping[str, BucketTable]) -> dict[str, LaneLayout]:
    """The layout of what is sent, by the digest of the table."""
    if not request.part:
        if request.lanes:
            raise Refused(BAD_LANE, "a request that is of no lane may not name buckets")
        return {digest: LaneLayout(table) for digest, table in used.items()}
    named: dict[str, LaneLayout] = {}
    for lane in request.lanes:
        if lane.table_digest in named:
            raise Refused(BAD_LANE, f"two lanes of table {lane.table_digest[:64]!r}")
        table = used.get(lane.table_digest)
        if table is not None:  # a request may name tables whose turn does not come
            header = ContributionHeader(round=request.first, part=True, buckets=lane.buckets)
            named[lane.table_digest] = layout_of(header, table)
    for digest in used:
        if digest not in named:
            raise Refused(
                WRONG_TABLE,
                f"the request names no lane of table {digest}: join again with the coordinator's run file",
                "FAILED_PRECONDITION",
            )
    return named


async def _frames(
    request: ResultsRequest,
    node: str,
    lanes: Mapping[str, LaneLayout],
    tables: TableSchedule,
    ring: ResultRing,
    journal: Journal,
) -> AsyncGenerator[bytes, None]:
    end = request.first + request.count
    ahead: asyncio.Future[Result | None] | None = None
    for round_index in range(request.first, end):
        result = await (ahead or _load(round_index, ring, journal))
        if result is None:
            raise Refused(
                FELL_BEHIND, f"the result of round {round_index + 1} is gone or damaged", "NOT_FOUND"
            )
        following = round_index + 1
        ahead = None
        if following < end and tables.of(following).result_nbytes <= AHEAD_BYTES:
            ahead = _load(following, ring, journal)
        delivery = Delivery(result, lanes[tables.of(round_index).digest], node)
        while (frame := delivery.next()) is not None:
            yield frame


def _load(round_index: int, ring: ResultRing, journal: Journal) -> asyncio.Future[Result | None]:
    future: asyncio.Future[Result | None] = asyncio.get_running_loop().create_future()
    result = ring.get(round_index)
    if result is not None:
        future.set_result(result)
        return future

    def loaded(kept: Kept | None) -> None:
        if not future.done():
            future.set_result(None if kept is None else Result.of(kept))

    journal.load(round_index, loaded)
    return future
