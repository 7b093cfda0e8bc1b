"""One model and one Muon, sharded in three ways: by our islands, and by stock FSDP2 with two ways to step.

Whatever does not belong to the sharding is the same code in all of them: the model and its weights, the
momentum, the Newton–Schulz iteration, and AdamW for embeddings, head and norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.island_baselines import Sharded, gathered, scattered
from bench.island_ranks import Member
from node.island import CommPolicy, Link, fully_shard
from node.island.optimizers import IslandOptimizer
from node.language import LanguageModel
from node.model import LlamaShape, build_model
from optim.muon import muon_scale
from optim.newton_schulz import newton_schulz, newton_schulz_reference

Method = Literal["owner", "fsdp2-gather", "fsdp2-a2a", "single"]
Orthogonalise = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]

METHODS: Final[tuple[Method, ...]] = ("owner", "fsdp2-gather", "fsdp2-a2a")
SEED: Final = 5


@dataclass(frozen=True)
class Size:
    """What is trained: the model's shape, and the sequences in one step of all ranks together."""

    shape: LlamaShape
    batch: int

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        assert self.shape.vocab is not None, "the shape names its vocabulary"
        return self.shape.vocab

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.model().parameters())

    def model(self) -> LanguageModel:
        """The whole model with its initial weights."""
        return build_model(self.shape, SEED, vocab=self.vocab)

    def tokens(self, step: int) -> Tensor:
        """``int64[batch, context + 1]``: every second token follows from the one before it."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, self.vocab, (self.batch, self.shape.context + 1), generator=generator)
        tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % self.vocab
        return tokens


def orthogonal_factor(matrix: Tensor) -> Tensor:
    """Five Newton–Schulz steps, in fp64 for an fp64 matrix."""
    if matrix.dtype == torch.float64:
        return newton_schulz_reference(matrix)
    return newton_schulz(matrix, dtype=torch.float32)


def alone(parameters: Sequence[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalise whole matrices where they are."""
    return [orthogonal_factor(direction) for direction in directions]


class Muon(torch.optim.Optimizer):
    """Muon whose matrices are orthogonalised by a function that is passed in.

    Args:
        parameters: matrices, or this rank's rows of them.
        orthogonalise: takes the parameters and their momenta (after Nesterov's step), and returns for each
            the rows of the orthogonal factor that this rank holds.
        shapes: of the whole matrices; None: the parameters'.
        lr, momentum, weight_decay: as usual.
    """

    def __init__(
        self,
        parameters: Any,
        orthogonalise: Orthogonalise,
        *,
        shapes: Sequence[tuple[int, ...]] | None = None,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self._orthogonalise, self._momentum, self._decay = orthogonalise, momentum, weight_decay
        self._shapes = shapes

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            parameters, directions = group["params"], []
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].mul_(self._momentum).add_(parameter.grad)
                directions.append(parameter.grad.add(momentum, alpha=self._momentum))
            factors = self._orthogonalise(parameters, directions)
            shapes = self._shapes or [tuple(parameter.shape) for parameter in parameters]
            for parameter, factor, (rows, columns) in zip(parameters, factors, shapes, strict=True):
                scale = muon_scale("original", rows, columns)
                parameter.mul_(1 - group["lr"] * self._decay).add_(factor, alpha=-group["lr"] * scale)


def adamw(groups: Any) -> torch.optim.AdamW:
    """For everything but the matrices."""
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)


class Trainer:
    """A model with its optimizers.

    Args:
        model: called with tokens, gives logits.
        optimizers: stepped one after the other.
        baseline: the stand-ins of FSDP2's parameters; None where optimizers have the parameters themselves.
    """

    def __init__(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], baseline: Sharded | None
    ) -> None:
        self.model, self._optimizers, self._baseline = model, optimizers, baseline

    def backward(self, tokens: Tensor) -> Tensor:
        """Forward and backward; the mean loss of ``tokens``."""
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> None:
        """The optimizers' step; gradients are forgotten after it."""
        if self._baseline is not None:
            self._baseline.take_gradients()
        for optimizer in self._optimizers:
            optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        if self._baseline is not None:
            self._baseline.forget_gradients()


def build(
    method: Method,
    size: Size,
    member: Member | None = None,
    *,
    bandwidth: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Trainer:
    """The trainer of ``method``.

    Args:
        method: ``"owner"`` is ours, ``"single"`` one process without any sharding.
        size: what is trained.
        member: this rank; None for ``"single"``.
        bandwidth: of a rank's link in bytes a second, for our choice of collectives; None: choose by timing.
        dtype: of weights and arithmetic.
    """
    model: nn.Module = size.model().to(dtype)
    if method == "single":
        named = list(model.named_parameters())
        matrices = [parameter for name, parameter in named if is_matrix(name, parameter)]
        rest = [parameter for name, parameter in named if not is_matrix(name, parameter)]
        return Trainer(model, [Muon(matrices, alone), adamw(rest)], None)
    assert member is not None, f"{method} needs ranks"
    layers = model.get_submodule("layers").children()
    if method == "owner":
        policy = CommPolicy(gather="measure") if bandwidth is None else CommPolicy(link=Link(bandwidth))
        for layer in layers:
            fully_shard(layer, mesh=member.mesh, comm_policy=policy)
        fully_shard(model, mesh=member.mesh, comm_policy=policy)
        return Trainer(model, [IslandOptimizer(model, lambda groups: Muon(groups, alone), adamw)], None)
    sharded = Sharded(model, list(layers), member, is_matrix)
    way = gathered if method == "fsdp2-gather" else scattered

    def orthogonalise(_: Sequence[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
        return way(sharded.matrices, directions, member.group, orthogonal_factor)

    shapes = [tuple(matrix.shape) for matrix in sharded.matrices]
    muon = Muon(sharded.local_matrices, orthogonalise, shapes=shapes)
    return Trainer(model, [muon, adamw(sharded.local_rest)], sharded)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon steps it: a matrix of a layer, not embedding or head."""
    return parameter.ndim == 2 and name.startswith("layers.")
