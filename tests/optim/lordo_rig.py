"""One matrix with made-up gradients, trained by the product as the reference trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from optim.aggregate import ReducerMemory
from optim.lordo.basis import compute_basis
from optim.lordo.optimizer import LoRDO
from optim.lordo.reference import F64, Gradient, Settings
from optim.reduce import reduce_payloads
from optim.round_optimizer import RoundOptimizer


class Matrix(nn.Module):
    """A model of one matrix, called ``weight``."""

    def __init__(self, weight: F64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))


def start(rows: int, columns: int, seed: int = 0) -> F64:
    """Weights of magnitude 1, exact in fp32."""
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32).astype(np.float64)


def quadratic(rows: int, columns: int, *, noise: float = 0.3, workers: int = 100) -> Gradient:
    """Gradient of ``|A (W - T) B|^2 / 2``, plus noise by worker (modulo ``workers``) and step."""
    rng = np.random.default_rng(7)
    curve = np.diag(np.arange(1.0, rows + 1) ** -1.0)
    other = np.diag(np.arange(1.0, columns + 1) ** -0.5)
    target = rng.standard_normal((rows, columns))

    def gradient(worker: int, weight: F64, step: int) -> F64:
        own = np.random.default_rng((worker % workers, step))
        return curve @ (weight - target) @ other + noise * own.standard_normal((rows, columns))

    return gradient


def transposed(gradient: Gradient) -> Gradient:
    """The same problem for the transposed weights."""
    return lambda worker, weight, step: gradient(worker, weight.T, step).T


def warm_basis(matrix: F64, rank: int, previous: F64 | None) -> F64:
    """The product's basis, for the reference."""
    old = None if previous is None else previous.astype(np.float32)
    return compute_basis(matrix.astype(np.float32), rank, old).astype(np.float64)


def build(settings: Settings, weight: F64, **options: object) -> LoRDO:
    """A node of the product with the reference's settings; ``options`` go to :class:`LoRDO`."""
    choices = {
        "rank": settings.rank,
        "local_steps": settings.local_steps,
        "betas": settings.betas,
        "eps": settings.eps,
        "omega": settings.omega,
        "mu": settings.mu,
        "weight_decay": settings.weight_decay,
        "projection_feedback": settings.error_feedback,
        **options,
    }
    return LoRDO(Matrix(weight), settings.lr, **choices)  # type: ignore[arg-type]


@dataclass
class Round:
    """Copies of what all nodes share after a round, and the live weights of each just before."""

    shared: dict[str, Tensor]
    ends: list[Tensor]

    def state(self, key: str) -> F64:
        return self.shared[f"optimizer/weight/{key}"].double().numpy()


def train(
    nodes: Sequence[RoundOptimizer],
    gradient: Gradient,
    rounds: int,
    watch: Callable[[int], None] | None = None,
) -> list[Round]:
    """Train all nodes, a contribution each in every round; asserts that they stay bit-identical."""
    memory, history, micro_step = ReducerMemory(), [], 0
    for index in range(rounds):
        table = nodes[0].tables.of(index)
        payloads, ends = [], []
        for worker, node in enumerate(nodes):
            (parameter,) = (p for group in node.param_groups for p in group["params"])
            for step in range(node.micro_steps(index)):
                value = gradient(worker, parameter.detach().double().numpy(), micro_step + step)
                parameter.grad = torch.tensor(value, dtype=torch.float32)
                assert node.local_step(index, step)
                if watch is not None:
                    watch(micro_step + step)
            ends.append(parameter.detach().clone())
            payloads.append(torch.empty(table.nbytes, dtype=torch.uint8))
            assert node.propose(index, payloads[-1])
        micro_step += nodes[0].micro_steps(index)
        result = reduce_payloads(table, payloads, round_index=index, memory=memory)
        for node in nodes:
            node.apply(index, result)
        shared = {key: value.clone() for key, value in nodes[0].shared_tensors().items()}
        for node in nodes[1:]:
            others = node.shared_tensors()
            assert others.keys() == shared.keys()
            assert all(torch.equal(shared[key], others[key]) for key in shared)
        history.append(Round(shared, ends))
    return history
