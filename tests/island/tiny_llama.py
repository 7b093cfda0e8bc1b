"""A small decoder, and the same training of it twice: sharded over ranks, and whole in one process.

The reference goes through the parts of all ranks one after the other and adds their gradients up; each of
its steps is therefore the step that the ranks take together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from node.island import (
    CommPolicy,
    MixedPrecisionPolicy,
    Schedule,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    sharded_parameters,
)
from tests.island.rig import Member, device

VOCAB, WIDTH, HEADS, HIDDEN, CONTEXT, BATCH = 37, 16, 2, 24, 5, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.recompute = self.extra_now = False
        self.extra: nn.Linear | None = None

    def inner(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, length, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, WIDTH))
        x = x + self.down(F.silu(self.up(self.norm2(x))))
        return x + self.extra(x) if self.extra is not None and self.extra_now else x

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner(x)


class Llama(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.outer_checkpoint = self.twice = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in [*self.layers, *([self.layers[1]] if self.twice else [])]:
            x = checkpoint(block, x, use_reentrant=False) if self.outer_checkpoint else block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """What is switched on in a training; see :func:`build` and :func:`train`."""

    tied: bool = False
    tied_blocks: bool = False
    frozen: bool = False
    unused: bool = False
    conditional: bool = False
    inner_checkpoint: bool = False
    outer_checkpoint: bool = False
    twice: bool = False
    accumulate: int = 1
    no_sync: bool = False
    clip: float | None = None
    hybrid: bool = False
    compiled: bool = False
    dtype: torch.dtype = torch.float64
    optimizer: str = "muon"
    # of the sharded run only
    placement: Any = "owner"
    granularity: Any = "row"
    by_block: bool = False
    reshard: bool | None = None
    comm: CommPolicy = field(default_factory=CommPolicy)
    schedule: Schedule = field(default_factory=Schedule)
    precision: MixedPrecisionPolicy | None = None


def build(case: Case) -> Llama:
    torch.manual_seed(3)
    model = Llama().to(device(), case.dtype)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.1)
    if case.tied:
        model.head.weight = model.embed.weight
    if case.tied_blocks:
        model.layers[2].q.weight = model.layers[0].q.weight
    if case.frozen:
        for name, parameter in model.named_parameters():
            if ".q." in name or "layers.0" in name or "embed" in name:
                parameter.requires_grad_(False)
    if case.unused or case.conditional:
        model.layers[1].extra = nn.Linear(WIDTH, WIDTH).to(device(), case.dtype)
    for block in model.layers:
        block.recompute = case.inner_checkpoint
    model.outer_checkpoint, model.twice = case.outer_checkpoint, case.twice
    return model


def shard(model: Llama, case: Case, member: Member) -> None:
    options: dict[str, Any] = {
        "mesh": member.grid if case.hybrid else member.mesh,
        "placement": case.placement,
        "granularity": case.granularity,
        "reshard_after_forward": case.reshard,
        "comm_policy": case.comm,
        "schedule": case.schedule,
        "mp_policy": case.precision,
    }
    if case.by_block:
        for block in model.layers:
            fully_shard(block, **options)
        fully_shard(model, **options)
    else:
        fully_shard(model, units=model.layers, **options)


def optimizers(case: Case, named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Muon for whole matrices but embedding and head, AdamW for the rest; or one of them for all."""
    named = [(name, parameter) for name, parameter in named if parameter.requires_grad and parameter.numel()]
    matrices = [
        p
        for n, p in named
        if p.ndim == 2 and "embed" not in n and "head" not in n and case.optimizer == "muon"
    ]
    rest = [p for _, p in named if all(p is not matrix for matrix in matrices)]
    found: list[torch.optim.Optimizer] = []
    if matrices and hasattr(torch.optim, "Muon"):
        found.append(torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1))
    elif matrices:  # before torch 2.9
        found.append(torch.optim.SGD(matrices, lr=0.02, momentum=0.95, nesterov=True))
    if rest and case.optimizer == "sgd":
        found.append(torch.optim.SGD(rest, lr=0.1, momentum=0.9))
    elif rest:
        found.append(torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1))
    return found


def batch(step: int) -> Tensor:
    tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % VOCAB
    return tokens.to(device())


def loss_of(model: nn.Module, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1).to(dtype)
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


def train(
    case: Case,
    steps: int,
    ranks: int,
    member: Member | None = None,
    after_step: Callable[[int, Llama], None] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of every step and rank, and the final weights, of ``ranks`` ranks; ``member`` is this one, or
    None for the reference."""
    model = build(case)
    named = list(model.named_parameters())
    if member is not None:
        shard(model, case, member)
        named = [(entry.name, entry.parameter) for entry in sharded_parameters(model)]
    if case.compiled:
        for block in model.layers:
            block.inner = torch.compile(block.inner, backend="aot_eager", fullgraph=True)
    steppers, losses = optimizers(case, named), []
    for step in range(steps):
        totals = torch.zeros(ranks, dtype=torch.float64, device=device())
        parts = batch(step).chunk(ranks)
        for rank in range(ranks) if member is None else [member.rank]:
            if case.conditional:
                model.layers[1].extra_now = (step + rank) % 2 == 0
            pieces = parts[rank].chunk(case.accumulate)
            for number, tokens in enumerate(pieces):
                hold = case.no_sync and member is not None and number < len(pieces) - 1
                with model.no_sync() if hold else nullcontext():  # type: ignore[operator]
                    loss = loss_of(model, tokens, case.dtype) / len(pieces)
                    loss.backward()
                totals[rank] += loss.detach()
        if member is None:
            for _, parameter in named:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / ranks)
        else:
            dist.all_reduce(totals, group=member.group)
        if case.clip is not None and member is not None:
            clip_grad_norm_(model, case.clip)
        elif case.clip is not None:
            nn.utils.clip_grad_norm_([p for _, p in named], case.clip)
        if after_step is not None:
            after_step(step, model)
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
        losses += totals.tolist()
    state = model.state_dict() if member is None else full_state_dict(model, rank=0)
    return losses, {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def sharded(member: Member, case: Case, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """:func:`train` as the work of a rank."""
    return train(case, steps, member.ranks, member)


def difference(
    one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]
) -> float:
    """The largest difference of two trainings, in losses and weights."""
    assert one[1].keys() == other[1].keys()
    losses = max(abs(a - b) for a, b in zip(one[0], other[0], strict=True))
    return max(losses, *((one[1][name] - other[1][name]).abs().max().item() for name in one[1]))
