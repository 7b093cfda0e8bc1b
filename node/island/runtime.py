"""When the groups of a model are gathered, released and reduced: the same order on every rank.

Order is what keeps ranks together. Gathers follow the order in which units run, and prefetches follow the
order of the last forward. Reduces follow the reverse of the forward, whatever the order in which gradients
happen to be complete on a rank (a parameter may be used on one rank only): a group is reduced when all groups
before it have been, and at the end of backward the rest follows with zeros for what was not used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from node.island.collectives import Collectives
from node.island.transfer import IslandError, Transfer
from node.island.unit import Call, ParamGroup, Schedule, Unit

UNIT_ATTRIBUTE = "_island_unit"


def in_backward() -> bool:
    """Whether autograd is running, as in the recomputation of a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def units_of(module: nn.Module) -> list[tuple[str, Unit]]:
    """The wrapped modules in ``module`` with their names, in registration order; itself first."""
    found = []
    for name, child in module.named_modules():
        unit = child.__dict__.get(UNIT_ATTRIBUTE)
        if isinstance(unit, Unit):
            found.append((name, unit))
    return found


class Runtime:
    """The units of one root module. Made at the first forward (:meth:`start`)."""

    def __init__(self, units: list[Unit], schedule: Schedule) -> None:
        self.units, self.schedule = units, schedule
        self._entry: Unit | None = None
        self._trace: list[Unit] = []
        self._traces: dict[bool, list[Unit]] = {}
        self._backward = False
        self._order: list[Unit] = []  # of backward
        self._left: list[Unit] = []  # not in it, with gradients of earlier micro-batches
        self._late: list[Unit] = []  # in neither: their forward was not the last
        self._pending: list[ParamGroup] = []  # to be reduced, in order
        self._queue: list[tuple[ParamGroup, Transfer]] = []
        self._fresh: list[tuple[ParamGroup, list[bool]]] = []

    @staticmethod
    def start(root: Unit) -> Runtime:
        """Bind the units under ``root``: names, dtypes and layouts must be the same on all ranks.

        Raises:
            IslandError: on every rank, if they are not.
        """
        named = units_of(root.module)
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
            unit.name = name or type(unit.module).__name__
            for number, group in enumerate(unit.groups):
                group.name = f"{unit.name} (group {number})"
                group.on_complete, group.on_gradient = runtime._complete, runtime._begin_backward
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
            unit.unshard()
            unit.wait()
            return
        if self._entry is None or self._entry is unit:
            self._begin_forward(unit)
        self._trace.append(unit)
        unit.unshard()
        unit.wait()
        order, at = self._traces.get(torch.is_grad_enabled(), []), len(self._trace)
        if at <= len(order) and order[at - 1] is unit:
            self._run_ahead(order[at:])

    def _run_ahead(self, following: list[Unit]) -> None:
        depth = self.schedule.prefetch
        for unit in following[:depth]:
            unit.unshard()
        if depth:
            for unit in following[depth : depth + 1]:
                unit.prepare()

    def _begin_forward(self, entry: Unit) -> None:
        if self._entry is not None or self._backward:  # the last step was left by an exception
            self.reset()
        for unit in self.units:
            unit.reshard()  # whatever an evaluation, or a forward without a backward, has left
            for group in unit.groups:
                group.follow()
        self._entry, self._trace = entry, []

    def forward_exit(self, unit: Unit) -> None:
        """Release the unit's weights, if it does so before its backward."""
        if in_backward():
            return
        if unit.reshard_after_forward:
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
        reduced = [unit for unit in self._order + self._left if unit.sync]
        for unit in self._order + self._left:
            unit.owes = not unit.sync
        self._pending = [group for unit in reduced for group in unit.groups if group.trainable]
        self._late, self._fresh = [], []
        engine = torch.autograd.Variable._execution_engine
        cast(Callable[[Any], None], engine.queue_callback)(self._end_backward)

    def backward_enter(self, unit: Unit) -> None:
        """Gather the weights again, and start to gather those that backward needs next."""
        self._begin_backward()
        if unit.entered:
            return
        unit.entered = True
        unit.unshard()
        unit.wait()
        if unit not in self._order:
            if unit not in self._left:
                self._late.append(unit)
        else:
            following = self._order[self._order.index(unit) + 1 :]
            self._run_ahead([other for other in following if not other.entered])

    def backward_exit(self, unit: Unit, call: Call) -> None:
        """All gradients of the inputs of one call of the unit are there."""
        self._begin_backward()
        if unit.end_call(call):
            for group in unit.groups:
                self._complete(group)

    def _complete(self, group: ParamGroup) -> None:
        if group.complete:
            return
        group.complete = True
        group.reshard()
        if group.trainable:
            self._make_room()
            if group.has_gradients:
                group.pack()
            self._reduce_complete()

    def _reduce_complete(self, *, rest: bool = False) -> None:
        while self._pending and (rest or self._pending[0].complete):
            group = self._pending.pop(0)
            self._make_room()
            self._queue.append((group, group.reduce()))

    def _make_room(self) -> None:
        """Before another gradient buffer is allocated: those on their way give up what they can."""
        while len(self._queue) >= max(1, self.schedule.reduces_in_flight):
            self._finish_reduce()
        for _, transfer in self._queue:
            transfer.progress()

    def _finish_reduce(self) -> None:
        group, transfer = self._queue.pop(0)
        segment = transfer.wait()
        scale = 1.0 / (group.comm.ranks * group.comm.copies)
        self._fresh.append((group, group.buffer.accept(segment, scale)))

    def _end_backward(self) -> None:
        for unit in self._late:
            if unit.sync:
                self._pending += [group for group in unit.groups if group.trainable]
            unit.owes = not unit.sync
        for unit in self.units:
            unit.end_backward()
            for group in unit.groups:
                if group.trainable and not group.complete:
                    group.complete = True
                    if group.has_gradients and group not in self._pending:
                        group.pack()
        self._reduce_complete(rest=True)
        while self._queue:
            self._finish_reduce()
        if self.schedule.find_unused_parameters:
            self._forget_unused()
        for group, _ in self._fresh:
            group.used = [False] * len(group.used)
        for unit in self.units:
            unit.reshard()
        self._backward = False

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
        self._entry, self._backward, self._pending, self._fresh = None, False, [], []
        queue, self._queue = self._queue, []
        failure: IslandError | None = None
        for _, transfer in queue:
            try:
                transfer.abandon()
            except IslandError as error:
                failure = failure or error
        for unit in self.units:
            unit.begin_backward()
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
