"""Parameters that are gathered and reduced together (a group), and what a rank holds of each.

    SHARDED ──(prepare)──unshard──► GATHERING ──wait──► WHOLE ──reshard──► SHARDED

The modules hold the sharded parameters, and while the group is whole the unsharded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from node.island.collectives import Collectives
from node.island.dbuffer import DBuffer
from node.island.layout import GroupLayout, LayoutError, Piece, TensorMeta
from node.island.policies import MixedPrecisionPolicy
from node.island.transfer import Transfer

Site = tuple[nn.Module, str]


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
        self.on_gradient: Callable[[int], None] | None = None  # told the elements of what has come
        self._torn = False  # a conversion has come to some of the modules
        self._gather: Transfer | None = None
        self._gradients: Tensor | None = None
        self.partial: Tensor | None = None  # sums of this replica that the others have not seen
        self.used = [False] * len(sites)
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
            if (here := group()) is not None and here.on_gradient is not None:
                here.on_gradient(parameter.numel())

        trainable = [parameter for parameter in self.buffer.unsharded if parameter.requires_grad]
        self.trainable = bool(trainable)
        for parameter in trainable:
            if id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                cast(Any, parameter).register_post_accumulate_grad_hook(arrived)

    def install(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put these parameters into the modules."""
        for sites, parameter in zip(self.sites, parameters, strict=True):
            for module, attribute in sites:
                module._parameters[attribute] = parameter

    @contextmanager
    def holding(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Within this context the modules hold these parameters; afterwards those that they held before."""
        before = [(holder, name, holder._parameters[name]) for sites in self.sites for holder, name in sites]
        try:
            self.install(parameters)
            yield
        finally:
            for holder, name, parameter in before:
                holder._parameters[name] = parameter

    def prepare(self) -> None:
        """Issue the first stage of a gather, which needs no whole buffer."""
        if self._torn:
            raise LayoutError(
                f"{self.name}: only some of the modules that were wrapped together have been converted:"
                f" convert all of them, as model.to(…) does"
            )
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

    def rebind(self, *, partly: bool) -> None:
        """Rebuild the memory after something has converted the sharded parameters (:meth:`DBuffer.move`);
        not while dtypes or devices are mixed, if it may have come to a part of them only."""
        values = []
        for sites in self.sites:
            module, attribute = sites[0]
            parameter = module._parameters[attribute]
            assert isinstance(parameter, nn.Parameter), f"{self.name}: {attribute} has been removed"
            values.append(parameter)
        self._torn = partly and len({(value.device, value.dtype) for value in values}) > 1
        if self._torn:
            return
        self.buffer.move(values)
        self._watched.clear()
        self._watch()
        self.install(self.buffer.sharded)

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

    def reduce(self, comm: Collectives) -> Transfer:
        """Issue the reduce of all gradients so far over the ranks of ``comm``; missing ones count as
        zeros."""
        if self._gradients is None or self.has_fresh_gradients:
            self.pack()
        assert self._gradients is not None
        gradients, self._gradients = self._gradients, None
        if self.partial is not None:  # one rank of the shards adds it, so that the sum has it once
            gradients[self.buffer.low : self.buffer.high].add_(self.partial)
            self.partial = None
        transfer = comm.reduce(f"reduce of {self.name}", self.layout, gradients)
        transfer.advance()
        return transfer

    def drop_gradients(self) -> None:
        """Forget unreduced gradients."""
        self._gradients, self.partial, self.used = None, None, [False] * len(self.sites)
        for parameter in self.buffer.unsharded:
            parameter.grad = None
