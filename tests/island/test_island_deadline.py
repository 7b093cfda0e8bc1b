"""Every collective has a deadline that we chose, and names who did not come."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from node.island import CommPolicy, fully_shard
from node.island.collectives import Collectives
from node.island.deadline import ask, deadline, set_deadline, timeout_of, word_of
from node.island.watch import Watch
from tests.island.rig import Member, Ranks, pool


def test_the_deadline_is_what_is_wanted_or_the_shortest_there_is() -> None:
    assert deadline(None, []) == 300.0
    assert deadline(None, [1800.0, None]) == 300.0
    assert deadline(None, [1800.0, 20.0]) == 20.0
    assert deadline(900.0, [1800.0, 20.0]) == 900.0
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="give the seconds that a collective may take"):
            deadline(wrong, [])


def timeouts(member: Member) -> list[float | None]:
    assert dist.group.WORLD is not None
    fresh = dist.new_group(list(range(member.ranks)), timeout=timedelta(minutes=30))
    found = [timeout_of(fresh)]
    for policy in (CommPolicy(), CommPolicy(timeout=7.0)):
        comm = Collectives(fresh, None, policy)
        found += [comm.timeout, timeout_of(fresh)]
    kept = timeout_of(dist.group.WORLD)
    model = torch.nn.Linear(4, 4).to(member.device)
    mesh = init_device_mesh(member.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh, comm_policy=CommPolicy(timeout=9.0))
    return [*found, kept, timeout_of(dist.group.WORLD), *(timeout_of(g) for g in mesh.get_all_groups())]


def test_groups_get_the_deadline_as_their_timeout() -> None:
    world = 120.0
    wanted = [1800.0, world, world, 7.0, 7.0, world, world, 9.0, 9.0]
    assert pool().run(timeouts, 4) == [wanted] * 4


def alone_in_a_mesh(member: Member, hybrid: bool) -> str:
    """Ranks 1 and 3 stay away from the second step; the groups of a mesh have torch's 30 minutes."""
    mesh = init_device_mesh(member.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Linear(8, 8).to(member.device)
    policy = CommPolicy(timeout=4.0)
    fully_shard(model, mesh=mesh if hybrid else mesh["shard"], comm_policy=policy)
    dist.barrier()  # none comes late to the first step
    for step in range(2):
        if step == 1 and member.rank in (1, 3):
            return "left"
        model(torch.ones(1, 8, device=member.device)).sum().backward()
    return "finished"


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_rank_that_does_not_come_is_named_within_the_deadline(hybrid: bool) -> None:
    ranks = Ranks(4)
    try:
        answers = ranks.answers_of(alone_in_a_mesh, 4, hybrid, patience=30.0)
        assert [answer[0] for answer in answers] == [False, True, False, True]
        for rank in (0, 2):
            text = answers[rank][1].splitlines()[-1]
            assert "IslandError: gather of" in text
            assert f"failed on rank 0 of 2 (shard group of the global ranks [{rank}, {rank + 1}]" in text
            assert f"replicas {'[0, 2]' if hybrid else 'none'}, timeout 4 s)" in text
            if hybrid:  # the other replica of the same segment has failed as well, and says so
                assert f"rank {2 - rank} failed at: gather of" in text
            assert f"rank {rank + 1} has not come" in text
    finally:
        ranks.close()


class Shelf:
    """A store in memory."""

    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.notes[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.notes for key in keys)

    def get(self, key: str) -> bytes:
        return self.notes[key]


def test_notes_say_who_failed_and_who_said_nothing() -> None:
    shelf, now = Shelf(), [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 1.0:  # rank 2 takes a while
            shelf.set("atoll/island/failed/2", "reduce of head: timed out")

    def word(ranks: list[int], rank: int) -> str:
        return word_of(
            ranks, rank, "gather of w: lost", shelf, grace=2.0, clock=lambda: now[0], sleep=pass_time
        )

    text = word([0, 1, 2, 5], 1)
    assert text == (
        "ranks [0, 5] have not come and reported no failure: dead, stuck, or at other work;"
        " rank 2 failed at: reduce of head: timed out"
    )
    assert 2.0 <= now[0] < 2.2
    assert word([1, 2], 2) == "rank 1 failed at: gather of w: lost"  # at once, as all have said something
    assert now[0] < 2.2


def test_a_store_that_is_gone_is_part_of_the_story() -> None:
    class Gone(Shelf):
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Connection reset by peer\nstack")

    text = word_of([0, 1], 1, "x", Gone())
    assert "The ranks' store is gone too (Connection reset by peer)" in text and "often 0" in text
    assert ask([0, 1], "x") == "" and set_deadline(5.0, []) == 5.0  # a single process


def test_late_transfers_are_reported_once_and_in_order() -> None:
    now, reports, done = [0.0], list[str](), {"a": False, "b": False, "c": False}
    watch = Watch(reports.append, lambda: now[0], threaded=False)
    for name in done:
        watch.begin(lambda name=name: done[name], 10.0, lambda name=name: f"{name} is late")  # type: ignore[misc]
    now[0], done["a"] = 8.0, True
    assert watch.look() == 2 and reports == []
    now[0] = 9.5
    assert watch.look() == 0 and reports == ["b is late", "c is late"]
    assert watch.look() == 0 and len(reports) == 2


def test_the_watching_thread_sleeps_and_wakes() -> None:
    said = threading.Event()
    watch = Watch(lambda text: said.set() if text == "late" else None, lambda: 0.0)
    watch.begin(lambda: True, 1.0, lambda: "never")
    watch.begin(lambda: False, 0.0, lambda: "late")
    assert said.wait(30.0)
    said.clear()
    watch.begin(lambda: False, 0.0, lambda: "late")
    assert said.wait(30.0)
