"""The full-precision baselines, and the mean rules of the voting methods."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from optim.averaged import DDPAdamW, DDPMuon
from optim.exchanged import ExchangedOptimizer
from optim.mean import Row, mean_into
from optim.muon import Muon
from optim.reduce import reduce_payloads
from optim.sign_muon import SignMuon


def mean_of(rows: list[Row], weights: list[int] | None = None) -> Row:
    out = rows[0].copy()
    mean_into(rows, weights or [1] * len(rows), out)
    return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(24, 8)
        self.up = nn.Linear(8, 20)
        self.down = nn.Linear(20, 8)
        self.experts = nn.Parameter(torch.randn(3, 8, 8) / 3)
        self.norm = nn.LayerNorm(8)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        x = x + self.down(torch.tanh(self.up(x)))
        for expert in self.experts:
            x = x + torch.tanh(x @ expert)
        logits = self.norm(x) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


MATRICES = ("up.weight", "down.weight", "experts")


def tokens_of(round_index: int, node: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * node + round_index)
    return torch.randint(0, 24, (4, 10), generator=generator)


def backward(model: Model, tokens: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model.loss(tokens).backward()


def assert_close(left: nn.Module, right: nn.Module, tolerance: float) -> None:
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        torch.testing.assert_close(
            a.detach(), b.detach(), atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_ddp_adamw_equals_torch(decay: float) -> None:
    ours, theirs = Model(), Model()
    optimizer = DDPAdamW(ours, lr=5e-3, embedding_lr=2e-3, vector_lr=1e-3, weight_decay=decay)
    named = dict(theirs.named_parameters())
    vectors = [p for p in named.values() if p.ndim == 1]
    groups = [
        {"params": [named[name] for name in MATRICES], "lr": 5e-3, "weight_decay": decay},
        {"params": [named["embedding.weight"]], "lr": 2e-3, "weight_decay": decay},
        {"params": vectors, "lr": 1e-3, "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for round_index in range(10):
        backward(ours, tokens_of(round_index))
        optimizer.step()
        backward(theirs, tokens_of(round_index))
        reference.step()
    assert_close(ours, theirs, 2e-5)


@pytest.mark.parametrize("scaling", ["match-rms", "unit-gain"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_ddp_muon_equals_muon_and_adamw(scaling, nesterov: bool) -> None:
    ours, theirs = Model(), Model()
    optimizer = DDPMuon(
        ours, 1e-2, ns_coefficients="quintic", scaling=scaling, weight_decay=0.1, nesterov=nesterov
    )
    named = dict(theirs.named_parameters())
    muon = Muon(
        [named[name] for name in MATRICES],
        lr=1e-2,
        weight_decay=0.1,
        nesterov=nesterov,
        adjust_lr_fn="match_rms_adamw" if scaling == "match-rms" else "original",
    )
    rest = [
        {"params": [named["embedding.weight"]], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(rest, lr=6e-3, betas=(0.9, 0.95), eps=1e-8)
    for round_index in range(6):
        backward(ours, tokens_of(round_index))
        optimizer.step()
        backward(theirs, tokens_of(round_index))
        muon.step()
        adamw.step()
    assert_close(ours, theirs, 2e-4)


@pytest.mark.parametrize("nodes", [1, 3, 6, 7])
@pytest.mark.parametrize("make", [DDPMuon, DDPAdamW])
def test_nodes_with_identical_batches_equal_one_node(make, nodes: int) -> None:
    alone, models = Model(), [Model() for _ in range(nodes)]
    single, optimizers = make(alone), [make(model) for model in models]
    for round_index in range(4):
        backward(alone, tokens_of(round_index))
        single.step()
        for model in models:
            backward(model, tokens_of(round_index))
        exchange(optimizers, round_index)
        for model in models:
            assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))


def exchange(optimizers: list[ExchangedOptimizer], round_index: int) -> None:
    payloads = []
    for optimizer in optimizers:
        payload = torch.empty(optimizer.table.nbytes, dtype=torch.uint8)
        assert optimizer.propose(round_index, payload)
        payloads.append(payload)
    result = reduce_payloads(optimizers[0].table, payloads, round_index=round_index)
    for optimizer in optimizers:
        optimizer.apply(round_index, result)


@pytest.mark.parametrize("make", [DDPMuon, DDPAdamW])
def test_nodes_equal_one_node_with_all_batches(make) -> None:
    whole, models = Model(), [Model() for _ in range(3)]
    single, optimizers = make(whole), [make(model) for model in models]
    for round_index in range(3):
        parts = [tokens_of(round_index, node) for node in range(3)]
        backward(whole, torch.cat(parts))
        single.step()
        for model, part in zip(models, parts, strict=True):
            backward(model, part)
        exchange(optimizers, round_index)
        shared = [optimizer.shared_tensors() for optimizer in optimizers]
        assert all(torch.equal(shared[0][name], other[name]) for other in shared for name in other)
    assert_close(whole, models[0], 1e-3)


def test_shared_state_of_averaged_methods() -> None:
    optimizer = DDPMuon(Model())
    assert optimizer.local_tensors() == {}
    names = {name for name in optimizer.shared_tensors() if name.startswith("optimizer/")}
    assert {f"optimizer/{name}/momentum_buffer" for name in MATRICES} < names
    assert "optimizer/norm.weight/exp_avg_sq" in names


def test_the_counter_of_adamw_counts_committed_rounds_only() -> None:
    model = Model()
    optimizer = SignMuon(model, vectors="mean")
    backward(model, tokens_of(0))
    optimizer.step()
    optimizer.apply(1, None)
    optimizer.step()
    assert optimizer.shared_tensors()["optimizer/norm.weight/step"].item() == 2


def test_means_are_exact_and_follow_the_order_of_voters() -> None:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(1000, generator=generator)
    values[::7] = -0.0  # keeps its sign
    row = values.numpy().view("u1")
    for count in range(1, 10):
        assert (mean_of([row] * count) == row).all()
    rows = [torch.randn(1000, generator=generator) for _ in range(5)]
    expected = torch.stack(rows).double().sum(0).div(5).float()
    got = torch.from_numpy(mean_of([r.numpy().view("u1") for r in rows])).view(torch.float32)
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-7)
    weighted = mean_of([r.numpy().view("u1") for r in rows[:2]], [3, 1])
    torch.testing.assert_close(
        torch.from_numpy(weighted).view(torch.float32), 0.75 * rows[0] + 0.25 * rows[1], atol=1e-6, rtol=1e-6
    )


def test_a_round_without_contributions_has_no_result() -> None:
    assert reduce_payloads(SignMuon(Model()).table, [], round_index=0) is None
