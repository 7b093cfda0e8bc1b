"""A wrapped module (unit) and its groups of parameters: sharded, being gathered, whole, and back.

    SHARDED ──(prepare)──unshard──► GATHERING ──wait──► WHOLE ──reshard──► SHARDED

A unit has one group for each combination of placement, dtype and ``requires_grad`` among the parameters that
are its own. Its groups move together when forward or backward needs the module; each is released, and its
gradients reduced, as soon as they are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from node.island.collectives import Collectives
from node.island.dbuffer import DBuffer
from node.island.layout import GroupLayout, Piece, TensorMeta
from node.island.transfer import IslandError, Transfer

if TYPE_CHECKING:
    from node.island.runtime import Runtime

Site = tuple[nn.Module, str]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit, as in ``torch.distributed.fsdp``. None leaves things as they are.

    Attributes:
        param_dtype: of gathered weights, hence of forward, backward and unsharded gradients. The resident
            segment (the master weights) and the optimizer keep the dtype that the parameters have.
        reduce_dtype: of gradients while they are added up, over micro-batches and ranks; ``param_dtype``
            otherwise.
        output_dtype: floating-point outputs of the unit's forward are cast to it.
        cast_forward_inputs: floating-point inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class Schedule:
    """How far the runtime runs ahead.

    Attributes:
        prefetch: units that are gathered before the running one is done; 0 gathers on demand.
        reduces_in_flight: gradient buffers that may be on their way at once, at least 1. A reduce goes on
            while the next unit runs backward, and is waited for before that unit's gradients are packed.
        find_unused_parameters: leave the gradients of parameters that no rank used at None, as one process
            would, at the price of a small collective a step; otherwise they are zeros.
    """

    prefetch: int = 1
    reduces_in_flight: int = 1
    find_unused_parameters: bool = False


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter as this rank holds it.

    Attributes:
        name: fully qualified, in the model that was asked.
        parameter: what the optimizer sees. Its shape is the tensor's on the owner, ``(0, *shape[1:])`` where
            nothing is held, ``(rows, *shape[1:])`` for whole rows, and flat for any other piece.
        layout: of the group.
        index: the tensor's place in the layout.
        comm: the group's ranks.
    """

    name: str
    parameter: nn.Parameter
    layout: GroupLayout
    index: int
    comm: Collectives

    @property
    def meta(self) -> TensorMeta:
        """Name in its layout, global shape, granularity."""
        return self.layout.tensors[self.index]

    @property
    def rank(self) -> int:
        """This rank in the shard group."""
        return self.comm.rank

    @property
    def piece(self) -> Piece | None:
        """What this rank holds."""
        return self.layout.piece(self.index, self.comm.rank)

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of it."""
        return self.layout.owner(self.index) == self.comm.rank


class Phase(Enum):
    """Where a group's whole buffer is."""

    SHARDED = auto()
    GATHERING = auto()
    WHOLE = auto()


class ParamGroup:
    """Parameters that are gathered and reduced together.

    Args:
        name: shown in errors.
        layout: of the group.
        sites: for each tensor every module and attribute that holds it (several for tied parameters).
        parameters: the originals. They are replaced in their modules by sharded ones and not kept.
        comm: transfers.
        policy: dtypes.
        device: of the memory.
    """

    def __init__(
        self,
        name: str,
        layout: GroupLayout,
        sites: list[list[Site]],
        parameters: list[nn.Parameter],
        comm: Collectives,
        policy: MixedPrecisionPolicy,
        device: torch.device,
    ) -> None:
        self.name, self.layout, self.sites, self.comm = name, layout, sites, comm
        self.trainable = parameters[0].requires_grad
        self._policy = policy
        dtype = parameters[0].dtype
        self.buffer = DBuffer(
            layout,
            comm.rank,
            dtype=dtype,
            compute_dtype=policy.param_dtype if dtype.is_floating_point else None,  # quantised weights stay
            device=device,
            requires_grad=self.trainable,
        )
        if device.type != "meta":
            for index, parameter in enumerate(parameters):
                self.buffer.fill(index, parameter.detach())
        # tied parameters that are still held elsewhere can be told by identity
        self.originals = [ref(parameter) for parameter in parameters]
        self.phase = Phase.SHARDED
        self.on_complete: Callable[[ParamGroup], None] | None = None
        self.on_gradient: Callable[[], None] | None = None
        self._gather: Transfer | None = None
        self._gradients: Tensor | None = None
        self.used = [False] * len(sites)
        self.ready, self.complete = 0, False
        self._expected = 0
        self._watched: set[int] = set()
        self._watch()
        self.install(self.buffer.sharded)

    def follow(self) -> None:
        """Take over which parameters have been frozen or unfrozen since the last time."""
        pairs = zip(self.buffer.sharded, self.buffer.unsharded, strict=True)
        changed = [pair for pair in pairs if pair[0].requires_grad != pair[1].requires_grad]
        for sharded, unsharded in changed:
            unsharded.requires_grad_(sharded.requires_grad)
        if changed:
            self._watch()

    def _watch(self) -> None:
        # a parameter's hooks are outside of what the garbage collector sees: they must not hold the group
        group = ref(self)

        def arrived(parameter: Tensor) -> None:
            if (here := group()) is not None:
                here._arrived()

        trainable = [parameter for parameter in self.buffer.unsharded if parameter.requires_grad]
        self.trainable, self._expected = bool(trainable), len(trainable)
        for parameter in trainable:
            if id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                cast(Any, parameter).register_post_accumulate_grad_hook(arrived)

    def install(self, parameters: list[nn.Parameter]) -> None:
        """Put these parameters into the modules."""
        for sites, parameter in zip(self.sites, parameters, strict=True):
            for module, attribute in sites:
                module._parameters[attribute] = parameter

    def prepare(self) -> None:
        """Issue the first stage of a gather, which needs no whole buffer."""
        if self.phase is Phase.SHARDED and self._gather is None:
            what = f"gather of {self.name}"
            buffer = self.buffer
            self._gather = self.comm.gather(what, self.layout, buffer.segment(), buffer.allocate)
            self._gather.advance()

    def unshard(self) -> None:
        """Issue the gather."""
        if self.phase is Phase.SHARDED:
            self.prepare()
            assert self._gather is not None
            self._gather.advance()
            self.phase = Phase.GATHERING

    def wait(self) -> None:
        """Finish the gather and put the unsharded parameters into the modules."""
        if self.phase is Phase.GATHERING:
            assert self._gather is not None
            self._gather.wait()
            self._gather, self.phase = None, Phase.WHOLE
            self.install(self.buffer.unsharded)

    def reshard(self) -> None:
        """Put the sharded parameters into the modules and give the whole buffer's bytes back."""
        transfer, self._gather = self._gather, None
        whole, self.phase = self.phase is not Phase.SHARDED, Phase.SHARDED
        try:
            if transfer is not None:
                transfer.abandon()
        finally:
            if whole:
                self.install(self.buffer.sharded)
                self.buffer.release()

    def rebind(self) -> None:
        """Rebuild the memory after something has converted the sharded parameters (:meth:`DBuffer.move`)."""
        values = []
        for sites in self.sites:
            module, attribute = sites[0]
            parameter = module._parameters[attribute]
            assert isinstance(parameter, nn.Parameter), f"{self.name}: {attribute} has been removed"
            values.append(parameter)
        self.buffer.move(values)
        self._watched.clear()
        self._watch()
        self.install(self.buffer.sharded)

    def begin_backward(self) -> None:
        """Forget which gradients have come."""
        self.ready, self.complete = 0, False

    def _arrived(self) -> None:
        if self.on_gradient is not None:
            self.on_gradient()
        if self.complete:
            raise IslandError(
                f"{self.name}: a gradient came after the unit's backward was over: one of its weights is used"
                f" outside of the unit, or a reentrant checkpoint runs its backward in parts"
                f" (use checkpoint(…, use_reentrant=False))"
            )
        self.ready += 1
        if self.ready == self._expected and self.on_complete is not None:
            self.on_complete(self)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which gradients are added up."""
        return self._policy.reduce_dtype or self.buffer.compute_dtype

    @property
    def has_gradients(self) -> bool:
        """Whether this rank holds unreduced gradients."""
        return self._gradients is not None or self.has_fresh_gradients

    @property
    def has_fresh_gradients(self) -> bool:
        """Whether some of them are not in the flat buffer yet."""
        return any(parameter.grad is not None for parameter in self.buffer.unsharded)

    def pack(self) -> None:
        """Move the unsharded gradients to the flat buffer, where micro-batches add up."""
        for index, parameter in enumerate(self.buffer.unsharded):
            self.used[index] |= parameter.grad is not None
        self._gradients = self.buffer.pack(self._gradients, self.reduce_dtype)

    def reduce(self) -> Transfer:
        """Issue the reduce of all gradients so far; missing ones count as zeros."""
        if self._gradients is None or self.has_fresh_gradients:
            self.pack()
        assert self._gradients is not None
        gradients, self._gradients = self._gradients, None
        transfer = self.comm.reduce(f"reduce of {self.name}", self.layout, gradients)
        transfer.advance()
        return transfer

    def drop_gradients(self) -> None:
        """Forget unreduced gradients."""
        self._gradients, self.used = None, [False] * len(self.sites)
        self.ready, self.complete = 0, False
        for parameter in self.buffer.unsharded:
            parameter.grad = None


class Call:
    """One forward of a unit whose inputs tell when its backward is over. It lives as long as its graph."""

    def __init__(self) -> None:
        self.done = False  # in this backward
        self.past = False  # in some backward


class Unit:
    """A module whose parameters are gathered before its forward and backward, and released after.

    Args:
        module: the wrapped module.
        groups: of the parameters that are its own.
        comm: transfers.
        policy: dtypes.
        reshard_after_forward: whether to release the weights between forward and backward; None: unless the
            unit turns out to be the root.
        schedule: how far to run ahead, where the unit is the root.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: list[ParamGroup],
        comm: Collectives,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        schedule: Schedule,
    ) -> None:
        self.schedule = schedule
        self.module, self.groups, self.comm, self.policy = module, groups, comm, policy
        self.wanted_reshard = self.reshard_after_forward = reshard_after_forward
        self.name = type(module).__name__
        self.sync = True
        self.runtime: Runtime | None = None
        self.calls: WeakSet[Call] = WeakSet()
        self.open_calls = False  # whether there were forwards whose inputs will not tell
        self.owes = False  # whether gradients of earlier micro-batches wait for a reduce
        self.entered = False

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

    def begin_call(self) -> Call:
        """Note a forward. Earlier ones with a backward count no more, though a kept loss may hold them."""
        self.calls -= {call for call in self.calls if call.past}
        call = Call()
        self.calls.add(call)
        return call

    def begin_backward(self) -> None:
        """Forget the last backward."""
        self.entered = False
        for call in self.calls:
            call.done = False
        for group in self.groups:
            group.begin_backward()

    def end_call(self, call: Call) -> bool:
        """Note that the backward of ``call`` is over; returns whether those of all calls are."""
        call.done = call.past = True
        return not self.open_calls and all(other.done for other in self.calls)

    def end_backward(self) -> None:
        """Forget forwards that will not tell, unless others wait for their backward as well."""
        if all(call.past for call in self.calls):
            self.open_calls = False
