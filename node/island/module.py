"""What a sharded module can do, under the names of ``torch.distributed.fsdp.FSDPModule``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import Tensor, nn

from node.island.layout import LayoutError
from node.island.runtime import UNIT_ATTRIBUTE, units_of
from node.island.state import clip_grad_norm_
from node.island.unit import Unit


class UnshardHandle:
    """A gather that has been issued."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Finish it: the module's parameters are then the whole weights."""
        self._unit.wait()


class IslandModule(nn.Module):
    """What :func:`~node.island.fully_shard` adds to a module's class.

    Setters with ``recurse`` say something of the module's own unit and, by default, of all units in it.
    Whatever changes what travels must be said on all ranks.
    """

    def _own_unit(self) -> Unit:
        return cast(Unit, self.__dict__[UNIT_ATTRIBUTE])

    def _island_units(self, recurse: bool = True) -> list[Unit]:
        return [unit for _, unit in units_of(self)] if recurse else [self._own_unit()]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the weights of this module's own unit; see :meth:`reshard`.

        Args:
            async_op: do not wait. The module's forward does, and so does the handle that is returned.
        """
        unit = self._own_unit()
        unit.unshard()
        if async_op:
            return UnshardHandle(unit)
        unit.wait()
        return None

    def reshard(self) -> None:
        """Release the weights of this module's own unit again."""
        self._own_unit().reshard()

    def set_requires_gradient_sync(self, requires: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; without, whole gradients add up on every rank meanwhile."""
        for unit in self._island_units(recurse):
            unit.sync = unit.all_reduce = requires

    def set_requires_all_reduce(self, requires: bool, *, recurse: bool = True) -> None:
        """Whether backward adds gradients up over replicas (hybrid sharding) beside shards.

        Without, the sums of each replica add up in its shards until a backward with it; ``.grad`` is as it
        was meanwhile. No effect without replicas.
        """
        for unit in self._island_units(recurse):
            unit.all_reduce = requires

    def set_is_last_backward(self, last: bool) -> None:
        """Whether the next backward waits for its reduces at its end; without, they may go on beside the
        next one, and ``.grad`` lacks them until a backward that is the last. Said of the root."""
        for unit in self._island_units():
            unit.last_backward = last

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of this unit's gradients over all ranks is divided by, instead of their number."""
        self._own_unit().divisor = factor

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to release the weights between forward and backward."""
        for unit in self._island_units(recurse):
            unit.wanted_reshard = unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to release the weights after backward. If not, the next forward gathers nothing: for
        micro-batches, as it does not see what an optimizer does meanwhile."""
        for unit in self._island_units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this unit's weights; embeddings alone in a unit can do without."""
        self._own_unit().unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """The units to gather while this one runs forward, in place of those that followed the last time;
        none: those again. More of them hold more memory, also when forward does not come to them soon."""
        self._own_unit().forward_prefetch = _units(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """The same in backward, of those that it has not come to yet."""
        self._own_unit().backward_prefetch = _units(modules)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward within it adds up gradients without reducing them."""
        before = [(unit, unit.sync, unit.all_reduce) for unit in self._island_units()]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, sync, all_reduce in before:
                unit.sync, unit.all_reduce = sync, all_reduce

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See :func:`~node.island.clip_grad_norm_`."""
        return clip_grad_norm_(self, max_norm, norm_type)

    def reset_iter_state(self) -> None:
        """Forget a step that an exception cut short; on all ranks. The next forward does it by itself."""
        for unit in self._island_units():
            if unit.runtime is not None:
                unit.runtime.reset()
                return

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        unit: Unit | None = self.__dict__.get(UNIT_ATTRIBUTE)
        if unit is None:
            return cast(nn.Module, cast(Any, super())._apply(fn, recurse))
        unit.reshard()
        cast(Any, super())._apply(fn, recurse)
        unit.rebind()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``nn.Module``: the tensors of this rank, whether or not the weights are gathered."""
        unit: Unit | None = self.__dict__.get(UNIT_ATTRIBUTE)
        if unit is None:  # another instance of the class that a sharded module has, as from_pretrained makes
            return super().state_dict(*args, **kwargs)
        with unit.showing_shards():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As in ``nn.Module``, for the tensors of this rank; :func:`~node.island.load_full_state_dict` takes
        whole ones.

        Raises:
            LayoutError: for ``assign``, which would take the weights out of their buffers.
        """
        if assign:
            raise LayoutError("load_state_dict(assign=True) would replace sharded parameters: leave it out")
        with ExitStack() as stack:
            for unit in self._island_units():
                stack.enter_context(unit.showing_shards())
            return super().load_state_dict(state_dict, strict)


FSDPModule = IslandModule  # the name in torch


def _units(modules: Sequence[nn.Module]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, IslandModule):
            raise LayoutError(f"{type(module).__name__} is not wrapped: fully_shard it first")
    return [cast(IslandModule, module)._own_unit() for module in modules]
