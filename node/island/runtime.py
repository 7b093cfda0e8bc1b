"""When the groups of a model are gathered, released and reduced: the same order on every rank.

Order is what keeps ranks together. Which parameters a rank uses may be its own affair, so gradients decide
nothing but the moment: units are entered, and left, in the order in which all ranks run them. Gathers follow
it, and prefetches follow that of the last forward. A unit is reduced and released when the backward of all
its calls is over, in the reverse order of forward, with zeros for what was not used; units whose inputs need
no gradient do not tell when that is, and come last. What runs ahead beside a unit's backward
(:meth:`Runtime._go_on`) is begun by its gradients if there are any, and in any case before anything else
travels.

Memory is what a prefetch costs in backward, where the gradients of the last unit are still on their way:
see :class:`~node.island.policies.Schedule`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from node.island.collectives import Collectives
from node.island.param_group import ParamGroup
from node.island.policies import Schedule
from node.island.transfer import IslandError, Transfer
from node.island.unit import Call, Unit

UNIT_ATTRIBUTE = "_island_unit"


def in_backward() -> bool:
    """Whether autograd is running, as in the recomputation of a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def units_of(module: nn.Module) -> list[tuple[str, Unit]]:
    """The units in ``module`` with the names of their first modules, in registration order; itself first."""
    found: dict[int, tuple[str, Unit]] = {}
    for name, child in module.named_modules():
        unit = child.__dict__.get(UNIT_ATTRIBUTE)
        if isinstance(unit, Unit):
            found.setdefault(id(unit), (name, unit))
    return list(found.values())


class Reduce(NamedTuple):
    """Gradients on their way, of this replica only unless ``final``."""

    group: ParamGroup
    transfer: Transfer
    final: bool
    divisor: float


class Runtime:
    """The units of one root. Made at the first forward (:meth:`start`)."""

    def __init__(self, units: list[Unit], schedule: Schedule) -> None:
        self.units, self.schedule = units, schedule
        self._entry: Unit | None = None
        self._trace: list[Unit] = []
        self._traces: dict[bool, list[Unit]] = {}
        self._backward = False
        self._order: list[Unit] = []  # of backward
        self._left: list[Unit] = []  # not in it, with gradients of earlier micro-batches
        self._late: list[Unit] = []  # in neither: their forward was not the last
        self._pending: list[Unit] = []  # to be reduced, in order
        self._queue: list[list[Reduce]] = []  # what travels, by unit
        self._fresh: list[tuple[ParamGroup, list[bool]]] = []
        self._most_reduces = max(1, schedule.reduces_in_flight)
        self._ahead: list[Unit] = []  # to be gathered beside the running unit's backward
        self._begun = self._gone_on = True  # how far that is
        self._due = 0  # elements of gradients that come before the rest of it

    @staticmethod
    def start(root: Unit) -> Runtime:
        """Bind the units under ``root``: names, dtypes and layouts must be the same on all ranks.

        Raises:
            IslandError: on every rank, if they are not.
        """
        found = {id(unit): (name, unit) for module in root.modules for name, unit in units_of(module)}
        named = list(found.values())
        runtime = Runtime([unit for _, unit in named], root.schedule)
        shared: dict[tuple[int, int], Collectives] = {}
        for name, unit in named:
            # one object for each set of ranks, though every unit was wrapped with its own
            comm = shared.setdefault((id(unit.comm.group), id(unit.comm.replicas)), unit.comm)
            unit.comm = comm
            for group in unit.groups:
                group.comm = comm
            if unit.runtime is not None:
                unit.runtime.reset()
            unit.runtime = runtime
            unit.name = name or type(unit.modules[0]).__name__
            for number, group in enumerate(unit.groups):
                group.name = f"{unit.name} (group {number})"
                group.on_gradient = partial(runtime._gradient, unit, group)
        for _, unit in named:
            by_default = unit is not root
            unit.reshard_after_forward = by_default if unit.wanted_reshard is None else unit.wanted_reshard
        try:
            runtime._check()
        except BaseException:
            for _, unit in named:
                unit.runtime = None  # so that the next forward checks again
            raise
        return runtime

    def _check(self) -> None:
        by_comm: dict[int, tuple[Collectives, list[ParamGroup]]] = {}
        for unit in self.units:
            for group in unit.groups:
                by_comm.setdefault(id(unit.comm), (unit.comm, []))[1].append(group)
        for comm, groups in by_comm.values():
            digest = hashlib.sha256(repr((self.schedule, comm.policy)).encode())
            for group in groups:
                buffer = group.buffer
                digest.update(
                    f"{group.name} {group.trainable} {buffer.dtype} {buffer.compute_dtype}"
                    f" {group.reduce_dtype}".encode()
                )
                digest.update(group.layout.hash().encode())
            device = groups[0].buffer.device
            if device.type == "meta":
                raise IslandError(
                    f"{groups[0].name} is still on the meta device: call to_empty(device=…) or"
                    f" init_parameters before the first forward"
                )
            what = f"plan of {sum(len(group.sites) for group in groups)} tensors in {len(groups)} groups"
            comm.require_same("the sharding plan", f"{what}, hash {digest.hexdigest()[:32]}", device)
            for group in groups:
                comm.copy_to_replicas(f"first copy of {group.name}", group.buffer.shard)
            if comm.policy.gather == "measure" and comm.ranks > 1:
                largest = max(groups, key=lambda group: group.layout.total)
                comm.measure(largest.layout, largest.buffer.segment())

    # forward

    def forward_enter(self, unit: Unit) -> None:
        """Gather the unit's weights, and start to gather those of the next."""
        if in_backward():  # a checkpoint recomputes: backward keeps the weights from here on
            self._go_on()
            unit.unshard()
            unit.wait()
            return
        if self._entry is None or self._entry is unit:
            self._begin_forward(unit)
        unit.enter_forward()
        self._trace.append(unit)
        unit.unshard()
        unit.wait()
        order, at = self._traces.get(torch.is_grad_enabled(), []), len(self._trace)
        depth = self.schedule.prefetch
        if unit.forward_prefetch:
            for other in unit.forward_prefetch:
                other.unshard()
        elif depth and at <= len(order) and order[at - 1] is unit:
            for other in order[at : at + depth]:
                other.unshard()
            for other in order[at + depth : at + depth + 1]:
                other.prepare()

    def _begin_forward(self, entry: Unit) -> None:
        if self._entry is not None or self._backward:  # the last step was left by an exception
            self.reset()
        for unit in self.units:
            if unit.reshard_after_backward:
                unit.reshard()  # whatever an evaluation, or a forward without a backward, has left
            unit.forget_forward()
            for group in unit.groups:
                group.follow()
        self._entry, self._trace = entry, []

    def forward_exit(self, unit: Unit, module: nn.Module) -> None:
        """Release the unit's weights, if its last module has run and it does so before its backward."""
        if in_backward():
            return
        if unit.leave_forward(module) and unit.reshard_after_forward:
            unit.reshard()
        if unit is self._entry:
            self._traces[torch.is_grad_enabled()] = self._trace
            self._entry = None
            for other in self.units:
                if not torch.is_grad_enabled() or other not in self._trace:
                    other.reshard()

    # backward

    def _begin_backward(self) -> None:
        if self._backward:
            return
        self._backward = True
        self._order = list(dict.fromkeys(reversed(self._traces.get(True, []))))
        # what earlier micro-batches left is reduced too, though the last may not have run that unit
        self._left = [unit for unit in self.units if unit.owes and unit not in self._order]
        for unit in self.units:
            unit.begin_backward()
        run = self._order + self._left
        self._pending, self._late = self._to_reduce(run), []
        self._pending.sort(key=lambda unit: unit.open_calls)
        engine = torch.autograd.Variable._execution_engine
        cast(Callable[[Any], None], engine.queue_callback)(self._end_backward)

    @staticmethod
    def _to_reduce(units: list[Unit]) -> list[Unit]:
        for unit in units:
            unit.owes = not (unit.sync and unit.all_reduce)
        return [unit for unit in units if unit.sync and unit.trainable]

    def backward_enter(self, unit: Unit) -> None:
        """Gather the weights again, and prepare to gather those that backward needs next."""
        self._begin_backward()
        if unit.entered:
            return
        self._go_on()
        unit.entered = True
        if unit.unshard_in_backward:
            unit.unshard()
            unit.wait()
        following, depth = unit.backward_prefetch, len(unit.backward_prefetch)
        if unit not in self._order:
            if unit not in self._left:
                self._late.append(unit)
        elif not following:
            following, depth = self._order[self._order.index(unit) + 1 :], self.schedule.prefetch
        self._ahead = [u for u in following if u.unshard_in_backward and not u.entered][:depth]
        self._begun = self._gone_on = False
        self._due = sum(group.layout.total for group in unit.trainable) // 3
        if len(self._queue) < self._most_reduces:
            self._go_on()

    def _gradient(self, unit: Unit, group: ParamGroup, numel: int) -> None:
        self._begin_backward()
        if unit.complete:
            raise IslandError(
                f"{group.name}: a gradient came after the unit's backward was over: one of its weights is"
                f" used outside of the unit, or a reentrant checkpoint runs its backward in parts"
                f" (use checkpoint(…, use_reentrant=False))"
            )
        self._due -= numel
        self._begin_ahead()
        if self._due <= 0:
            self._go_on()

    def _begin_ahead(self) -> None:
        if not self._begun:
            self._begun = True
            for reduce in self._queue:
                for each in reduce:
                    each.transfer.progress()
            for unit in self._ahead:
                unit.prepare()

    def _go_on(self) -> None:
        """Gather what runs ahead of the unit that was entered last, unless that is done."""
        self._begin_ahead()
        if not self._gone_on:
            self._gone_on = True
            self._make_room()
            for unit in self._ahead:
                unit.unshard()

    def backward_exit(self, unit: Unit, call: Call) -> None:
        """All gradients of the inputs of one call of the unit are there."""
        self._begin_backward()
        if not unit.end_call(call) or unit.complete:
            return
        self._go_on()
        self._release(unit)
        if unit.trainable:
            self._make_room()
            self._pack(unit)
            while self._pending and self._pending[0].complete:
                self._reduce(self._pending.pop(0))

    @staticmethod
    def _release(unit: Unit) -> None:
        unit.complete = True
        if unit.reshard_after_backward:
            unit.reshard()

    @staticmethod
    def _pack(unit: Unit) -> None:
        for group in unit.trainable:
            if group.has_gradients:
                group.pack()

    def _reduce(self, unit: Unit) -> None:
        self._make_room()
        final, reduces = unit.all_reduce or unit.comm.copies == 1, []
        comm = unit.comm
        if not final:
            comm = copy(comm)
            comm.replicas, comm.copies = None, 1
        divisor = unit.divisor or float(unit.comm.ranks * unit.comm.copies)
        for group in unit.trainable:
            reduces.append(Reduce(group, group.reduce(comm), final, divisor))
        self._queue.append(reduces)

    def _make_room(self) -> None:
        """Before another unit's memory is taken: the gradients on their way give up what they can."""
        while len(self._queue) >= self._most_reduces:
            self._finish_reduce()
        for reduces in self._queue:
            for each in reduces:
                each.transfer.progress()

    def _finish_reduce(self) -> None:
        for group, transfer, final, divisor in self._queue.pop(0):
            segment = transfer.wait()
            if final:
                self._fresh.append((group, group.buffer.accept(segment, 1.0 / divisor)))
            else:
                group.partial = segment

    def _end_backward(self) -> None:
        self._go_on()
        self._pending += self._to_reduce(self._late)
        for unit in self.units:
            unit.end_backward()
            if not unit.complete:
                self._release(unit)
                if unit not in self._pending:
                    self._pack(unit)
        for unit in self._pending:
            self._reduce(unit)
        self._pending, self._backward = [], False
        if self.units[0].last_backward:
            self._settle()

    def _settle(self) -> None:
        """Wait for all reduces."""
        while self._queue:
            self._finish_reduce()
        if self.schedule.find_unused_parameters:
            self._forget_unused()
        for group, _ in self._fresh:
            group.used = [False] * len(group.used)
        self._fresh = []

    def _forget_unused(self) -> None:
        by_comm: dict[int, list[tuple[ParamGroup, list[bool]]]] = {}
        for group, fresh in self._fresh:
            by_comm.setdefault(id(group.comm), []).append((group, fresh))
        for reduced in by_comm.values():
            device = reduced[0][0].buffer.device
            flags = [flag for group, _ in reduced for flag in group.used]
            mine = torch.tensor(flags, dtype=torch.uint8, device=device)
            used = iter(reduced[0][0].comm.union("union of the used parameters", mine).tolist())
            for group, fresh in reduced:
                for parameter, new in zip(group.buffer.sharded, fresh, strict=True):
                    if not next(used) and new:
                        parameter.grad = None

    def reset(self) -> None:
        """Forget a step that an exception cut short; the weights stay, unreduced gradients are dropped.

        All ranks must do it at the same point. Gradients that had been reduced already remain in ``.grad``.
        """
        self._entry, self._backward, self._pending, self._fresh, self._ahead = None, False, [], [], []
        self._begun = self._gone_on = True
        queue, self._queue = self._queue, []
        failure: IslandError | None = None
        for each in (each for reduces in queue for each in reduces):
            try:
                each.transfer.abandon()
            except IslandError as error:
                failure = failure or error
        for unit in self.units:
            unit.begin_backward()
            unit.forget_forward()
            unit.calls.clear()
            unit.open_calls = unit.owes = False
            for group in unit.groups:
                group.drop_gradients()
                try:
                    group.reshard()
                except IslandError as error:
                    failure = failure or error
        if failure is not None:
            raise failure
