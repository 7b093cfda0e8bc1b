"""Nodes whose model is shared out to several ranks, each a thread of this process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn

from optim.methods import MethodConfig, build_method
from optim.round_optimizer import RoundOptimizer
from protos.buckets import TableSchedule

T = TypeVar("T")
DEADLINE = 60.0
WORDS = 16


class Votes:
    """What :attr:`RoundOptimizer.agree` is between threads: all ranks ask, and hear whether all said yes.

    Attributes:
        asked: how often each rank did.
    """

    def __init__(self, size: int) -> None:
        self.asked = [0] * size
        self._said = [True] * size
        self._barrier = threading.Barrier(size, timeout=DEADLINE)

    def of(self, rank: int) -> Callable[[bool], bool]:
        def agree(ok: bool) -> bool:
            self.asked[rank] += 1
            self._said[rank] = ok
            self._barrier.wait()
            agreed = all(self._said)
            self._barrier.wait()
            return agreed

        return agree


def model(seed: int = 0) -> nn.Sequential:
    """An embedding, five matrices of which some are alike, the head, and vectors."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(WORDS, 12),
        nn.Linear(12, 20),
        nn.LayerNorm(20),
        nn.Linear(20, 18, bias=False),
        nn.ReLU(),
        nn.Linear(18, 20, bias=False),
        nn.Linear(20, 12),
        nn.Linear(12, 12, bias=False),
        nn.Linear(12, WORDS, bias=False),
    )


def backward(net: nn.Module, seed: int) -> None:
    """Fill in the gradients of one batch."""
    words = torch.randint(0, WORDS, (16,), generator=torch.Generator().manual_seed(seed))
    net.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(net(words), (3 * words + 1) % WORDS).backward()


def owners(net: nn.Module, size: int) -> dict[str, int]:
    """A rank for every parameter: tensors of two dimensions in turn, all vectors together. The last of five
    ranks holds nothing."""
    used = size - 1 if size == 5 else size
    tensors = [name for name, parameter in net.named_parameters() if parameter.ndim > 1]
    found = {name: index * 7 % used for index, name in enumerate(tensors)}
    return {name: found.get(name, used - 1) for name, _ in net.named_parameters()}


def part_of(net: nn.Module, owner: dict[str, int], rank: int) -> nn.Module:
    """A copy in which parameters of other ranks have no storage."""
    part = copy.deepcopy(net)
    for name, parameter in list(part.named_parameters()):
        if owner[name] != rank:
            module, _, key = name.rpartition(".")
            setattr(part.get_submodule(module), key, nn.Parameter(parameter.detach().to("meta")))
    return part


class Whole:
    """A node of one rank."""

    def __init__(self, config: MethodConfig, size: int = 1) -> None:
        self.net = model()
        self.optimizer: RoundOptimizer = build_method(config, self.net)

    @property
    def tables(self) -> TableSchedule:
        return self.optimizer.tables

    def local_step(self, round_index: int, step: int) -> bool:
        return self.optimizer.local_step(round_index, step)

    def propose(self, round_index: int) -> Tensor | None:
        out = torch.full((self.optimizer.lane.of(round_index).nbytes,), 0xA5, dtype=torch.uint8)
        return out if self.optimizer.propose(round_index, out) else None

    def apply(self, round_index: int, result: Tensor | None, counted: bool) -> None:
        self.optimizer.apply(round_index, result, counted=counted)

    def tensors(self) -> dict[str, Tensor]:
        found = {**self.optimizer.shared_tensors(), **self.optimizer.local_tensors()}
        found |= {f"live/{name}": parameter.detach() for name, parameter in self.net.named_parameters()}
        return {name: tensor for name, tensor in found.items() if not tensor.is_meta}


class Island:
    """A node of several ranks. The gradients of each are those that one rank would have."""

    def __init__(self, config: MethodConfig, size: int) -> None:
        self.net = model()
        self.size = size
        owner = owners(self.net, size)
        self.parts = [part_of(self.net, owner, rank) for rank in range(size)]
        self.votes = Votes(size)
        self.ranks: list[RoundOptimizer] = []
        for rank, part in enumerate(self.parts):
            optimizer = build_method(config, part)
            optimizer.agree = self.votes.of(rank)
            self.ranks.append(optimizer)
        self._pool = ThreadPoolExecutor(size)

    @property
    def tables(self) -> TableSchedule:
        return self.ranks[0].tables

    def on_all(self, call: Callable[[int], T]) -> list[T]:
        return list(self._pool.map(call, range(self.size), timeout=DEADLINE))

    def hand_out(self) -> None:
        """Give every rank the gradients of what it holds."""
        whole = dict(self.net.named_parameters())
        for part in self.parts:
            for name, parameter in part.named_parameters():
                parameter.grad = None if parameter.is_meta else whole[name].grad.clone()

    def hand_in(self) -> None:
        """Put the ranks' parameters together in the whole model, for the next batch."""
        with torch.no_grad():
            for part in self.parts:
                for name, parameter in part.named_parameters():
                    if not parameter.is_meta:
                        self.net.get_parameter(name).copy_(parameter)

    def local_step(self, round_index: int, step: int) -> bool:
        self.hand_out()
        (answer,) = set(self.on_all(lambda rank: self.ranks[rank].local_step(round_index, step)))
        self.hand_in()
        return answer

    def propose(self, round_index: int) -> Tensor | None:
        tables = [optimizer.lane.of(round_index) for optimizer in self.ranks]
        outs = [torch.full((table.nbytes,), 0xA5, dtype=torch.uint8) for table in tables]
        (answer,) = set(self.on_all(lambda rank: self.ranks[rank].propose(round_index, outs[rank])))
        if not answer:
            return None
        whole = self.tables.of(round_index)
        joined = torch.empty(whole.nbytes, dtype=torch.uint8)
        joined.copy_(torch.cat(self._joined(round_index, outs, "offsets", "nbytes")))
        return joined

    def _joined(self, round_index: int, outs: Sequence[Tensor], offsets: str, size: str) -> list[Tensor]:
        pieces: dict[str, Tensor] = {}
        for optimizer, out in zip(self.ranks, outs, strict=True):
            table = optimizer.lane.of(round_index)
            for bucket, start in zip(table.buckets, getattr(table, offsets), strict=True):
                assert bucket.name not in pieces, "two lanes carry one bucket"
                pieces[bucket.name] = out[start : start + getattr(bucket, size)]
        return [pieces[bucket.name] for bucket in self.tables.of(round_index).buckets]

    def lanes(self, round_index: int, whole: Tensor, *, result: bool) -> list[Tensor]:
        """A contribution or a result, cut for the ranks."""
        table = self.tables.of(round_index)
        offsets, size = (table.result_offsets, "result_nbytes") if result else (table.offsets, "nbytes")
        pieces = {
            bucket.name: whole[start : start + getattr(bucket, size)]
            for bucket, start in zip(table.buckets, offsets, strict=True)
        }
        empty = torch.empty(0, dtype=torch.uint8)
        return [
            torch.cat([empty, *(pieces[bucket.name] for bucket in optimizer.lane.of(round_index).buckets)])
            for optimizer in self.ranks
        ]

    def apply(self, round_index: int, result: Tensor | None, counted: bool) -> None:
        parts = [None] * self.size if result is None else self.lanes(round_index, result, result=True)
        self.on_all(lambda rank: self.ranks[rank].apply(round_index, parts[rank], counted=counted))
        self.hand_in()

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for optimizer in self.ranks:
            own = {**optimizer.shared_tensors(), **optimizer.local_tensors()}
            assert not own.keys() & found.keys(), "two ranks keep one tensor"
            found |= own
        return found | {f"live/{name}": p.detach() for name, p in self.net.named_parameters()}

    def close(self) -> None:
        self._pool.shutdown()
