"""Every way to gather and reduce, on even, ragged and one-owner layouts, between real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from node.island.collectives import Collectives, CommPolicy
from node.island.costs import Link, choose, gather_costs, reduce_costs
from node.island.layout import GroupLayout, TensorMeta, from_cuts
from node.island.transfer import IslandError, Stages, Transfer
from tests.island.rig import Member, Ranks, device, pool

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZE = 120  # divisible by 2, 3 and 4


def layout_of(*cuts: int) -> GroupLayout:
    return from_cuts([TensorMeta("w", (cuts[-1],), 1)], [0], cuts)


def layouts(ranks: int) -> dict[str, GroupLayout]:
    even = tuple(SIZE // ranks * rank for rank in range(ranks + 1))
    return {
        "even": layout_of(*even),
        "ragged": layout_of(0, *(SIZE - SIZE // 2**rank - 1 for rank in range(1, ranks)), SIZE),
        "first": layout_of(0, *[SIZE] * ranks),
        "last": layout_of(*[0] * ranks, SIZE),
        "gap": layout_of(*[0] * (ranks - 1), 7, SIZE) if ranks > 1 else layout_of(0, SIZE),
    }


def gather_every_way(member: Member) -> list[str]:
    wrong = []
    for mode in ("chunks", "roots", "peers", "auto"):
        comm = Collectives(member.group, None, CommPolicy(gather=mode))
        for name, layout in layouts(member.ranks).items():
            for dtype in DTYPES:
                expected = (torch.arange(SIZE) % 100).to(device(), dtype)
                segment = expected[layout.cuts[member.rank] : layout.cuts[member.rank + 1]].clone()
                transfer = comm.gather(name, layout, segment, lambda like=expected: torch.empty_like(like))
                if not torch.equal(transfer.wait(), expected):
                    wrong.append(f"{mode} {name} {dtype}")
        assert comm.counters.gathers == 15 and comm.counters.gathered_bytes > 0
    return wrong


def reduce_every_way(member: Member) -> list[str]:
    wrong = []
    factor = member.ranks * (member.ranks + 1) // 2
    for mode in ("fused", "chunks", "roots", "auto"):
        comm = Collectives(member.group, None, CommPolicy(reduce=mode))
        for name, layout in layouts(member.ranks).items():
            for dtype in DTYPES:
                pattern = torch.arange(SIZE, device=device()) % 13
                buffer = (pattern * (member.rank + 1)).to(dtype)
                segment = comm.reduce(name, layout, buffer).wait()
                expected = (pattern * factor).to(dtype)
                if not torch.equal(
                    segment, expected[layout.cuts[member.rank] : layout.cuts[member.rank + 1]]
                ):
                    wrong.append(f"{mode} {name} {dtype}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gather_and_reduce(ranks: int) -> None:
    assert pool().run(gather_every_way if ranks > 1 else gather_alone, ranks) == [[]] * ranks
    assert pool().run(reduce_every_way, ranks) == [[]] * ranks


def gather_alone(member: Member) -> list[str]:
    segment = torch.arange(5.0, device=device())
    comm, layout = Collectives(member.group), layout_of(0, 5)
    full = comm.gather("one", layout, segment, lambda: torch.zeros_like(segment)).wait()
    return [] if torch.equal(full, segment) else ["alone"]


def sum_in_order(member: Member) -> bool:
    def of(rank: int) -> torch.Tensor:
        values = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 3)
        return values.to(device())

    expected = of(0)
    for rank in range(1, member.ranks):
        expected = expected + of(rank)
    comm = Collectives(member.group, None, CommPolicy(ordered=True))
    same = True
    for layout in layouts(member.ranks).values():
        segment = comm.reduce("sum", layout, of(member.rank)).wait()
        same &= torch.equal(segment, expected[layout.cuts[member.rank] : layout.cuts[member.rank + 1]])
    return same


def test_ordered_sums_are_those_of_one_process() -> None:
    assert pool().run(sum_in_order, 4) == [True] * 4


def reduce_over_replicas(member: Member, ordered: bool) -> tuple[list[float], list[float]]:
    assert member.grid is not None
    policy = CommPolicy(ordered=ordered)
    comm = Collectives(member.grid.get_group(1), member.grid.get_group(0), policy)
    layout = layout_of(0, 5, 8)
    segment = comm.reduce("grid", layout, torch.arange(8.0, device=device()) * 10.0**member.rank).wait()
    first = torch.full((3,), float(member.rank), device=device())
    comm.copy_to_replicas("copy", first)
    flags = torch.zeros(4, dtype=torch.uint8, device=device())
    flags[member.rank] = 1
    assert comm.union("flags", flags).tolist() == [1, 1, 1, 1]
    return segment.tolist(), first.tolist()


@pytest.mark.parametrize("ordered", [False, True])
def test_hybrid_sharding_adds_over_replicas(ordered: bool) -> None:
    answers = pool().run(reduce_over_replicas, 4, ordered)
    total = [1111.0 * value for value in range(8)]
    assert [answer[0] for answer in answers] == [total[:5], total[5:], total[:5], total[5:]]
    assert [answer[1][0] for answer in answers] == [0.0, 1.0, 0.0, 1.0]


def overlapping_transfers(member: Member) -> bool:
    """Two gathers and a reduce under way at once, advanced in one order everywhere."""
    comm = Collectives(member.group, None, CommPolicy(gather="chunks", reduce="chunks"))
    layout = layouts(member.ranks)["ragged"]
    low, high = layout.cuts[member.rank], layout.cuts[member.rank + 1]
    first = torch.arange(SIZE, device=device()) * 1.0
    second = first * 2.0
    a = comm.gather("a", layout, first[low:high].clone(), lambda: torch.empty_like(first))
    a.advance()
    b = comm.gather("b", layout, second[low:high].clone(), lambda: torch.empty_like(first))
    b.advance()
    c = comm.reduce("c", layout, first.clone())
    c.advance()
    a.advance()
    c.progress()
    lost = comm.gather("d", layout, first[low:high].clone(), lambda: torch.empty_like(first))
    lost.advance()
    lost.abandon()
    return (
        torch.equal(b.wait(), second)
        and torch.equal(a.wait(), first)
        and torch.equal(c.wait(), first[low:high] * member.ranks)
    )


def test_transfers_overlap_and_can_be_abandoned() -> None:
    assert pool().run(overlapping_transfers, 4) == [True] * 4


def measured_mode(member: Member) -> tuple[str, str]:
    comm = Collectives(member.group, None, CommPolicy(gather="measure"))
    layout = layouts(member.ranks)["ragged"]
    choice = comm.measure(layout, torch.empty(0, device=device()))
    return choice.mode, comm.gather_mode(layout_of(0, 1, 2, 3, 4), 4)


def test_measured_choice_is_the_same_everywhere() -> None:
    answers = pool().run(measured_mode, 4)
    assert len({*answers}) == 1 and answers[0][0] == answers[0][1] and answers[0][0] in ("chunks", "roots")


def disagree(member: Member) -> tuple[str, str]:
    comm = Collectives(member.group, None, CommPolicy(check_signatures=True))
    with pytest.raises(IslandError) as plan:
        comm.require_same("the sharding plan", f"hash {member.rank // 3}", device())
    layout = layouts(member.ranks)["even"]
    unit = "layers.1" if member.rank == 2 else "layers.0"
    with pytest.raises(IslandError) as signature:
        comm.reduce(unit, layout, torch.zeros(SIZE, device=device()))
    return str(plan.value), str(signature.value)


def test_disagreement_is_an_error_on_every_rank() -> None:
    for plan, signature in pool().run(disagree, 4):
        assert "the ranks disagree on the sharding plan" in plan and "rank 3: hash 1" in plan
        assert "rank 2: reduce layers.1 chunks 120 torch.float32" in signature
        assert "rank 0: reduce layers.0 chunks 120 torch.float32" in signature


def scaled(*parts: float) -> GroupLayout:
    size = 6_400_000  # of 25 MB in fp32, as in the measurements
    cuts = [0]
    for part in parts:
        cuts.append(cuts[-1] + int(size * part))
    return layout_of(*cuts)


def test_costs_rank_the_ways_as_measured_at_1_gbit() -> None:
    """25 MB on 4 ranks at 1 Gbit/s; measured: chunks 207/232/378, roots 384/336/485, peers 245/324/662 ms."""
    measured = {
        (0.25, 0.25, 0.25, 0.25): (0.207, 0.384, 0.245),
        (0.5, 0.25, 0.25, 0.0): (0.232, 0.336, 0.324),
        (1.0, 0.0, 0.0, 0.0): (0.378, 0.485, 0.662),
    }
    for parts, (chunks, roots, peers) in measured.items():
        costs = gather_costs(scaled(*parts), 4, Link())
        for mode, seconds in (("chunks", chunks), ("roots", roots), ("peers", peers)):
            assert seconds / 1.7 < costs[mode] < seconds * 1.1, (parts, mode)  # type: ignore[index]
        assert choose(costs).mode == "chunks"
    one_owner = reduce_costs(scaled(1.0, 0.0, 0.0, 0.0), 4, Link(), "gloo")
    assert choose(one_owner).mode == "roots" and "fused" not in one_owner
    even = reduce_costs(scaled(0.25, 0.25, 0.25, 0.25), 4, Link(), "nccl")
    assert choose(even).mode == "fused"
    assert "roots is the cheapest of roots" in choose(one_owner).reason
    assert set(gather_costs(layout_of(0, 8), 4, Link()).values()) == {0.0}


def gathers_without_the_last_rank(member: Member) -> str:
    comm = Collectives(member.group)
    layout, whole = layout_of(0, 64, 192), torch.empty(192, device=device())
    for step in range(2):
        if step == 1 and member.rank == 1:
            return "left"
        segment = torch.zeros(layout.resident(member.rank), device=device())
        comm.gather(f"gather of layers.{step}", layout, segment, whole.clone).wait()
    return "finished"


def test_a_rank_that_stays_away_is_a_clear_error_within_the_timeout() -> None:
    ranks = Ranks(2, timeout=3.0)
    try:
        (ok, text), other = ranks.answers_of(gathers_without_the_last_rank, 2)
        assert not ok and other == (True, "left")
        assert (
            "IslandError: gather of layers.1 failed on rank 0 of 2" in text and "A rank may have died" in text
        )
    finally:
        ranks.close()


def test_a_transfer_that_failed_does_not_go_on() -> None:
    def failing() -> Stages:
        yield []
        raise RuntimeError("the peer is gone")

    comm = Collectives()
    transfer = Transfer("gather of head", failing(), 2, comm.guard)
    transfer.advance()
    with pytest.raises(IslandError, match=r"gather of head failed on rank 0 of 1: the peer is gone"):
        transfer.wait()
    for _ in range(2):
        with pytest.raises(IslandError, match=r"gather of head failed before: .*the peer is gone"):
            transfer.wait()
    transfer.abandon()  # nothing is left to wait for


def test_backends_failures_are_named() -> None:
    comm = Collectives()
    with (
        pytest.raises(IslandError, match=r"reduce of head failed on rank 0 of 1: boom\. A rank may"),
        comm.guard("reduce of head"),
    ):
        raise dist.DistBackendError("boom\nwith a stack")
