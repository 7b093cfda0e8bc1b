"""How long results may stand still."""

from __future__ import annotations

from node.exchange.peers.pace import Coming, standing_still
from protos.waits import FLOOR_SECONDS

HERE = [Coming("a", whole_at=110.0), Coming("b", whole_at=130.0)]


def test_one_may_take_twice_as_long_as_the_others() -> None:
    results = [*HERE, Coming("c")]
    assert standing_still(results, 100.0, 130.0) == ((), 160.0)
    assert standing_still(results, 100.0, 159.0) == ((), 160.0)
    assert standing_still(results, 100.0, 160.0) == ((2,), None)


def test_bytes_that_come_give_it_time() -> None:
    results = [*HERE, Coming("c", moved_at=150.0)]
    assert standing_still(results, 100.0, 160.0) == ((), 180.0)
    assert standing_still([*HERE, Coming("c", moved_at=105.0)], 100.0, 160.0) == ((2,), None)


def test_there_is_a_least_time() -> None:
    results = [Coming("a", whole_at=100.5), Coming("c")]
    assert standing_still(results, 100.0, 101.0) == ((), 100.5 + FLOOR_SECONDS)


def test_all_slices_of_one_reducer_count() -> None:
    results = [Coming("c"), *HERE, Coming("c", moved_at=140.0)]
    assert standing_still(results, 100.0, 160.0) == ((), 170.0)
    assert standing_still(results, 100.0, 170.0) == ((0, 3), None)


def test_without_something_to_compare_with_there_is_nothing_to_say() -> None:
    for results in ([], [Coming("a")], HERE, [*HERE, Coming("c"), Coming("d")]):
        assert standing_still(results, 100.0, 1e6) == ((), None)
