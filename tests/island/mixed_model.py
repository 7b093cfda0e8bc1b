"""A model with matrices of every kind, matrix optimizers for it, and its training on one rank of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from node.island import CommPolicy, fully_shard
from node.island.optimizers import IslandOptimizer, PolarSteps
from optim.muon import Muon
from tests.island.rig import Member, device

VOCAB, WIDTH, EXPERTS = 41, 12, 3


class Mixed(nn.Module):
    """An embedding with a prime vocabulary, a fused and a plain matrix, a stack of experts, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8) * 0.3)
        self.down = nn.Linear(8, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = self.norm(x + self.o(torch.sigmoid(q * k) * v))
        which = tokens % EXPERTS
        for number in range(EXPERTS):
            part = self.down(F.silu(x @ self.experts[number]))
            x = x + part * (which == number).unsqueeze(-1).to(x.dtype)
        return self.head(x)  # type: ignore[no-any-return]


BLOCKS = {"qkv.weight": 3}


class Shampoo(torch.optim.Optimizer):
    """Gupta et al., arXiv 1802.09568, for matrices, with roots by eigenvalues in every step."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state["factors"] = [
                        torch.eye(size, dtype=parameter.dtype, device=parameter.device) * 1e-4
                        for size in parameter.shape
                    ]
                left, right = state["factors"]
                left.add_(gradient @ gradient.T)
                right.add_(gradient.T @ gradient)
                update = self.root(left) @ gradient @ self.root(right)
                parameter.sub_(update, alpha=group["lr"])

    @staticmethod
    def root(matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T


class Soap(torch.optim.Optimizer):
    """Vyas et al., arXiv 2409.11321: Adam in the eigenbasis of Shampoo's factors, every second step."""

    def __init__(self, params: Any, lr: float = 3e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                rows, columns = parameter.shape
                if not state:
                    state["left"] = gradient.new_zeros(rows, rows)
                    state["right"] = gradient.new_zeros(columns, columns)
                    state["mean"], state["square"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
                    state["step"] = 0
                state["left"].lerp_(gradient @ gradient.T, 0.1)
                state["right"].lerp_(gradient.T @ gradient, 0.1)
                if state["step"] % 2 == 0:
                    # eigh's lie column by column, and a checkpoint gives everything back row by row: on some
                    # processors a product of the same numbers has other last bits then.
                    state["bases"] = tuple(
                        torch.linalg.eigh(state[key])[1].contiguous() for key in ("left", "right")
                    )
                state["step"] += 1
                left, right = state["bases"]
                rotated = left.T @ gradient @ right
                state["mean"].lerp_(gradient, 0.1)
                state["square"].lerp_(rotated * rotated, 0.1)
                update = (left.T @ state["mean"] @ right) / (state["square"].sqrt() + 1e-6)
                parameter.sub_(left @ update @ right.T, alpha=group["lr"])


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def package(name: str, groups: Any) -> torch.optim.Optimizer:
    import pytorch_optimizer

    options: dict[str, Any] = {"SOAP": {"precondition_frequency": 2}}.get(name, {})
    found: torch.optim.Optimizer = getattr(pytorch_optimizer, name)(groups, lr=3e-3, **options)
    return found


def matrix_rule(name: str) -> Any:
    rules: dict[str, Any] = {
        "adamw": None,
        "torch-muon": lambda groups: torch.optim.Muon(groups, lr=0.02),
        "muon": lambda groups: Muon(groups, lr=0.02),
        "sign-muon": lambda groups: PolarSteps(groups, 0.01, weight_decay=0.1, signed=True),
        "shampoo": Shampoo,
        "soap": Soap,
    }
    return rules[name] if name in rules else lambda groups: package(name, groups)


@dataclass(frozen=True)
class Case:
    rule: str
    placement: Any = "owner"
    granularity: Any = "row"
    hybrid: bool = False
    steps: int = 6
    ordered: bool = True
    dtype: torch.dtype = torch.float64


def fresh(dtype: torch.dtype = torch.float64) -> Mixed:
    torch.manual_seed(11)
    return Mixed().to(device(), dtype)


def parts(step: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (12, 8), generator=generator).to(device())
    return [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(ranks)]


def loss_of(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(part[0]).flatten(0, 1), part[1].flatten())


def sharded(case: Case, member: Member) -> tuple[Mixed, IslandOptimizer]:
    model = fresh(case.dtype)
    mesh = member.grid if case.hybrid else member.mesh
    fully_shard(
        model,
        mesh=mesh,
        placement=case.placement,
        granularity=case.granularity,
        comm_policy=CommPolicy(ordered=case.ordered),
    )
    return model, IslandOptimizer(model, matrix_rule(case.rule), adamw, blocks=BLOCKS)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(160, 128), nn.Linear(128, 160, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def wide() -> Wide:
    torch.manual_seed(2)
    return Wide().to(device())
