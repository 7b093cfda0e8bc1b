"""The base of every optimizer whose update is agreed between nodes once a round.

A round is ``micro_steps`` local batches long (1 for a vote every step, K for methods with local steps). After
each backward pass the worker calls :meth:`RoundOptimizer.local_step`. Then :meth:`~RoundOptimizer.propose`
writes the bytes that travel and :meth:`~RoundOptimizer.apply` turns the committed result, the same bytes on
every node, into the update. What lies between is not this module's business: a coordinator, a process group,
or nothing at all (:meth:`~RoundOptimizer.step`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from optim.reduce import Reduction, identity
from protos.buckets import TableSchedule


def _direct(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ``torch.optim.Optimizer`` without the wrapper that imports torch's compiler (1.5 CPU
    seconds in every node) to keep it away from the method."""
    inner: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return inner


_add_param_group = _direct(torch.optim.Optimizer.add_param_group)
_zero_grad = _direct(torch.optim.Optimizer.zero_grad)
_state_dict = _direct(torch.optim.Optimizer.state_dict)
_load_state_dict = _direct(torch.optim.Optimizer.load_state_dict)


class RoundOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose update is agreed once a round.

    Args:
        params: as of torch; every trainable parameter of the run.
        reduce: the exchange used by :meth:`step`.

    Attributes:
        tables: what travels, round by round.
        round_index: the round that :meth:`step` is in; saved in ``state_dict``.
        reduce: may be replaced at any time.
    """

    tables: TableSchedule

    def __init__(self, params: Iterable[Any], *, reduce: Reduction = identity) -> None:
        self.reduce = reduce
        self.round_index = 0
        self._done = 0  # micro-steps of the round that step() has made
        self._payload: Tensor | None = None
        self._sealed = False
        super().__init__(params, {})
        self._sealed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only used while constructing: afterwards the table is agreed with other nodes and cannot grow."""
        if self._sealed:
            raise RuntimeError(
                "the bucket table of a run is fixed: build a new optimizer with all its parameters"
            )
        _add_param_group(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of torch."""
        _zero_grad(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As of torch."""
        return _state_dict(self)  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch."""
        _load_state_dict(self, state_dict)

    # ------------------------------------------------------------------ a round

    def micro_steps(self, round_index: int) -> int:
        """Batches that a node trains in a round, at least 1."""
        return 1

    def send_after(self, round_index: int) -> int:
        """The micro-steps of a round before :meth:`propose`; the others, if any, run during the exchange."""
        return self.micro_steps(round_index)

    def local_step(self, round_index: int, micro_step: int) -> bool:
        """Use the gradients of one backward pass; called for ``micro_step`` 0, 1, ... of the round.

        Methods without local steps do nothing here: :meth:`propose` reads the gradients.

        Returns:
            False if a gradient was not finite: the step was left out and the state is as before.
        """
        return True

    @abstractmethod
    def propose(self, round_index: int, out: Tensor) -> bool:
        """Write this node's contribution to a round into ``out``.

        ``out`` is uint8, ``tables.of(round_index).nbytes`` elements, contiguous. Returns False if the node
        has to abstain; ``out`` is then of no use. It may be called again for the same round, after more
        steps.
        """

    @abstractmethod
    def apply(self, round_index: int, payload: Tensor | None, *, counted: bool = True) -> None:
        """Apply the committed result of a round; equal bytes give equal shared tensors.

        Args:
            round_index: number of the round; :meth:`propose` need not have been called for it.
            payload: uint8, ``tables.of(round_index).result_nbytes`` elements; ``None`` for a round nobody
                contributed to.
            counted: whether what :meth:`propose` wrote is in the result; if not, it stays in the error
                feedback.
        """

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One micro-step; the last of a round also proposes, exchanges by :attr:`reduce` and applies.

        Returns what ``closure`` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.local_step(self.round_index, self._done)
        self._done += 1
        if self._done < self.micro_steps(self.round_index):
            return loss
        self._done = 0
        if self._payload is None:
            self._payload = torch.empty(self.tables.nbytes, dtype=torch.uint8)
        table = self.tables.of(self.round_index)
        payload = self._payload[: table.nbytes]
        usable = self.propose(self.round_index, payload)
        result = self.reduce(payload if usable else None, round_index=self.round_index, table=table)
        self.apply(self.round_index, result, counted=usable)
        return loss

    # ------------------------------------------------------------------ state

    @abstractmethod
    def shared_tensors(self) -> dict[str, Tensor]:
        """The tensors that are bit-identical on all nodes between rounds, live: the model's under its
        parameters' names, the optimizer's as ``optimizer/<name>/<key>``."""

    @abstractmethod
    def local_tensors(self) -> dict[str, Tensor]:
        """The state that is this node's own, live, as ``optimizer/<name>/<key>``."""

    def prepare_load(self) -> None:
        """Make every local tensor exist, so that a checkpoint can be copied into :meth:`local_tensors`."""

    def loaded(self) -> None:
        """The shared tensors were overwritten from outside: bring the model in line with them."""
