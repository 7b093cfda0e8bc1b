"""Islands of 1, 2 and 4 ranks in one run with a real coordinator: they equal single nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from node.model import model_on_meta
from optim.methods import build_method
from protos.runfile import RunFile
from tests.node.fleet import Coordinator, Fleet, Log
from tests.node.island_rig import Island, Single, small_run
from tests.node.peers.mesh_rig import most_reducers, transported

SIZES = (1, 2, 4)
ROUNDS = 3
LONG = 20  # rounds after which replaying costs more than a state
OVERHEAD = 6_000  # bytes of headers and of the session, in a run of a few rounds
METHODS = {"sign-muon": {}, "muloco": {"local_steps": 2}, "lordo": {"local_steps": 2}}


@pytest.fixture(scope="module")
def islands() -> Iterator[list[Island]]:
    made = [Island(size) for size in SIZES]
    yield made
    for island in made:
        island.close()


def coordinator_of(fleet: Fleet, run: RunFile, **more: Any) -> Coordinator:
    return fleet.coordinator(run, build_method(run.method, model_on_meta(run.model)).tables, **more)


@pytest.mark.parametrize("method", METHODS)
def test_islands_of_any_size_equal_single_nodes_that_accumulate(
    method: str, islands: list[Island], fleet: Fleet
) -> None:
    run = small_run(method, nodes=len(SIZES), rounds=ROUNDS, **METHODS[method])
    first = coordinator_of(fleet, run)
    names = [island.join(first.invite, ordered=True) for island in islands]
    assert names == ["node-0", "node-1", "node-2"]
    ends = {}
    for island in islands:
        for number, rank in enumerate(island.ranks):
            end, before = rank.until("done")
            rounds = [line for line in before if "round" in line and "digest" in line]
            ends[island.size, number] = end, [(line["digest"], line["tokens"]) for line in rounds], rounds

    second = coordinator_of(fleet, run)
    singles = [Single(second.invite, accumulate=size) for size in SIZES]
    for single in singles:
        single.wait()
    expected = [(event.digest, event.tokens) for event in singles[0].rounds]
    assert len(expected) == ROUNDS and len(set(expected)) == ROUNDS
    for (size, number), (end, seen, rounds) in ends.items():
        assert end["done"] and seen == expected, (size, number)
        assert end["outside"] == 0, "a tensor was gathered or reduced for the exchange"
        assert (end["transfers"] > 0) == (size > 1)
        assert end["payload"] <= end["lane"] <= end["payload"] + OVERHEAD
        single = singles[SIZES.index(size)].rounds
        assert [line["validation"] for line in rounds] == [event.validation_loss for event in single]
        assert [line["loss"] for line in rounds] == pytest.approx([event.loss for event in single], rel=1e-6)
    whole = ends[1, 0][0]["payload"]
    for size in SIZES:
        lanes = [ends[size, number][0]["payload"] for number in range(size)]
        assert sum(lanes) == whole
        sent = sum(ends[size, number][0]["lane"] for number in range(size))  # the farewell included
        assert 0 <= sent - ends[size, 0][0]["up"] < 200


@pytest.mark.parametrize("method", ["sign-muon", "lordo"])
def test_an_island_among_nodes_that_reduce_for_each_other(
    method: str, islands: list[Island], fleet: Fleet
) -> None:
    found = {}
    for transport in ("hub", "direct"):
        run = transported(small_run(method, nodes=3, rounds=ROUNDS, **METHODS[method]), transport)
        log = Log()
        coordinator = coordinator_of(fleet, run, on_event=log.listener("coordinator"))
        islands[1].join(coordinator.invite)
        singles = [Single(coordinator.invite) for _ in range(2)]
        for single in singles:
            single.wait()
        ends = [rank.until("done") for rank in islands[1].ranks]
        found[transport], others = ([event.digest for event in single.rounds] for single in singles)
        assert others == found[transport]
        for end, before in ends:
            assert end["done"] and [line["digest"] for line in before if "digest" in line] == found[transport]
        assert most_reducers(log) == (3 if transport == "direct" else 0)
    assert found["direct"] == found["hub"] and len(set(found["hub"])) == ROUNDS
    assert ends[1][0]["lane"] < OVERHEAD, "the coordinator hears nothing of a rank that does not lead"


def test_nodes_of_unlike_precision_and_batch_hold_the_same_state(islands: list[Island], fleet: Fleet) -> None:
    run, island = small_run("sign-muon", nodes=2, rounds=ROUNDS), islands[1]
    coordinator = coordinator_of(fleet, run)
    island.join(coordinator.invite, precision="bf16", batch=6)
    single = Single(coordinator.invite)
    single.wait()
    digests = [event.digest for event in single.rounds]
    assert len(set(digests)) == ROUNDS
    for rank in island.ranks:
        end, before = rank.until("done")
        rounds = [line for line in before if "digest" in line]
        assert end["done"] and [line["digest"] for line in rounds] == digests
        assert [line["tokens"] for line in rounds] == [6 * run.model.context] * ROUNDS
        # of other samples and in bf16, but of the same weights
        losses = [line["loss"] for line in rounds]
        assert losses == pytest.approx([event.loss for event in single.rounds], abs=0.2)
    assert [event.tokens for event in single.rounds] == [8 * run.model.context] * ROUNDS


@pytest.mark.parametrize("first", ["island", "single"])
def test_state_goes_from_owners_to_a_joiner_and_to_owners(
    first: str, islands: list[Island], fleet: Fleet
) -> None:
    run, island = small_run("ddp-adamw", nodes=1, rounds=150), islands[1]
    coordinator = coordinator_of(fleet, run)
    if first == "island":
        island.join(coordinator.invite)
        for _ in range(LONG):
            island.ranks[1].until("digest")
        single = Single(coordinator.invite)
    else:
        single = Single(coordinator.invite)
        single.reach(LONG)
        island.join(coordinator.invite)
    single.wait()
    for number, rank in enumerate(island.ranks):
        end, before = rank.until("done")
        told = {line.get("event") for line in before}
        assert end["done"] and end["digest"] == single.rounds[-1].digest
        if first == "single":
            assert "StateLoaded" in told
        elif number == 0:
            assert "StateSent" in told


def test_killed_rank_ends_its_node_and_the_others_go_on(islands: list[Island], fleet: Fleet) -> None:
    run = small_run("sign-muon", nodes=len(SIZES), rounds=12)
    coordinator = coordinator_of(fleet, run)
    for island in islands:
        island.join(coordinator.invite)
    *others, broken = islands
    for _ in range(3):
        broken.ranks[0].until("round")
    victim = broken.ranks.pop(2)
    victim.process.kill()
    for rank in broken.ranks:
        failed, _ = rank.until("failed")
        assert "rank" in failed["failed"] or "closed" in failed["failed"]
    digests = set()
    for island in others:
        for rank in island.ranks:
            end, _ = rank.until("done")
            assert end["done"]
            digests.add(end["digest"])
    assert len(digests) == 1
