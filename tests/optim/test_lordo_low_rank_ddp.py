"""The low-rank baseline with an exchange in every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from optim.aggregate import ReducerMemory
from optim.averaged import DDPAdamW
from optim.lordo.low_rank_ddp import LowRankDDP
from optim.lordo.reference import F64, Gradient, rotate
from optim.packs import PayloadError
from optim.reduce import reduce_payloads
from optim.roles import by_role, classify
from tests.optim.lordo_rig import Matrix, quadratic, start, train, transposed, warm_basis

BETAS = (0.908, 0.99)


def reference(
    gradient: Gradient,
    weight: F64,
    steps: int,
    *,
    rank: int,
    every: int,
    lr: float,
    omega: float = 1.0,
    workers: int = 1,
    decay: float = 0.0,
    ldadam: bool = False,
) -> F64:
    """GaLore's and LDAdam's loops in fp64, for a matrix that is not higher than wide."""
    (b1, b2), basis = BETAS, np.eye(len(weight), min(rank, len(weight)))
    u, v = np.zeros((basis.shape[1], weight.shape[1])), np.zeros((basis.shape[1], weight.shape[1]))
    error, previous = np.zeros_like(weight), None
    for t in range(steps):
        g = np.mean([gradient(worker, weight, t) for worker in range(workers)], axis=0)
        a, old, momentum = g + error, basis, basis @ u
        if ldadam and t:
            b = b1 * momentum / (1 - b1**t) + (1 - b1) * a
            basis = np.linalg.qr(b @ (b.T @ basis))[0]
        elif ldadam or t % every == 0:
            basis = previous = warm_basis(a, rank, previous)
        if t and basis is not old:
            u, v = rotate(u, v, basis.T @ old, t, BETAS)
        low = basis.T @ a
        if ldadam:
            error = a - basis @ low + b1 / (1 - b1) * (momentum - basis @ u)
        u, v = b1 * u + (1 - b1) * low, b2 * v + (1 - b2) * low * low
        u_hat, v_hat = u / (1 - b1 ** (t + 1)), v / (1 - b2 ** (t + 1))
        full = g / np.maximum(np.sqrt(v_hat.mean(axis=0)) + 1e-8, np.sqrt((g * g).mean(axis=0)) / 10)
        step = omega * (basis @ (u_hat / (np.sqrt(v_hat) + 1e-8))) + (1 - omega) * full
        weight = weight * (1 - lr * decay) - lr * step
    return weight


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 3},
        {"omega": 0.7},
        {"decay": 0.2},
        {"every": 1},
        {"rank": 99},
        {"ldadam": True},
        {"ldadam": True, "omega": 0.9, "workers": 2},
    ],
)
@pytest.mark.parametrize("tall", [False, True])
def test_equals_the_papers_loop_in_fp64(options: dict[str, Any], tall: bool) -> None:
    choices = {"rank": 3, "every": 4, "lr": 0.03, **options}
    weight, gradient = start(8, 13), quadratic(8, 13)
    wanted = reference(gradient, weight, 11, **choices)
    workers, every = choices.pop("workers", 1), choices.pop("every")
    choices["weight_decay"] = choices.pop("decay", 0.0)
    problem = transposed(gradient) if tall else gradient
    first = weight.T.copy() if tall else weight
    nodes = [LowRankDDP(Matrix(first), basis_every=every, **choices) for _ in range(workers)]
    end = train(nodes, problem, 11)[-1].shared["weight"].numpy()
    np.testing.assert_allclose(end.T if tall else end, wanted, atol=5e-5)
    assert np.abs(wanted - weight).max() > 0.1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(24, 8)
        self.up = nn.Linear(8, 20)
        self.down = nn.Linear(20, 8)
        self.norm = nn.LayerNorm(8)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        x = x + self.down(torch.tanh(self.up(x)))
        logits = self.norm(x) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def backward(model: Model, *, step: int, node: int = 0) -> None:
    generator = torch.Generator().manual_seed(1000 * node + step)
    model.zero_grad(set_to_none=True)
    model.loss(torch.randint(0, 24, (4, 10), generator=generator)).backward()


def run(make: Callable[[Model], LowRankDDP], nodes: int, rounds: int) -> list[tuple[Model, LowRankDDP]]:
    models = [Model() for _ in range(nodes)]
    pairs, memory = [(model, make(model)) for model in models], ReducerMemory()
    for index in range(rounds):
        table, payloads = pairs[0][1].tables.of(index), []
        for node, (model, optimizer) in enumerate(pairs):
            backward(model, step=index, node=node)
            payloads.append(torch.full((table.nbytes,), 255, dtype=torch.uint8))
            assert optimizer.propose(index, payloads[-1])
        result = reduce_payloads(table, payloads, round_index=index, memory=memory)
        for _, optimizer in pairs:
            optimizer.apply(index, result)
    return pairs


@pytest.mark.parametrize("options", [{}, {"omega": 0.8}, {"ldadam": True}])
def test_nodes_stay_bit_identical(options: dict[str, Any]) -> None:
    pairs = run(lambda model: LowRankDDP(model, rank=3, basis_every=3, **options), 3, 8)
    shared = [optimizer.shared_tensors() for _, optimizer in pairs]
    for other in shared[1:]:
        assert shared[0].keys() == other.keys()
        assert all(torch.equal(shared[0][key], other[key]) for key in other)
    assert not any(optimizer.local_tensors() for _, optimizer in pairs)


def test_what_is_no_matrix_takes_adamw() -> None:
    ((ours, _),) = run(lambda model: LowRankDDP(model, lr=0.0, embedding_lr=2e-3, vector_lr=1e-3), 1, 5)
    theirs = Model()
    adamw = DDPAdamW(theirs, lr=0.0, embedding_lr=2e-3, vector_lr=1e-3)
    for step in range(5):
        backward(theirs, step=step)
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def up(size: int) -> int:
    return -(-size // 64) * 64


def test_bytes_of_a_round_are_those_of_the_formula() -> None:
    rest = up(4 * 24 * 8) + up(4 * (20 + 8 + 8 + 8))
    whole, low, bases = 2 * up(4 * 160), 2 * up(4 * 3 * 20), 2 * up(4 * 3 * 8)
    plain = LowRankDDP(Model(), rank=3, basis_every=4)
    for index in range(9):
        table = plain.tables.of(index)
        refresh = index % 4 == 0
        assert table.nbytes == rest + (whole if refresh else low)
        assert table.result_nbytes == table.nbytes + (bases if refresh else 0)
    up_mean, _ = plain.tables.mean_nbytes
    assert up_mean == rest + (whole + 3 * low) / 4
    full = LowRankDDP(Model(), rank=3, basis_every=4, omega=0.9)
    assert [full.tables.of(index).nbytes for index in range(5)] == [rest + whole] * 5
    assert full.tables.of(1).result_nbytes == rest + whole
    ldadam = LowRankDDP(Model(), rank=3, ldadam=True)
    assert [ldadam.tables.of(index).result_nbytes for index in range(3)] == [rest + whole] * 3


def test_memory_is_what_the_text_says() -> None:
    model = Model()
    optimizer = LowRankDDP(model, rank=3)
    for role in by_role(classify(model), "matrix"):
        state = optimizer.state[role.parameter]
        assert sum(value.numel() for value in state.values() if value.ndim) == 2 * 3 * 20 + 3 * 8


def test_alone_in_a_loop_it_trains_and_resumes_bit_for_bit() -> None:
    def fresh() -> tuple[Model, LowRankDDP]:
        model = Model()
        return model, LowRankDDP(model, rank=3, basis_every=3, ldadam=True)

    def steps(model: Model, optimizer: LowRankDDP, indices: range) -> None:
        for step in indices:
            backward(model, step=step % 2)
            optimizer.step()

    model, optimizer = fresh()
    before = model.loss(torch.arange(24).view(2, 12)).item()
    steps(model, optimizer, range(7))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, range(7, 40))
    backward(model, step=0)
    assert model.loss(torch.arange(24).view(2, 12)).item() != before
    resumed, again = fresh()
    live = again.shared_tensors()["optimizer/up.weight/basis"]
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert live is again.shared_tensors()["optimizer/up.weight/basis"]  # loaded in place
    steps(resumed, again, range(7, 40))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    other = LowRankDDP(Model(), rank=2, ldadam=True)
    with pytest.raises(ValueError, match="has no basis of shape"):
        other.load_state_dict(saved[1])
    with pytest.raises(ValueError, match="other groups"):
        LowRankDDP(Matrix(start(3, 4))).load_state_dict(saved[1])


@pytest.mark.parametrize("rounds", [0, 1])
def test_what_is_not_finite_changes_nothing(rounds: int) -> None:
    ((model, optimizer),) = run(lambda model: LowRankDDP(model, rank=3, basis_every=2), 1, rounds)
    before = {key: value.clone() for key, value in optimizer.shared_tensors().items()}
    table = optimizer.tables.of(rounds)
    payload = torch.empty(table.nbytes, dtype=torch.uint8)
    backward(model, step=9)
    assert optimizer.propose(rounds, payload)
    bad = reduce_payloads(table, [payload], round_index=rounds, memory=ReducerMemory())
    assert bad is not None
    bad[-64:-60] = torch.tensor([0, 0, 0x80, 0x7F], dtype=torch.uint8)  # infinity
    with pytest.raises(PayloadError, match="not finite"):
        optimizer.apply(rounds, bad)
    with pytest.raises(PayloadError, match="bytes"):
        optimizer.apply(rounds, bad[:-64])
    with pytest.raises(PayloadError, match="uint8"):
        optimizer.propose(rounds, payload.view(torch.int8))
    assert model.up.weight.grad is not None
    model.up.weight.grad[0, 0] = float("nan")
    assert not optimizer.propose(rounds, payload)
    optimizer.apply(rounds, None)
    assert all(torch.equal(before[key], value) for key, value in optimizer.shared_tensors().items())
    assert optimizer.round_index == rounds + 1


def test_missing_gradients_count_as_zero() -> None:
    model = Model()
    optimizer = LowRankDDP(model, rank=3, basis_every=2)
    before = model.up.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step()
    assert torch.equal(model.up.weight, before)


def test_only_vectors_or_only_matrices() -> None:
    norm = nn.LayerNorm(5)
    optimizer = LowRankDDP(norm)
    assert len(optimizer.tables.tables) == 1
    norm(torch.randn(2, 5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(norm.weight, torch.ones(5))
    matrix = Matrix(start(4, 6))
    alone = LowRankDDP(matrix, rank=2)
    matrix.weight.grad = torch.ones(4, 6)
    alone.step()
    assert alone.round_index == 1 and not torch.equal(matrix.weight, Matrix(start(4, 6)).weight)
    with pytest.raises(ValueError, match="nothing to train"):
        LowRankDDP(nn.LayerNorm(3, elementwise_affine=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": -1}, "rank"),
        ({"basis_every": 0}, "basis_every"),
        ({"lr": -1.0}, "lr"),
        ({"omega": 2.0}, "omega"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowRankDDP(Model(), **options)
