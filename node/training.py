"""Training: what a node computes for a round, one micro-step after another, and what it proposes.

A round of K micro-steps splits the samples leased for it into K batches. After ``send_after`` of them the
contribution is written; where steps are left, they run while the contribution travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from node.clocks import Clocks, Stopwatch
from node.evaluation import Data, Model
from node.events import Listener, MicroStep, Notice
from node.exchange.base import RoundOrder
from optim.round_optimizer import RoundOptimizer

PROGRESS_SECONDS: Final = 2.0  # between two events about the steps within a round
NOTICE_SECONDS: Final = 30.0  # between two notices about steps that were left out


@dataclass
class Work:
    """What a node does for a round; without a payload it abstains for ``reason``.

    Attributes:
        round: its number.
        batches: first global sample and number of samples of each micro-step.
        send_after: micro-steps before the proposal.
        done: micro-steps made.
        skipped: those of them that were left out, as a gradient was not finite.
        loss: nats per token, the mean over the micro-steps that were not left out; NaN without any.
        tokens: predicted in them.
        compute: CPU seconds in forward and backward.
        payload: the contribution.
        reason: why there is none.
    """

    round: int
    batches: tuple[tuple[int, int], ...] = ()
    send_after: int = 0
    done: int = 0
    skipped: int = 0
    loss: float = math.nan
    tokens: int = 0
    compute: float = 0.0
    payload: torch.Tensor | None = None
    reason: str = ""

    @property
    def unfinished(self) -> bool:
        """Whether micro-steps are left."""
        return self.done < len(self.batches)

    def count(self, loss: float, tokens: int) -> None:
        """Take a batch into the mean; that of a single batch is its own loss to the last bit."""
        if self.reason:
            return
        self.tokens += tokens
        share = tokens / self.tokens
        self.loss = loss if share == 1.0 else self.loss + (loss - self.loss) * share

    def abstain(self, reason: str) -> None:
        """Leave the round without a contribution; its samples count as not trained."""
        self.payload, self.reason = None, reason
        self.loss, self.tokens = math.nan, 0


def micro_batches(start: int, count: int, steps: int) -> tuple[tuple[int, int], ...]:
    """Cut the samples ``start`` to ``start + count - 1`` into ``steps`` batches ``(first, samples)``.

    As ``torch.tensor_split``: consecutive, the first ones larger by one. With fewer samples than steps there
    are fewer batches, of one sample each.
    """
    parts = min(count, steps)
    batches = []
    for index in range(parts):
        size = count // parts + (index < count % parts)
        batches.append((start, size))
        start += size
    return tuple(batches)


class Training:
    """Runs the micro-steps of a round.

    Args:
        model: on ``device``.
        data: the run's.
        optimizer: over the model's parameters.
        seed: of the order of the samples.
        set_rate: sets the learning rate of a moment, in rounds; a fraction within a round.
        device: where batches go.
        clocks: for phases and intervals.
        watch: counts the phases ``data``, ``compute`` and ``propose``.
        on_event: told how far a long round is, and of steps that were left out.

    Attributes:
        ahead: gradients that the optimizer's state has taken in, and whose round is not applied.
    """

    def __init__(
        self,
        model: Model,
        data: Data,
        optimizer: RoundOptimizer,
        *,
        seed: int,
        set_rate: Callable[[float], None],
        device: torch.device,
        clocks: Clocks,
        watch: Stopwatch,
        on_event: Listener,
    ) -> None:
        self.ahead = 0
        self._model = model
        self._data = data
        self._optimizer = optimizer
        self._seed = seed
        self._set_rate = set_rate
        self._device = device
        self._clocks = clocks
        self._watch = watch
        self._on_event = on_event
        self._payload = torch.empty(optimizer.tables.nbytes, dtype=torch.uint8)
        self._last_progress = -math.inf
        self._last_notice = -math.inf
        self._skipped = 0  # in all rounds

    def begin(self, order: RoundOrder) -> Work:
        """Train until the contribution is due, and write it. :meth:`finish` makes the steps that are left."""
        if order.result_ready:
            return Work(order.round, reason="catching up")
        if not order.lease_count:
            return Work(order.round, reason="no samples were leased to this node")
        steps = self._optimizer.micro_steps(order.round)
        batches = micro_batches(order.lease_start, order.lease_count, steps)
        send_after = max(1, len(batches) * self._optimizer.send_after(order.round) // steps)
        work = Work(order.round, batches, send_after)
        if len(batches) > 1:
            self._last_progress = self._clocks.wall()
        while work.done < send_after:
            loss = self._micro_step(work)
        self._propose(work, loss)
        return work

    def finish(self, work: Work) -> None:
        """Make the micro-steps that are left, while the contribution is on its way."""
        while work.unfinished:
            self._micro_step(work)
        if 0 < work.skipped < work.done:
            self._tell_skipped(work)

    def _micro_step(self, work: Work) -> float:
        """Read a batch, compute its gradients and let the optimizer use them; returns the batch's loss."""
        index, steps = work.done, len(work.batches)
        self._set_rate(work.round + index / steps)
        start, count = work.batches[index]
        with self._watch.phase("data"):
            tokens = self._data.batch(start, count, self._seed).to(self._device)
        with self._watch.phase("compute"):
            mark = self._clocks.cpu()
            self._optimizer.zero_grad(set_to_none=True)
            loss = self._model.loss(tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            value = float(loss.detach())
            work.compute += self._clocks.cpu() - mark
            usable = self._optimizer.local_step(work.round, index)
        work.done += 1
        if usable:
            work.count(value, tokens.shape[0] * (tokens.shape[1] - 1))
            self.ahead += steps > 1  # where there is one step, only the proposal takes its gradient in
        else:
            work.skipped += 1
        if steps > 1:
            self._tell_progress(work, value)
        return value

    def _propose(self, work: Work, loss: float) -> None:
        payload = self._payload[: self._optimizer.tables.of(work.round).nbytes]
        with self._watch.phase("propose"):
            before, self.ahead = self.ahead, max(1, self.ahead)
            if self._optimizer.propose(work.round, payload):
                work.payload = payload
                return
        self.ahead = before
        work.abstain(_not_finite(work, loss))

    # -------------------------------------------------------------------------------- telling

    def _tell_progress(self, work: Work, loss: float) -> None:
        now = self._clocks.wall()
        if work.unfinished and now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self._on_event(MicroStep(work.round, work.done, len(work.batches), loss))

    def _tell_skipped(self, work: Work) -> None:
        self._skipped += work.skipped
        now = self._clocks.wall()
        if now - self._last_notice < NOTICE_SECONDS:
            return
        self._last_notice = now
        self._on_event(
            Notice(
                f"round {work.round + 1}: {work.skipped} of {work.done} micro-steps were left out, their "
                f"gradients are not finite ({self._skipped} so far)"
            )
        )


def _not_finite(work: Work, loss: float) -> str:
    if len(work.batches) == 1:
        return f"the gradient is not finite (loss {loss:.4g})"
    if work.skipped == work.done:
        return f"none of {work.done} gradients is finite (last loss {loss:.4g})"
    return f"what {work.done} micro-steps have changed is not finite (last loss {loss:.4g})"
