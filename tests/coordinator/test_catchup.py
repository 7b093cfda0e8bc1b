"""The way to the present state: the cheapest of all that are possible, and when a snapshot is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.catchup import CatchUp, plan, result_bytes, snapshot_due
from protos.buckets import Bucket, BucketTable, TableSchedule

P = 512 * 4096  # parameters
STATE = 4 * P  # float32, without moments
VOTES = BucketTable((Bucket.of("w", "majority", [("w", (P,))]),))
SIGN_MUON = result_bytes(TableSchedule((VOTES,)))


def away(rounds: int, *, snapshots: tuple[int, ...] = (), first_kept: int = 0) -> CatchUp:
    return plan(
        2000 - rounds,
        2000,
        first_kept=first_kept,
        result_bytes=SIGN_MUON,
        snapshots=snapshots,
        state_bytes=STATE,
    )


def test_away_for_20_rounds_of_sign_muon() -> None:
    way = away(20, snapshots=(1900, 1990))
    assert (way.action, way.nbytes) == ("replay", 20 * P // 8)
    assert way.reason.startswith("its state is 20 rounds old: it replays 20 rounds, ")


def test_away_for_1000_rounds_of_sign_muon() -> None:
    way = away(1000, snapshots=(1900, 1990))
    assert (way.action, way.snapshot, way.nbytes) == ("load", 1990, STATE + 10 * P // 8)
    way = away(1000, snapshots=(1000,))
    assert (way.action, way.snapshot, way.nbytes) == ("snapshot", None, STATE)


def test_after_the_end_nobody_is_asked_for_a_new_snapshot() -> None:
    def ended(first_kept: int, snapshots: tuple[int, ...] = ()) -> CatchUp:
        return plan(
            1000,
            2000,
            first_kept=first_kept,
            result_bytes=SIGN_MUON,
            snapshots=snapshots,
            state_bytes=STATE,
            training=False,
        )

    assert ended(0).action == "replay", "dear, and the only way"
    assert ended(1001, snapshots=(1100,)).action == "load"
    assert ended(1001).action == "snapshot", "there is no way"


def test_what_is_not_kept_cannot_be_replayed() -> None:
    assert away(20, first_kept=1981).action == "snapshot"
    assert "results are kept since round 1982" in away(20, first_kept=1981).reason
    assert away(20, first_kept=1981, snapshots=(1980,)).action == "snapshot"
    way = away(20, first_kept=1981, snapshots=(1980, 1981))
    assert (way.action, way.snapshot) == ("load", 1981)


def test_who_holds_nothing_or_is_ahead() -> None:
    for held, words in ((None, "it holds no state"), (11, "that after 11 rounds, 10 are committed")):
        way = plan(held, 10, first_kept=0, result_bytes=SIGN_MUON, snapshots=(4, 12), state_bytes=STATE)
        assert (way.action, way.snapshot) == ("load", 4)
        assert words in way.reason


def test_nothing_is_missing() -> None:
    way = plan(10, 10, first_kept=10, result_bytes=SIGN_MUON, snapshots=(10,), state_bytes=STATE)
    assert (way.action, way.nbytes) == ("replay", 0)


@given(
    sizes=st.lists(st.integers(0, 50), max_size=12),
    held=st.none() | st.integers(0, 13),
    first_kept=st.integers(0, 12),
    snapshots=st.lists(st.integers(0, 13), max_size=4),
    state_bytes=st.integers(1, 200),
)
def test_no_way_moves_fewer_bytes(
    sizes: list[int], held: int | None, first_kept: int, snapshots: list[int], state_bytes: int
) -> None:
    """Walk all ways that there are, round by round."""
    committed = len(sizes)
    first_kept = min(first_kept, committed)

    def walk(start: int) -> int | None:
        total = 0
        for index in range(start, committed):
            if index < first_kept:
                return None
            total += sizes[index]
        return total if start <= committed else None

    ways = [("snapshot", 2 * state_bytes, state_bytes)]
    # The results behind a snapshot are needed even if there is none yet: what is dropped is older than it.
    for start in snapshots:
        if start >= first_kept and (rest := walk(start)) is not None:
            ways.append(("load", state_bytes + rest, state_bytes + rest))
    if held is not None and held >= first_kept and (rest := walk(held)) is not None:
        ways.append(("replay", rest, rest))
    way = plan(
        held,
        committed,
        first_kept=first_kept,
        result_bytes=lambda first, end: sum(sizes[first:end]),
        snapshots=snapshots,
        state_bytes=state_bytes,
    )
    least = min(cost for _, cost, _ in ways)
    assert (way.action, least, way.nbytes) in ways
    assert (way.snapshot is not None) == (way.action == "load")
    if way.snapshot is not None:
        assert way.nbytes == state_bytes + sum(sizes[way.snapshot :])


@given(first=st.integers(0, 40), count=st.integers(0, 40), cycle=st.permutations([0, 0, 1, 2, 1]))
def test_result_bytes_are_those_of_the_tables(first: int, count: int, cycle: list[int]) -> None:
    tables = TableSchedule(
        tuple(
            BucketTable((Bucket.of("w", rule, [("w", (n,))]),))
            for rule, n in (("majority", 512), ("mean", 700), ("majority", 5000))
        ),
        tuple(cycle),
    )
    expected = sum(tables.of(index).result_nbytes for index in range(first, first + count))
    assert result_bytes(tables)(first, first + count) == expected


@pytest.mark.parametrize(
    ("round_index", "last", "due"),
    [(0, None, False), (19, None, False), (20, None, True), (39, 20, False), (40, 20, True), (20, 20, False)],
)
def test_a_snapshot_every_20_rounds(round_index: int, last: int | None, due: bool) -> None:
    reason = snapshot_due(round_index, last, 20, result_bytes_since=1 << 60, state_bytes=1)
    assert bool(reason) == due
    if due:
        assert reason.endswith("one is due every 20")


def test_by_default_a_snapshot_follows_results_of_8_states() -> None:
    def due(round_index: int, last: int | None) -> str:
        since = SIGN_MUON(last or 0, round_index)
        return snapshot_due(round_index, last, 0, result_bytes_since=since, state_bytes=STATE)

    assert not due(256, None)  # 256 rounds of P/8 bytes are 8 states of 4 P
    assert "since the start" in due(257, None) and "more than 8 states" in due(257, None)
    assert not due(556, 300)
    assert due(557, 300)
