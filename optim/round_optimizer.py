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
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor

from optim.reduce import Reduction, SingleNode
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
        reduce: the exchange used by :meth:`step`; a :class:`~optim.reduce.SingleNode` if ``None``.

    A parameter without storage (on the meta device) is held by another rank of this node's island: it has its
    place in :attr:`tables`, and nothing of it is kept, proposed or applied here.

    Attributes:
        tables: what travels, round by round; the same on all nodes of a run.
        lane: the part of it that this rank carries: all but the buckets of parameters that are held
            elsewhere. :meth:`propose` and :meth:`apply` are about its bytes.
        agree: asks all ranks of the island whether something went well with each of them; a rank that is
            alone agrees with itself. Every rank, one that holds nothing too, asks once in each
            :meth:`propose`, and once in each :meth:`local_step` of a method with local steps.
        round_index: the round that :meth:`step` is in; saved in ``state_dict``.
        reduce: may be replaced at any time.
        driver: makes the rounds in place of :meth:`step`, which then only tells it the loss, if it knows it.
    """

    tables: TableSchedule
    lane: TableSchedule

    def __init__(self, params: Iterable[Any], *, reduce: Reduction | None = None) -> None:
        self.reduce: Reduction = SingleNode() if reduce is None else reduce
        self.agree: Callable[[bool], bool] = bool
        self.driver: Callable[[float | None], None] | None = None
        self.round_index = 0
        self._done = 0  # micro-steps of the round that step() has made
        self._held: tuple[bool, Tensor | None] | None = None  # the exchange of step(), until its round ends
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
        """The micro-steps of a round before :meth:`propose`; the others, if any, run during the exchange.
        0 proposes first of all, what earlier rounds have left."""
        return self.micro_steps(round_index)

    def local_step(self, round_index: int, micro_step: int) -> bool:
        """Use the gradients of one backward pass; called for ``micro_step`` 0, 1, ... of the round.

        Methods without local steps do nothing here: :meth:`propose` reads the gradients.

        Returns:
            False if a gradient was not finite, here or on another rank: the step was left out and the state
            is as before.
        """
        return True

    def start(self, round_index: int, out: Tensor, on_ready: Callable[[int], None]) -> None:
        """The round's contribution may be written to ``out`` from now on, front to back.

        Called before the backward pass after which :meth:`propose` is called with the same ``out``; up to
        then the caller announces each gradient by :meth:`arrived`. Whether anything is written before
        :meth:`propose` is the method's choice, and makes no difference to the bytes.

        Args:
            round_index: number of the round.
            out: as for :meth:`propose`; not to be touched until that has returned.
            on_ready: is told, from the thread that does the work, how many bytes from the first are final:
                more at each call. Their rest is final when :meth:`propose` has returned True.
        """
        return None

    def arrived(self, parameter: Tensor) -> None:
        """The gradient of a held parameter is final. Any order, and any thread, one at a time; without
        :meth:`start` nothing happens."""
        return None

    def completes(self, parameter: Tensor) -> bool:
        """Whether :meth:`arrived`, with this gradient, will do more than note it."""
        return False

    @abstractmethod
    def propose(self, round_index: int, out: Tensor) -> bool:
        """Write this node's contribution to a round into ``out``.

        ``out`` is uint8, ``lane.of(round_index).nbytes`` elements, contiguous. Returns False if the node has
        to abstain, on all of its ranks; ``out`` is then of no use. It may be called again for the same round,
        after more steps.
        """

    @abstractmethod
    def apply(self, round_index: int, payload: Tensor | None, *, counted: bool = True) -> None:
        """Apply the committed result of a round; equal bytes give equal shared tensors.

        Args:
            round_index: number of the round; :meth:`propose` need not have been called for it.
            payload: uint8, ``lane.of(round_index).result_nbytes`` elements; ``None`` for a round nobody
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
        """One micro-step. That which :meth:`send_after` names also proposes and exchanges by :attr:`reduce`;
        the last of a round applies the result.

        Returns what ``closure`` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.driver is not None:
            self.driver(loss)
            return loss
        index = self.round_index
        if not self._done and not self.send_after(index):
            self._held = self._exchange(index)
        self.local_step(index, self._done)
        self._done += 1
        if self._done == self.send_after(index):
            self._held = self._exchange(index)
        if self._done >= self.micro_steps(index):
            usable, result = self._held or (False, None)
            self._done, self._held = 0, None
            self.apply(index, result, counted=usable)
        return loss

    def _exchange(self, round_index: int) -> tuple[bool, Tensor | None]:
        """Propose and reduce: whether this node contributed, and the result."""
        if self._payload is None:
            self._payload = torch.empty(self.lane.nbytes, dtype=torch.uint8)
        table = self.lane.of(round_index)
        payload = self._payload[: table.nbytes]
        usable = self.propose(round_index, payload)
        return usable, self.reduce(payload if usable else None, round_index=round_index, table=table)

    # ------------------------------------------------------------------ state

    @abstractmethod
    def shared_tensors(self) -> dict[str, Tensor]:
        """The tensors that are bit-identical on all nodes between rounds, live: the model's under its
        parameters' names, the optimizer's as ``optimizer/<name>/<key>``; of held parameters only."""

    @abstractmethod
    def local_tensors(self) -> dict[str, Tensor]:
        """The state that is this node's own, live, as ``optimizer/<name>/<key>``; of held parameters only."""

    def prepare_load(self) -> None:
        """Make every local tensor exist, so that a checkpoint can be copied into :meth:`local_tensors`."""

    def loaded(self) -> None:
        """The shared tensors were overwritten from outside: bring the model in line with them.

        Where a checkpoint is loaded, its local tensors are copied in after this call: what it changes of
        them does not count.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Within this context the model's parameters are the shared ones, for measuring; after it they are
        again what local steps have made of them. Nothing to do where there are none."""
        return nullcontext()
