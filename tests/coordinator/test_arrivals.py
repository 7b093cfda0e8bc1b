"""How long a round waits: the formula, its properties, and rounds with a node slower than the others."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.arrivals import ENOUGH, ROUNDS, Arrivals, Deadlines, Wait, adaptive
from coordinator.rounds import Policy, RoundView, Seat, State, decide, worth_waiting

CEILING = 60.0
GAPS = st.lists(st.floats(0.0, 100.0), min_size=2, max_size=5).map(lambda gaps: (0.0, *sorted(gaps)))
OBSERVED = st.builds(Arrivals, first=st.floats(0.0, 100.0), behind=GAPS, missing=st.integers(0, 2))
HISTORY = st.lists(OBSERVED, min_size=ENOUGH, max_size=12)


def test_median_and_spread_of_what_came() -> None:
    rounds = [Arrivals(1.0, (0.0, 0.2, 0.4))] * ENOUGH
    assert adaptive(rounds, CEILING) == Wait(1.4, "1.4 s: median 0.2 s + 6 x MAD 0.2 s of 4 rounds")


def test_without_enough_rounds_it_is_the_ceiling() -> None:
    alone, together = Arrivals(1.0, (0.0,)), Arrivals(1.0, (0.0, 0.1))
    wait = adaptive([together] * (ENOUGH - 1) + [alone] * 20, CEILING)
    assert wait == Wait(CEILING, "60 s, the longest: 3 of 4 rounds to learn from")
    assert adaptive([together] * ENOUGH, CEILING).seconds < CEILING


def test_the_floor_is_what_one_more_contribution_is_worth() -> None:
    def wait(first: float, ceiling: float = CEILING) -> Wait:
        return adaptive([Arrivals(first, (0.0, 0.0, 0.01))] * ENOUGH, ceiling)

    assert wait(10.0).seconds == 5.0  # three nodes in 15 s do as much a second as two in 10 s
    assert adaptive([Arrivals(10.0, (0.0, 0.01))] * ENOUGH, CEILING).seconds == 10.0
    assert adaptive([Arrivals(10.0, (0.0,) * 101)] * ENOUGH, CEILING).seconds == 1.0
    assert wait(10.0).reason.startswith("5 s: the least after a first one at 10 s; median 0 s + 6 x MAD 0 s")
    assert wait(0.01).seconds == 1.0
    assert wait(5.0, ceiling=0.2).seconds == 0.2


@given(rounds=HISTORY, ceiling=st.floats(0.001, 1000.0))
def test_it_stays_within_its_bounds(rounds: list[Arrivals], ceiling: float) -> None:
    wait = adaptive(rounds, ceiling)
    floor = max(1.0, 0.1 * median(arrivals.first for arrivals in rounds))
    assert min(floor, ceiling) <= wait.seconds + 1e-9 and wait.seconds <= ceiling
    assert f"{wait.seconds:.3g} s" in wait.reason


@given(rounds=HISTORY, factor=st.floats(1.0, 50.0), more=st.floats(1.0, 10.0))
def test_slower_rounds_and_a_longer_ceiling_never_shorten_it(
    rounds: list[Arrivals], factor: float, more: float
) -> None:
    slower = [
        replace(one, first=one.first * factor, behind=tuple(gap * factor for gap in one.behind))
        for one in rounds
    ]
    wait = adaptive(rounds, CEILING).seconds
    assert adaptive(slower, CEILING * factor).seconds >= wait - 1e-3
    whole = [replace(one, missing=0) for one in rounds]  # a missing one counts as the ceiling, so as more
    assert adaptive(whole, CEILING * more * 10).seconds >= adaptive(whole, CEILING).seconds - 1e-3


@given(rounds=HISTORY, data=st.data())
def test_how_late_one_outlier_was_does_not_matter(rounds: list[Arrivals], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(rounds) - 1))
    before, hit, after = rounds[:index], rounds[index], rounds[index + 1 :]

    def with_outlier(seconds: float) -> float:
        late = replace(hit, behind=(*hit.behind[:-1], seconds))
        return adaptive([*before, late, *after], 1e6).seconds

    one, other = (data.draw(st.floats(500.0, 1e5)) for _ in range(2))
    if all(arrivals.missing == 0 for arrivals in rounds):
        assert with_outlier(one) == with_outlier(other)


@given(seconds=st.lists(st.floats(0.05, 0.2), min_size=24, max_size=24), late=st.floats(10.0, 59.0))
def test_a_minority_that_is_late_or_missing_does_not_stretch_it(seconds: list[float], late: float) -> None:
    three = [(0.0, *sorted(seconds[i : i + 2])) for i in range(0, 24, 2)]
    came = adaptive([Arrivals(1.0, (*gaps, late)) for gaps in three], CEILING)
    missing = adaptive([Arrivals(1.0, gaps, missing=1) for gaps in three], CEILING)
    assert came == missing
    assert came.seconds <= 0.2 + 6 * 0.2


def test_a_majority_that_is_late_is_waited_for() -> None:
    wait = adaptive([Arrivals(1.0, (0.0, 2.0, 2.1))] * ENOUGH, CEILING)
    assert wait.seconds == pytest.approx(2.6)


class TestDeadlines:
    @staticmethod
    def after(rounds: int, deadlines: Deadlines, gap: float = 0.2) -> Wait:
        for index in range(rounds):
            deadlines.opened()
            deadlines.committed(index, 10.0 * index, [10.0 * index + 1 + gap, 10.0 * index + 1])
        return deadlines.opened()

    def test_it_begins_with_the_ceiling_and_learns(self) -> None:
        deadlines = Deadlines(CEILING)
        assert deadlines.wait.seconds == CEILING and "no round" in deadlines.wait.reason
        assert deadlines.opened().seconds == CEILING
        assert self.after(ENOUGH, deadlines, gap=1.0).seconds == pytest.approx(0.5 + 6 * 0.5, abs=2e-3)
        assert deadlines.wait.reason.startswith("3.5 s: median 0.5 s")

    def test_whoever_is_late_by_design_gets_the_ceiling_and_teaches_nothing(self) -> None:
        deadlines = Deadlines(CEILING)
        usual = self.after(ENOUGH, deadlines)
        for index in range(ENOUGH, 3 * ROUNDS):
            wait = deadlines.opened("node-1 evaluates")
            assert wait == Wait(CEILING, "60 s, the longest: node-1 evaluates")
            deadlines.committed(index, 0.0, [1.0, 50.0])
            deadlines.late(index, 80.0)
        assert deadlines.opened() == usual

    def test_old_rounds_are_forgotten(self) -> None:
        deadlines = Deadlines(CEILING)
        self.after(2 * ROUNDS, deadlines, gap=0.2)
        assert self.after(ROUNDS, deadlines, gap=2.0).seconds == pytest.approx(7.0, abs=2e-3)

    def test_late_contributions_count_as_late_as_they_were(self) -> None:
        deadlines = Deadlines(CEILING)
        for index in range(ENOUGH):
            deadlines.opened()
            deadlines.committed(index, 0.0, [1.0], missing=1)
            deadlines.late(index - 1, 500.0)  # of an older round: it tells no more
            deadlines.late(index, 1.5)
            deadlines.late(index, 9.0)  # nothing else is missing
        assert deadlines.opened().seconds == pytest.approx(0.25 + 6 * 0.25)

    def test_a_round_without_voters_teaches_nothing(self) -> None:
        deadlines = Deadlines(CEILING)
        usual = self.after(ENOUGH, deadlines)
        deadlines.committed(9, 0.0, [], missing=3)
        assert deadlines.opened() == usual


# ------------------------------------------------------------------------------------ rounds in virtual time


@dataclass
class Peer:
    """A node of the simulation; ``position`` is the first round whose result it has not got."""

    name: str
    seconds: Callable[[int], float]  # of a contribution, by round
    position: int = 0
    busy: bool = False
    lagging: bool = False
    silent_at: int = -1
    streak: int = 0
    counted: int = 0


def train(peers: list[Peer], rounds: int) -> list[float]:
    """Seconds of each round. Who comes too late fetches the results and goes on with the open round."""
    deadlines, now, lengths = Deadlines(CEILING), 0.0, []
    arrivals: list[tuple[float, str, int]] = []  # of contributions that are being computed
    byname = {peer.name: peer for peer in peers}
    for index in range(rounds):
        opened, whole = now, dict[str, float]()
        policy = Policy(deadlines.opened().seconds, 600.0, 0.6)
        states = {peer.name: State.LAGGING if peer.lagging else State.EXPECTED for peer in peers}

        def start(peer: Peer, at: float, index: int = index, states: dict[str, State] = states) -> None:
            peer.busy, peer.position = True, index
            heapq.heappush(arrivals, (at + peer.seconds(index), peer.name, index))
            if worth_waiting(index, peer.silent_at, peer.streak):
                states[peer.name] = State.EXPECTED

        for peer in peers:
            if not peer.busy:
                start(peer, now)
        while True:
            first = min(whole.values(), default=None)
            seats = tuple(Seat(name, state) for name, state in states.items())
            verdict = decide(RoundView(index, seats, opened, first, now), policy)
            if verdict.action == "commit":
                break
            assert verdict.until is not None
            if not arrivals or arrivals[0][0] > verdict.until:
                now = verdict.until
                continue
            now, name, of = heapq.heappop(arrivals)
            byname[name].busy = False
            if of == index:
                whole[name], states[name] = now, State.COMPLETE
            else:
                deadlines.late(of, now)
                start(byname[name], now)
        missing = sum(state in (State.EXPECTED, State.LAGGING) for state in states.values())
        deadlines.committed(index, opened, list(whole.values()), missing)
        for peer in peers:
            if peer.name in verdict.voters:
                peer.counted, peer.lagging, peer.streak = peer.counted + 1, False, 0
            elif peer.name in verdict.silent:
                peer.lagging, peer.silent_at, peer.streak = True, index, peer.streak + 1
        lengths.append(now - opened)
    return lengths


def peers(*factors: Callable[[int], float], seed: int = 0) -> list[Peer]:
    """Nodes that take ten seconds times their factor, and up to 4 % more or less."""
    chance = random.Random(seed)

    def seconds(factor: Callable[[int], float]) -> Callable[[int], float]:
        return lambda index: 10 * factor(index) * chance.uniform(0.96, 1.04)

    return [Peer(f"node-{i}", seconds(factor)) for i, factor in enumerate(factors)]


def p95(lengths: list[float]) -> float:
    return sorted(lengths)[int(0.95 * len(lengths))]


def usual(index: int) -> float:
    return 1.0


@settings(max_examples=5)
@given(seed=st.integers(0, 1 << 30))
def test_one_of_four_three_times_slower_hardly_holds_the_others_up(seed: int) -> None:
    three = train(peers(usual, usual, usual, seed=seed), 300)
    four = peers(usual, usual, usual, lambda index: 3.0, seed=seed)
    lengths = train(four, 300)
    assert p95(lengths) <= 1.2 * p95(three)
    assert sum(lengths) <= 1.1 * sum(three)
    assert min(peer.counted for peer in four[:3]) >= 299
    assert 1 <= four[3].counted <= 30, "while nothing is known of the others it is waited for"


@settings(max_examples=5)
@given(seed=st.integers(0, 1 << 30))
def test_who_is_a_little_slower_is_counted(seed: int) -> None:
    four = peers(usual, usual, usual, lambda index: 1.1, seed=seed)
    lengths = train(four, 300)
    assert four[3].counted >= 299 and p95(lengths) <= 12


def test_who_was_slow_for_a_while_is_counted_again() -> None:
    four = peers(usual, usual, usual, lambda index: 3.0 if 20 <= index < 80 else 1.0)
    train(four, 400)
    assert four[3].counted >= 400 - 60 - 70


def test_two_of_three_slower_are_the_measure() -> None:
    three = peers(usual, lambda index: 2.0, lambda index: 2.0)
    train(three, 200)
    assert min(peer.counted for peer in three) >= 195
