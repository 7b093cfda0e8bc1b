"""LoRDO in an ordinary training loop."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from optim.lordo.optimizer import LoRDO


class Model(nn.Module):
    """A next-token model with every kind of parameter, a convolution and a frozen layer among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(24, 12)
        self.mix = nn.Conv1d(12, 12, 1)
        self.up = nn.Linear(12, 30)
        self.frozen = nn.Linear(30, 30).requires_grad_(False)
        self.down = nn.Linear(30, 12)
        self.norm = nn.LayerNorm(12)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        x = x + self.mix(x.mT).mT
        x = x + self.down(self.frozen(torch.tanh(self.up(x))))
        logits = self.norm(x) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(step: int) -> Tensor:
    """Counting sequences: something that can be learned."""
    first = torch.randint(0, 24, (8, 1), generator=torch.Generator().manual_seed(step))
    return (first + 5 * torch.arange(9)) % 24


def train(model: Model, optimizer: LoRDO, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model.loss(tokens_of(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"direction": "muon"},
        {"basis": "local"},
        {"codec": "int4", "embedding_codec": "int8", "moments_codec": "bf16"},
        {"outer": "nesterov", "outer_lr": 0.7, "weight_decay": 0.01},
    ],
)
def test_it_trains(options: dict[str, object]) -> None:
    model = Model()
    frozen = model.frozen.weight.detach().clone()
    optimizer = LoRDO(model, 2e-2, rank=3, local_steps=4, **options)  # type: ignore[arg-type]
    losses = train(model, optimizer, range(optimizer.micro_steps(0) + 20 * 4))
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(model.frozen.weight, frozen)
    shared = optimizer.shared_tensors()
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    assert all(torch.equal(value, shared[name]) for name, value in trained)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit() -> None:
    def fresh() -> tuple[Model, LoRDO]:
        model = Model()
        options = {"codec": "2bit", "moments_codec": "bf16", "projection_feedback": True}
        return model, LoRDO(model, 2e-2, rank=3, local_steps=4, **options)  # type: ignore[arg-type]

    model, optimizer = fresh()
    train(model, optimizer, range(11))  # in the middle of a round
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    memory = optimizer.reduce.memory.arrays()  # type: ignore[attr-defined]
    train(model, optimizer, range(11, 26))

    resumed, again = fresh()
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    again.reduce.memory.load(memory)  # type: ignore[attr-defined]
    train(resumed, again, range(11, 26))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    ours, theirs = optimizer.shared_tensors(), again.shared_tensors()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_schedule_can_set_the_rates() -> None:
    model = Model()
    optimizer = LoRDO(model, 2e-2, embedding_lr=1e-3, vector_lr=2e-3, rank=3, local_steps=4)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"matrices": 2e-2, "embeddings": 1e-3, "vectors": 2e-3}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, range(9))
    schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_the_round_is_one_batch_and_then_k() -> None:
    model = Model()
    optimizer = LoRDO(model, rank=3, local_steps=4)
    rounds = []
    for step in range(13):
        train(model, optimizer, range(step, step + 1))
        rounds.append(optimizer.round_index)
    assert rounds == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert all(later >= earlier for earlier, later in pairwise(rounds))


def test_votes_cannot_carry_a_global_basis() -> None:
    with pytest.raises(ValueError, match="basis follows from the mean pseudo-gradient, and a vote has none"):
        LoRDO(Model(), codec="vote")
    LoRDO(Model(), codec="vote", basis="local")
