"""No sample is lost, none is trained twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.leases import Lease, LeaseBook, LeaseError


def test_consecutive_ranges() -> None:
    book = LeaseBook()
    assert [book.take(node, 0, 4) for node in "abc"] == [Lease(0, 4), Lease(4, 4), Lease(8, 4)]
    book.settle(0, {"a", "b", "c"})
    assert (book.trained, book.frontier, book.returned, book.held) == (12, 12, (), {})


def test_what_was_not_counted_comes_first() -> None:
    book = LeaseBook()
    for node in "abc":
        book.take(node, 0, 4)
    book.settle(0, {"a", "c"})
    assert book.returned == (Lease(4, 4),)
    assert book.take("b", 1, 4) == Lease(4, 4)
    assert book.take("a", 1, 4) == Lease(12, 4)


def test_neighbours_merge_and_split() -> None:
    book = LeaseBook()
    for node in "abcd":
        book.take(node, 0, 3)
    book.settle(0, {"a"})
    assert book.returned == (Lease(3, 9),)
    assert book.take("a", 1, 5) == Lease(3, 5)
    assert book.returned == (Lease(8, 4),)
    assert book.take("b", 1, 5) == Lease(8, 4)  # shorter: one lease is one range
    book.settle(1, ())
    assert book.returned == (Lease(3, 9),)


def test_only_the_settled_round_is_touched() -> None:
    book = LeaseBook()
    book.take("a", 0, 2)
    book.settle(1, {"a"})
    assert book.held == {"a": Lease(0, 2)}


def test_impossible_leases() -> None:
    book = LeaseBook()
    with pytest.raises(LeaseError, match="at least one sample"):
        book.take("a", 0, 0)
    book.take("a", 0, 2)
    with pytest.raises(LeaseError, match="a still holds samples 0 to 1 of round 0"):
        book.take("a", 1, 2)


events = st.lists(
    st.tuples(
        st.lists(st.integers(1, 7), min_size=1, max_size=6),  # batch of each member
        st.integers(0, 63),  # bit i: member i is counted
    ),
    max_size=25,
)


@given(events)
def test_a_ledger_of_samples_balances(rounds: list[tuple[list[int], int]]) -> None:
    book = LeaseBook()
    trained: list[int] = []
    for index, (batches, mask) in enumerate(rounds):
        leases = {f"node-{i}": book.take(f"node-{i}", index, batch) for i, batch in enumerate(batches)}
        counted = {node for i, node in enumerate(leases) if mask >> i & 1}
        for node in counted:
            trained += range(leases[node].start, leases[node].end)
        for lease, batch in zip(leases.values(), batches, strict=True):
            assert 1 <= lease.count <= batch
        book.settle(index, counted)
        waiting = [sample for lease in book.returned for sample in range(lease.start, lease.end)]
        assert len(set(trained)) == len(trained) == book.trained, "a sample was trained twice"
        assert sorted(trained + waiting) == list(range(book.frontier)), "a sample was lost"
        assert not book.held
    # Nothing stays in the pool for ever: without further losses it drains.
    for index in range(len(rounds), len(rounds) + 200):
        if not book.returned:
            break
        book.take("last", index, 7)
        book.settle(index, {"last"})
    assert not book.returned
    assert book.trained == book.frontier


def test_work_in_hand_is_leased_again() -> None:
    book = LeaseBook(12)
    assert book.reclaim("c", 3, Lease(20, 4)), "what lies before it was others'"
    assert (book.frontier, book.returned) == (24, (Lease(12, 8),))
    assert book.reclaim("b", 3, Lease(16, 4)) and book.returned == (Lease(12, 4),)
    assert book.take("a", 3, 4) == Lease(12, 4)
    assert book.reclaim("b", 3, Lease(16, 4)), "it has it already"
    assert not book.reclaim("b", 3, Lease(12, 4))


@pytest.mark.parametrize(
    "lease", [Lease(0, 4), Lease(10, 4), Lease(22, 4), Lease(14, 0)], ids=["trained", "half", "over", "empty"]
)
def test_what_is_not_free_is_not_leased_again(lease: Lease) -> None:
    book = LeaseBook(24, [Lease(14, 4)], trained=20)
    before = (book.frontier, book.returned, book.held)
    assert not book.reclaim("a", 3, lease)
    assert (book.frontier, book.returned, book.held) == before


def test_after_rounds_that_are_lost_only_work_in_hand_waits() -> None:
    book = LeaseBook(12, [Lease(4, 4)], trained=8).skipped(
        36, [Lease(28, 4), Lease(24, 4), Lease(26, 4), Lease(0, 4), Lease(36, 4), Lease(20, 0)]
    )
    assert (book.frontier, book.returned, book.trained) == (36, (Lease(24, 8),), 8)


NAMES = st.sampled_from("abcd")


class Ledger(RuleBasedStateMachine):
    """A book against sets of samples, with coordinators that are started again in between.

    What was leased beyond the last committed round is forgotten by a restart, but not by the nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook()
        self.round = 0
        self.trained: set[int] = set()
        self.hands: dict[str, Lease] = {}  # what nodes work on, whatever the book knows
        self.kept = LeaseBook()

    def held(self) -> set[int]:
        return {i for lease in self.book.held.values() for i in range(lease.start, lease.end)}

    @rule(node=NAMES, count=st.integers(1, 5))
    def take(self, node: str, count: int) -> None:
        if node not in self.book.held:
            lease = self.book.take(node, self.round, count)
            assert 1 <= lease.count <= count
            self.hands[node] = lease

    @rule(counted=st.sets(NAMES))
    def commit(self, counted: set[str]) -> None:
        for lease in self.book.settle(self.round, counted).values():
            samples = set(range(lease.start, lease.end))
            assert not samples & self.trained, "a sample was trained twice"
            self.trained |= samples
        self.round += 1
        self.hands.clear()
        self.kept = LeaseBook(self.book.frontier, self.book.returned, self.book.trained)

    @rule(order=st.permutations("abcd"), back=st.sets(NAMES))
    def restart(self, order: list[str], back: set[str]) -> None:
        self.book = LeaseBook(self.kept.frontier, self.kept.returned, self.kept.trained)
        for node in order:
            if node in back and node in self.hands:
                assert self.book.reclaim(node, self.round, self.hands[node]), "nobody else can have had it"
        self.hands = {node: lease for node, lease in self.hands.items() if node in back}

    @rule(node=NAMES, start=st.integers(0, 60), count=st.integers(0, 6))
    def lie(self, node: str, start: int, count: int) -> None:
        """A node claims samples that it was never given."""
        lease = Lease(start, count)
        samples = set(range(start, lease.end))
        free = samples - self.trained - self.held() == samples and count > 0
        known = self.book.held.get(node)
        spans = start < self.book.frontier < lease.end
        assert self.book.reclaim(node, self.round, lease) == (
            known == lease if known is not None else free and not spans
        )
        # No coordinator gives a lease across the frontier of the last commit, and a restarted one takes none.
        if known is None and free and not spans and not start < self.kept.frontier < lease.end:
            self.hands[node] = lease

    @invariant()
    def nothing_is_lost(self) -> None:
        returned = [i for lease in self.book.returned for i in range(lease.start, lease.end)]
        held = [i for lease in self.book.held.values() for i in range(lease.start, lease.end)]
        everything = [*returned, *held, *self.trained]
        assert sorted(everything) == list(range(self.book.frontier))
        assert self.book.trained == len(self.trained)


TestLedger = Ledger.TestCase
