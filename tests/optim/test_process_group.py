"""The exchange over a process group: real processes on the loopback interface, gloo."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from optim.aggregate import ReducerMemory
from optim.averaged import DDPAdamW, DDPMuon
from optim.process_group import GroupReduceError, MajorityAllReduce, broadcast_shared_tensors
from optim.reduce import reduce_payloads
from optim.sign_muon import SignMuon
from tests.optim.aggregate_rig import contribution, mixed
from tests.waiting import free_port

DEADLINE = 120.0  # seconds for all processes of a test
ROUNDS = 4
WORLD = 3
CODED = ("int4", "lowrank:3")  # of alternating tables
METHODS = ("votes", "votes-and-means", "muon", "adamw")


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 10), nn.LayerNorm(10), nn.Linear(10, 5))


def backward(model: nn.Module, stream: int, round_index: int) -> None:
    generator = torch.Generator().manual_seed(100 * stream + round_index)
    model.zero_grad(set_to_none=True)
    inputs = torch.randn(16, 10, generator=generator)
    labels = torch.randint(0, 5, (16,), generator=generator)
    nn.functional.cross_entropy(model(inputs), labels).backward()


def optimizer_of(name: str, model: nn.Module):
    if name == "votes-and-means":
        return SignMuon(model, embeddings="mean", vectors="mean")
    return {"votes": SignMuon, "muon": DDPMuon, "adamw": DDPAdamW}[name](model)


def digest(tensors: dict[str, Tensor]) -> str:
    state = hashlib.sha256()
    for name, tensor in tensors.items():
        state.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return state.hexdigest()


def train(rank: int, world: int, group: dist.ProcessGroup | None) -> dict[str, list[str]]:
    """Train every method in every scenario; digests of the shared tensors after each round."""
    results: dict[str, list[str]] = {}
    for method in METHODS:
        for scenario in ("same", "own"):
            model = network(seed=rank)  # ranks start apart: the broadcast has to make them equal
            optimizer = optimizer_of(method, model)
            broadcast_shared_tensors(optimizer, group)
            optimizer.reduce = MajorityAllReduce(group, timeout=30.0)
            row = results[f"{method}/{scenario}"] = []
            for round_index in range(ROUNDS):
                backward(model, 0 if scenario == "same" else rank, round_index)
                if scenario == "own" and abstains(rank, world, round_index):
                    next(model.parameters()).grad[0, 0] = float("nan")  # one abstains, later all do
                optimizer.step()
                row.append(digest(optimizer.shared_tensors()))
    return results


def coded(rank: int, group: dist.ProcessGroup | None) -> list[str]:
    """Results of encoded means, bases, votes and exact means, round after round; the last rank abstains from
    the second."""
    reduce = MajorityAllReduce(group, timeout=30.0)
    results = []
    for round_index in range(ROUNDS):
        table = mixed(CODED[round_index % 2])
        payload = torch.from_numpy(contribution(10 * round_index + rank, table))
        silent = round_index == 1 and dist.get_rank(group) == dist.get_world_size(group) - 1
        result = reduce(None if silent else payload, round_index=round_index, table=table)
        assert result is not None
        results.append(hashlib.sha256(result.numpy().tobytes()).hexdigest())
    return [*results, ",".join(sorted(reduce.memory.arrays()))]


def disagree(rank: int, group: dist.ProcessGroup | None) -> list[str]:
    """Messages of what must be refused."""
    messages = []
    model = nn.Linear(4, 4 + rank)
    optimizer = SignMuon(model)
    reduce = MajorityAllReduce(group, timeout=30.0)
    payload = torch.zeros(optimizer.table.nbytes, dtype=torch.uint8)
    try:
        reduce(payload, round_index=0, table=optimizer.table)
    except GroupReduceError as error:
        messages.append(str(error))
    optimizer = SignMuon(nn.Linear(4, 4))
    payload = torch.zeros(optimizer.table.nbytes, dtype=torch.uint8)
    try:
        reduce(payload, round_index=5 + rank, table=optimizer.table)
    except GroupReduceError as error:
        messages.append(str(error))
    if rank == 0:  # nobody else comes
        impatient = MajorityAllReduce(group, timeout=0.2)
        try:
            impatient(payload, round_index=9, table=optimizer.table)
        except GroupReduceError as error:
            messages.append(str(error))
    return messages


def entry(rank: int, port: int, out: str) -> None:
    os.environ["ATOLL_BITS"] = "numpy"  # quicker to start; this process may use numba, the bits are the same
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    pair, late_pair = dist.new_group([0, 1]), dist.new_group([1, 2])
    results: dict[str, object] = {"three": train(rank, 3, None), "coded": coded(rank, None)}
    if rank > 0:
        results["coded pair"] = coded(rank, late_pair)
    if rank < 2:
        results["two"] = train(rank, 2, pair)
        results["messages"] = disagree(rank, pair)
    torch.save(results, f"{out}/{rank}")
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{other}" for other in range(WORLD)], timedelta(seconds=60))  # rank 0 holds the store
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of three processes saw."""
    out = tmp_path_factory.mktemp("ranks")
    port = free_port()
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=entry, args=(rank, port, os.fspath(out)), daemon=True) for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    try:
        pending = {process.sentinel: process for process in processes}
        while pending:
            ready = wait(list(pending), timeout=DEADLINE)
            assert ready, f"{len(pending)} of {WORLD} processes did not end within {DEADLINE:g} s"
            for sentinel in ready:
                process = pending.pop(int(sentinel))  # type: ignore[call-overload]
                process.join()
                assert process.exitcode == 0
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [torch.load(out / str(rank), weights_only=True) for rank in range(WORLD)]


def abstains(rank: int, world: int, round_index: int) -> bool:
    return (round_index == 1 and rank == world - 1) or round_index == 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [2, 3])
def test_identical_batches_equal_one_process(results: list[dict], world: int, method: str) -> None:
    rows = [result["three" if world == 3 else "two"][f"{method}/same"] for result in results[:world]]
    model = network(seed=0)
    alone = optimizer_of(method, model)
    expected = []
    for round_index in range(ROUNDS):
        backward(model, 0, round_index)
        alone.step()
        expected.append(digest(alone.shared_tensors()))
    assert rows == [expected] * world


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [2, 3])
def test_own_batches_equal_simulated_nodes(results: list[dict], world: int, method: str) -> None:
    rows = [result["three" if world == 3 else "two"][f"{method}/own"] for result in results[:world]]
    models = [network(seed=0) for _ in range(world)]
    optimizers = [optimizer_of(method, model) for model in models]
    expected = []
    for round_index in range(ROUNDS):
        payloads = []
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, rank, round_index)
            payload = torch.empty(optimizer.table.nbytes, dtype=torch.uint8)
            if not abstains(rank, world, round_index):
                assert optimizer.propose(round_index, payload)
                payloads.append(payload)
        result = reduce_payloads(optimizers[0].table, payloads, round_index=round_index)
        for optimizer in optimizers:
            optimizer.apply(round_index, result)
        expected.append(digest(optimizers[0].shared_tensors()))
    assert rows == [expected] * world
    assert expected[2] == expected[3] and len(set(expected)) == 3  # nobody voted in the last round


def test_disagreement_and_absence_are_errors(results: list[dict]) -> None:
    first, second = results[0]["messages"], results[1]["messages"]
    assert "rank 1 has the bucket table" in first[0] and "same model and optimizer" in first[0]
    assert "rank 0 has the bucket table" in second[0]
    assert first[1] == "rank 1 is in round 6, this rank in round 5"
    assert second[1] == "rank 0 is in round 5, this rank in round 6"
    assert "the headers of round 9 failed or took longer than 0.2 s" in first[2]


@pytest.mark.parametrize(("scenario", "ranks"), [("coded", (0, 1, 2)), ("coded pair", (1, 2))])
def test_encoded_means_and_bases(results: list[dict], scenario: str, ranks: tuple[int, ...]) -> None:
    """All ranks hold the bytes that one reducer with a memory would send them."""
    memory = ReducerMemory()
    expected = []
    for round_index in range(ROUNDS):
        table = mixed(CODED[round_index % 2])
        payloads = [
            torch.from_numpy(contribution(10 * round_index + rank, table))
            for rank in ranks
            if not (round_index == 1 and rank == ranks[-1])
        ]
        result = reduce_payloads(table, payloads, round_index=round_index, memory=memory)
        expected.append(hashlib.sha256(result.numpy().tobytes()).hexdigest())
    rows = [results[rank][scenario] for rank in ranks]
    assert [row[:-1] for row in rows] == [expected] * len(ranks)
    assert rows[0][-1] == ",".join(sorted(memory.arrays()))
    assert [row[-1] for row in rows[1:]] == [""] * (len(ranks) - 1)  # only the first rank remembers
