"""No sample is lost, none is trained twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
