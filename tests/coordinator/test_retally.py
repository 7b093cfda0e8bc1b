"""What follows from drawn lines: no honest node is accused, no lie passes, whatever a minority says."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.retally import Disputes, Effort, Shown, Statement, Verdict, differing, draw, judge
from optim.aggregate import Bytes, casting_voter
from optim.bits import tally
from optim.recount import Line, Terms, recount
from protos.buckets import LINE_BYTES, MeanRule

LINES = [Line(0, 0, "majority"), Line(64, 64, "mean"), Line(128, 128, "majority")]
PLACES = range(len(LINES))


def terms(voters: int) -> Terms:
    return Terms(1, MeanRule(), tally, [1] * voters, [1] * voters)


def made(places: Sequence[int], rows: Sequence[Bytes | None]) -> tuple[Bytes, Bytes]:
    return recount(terms(len(rows)), [LINES[place] for place in places], rows)


def plain(rows: Sequence[Bytes]) -> Bytes:
    """The definition: majorities by counting, means by adding."""
    result = np.empty_like(rows[0])
    for place, line in enumerate(LINES):
        if line.rule == "mean":
            values = np.stack([row[place].view("<f4").astype(np.float64) for row in rows])
            result[place] = (sum(values) / len(rows)).astype("<f4").view(np.uint8)
            continue
        bits = np.stack([np.unpackbits(row[place]) for row in rows]).astype(int)
        yes = 2 * bits.sum(0)
        tie = bits[casting_voter(1, len(rows))]
        result[place] = np.packbits(np.where(yes == len(rows), tie, yes > len(rows)))
    return result


def contribution(rng: np.random.Generator) -> Bytes:
    row = rng.integers(0, 256, (len(LINES), LINE_BYTES), dtype=np.uint8)
    row[1] = rng.standard_normal(LINE_BYTES // 4).astype("<f4").view(np.uint8)
    return row


def spoiled(lines: Bytes, rng: np.random.Generator) -> Bytes:
    """Another value at one place at least, and finite."""
    other = lines.copy()
    for place in rng.choice(len(LINES), rng.integers(1, len(LINES) + 1), replace=False):
        other[place, 4 * rng.integers(0, 16)] ^= 1 << rng.integers(0, 8)
    return other


def names(count: int) -> list[str]:
    return [f"node-{index}" for index in range(count)]


def verdict_on(
    reducer: str, voters: Sequence[str], statements: Mapping[str, Statement], shown: Shown | None
) -> Verdict | None:
    """As the coordinator comes to it; ``None``: all is clear, or nothing is known."""
    wrong = differing(PLACES, voters, statements, made)
    if not wrong:
        return None
    if shown is not None:
        shown = Shown([row[wrong] for row in shown.rows], shown.result[wrong])
    return judge(reducer, wrong, voters, statements, shown, made)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[str], set[str], int]:
    """Voters, fewer than half of them false, and a seed."""
    voters = names(draw(st.integers(3, 7)))
    false = draw(st.sets(st.sampled_from(voters), max_size=(len(voters) - 1) // 2))
    return voters, false, draw(st.integers(0, 1000))


@given(rounds())
@settings(max_examples=20, deadline=None)
def test_an_honest_reducer_is_never_accused(found: tuple[list[str], set[str], int]) -> None:
    voters, false, seed = found
    rng = np.random.default_rng(seed)
    rows = {voter: contribution(rng) for voter in voters}
    result = made(PLACES, list(rows.values()))[0]
    assert (result == plain(list(rows.values()))).all()
    honest = Shown(list(rows.values()), result)
    disputes = Disputes()
    for reducer in (voter for voter in voters if voter not in false):
        statements = {}
        for voter in voters:
            row: Bytes | None = rows[voter]
            received: Bytes | None = result
            if voter in false:  # lies about either, or both, or says nothing
                row = [rows[voter], spoiled(rows[voter], rng), None][rng.integers(3)]
                received = [result, spoiled(result, rng), None][rng.integers(3)]
            statements[voter] = Statement(row, received)
        verdict = verdict_on(reducer, voters, statements, honest)
        if verdict is None:
            continue
        assert verdict.outcome == "disputed" and set(verdict.against) <= false, verdict.reason
        disputes.add(reducer, verdict, voters)
        assert disputes.liars.keys() <= false
    if not false:
        assert not disputes.barred()


@given(rounds(), st.sampled_from(["truth", "rows", "nothing", "noise"]))
@settings(max_examples=25, deadline=None)
def test_a_false_result_is_never_clear(found: tuple[list[str], set[str], int], shows: str) -> None:
    voters, accomplices, seed = found
    rng = np.random.default_rng(seed)
    reducer = voters[0]
    rows = {voter: contribution(rng) for voter in voters}
    true = plain(list(rows.values()))
    lie = spoiled(true, rng)
    statements = {voter: Statement(rows[voter], lie) for voter in voters}
    shown: Shown | None = Shown(list(rows.values()), lie)
    if shows == "truth":  # of what it has made, to the coordinator alone
        shown = Shown(list(rows.values()), true)
    elif shows == "rows":  # made up so that they give what it has sent
        fitting = [lie.copy() for _ in voters]
        shown = Shown(fitting, lie)
    elif shows == "nothing":
        shown = None
    elif shows == "noise":
        shown = Shown([contribution(rng) for _ in voters], contribution(rng))
    verdict = verdict_on(reducer, voters, statements, shown)
    assert verdict is not None and verdict.outcome in ("lied", "disputed", "evaded")
    disputes = Disputes()
    liars = disputes.add(reducer, verdict, voters)
    assert reducer in disputes.barred()
    if shows != "nothing":
        assert list(liars) == [reducer]
    # Accomplices that say nothing cannot hide a vote on which all honest nodes agree.
    for voter in voters:
        rows[voter] = rows[voters[-1]]
    lie = spoiled(rows[voters[-1]], rng)
    lie[1] = rows[voters[-1]][1]
    if (lie != rows[voters[-1]]).any():
        statements = {
            voter: Statement() if voter in accomplices else Statement(rows[voter], lie) for voter in voters
        }
        assert verdict_on(reducer, voters, statements, None) is not None


def test_who_blames_one_voter_is_in_dispute_with_it() -> None:
    rng = np.random.default_rng(5)
    voters, row = names(3), contribution(rng)
    other = row.copy()
    other[0] ^= 0xFF
    lie = np.where(np.arange(len(LINES))[:, None] == 0, other, row)
    statements = {
        "node-0": Statement(other, lie),
        "node-1": Statement(row, lie),
        "node-2": Statement(row, lie),
    }
    verdict = verdict_on("node-0", voters, statements, Shown([other, other, row], lie))
    assert verdict is not None and (verdict.outcome, verdict.against) == ("disputed", ("node-1",))
    disputes = Disputes()
    assert disputes.add("node-0", verdict, voters) == {}
    assert disputes.barred().keys() == {"node-0"}, "either may lie: the voter stays, the reducer does not"
    assert "node-1" in disputes.barred()["node-0"]


def test_who_contradicts_more_than_half_of_all_has_lied() -> None:
    disputes, members = Disputes(), names(6)
    dispute = Verdict("disputed", "they say different things", ("node-5",))
    assert disputes.add("node-0", dispute, members) == {} == disputes.add("node-1", dispute, members)
    assert disputes.barred().keys() == {"node-0", "node-1"}
    liars = disputes.add("node-2", dispute, members)
    assert list(liars) == ["node-5"] and "node-0, node-1, node-2 contradict it" in liars["node-5"]
    assert disputes.barred().keys() == {"node-5"}, "whoever it has accused is believed again"
    assert disputes.add("node-3", dispute, members) == {}, "that is known by now"
    disputes.forget_all_but({"node-0"})
    assert not disputes.barred()


def test_of_two_nodes_nobody_can_tell_which_lies() -> None:
    disputes = Disputes()
    assert not disputes.add("node-0", Verdict("disputed", "x", ("node-1",)), names(2))
    assert disputes.barred().keys() == {"node-0"} and not disputes.liars


@pytest.mark.parametrize(("count", "lines"), [(3, 5), (5, 5), (100, 7), (10**9, 64)])
def test_lines_are_drawn_from_all_parts(count: int, lines: int) -> None:
    drawn = draw(count, lines, random.Random(3))
    assert list(drawn) == sorted(set(drawn)) and len(drawn) == min(count, lines)
    assert all(count * part // lines <= line for part, line in enumerate(drawn) if count > lines)
    assert drawn[-1] < count
    if count > lines:
        assert drawn != draw(count, lines, random.Random(4))


def test_the_chance_of_a_round_keeps_the_cost() -> None:
    effort = Effort(64, 0.004)
    sent = 2 * 64 * 64 + 128
    for nbytes in (10_000, 1_000_000):
        assert effort.chance(64, nbytes) * sent == pytest.approx(0.004 * nbytes)
    assert effort.chance(64, 100_000_000) == 1.0 and effort.chance(0, 10**9) == 0.0


def test_a_lie_is_found_as_often_as_the_docs_say() -> None:
    """1 - (1 - f)^k: by lines that hold a lie, however they lie."""
    chance, lines, count, share = random.Random(1), 16, 4000, 0.05
    for bad in (set(range(int(count * share))), set(chance.sample(range(count), int(count * share)))):
        hits = sum(not bad.isdisjoint(draw(count, lines, chance)) for _ in range(2000)) / 2000
        assert hits >= 1 - (1 - share) ** lines - 0.04
