"""A wrapped module (unit) and its groups of parameters (:mod:`node.island.param_group`).

A unit has one group for each combination of placement, dtype and ``requires_grad`` among the parameters that
are its own. Its groups move together: gathered when forward or backward needs the module, released and
reduced when the backward of all its calls is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import nn

from node.island.collectives import Collectives
from node.island.param_group import ParamGroup, Phase
from node.island.policies import MixedPrecisionPolicy, Schedule

if TYPE_CHECKING:
    from node.island.runtime import Runtime


class Call:
    """One forward of a unit whose inputs tell when its backward is over. It lives as long as its graph."""

    def __init__(self) -> None:
        self.done = False  # in this backward
        self.past = False  # in some backward


class Unit:
    """Modules (mostly one) whose parameters are gathered before forward and backward, and released after.

    Args:
        modules: the wrapped ones.
        groups: of the parameters that are their own.
        comm: transfers.
        policy: dtypes.
        reshard_after_forward: whether to release the weights between forward and backward; None: unless the
            unit turns out to be the root.
        schedule: how far to run ahead, where the unit is the root.

    Attributes:
        sync, all_reduce, last_backward, divisor, unshard_in_backward, reshard_after_backward,
        forward_prefetch, backward_prefetch: what the setters of
            :class:`~node.island.module.IslandModule` say.
        open_calls: whether there were forwards whose inputs will not tell that their backward is over.
        owes: whether gradients of earlier micro-batches wait for a reduce.
        entered, complete: whether the present backward has come to the unit, and has left it.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        groups: list[ParamGroup],
        comm: Collectives,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        schedule: Schedule,
    ) -> None:
        self.schedule = schedule
        self.modules, self.groups, self.comm, self.policy = modules, groups, comm, policy
        self.wanted_reshard = self.reshard_after_forward = reshard_after_forward
        self.name = type(modules[0]).__name__
        self.sync = self.all_reduce = self.last_backward = True
        self.unshard_in_backward = self.reshard_after_backward = True
        self.divisor: float | None = None
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.runtime: Runtime | None = None
        self.calls: WeakSet[Call] = WeakSet()
        self.open_calls = self.owes = False
        self.entered = self.complete = False
        self._to_run: set[int] = set()  # modules whose part of the forward is to come

    @property
    def trainable(self) -> list[ParamGroup]:
        """The groups that get gradients."""
        return [group for group in self.groups if group.trainable]

    def prepare(self) -> None:
        """Issue the first stage of the gathers."""
        for group in self.groups:
            group.prepare()

    def unshard(self) -> None:
        """Issue the gathers."""
        for group in self.groups:
            group.unshard()

    def wait(self) -> None:
        """Finish the gathers."""
        for group in self.groups:
            group.wait()

    def reshard(self) -> None:
        """Release the whole buffers."""
        for group in self.groups:
            group.reshard()

    def rebind(self) -> None:
        """Rebuild the memory after a conversion, once it has come to all modules of the unit."""
        for group in self.groups:
            group.rebind(partly=len(self.modules) > 1)

    @contextmanager
    def showing_shards(self) -> Iterator[None]:
        """The modules hold the sharded parameters meanwhile, though the weights may be gathered."""
        gathered = [group for group in self.groups if group.phase is Phase.WHOLE]
        for group in gathered:
            group.install(group.buffer.sharded)
        try:
            yield
        finally:
            for group in gathered:
                group.install(group.buffer.unsharded)

    def enter_forward(self) -> None:
        """A module begins its forward: if it is the first, those of the others are to follow."""
        if not self._to_run:
            self._to_run = {id(module) for module in self.modules}

    def leave_forward(self, module: nn.Module) -> bool:
        """``module`` has run; returns whether all of them have."""
        self._to_run.discard(id(module))
        return not self._to_run

    def forget_forward(self) -> None:
        """Those that have not run will not."""
        self._to_run.clear()

    def begin_call(self) -> Call:
        """Note a forward. Earlier ones with a backward count no more, though a kept loss may hold them."""
        self.calls -= {call for call in self.calls if call.past}
        call = Call()
        self.calls.add(call)
        return call

    def begin_backward(self) -> None:
        """Forget the last backward."""
        self.entered = self.complete = False
        for call in self.calls:
            call.done = False

    def end_call(self, call: Call) -> bool:
        """Note that the backward of ``call`` is over; returns whether those of all calls are."""
        call.done = call.past = True
        return not self.open_calls and all(other.done for other in self.calls)

    def end_backward(self) -> None:
        """Forget forwards that will not tell, unless others wait for their backward as well."""
        if all(call.past for call in self.calls):
            self.open_calls = False
