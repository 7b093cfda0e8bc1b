"""What the tests of local steps share: a small model, a task, and nodes in one memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optim.aggregate import ReducerMemory
from optim.local.layout import LocalGroup
from optim.local.local_steps import LocalSteps
from optim.methods import MethodConfig, build_method
from optim.reduce import reduce_payloads
from optim.roles import ParameterRole, by_role, classify
from optim.round_optimizer import RoundOptimizer
from protos.digests import state_digest

WORDS = 16


def model(seed: int = 0) -> nn.Sequential:
    """An embedding, three matrices (the last of them the head) and vectors."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(WORDS, 12),
        nn.Linear(12, 20),
        nn.LayerNorm(20),
        nn.Linear(20, 18, bias=False),
        nn.ReLU(),
        nn.Linear(18, 12),
        nn.Linear(12, WORDS, bias=False),
    )


def batch(index: int, size: int = 16) -> Tensor:
    """Words to read; the word to say is ``3 x + 1``."""
    return torch.randint(0, WORDS, (size,), generator=torch.Generator().manual_seed(index))


def backward(net: nn.Module, x: Tensor) -> float:
    """Fill in the gradients of one batch; returns the loss."""
    net.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(net(x), (3 * x + 1) % WORDS)
    loss.backward()
    return float(loss.detach())


def matrices(net: nn.Module) -> list[ParameterRole]:
    return list(by_role(classify(net), "matrix"))


def local_steps(net: nn.Module, make: Any, *, lr: float = 0.01, **options: Any) -> LocalSteps:
    """Local steps in which ``make(roles)`` is the local optimizer of every parameter; options of
    :class:`LocalGroup` and of :class:`LocalSteps` mixed."""
    group = {key: options.pop(key) for key in ("codec", "error_feedback", "weight_decay") if key in options}
    roles = classify(net)
    groups = [LocalGroup("all", make(roles), lr, **group)]
    return LocalSteps(groups, **{"local_steps": 4, **options})


class Node:
    """One of several simulated nodes."""

    def __init__(self, config: MethodConfig, index: int = 0, seed: int = 0) -> None:
        self.net = model(seed)
        self.optimizer: RoundOptimizer = build_method(config, self.net)
        self.index = index

    def train(self, round_index: int, first: int = 0, last: int | None = None) -> None:
        """The micro-steps ``first`` to ``last`` of a round (all before the proposal by default)."""
        steps = self.optimizer.send_after(round_index) if last is None else last
        for step in range(first, steps):
            backward(self.net, batch(1000 * round_index + 10 * step + self.index))
            assert self.optimizer.local_step(round_index, step)

    def propose(self, round_index: int) -> Tensor:
        payload = torch.full((self.optimizer.tables.of(round_index).nbytes,), 0xA5, dtype=torch.uint8)
        assert self.optimizer.propose(round_index, payload)
        return payload

    def digest(self) -> str:
        return state_digest(self.optimizer.shared_tensors())


def reduce(
    nodes: Sequence[Node], payloads: Sequence[Tensor], round_index: int, memory: ReducerMemory
) -> Tensor:
    result = reduce_payloads(
        nodes[0].optimizer.tables.of(round_index), payloads, round_index=round_index, memory=memory
    )
    assert result is not None
    return result


def run_round(nodes: Sequence[Node], round_index: int, memory: ReducerMemory) -> None:
    """A whole round of all nodes, with the steps that overlap the exchange."""
    payloads = []
    for node in nodes:
        node.train(round_index)
        payloads.append(node.propose(round_index))
    result = reduce(nodes, payloads, round_index, memory)
    for node in nodes:
        optimizer = node.optimizer
        node.train(round_index, optimizer.send_after(round_index), optimizer.micro_steps(round_index))
        optimizer.apply(round_index, result.clone(), counted=True)


def parameters(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def error(node: Node, name: str = "1.weight") -> Tensor:
    return node.optimizer.local_tensors()[f"optimizer/{name}/error"].clone()


def delta(node: Node, name: str = "1.weight") -> Tensor:
    return (node.optimizer.shared_tensors()[name] - node.net.get_parameter(name).detach()).view(-1)
