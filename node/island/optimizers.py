"""Optimizers on what a rank holds: unchanged ones, on plain tensors, one rank a matrix.

:class:`IslandOptimizer` hands whole matrices to a matrix optimizer (``torch.optim.Muon``, Shampoo, SOAP, …)
on the rank that :func:`~node.island.routing.route` names, and pieces of the rest to an elementwise one
(AdamW). Its step sends nothing unless the layout divides matrices: those, and only those, are gathered to
their rank before the step and sent back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Any, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from node.island.layout import LayoutError
from node.island.param_group import ShardedParameter
from node.island.routing import Matrix, Route, route
from node.island.state import sharded_parameters
from node.island.step_exchange import Exchange
from optim.local.polar import MuonInner
from optim.roles import ParameterRole, Role

Groups = list[dict[str, Any]]
Build = Callable[[Groups], Optimizer]


@dataclass(frozen=True)
class Slot:
    """A tensor that an optimizer of this rank steps, as a checkpoint names it.

    Attributes:
        name: of the parameter, or of the matrix in it.
        shape: of the whole thing of that name.
        start: first element of it that ``parameter`` has (all that follow are contiguous).
        parameter: the optimizer's.
        optimizer: whose state it has.
        group: of the optimizer's ``param_groups``.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    parameter: Tensor
    optimizer: Optimizer
    group: dict[str, Any]


class IslandOptimizer(Optimizer):
    """A matrix optimizer and an elementwise one on the parameters of a sharded model.

    Both are built on every rank, of parameters that may be none, so that a schedule of learning rates sees
    the same groups everywhere. ``matrix`` gets one group of two-dimensional parameters with the further keys
    ``role`` and ``fan_in`` (a list: inputs of one output of each); ``rest`` gets two groups, whose ``role``
    is ``embedding`` and ``vector``: ``lambda groups: torch.optim.AdamW(groups, lr=3e-3)``.

    Args:
        model: sharded; ignored parameters are left out.
        matrix: makes the matrix optimizer; None: matrices go to ``rest``, as a third group.
        rest: makes the elementwise optimizer.
        overrides, blocks, step_owners: see :func:`~node.island.routing.route`; the step owners of the plan
            that the model was sharded with are taken as they are.

    Attributes:
        route: who steps what.
        optimizers: the two, or one.
    """

    def __init__(
        self,
        model: nn.Module,
        matrix: Build | None,
        rest: Build,
        *,
        overrides: Mapping[str, Role] | None = None,
        blocks: Mapping[str, int] | None = None,
        step_owners: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.route: Route = route(model, overrides=overrides, blocks=blocks, step_owners=step_owners)
        routed = self.route
        entries = {id(m.entry.parameter): m.entry for m in routed.matrices}
        groups: Groups = [_group("embedding", routed.embeddings), _group("vector", routed.vectors)]
        self._proxies: dict[str, nn.Parameter] = {}
        self._exchanges: list[Exchange] = []
        self.optimizers: list[Optimizer] = []
        self._owned: list[tuple[Matrix, Tensor]] = []
        if matrix is None:
            groups.append(_group("matrix", [*entries.values()]))
        else:
            self._owned = [(item, self._parameter(item)) for item in routed.matrices if item.here]
            self._exchanges = Exchange.of(routed.gathered, self._proxies)
            parameters = [parameter for _, parameter in self._owned]
            fan_in = [item.fan_in for item, _ in self._owned]
            self.optimizers.append(matrix([{"params": parameters, "role": "matrix", "fan_in": fan_in}]))
        self.optimizers.append(rest(groups))
        self._entries = [*routed.embeddings, *routed.vectors, *entries.values()]
        super().__init__([{"params": [p for g in self._all_groups() for p in g["params"]]}], {})
        self.param_groups = self._all_groups()

    def _all_groups(self) -> Groups:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _parameter(self, matrix: Matrix) -> Tensor:
        """What the matrix optimizer sees: the sharded parameter itself, or a stand-in."""
        if not matrix.shared and matrix.alone:
            return matrix.entry.parameter
        parameter = matrix.entry.parameter
        if matrix.shared:  # it has memory during the step only
            value = torch.empty(matrix.rows, matrix.columns, dtype=parameter.dtype, device=parameter.device)
            if not value.is_meta:
                value.untyped_storage().resize_(0)
        else:
            value = _view(matrix, parameter.detach())
        stand_in = nn.Parameter(value)
        self._proxies[matrix.name] = stand_in
        return stand_in

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights and gradients that this rank has sent to others in all steps so far."""
        return sum(exchange.sent_bytes for exchange in self._exchanges)

    def slots(self) -> list[Slot]:
        """What the optimizers of this rank step, by name."""
        groups = {
            id(parameter): (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        found = []
        for matrix, parameter in self._owned:
            shape = (matrix.rows, matrix.columns)
            found.append(Slot(matrix.name, shape, 0, parameter, *groups[id(parameter)]))
        for entry in self._entries:
            if id(entry.parameter) in groups and all(entry.parameter is not p for _, p in self._owned):
                found.append(slot_of(entry, *groups[id(entry.parameter)]))
        return sorted(found, key=lambda slot: slot.name)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of both optimizers; a collective if the layout divides matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for matrix, parameter in self._owned:
            if not matrix.shared and not matrix.alone:
                whole = matrix.entry.parameter
                parameter.data = _view(matrix, whole.detach())
                parameter.grad = None if whole.grad is None else _view(matrix, whole.grad)
        for exchange in self._exchanges:
            exchange.bring()
        for optimizer in self.optimizers:
            optimizer.step()
        for exchange in self._exchanges:
            exchange.send()
        for parameter in self._proxies.values():
            parameter.grad = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all routed parameters."""
        for entry in self._entries:
            if entry.parameter.grad is None:
                continue
            if set_to_none:
                entry.parameter.grad = None
            else:
                entry.parameter.grad.zero_()

    def state_dict(self) -> NoReturn:
        """Refused: a rank's state alone is of no use; see :mod:`node.island.checkpoint`."""
        raise LayoutError("the state of a sharded optimizer is saved by node.island.checkpoint.save")

    def load_state_dict(self, state_dict: object) -> NoReturn:
        """Refused, likewise."""
        raise LayoutError("the state of a sharded optimizer is loaded by node.island.checkpoint.load")


class PolarSteps(Optimizer):
    """:class:`optim.local.polar.MuonInner` as a ``torch.optim`` optimizer with decoupled decay: for the
    ``matrix`` of :class:`IslandOptimizer`.

    Args:
        groups: with two-dimensional parameters, and perhaps ``fan_in``; see :class:`IslandOptimizer`.
        lr: learning rate.
        weight_decay: ``W`` is multiplied by ``1 - lr * weight_decay`` before the step.
        signed: Sign-Muon instead of Muon.
        options: further ones of ``MuonInner``.
    """

    def __init__(
        self,
        groups: Iterable[Tensor] | Groups,
        lr: float,
        *,
        weight_decay: float = 0.0,
        signed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._rules: list[MuonInner] = []
        for group in self.param_groups:
            roles = []
            fans = group.get("fan_in") or [parameter.shape[-1] for parameter in group["params"]]
            for number, (parameter, fan_in) in enumerate(zip(group["params"], fans, strict=True)):
                view = (1, *parameter.shape)
                if parameter.ndim != 2:
                    raise ValueError(f"a polar factor needs a matrix, not a tensor of {view[1:]}")
                roles.append(ParameterRole(f"{number:06d}", parameter, "matrix", view, fan_in))
            rule = MuonInner(roles, signed=signed, **options)
            self._rules.append(rule)
            for role in roles:
                self.state[role.parameter] = rule.state[role.name]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update; a parameter without a gradient counts as one with zeros."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, rule in zip(self.param_groups, self._rules, strict=True):
            for parameter in group["params"]:
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            rule.step(group["lr"])
        return loss


def slot_of(entry: ShardedParameter, optimizer: Optimizer, group: dict[str, Any]) -> Slot:
    """The slot of a sharded parameter that an optimizer steps as it is."""
    start = entry.piece.start if entry.piece is not None else 0
    return Slot(entry.name, entry.meta.shape, start, entry.parameter, optimizer, group)


def slots_of(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Slot]:
    """What ``optimizers`` step: any mixture of :class:`IslandOptimizer` and others that were given the
    sharded parameters themselves."""
    entries = {id(entry.parameter): entry for entry in sharded_parameters(model)}
    found: list[Slot] = []
    for optimizer in optimizers:
        if isinstance(optimizer, IslandOptimizer):
            found += optimizer.slots()
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in entries:
                    raise LayoutError(
                        f"{type(optimizer).__name__} steps a tensor of {tuple(parameter.shape)} that is no"
                        f" sharded parameter of the model: build optimizers after fully_shard"
                    )
                entry = entries[id(parameter)]
                if entry.piece is not None:
                    found.append(slot_of(entry, optimizer, group))
    return found


def quantisation_units(block: int = 256) -> Callable[[str, nn.Parameter], int]:
    """A ``granularity`` for ``fully_shard`` that cuts between rows and between quantisation blocks.

    8-bit optimizers (``torchao.optim.AdamW8bit``) quantise runs of ``block`` elements with one scale each.
    A unit is the fewest whole rows that are whole blocks too; a tensor that is no multiple of ``block`` stays
    whole, as such optimizers do not quantise it. (torchao keeps pieces below 4,096 elements in full
    precision.)
    """

    def unit(name: str, parameter: nn.Parameter) -> int:
        numel = parameter.numel()
        if numel % block:
            return max(1, numel)
        row = prod(parameter.shape[1:]) if parameter.ndim > 1 else 1
        return min(lcm(row, block), numel)

    return unit


def check_blocks(model: nn.Module, block: int = 256) -> None:
    """Raise :class:`LayoutError`, naming the tensor, if a rank's piece cuts a quantisation block."""
    for entry in sharded_parameters(model):
        if entry.meta.numel % block:
            continue  # not quantised as a whole, but a piece of it could be
        for rank in range(entry.layout.ranks):
            piece = entry.layout.piece(entry.index, rank)
            if piece is not None and (piece.start % block or piece.numel % block):
                raise LayoutError(
                    f"{entry.name}: rank {rank} holds elements {piece.start} …"
                    f" {piece.start + piece.numel}, which cuts a quantisation block of {block}: give"
                    f" fully_shard granularity=quantisation_units({block})"
                )


def _group(role: str, entries: Sequence[ShardedParameter]) -> dict[str, Any]:
    held = [entry.parameter for entry in entries if entry.piece is not None]
    return {"params": held, "role": role}


def _view(matrix: Matrix, local: Tensor) -> Tensor:
    """The matrix in a rank's piece of the parameter."""
    piece = matrix.entry.piece
    assert piece is not None
    low = matrix.start - piece.start
    return local.view(-1)[low : low + matrix.numel].view(matrix.rows, matrix.columns)
