"""Bit-identical replicas: the same shared state on every node after every round, for odd and even voters."""

from __future__ import annotations

import pytest

from tests.system.conftest import Bed

ROUNDS = 200


@pytest.fixture
def bed(forked_bed: Bed) -> Bed:
    return forked_bed


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [3, 4])
def test_digests_are_equal_on_all_nodes_in_every_round(bed, nodes):
    bed.lead(nodes=nodes, rounds=ROUNDS)
    names = [f"n{index}" for index in range(nodes)]
    for name in names:
        bed.join(name)
    bed.finished(*names)
    assert bed.agree(*names) == ROUNDS
    for name in names:
        rounds = bed.rounds(name)
        assert sorted(rounds) == list(range(ROUNDS))
        assert all(event["counted"] and len(event["voters"]) == nodes for event in rounds.values())
    first = bed.rounds(names[0])
    assert len({event["digest"] for event in first.values()}) == ROUNDS, (
        "the state must change in every round"
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["signum", "ddp-muon", "ddp-adamw"])
def test_other_methods_keep_replicas_equal_too(bed, method):
    bed.lead(nodes=2, rounds=12, method=method)
    for name in ("a", "b"):
        bed.join(name)
    bed.finished("a", "b")
    assert bed.agree("a", "b") == 12
