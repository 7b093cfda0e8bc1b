"""What the island's tests and benches run on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bench.island_ranks import RankFailed, choose_transport
from tests.island.rig import Member, Ranks, device, pool, transport


def test_nccl_takes_a_gpu_a_rank_where_there_are_gpus() -> None:
    assert choose_transport("", 0, 4)[:2] == ("gloo", 4)
    assert choose_transport("", 4, 4)[:2] == choose_transport("", 8, 4)[:2] == ("nccl", 4)
    few = choose_transport("", 1, 4)
    assert few[:2] == ("nccl", 1) and "one rank on each of 1 GPUs: 4 ranks need as many" in few.reason
    assert choose_transport("gloo", 8, 4)[:2] == ("gloo", 4)
    assert choose_transport("nccl", 2, 2)[:2] == ("nccl", 2)
    assert few.device.type == "cuda" and choose_transport("gloo", 1, 4).device.type == "cpu"
    with pytest.raises(ValueError, match="nccl needs a GPU for each rank"):
        choose_transport("nccl", 0, 4)
    with pytest.raises(ValueError, match="'mpi' is no backend of a world"):
        choose_transport("mpi", 8, 4)


def test_the_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("ATOLL_ISLAND_BACKEND", raising=False)
    assert transport()[:2] == ("nccl", 2) and device().type == "cuda"
    monkeypatch.setenv("ATOLL_ISLAND_BACKEND", "gloo")
    assert transport()[:2] == ("gloo", 4) and device().type == "cpu"


def test_work_for_more_ranks_than_there_are_is_skipped_with_the_reason() -> None:
    ranks = Ranks.__new__(Ranks)  # without processes: none may be needed to say so
    ranks.transport = choose_transport("", 1, 4)
    ranks.size = ranks.transport.ranks
    with pytest.raises(pytest.skip.Exception, match="2 ranks: nccl with one rank on each of 1 GPUs"):
        ranks.run(seat, 2)


def seat(member: Member) -> tuple[str, int, torch.Tensor]:
    one = torch.ones(2, device=device())
    assert one.device == member.device or one.device.type == "cpu"
    dist.all_reduce(one, group=member.group)
    assert member.mesh.device_type == member.device.type
    return str(dist.get_backend(member.group)), member.rank, one


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_compute_where_their_backend_is(ranks: int) -> None:
    answers = pool().run(seat, ranks)
    assert [answer[:2] for answer in answers] == [(transport().backend, rank) for rank in range(ranks)]
    assert all(answer[2].tolist() == [ranks] * 2 and answer[2].device.type == "cpu" for answer in answers)


def old_name(member: Member) -> None:
    full, part = torch.zeros(member.ranks, device=member.device), torch.ones(1, device=member.device)
    dist.all_gather_into_tensor(full, part, group=member.group)


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="before torch 2.13 it was the name")
def test_old_names_of_collectives_are_errors_here() -> None:
    ranks = Ranks(1)
    with pytest.raises(RankFailed, match=r"(?s)old_name failed on rank 0 of 1: .*FutureWarning"):
        ranks.run(old_name, 1)
    assert not ranks.alive
