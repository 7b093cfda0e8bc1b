"""The least that a method with local steps can be: SGD by oneself, then the mean of what it has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from optim.round_optimizer import RoundOptimizer
from protos.buckets import Bucket, BucketTable, TableSchedule
from tests.node.tiny import Node, TinyModel, run_file

RATE = 0.25


class LocalSgd(RoundOptimizer):
    """K steps with momentum 0.5; the shared parameters lie beside the model's.

    Args:
        model: trained.
        steps: K.
        send_after: of them, before the proposal.
        mix: share of the agreed parameters in those it goes on with.

    Attributes:
        calls: what was called, with the learning rate of that moment.
    """

    def __init__(self, model: nn.Module, steps: int, *, send_after: int = 0, mix: float = 1.0) -> None:
        self._named = dict(model.named_parameters())
        super().__init__([{"params": list(self._named.values()), "lr": RATE}])
        self._steps, self._send_after, self._mix = steps, send_after or steps, mix
        bucket = Bucket.of("all", "mean", [(name, tuple(p.shape)) for name, p in self._named.items()])
        self.tables = self.lane = TableSchedule((BucketTable((bucket,)),))
        self._members = {member.name: member for member in bucket.members}
        self._anchor = {name: p.detach().clone() for name, p in self._named.items()}
        self._momentum = {name: torch.zeros_like(p) for name, p in self._named.items()}
        self._made = self._left_out = 0
        self.calls: list[tuple[str, int, float]] = []

    def _call(self, name: str, number: int) -> float:
        rate: float = self.param_groups[0]["lr"]
        self.calls.append((name, number, rate))
        return rate

    def micro_steps(self, round_index: int) -> int:
        return self._steps

    def send_after(self, round_index: int) -> int:
        return self._send_after

    @torch.no_grad()
    def local_step(self, round_index: int, micro_step: int) -> bool:
        rate = self._call("step", micro_step)
        if not all(p.grad is not None and bool(p.grad.isfinite().all()) for p in self._named.values()):
            self._left_out += 1
            return False
        self._made += 1
        for name, parameter in self._named.items():
            self._momentum[name].mul_(0.5).add_(parameter.grad)
            parameter.sub_(self._momentum[name] * rate)
        return True

    @torch.no_grad()
    def propose(self, round_index: int, out: Tensor) -> bool:
        self._call("propose", round_index)
        if self._left_out and not self._made:
            return False
        out.zero_()
        for name, parameter in self._named.items():
            change = (self._anchor[name] - parameter).view(-1)
            if not change.isfinite().all():
                return False
            start = 4 * self._members[name].start
            out[start : start + 4 * change.numel()] = change.view(torch.uint8)
        return True

    @torch.no_grad()
    def apply(self, round_index: int, payload: Tensor | None, *, counted: bool = True) -> None:
        self._call("counted" if counted else "apply", round_index)
        self._made = self._left_out = 0
        for name, parameter in self._named.items():
            if payload is not None:
                start, count = self._members[name].start, parameter.numel()
                change = payload.view(torch.float32)[start : start + count]
                self._anchor[name].sub_(change.view(parameter.shape))
            own = parameter * (1.0 - self._mix) if self._mix < 1.0 else 0.0
            parameter.copy_(self._anchor[name] * self._mix + own)

    def shared_tensors(self) -> dict[str, Tensor]:
        return dict(self._anchor)

    def local_tensors(self) -> dict[str, Tensor]:
        tensors = {f"optimizer/{name}/momentum": tensor for name, tensor in self._momentum.items()}
        if self._mix < 1.0:
            tensors |= {f"optimizer/{name}/value": p.detach() for name, p in self._named.items()}
        return tensors

    def prepare_load(self) -> None:
        self._call("prepare_load", 0)

    @torch.no_grad()
    def loaded(self) -> None:
        self._call("loaded", 0)
        for name, parameter in self._named.items():
            parameter.copy_(self._anchor[name])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        own = {name: parameter.detach().clone() for name, parameter in self._named.items()}
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(self._anchor[name])
        yield
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(own[name])


def local_node(
    rounds: int = 5,
    *,
    steps: int = 4,
    model: TinyModel | None = None,
    exchange: Any = None,
    **options: Any,
) -> Node:
    """A node whose optimizer is :class:`LocalSgd`."""
    own = {key: options.pop(key) for key in ("send_after", "mix") if key in options}
    run = run_file(rounds, settings={"schedule": "linear", "warmup": 0}, **options.pop("run", {}))
    model = model or TinyModel()
    return Node(run, exchange, model=model, optimizer=LocalSgd(model, steps, **own), **options)


def optimizer_of(node: Node) -> LocalSgd:
    assert isinstance(node.optimizer, LocalSgd)
    return node.optimizer
