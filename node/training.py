"""Training: what a node computes for a round, one micro-step after another, and what it proposes.

A round of K micro-steps splits the samples leased for it into K batches. After ``send_after`` of them the
contribution is written; where steps are left, they run while the contribution travels. Its first bytes may
travel while the last gradients before it are still being computed.

The ranks of a node read disjoint parts of every batch. What they do together they do in the same order: as
many passes forward and backward, and as many agreements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from node.batches import micro_batches, parts_of
from node.clocks import Clocks, Stopwatch
from node.evaluation import Data, Model
from node.events import Listener, MicroStep, Notice
from node.exchange.base import RoundOrder
from node.exchange.filling import Filling
from node.ranks import Alone, Ranks
from optim.round_optimizer import RoundOptimizer


class BrokenOff(Exception):
    """A micro-step has come to its end, and there is to be no other."""


Send = Callable[[torch.Tensor, Filling], None]
Arrived = Callable[[torch.Tensor], None]

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
        loss: nats per token that this rank predicted, the mean over the micro-steps that were not left out;
            NaN without any.
        tokens: predicted in them by this rank.
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
        if not tokens or (self.reason and self.send_after):
            return
        self.tokens += tokens
        share = tokens / self.tokens
        self.loss = loss if share == 1.0 else self.loss + (loss - self.loss) * share

    def abstain(self, reason: str) -> None:
        """Leave the round without a contribution; its samples count as not trained."""
        self.payload, self.reason = None, reason
        self.loss, self.tokens = math.nan, 0


def watch_gradients(optimizer: RoundOptimizer, arrived: Arrived) -> None:
    """Call ``arrived`` with each parameter whose gradient a backward pass has made final."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.is_meta:
                parameter.register_post_accumulate_grad_hook(arrived)


class Training:
    """Runs the micro-steps of a round.

    Args:
        model: on ``device``; of an island, sharded by :func:`node.island.rounds.shard`.
        data: the run's.
        optimizer: over what this rank holds of the model's parameters.
        seed: of the order of the samples.
        set_rate: sets the learning rate of a moment, in rounds; a fraction within a round.
        device: where batches go.
        clocks: for phases and intervals.
        watch: counts the phases ``data``, ``compute`` and ``propose``.
        on_event: told how far a long round is, and of steps that were left out.
        ranks: of the node.
        accumulate: passes in which a rank reads its part of a batch.
        watch_gradients: see the function of that name; needed for :meth:`begin` with ``send``.
        stop_asked: looked at after every micro-step: whether :class:`BrokenOff` is to end the round there.
            The same on all ranks.

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
        ranks: Ranks | None = None,
        accumulate: int = 1,
        watch_gradients: Callable[[RoundOptimizer, Arrived], None] = watch_gradients,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stop_asked = stop_asked
        self.ahead = 0
        self._ranks = ranks or Alone()
        self._accumulate = accumulate
        self._watch_gradients: Callable[[RoundOptimizer, Arrived], None] | None = watch_gradients
        self._live = False  # whether gradients that come now are those of the proposal
        self._aside = 0.0  # CPU seconds of the optimizer during a backward pass
        self._model = model
        self._data = data
        self._optimizer = optimizer
        self._seed = seed
        self._set_rate = set_rate
        self._device = device
        self._clocks = clocks
        self._watch = watch
        self._on_event = on_event
        self._payload = torch.empty(optimizer.lane.nbytes, dtype=torch.uint8)
        self._last_progress = -math.inf
        self._last_notice = -math.inf
        self._skipped = 0  # in all rounds

    def begin(self, order: RoundOrder, send: Send | None = None) -> Work:
        """Train until the contribution is due, and write it. :meth:`finish` makes the steps that are left.

        Args:
            order: of the round.
            send: given, it is called before the last of these steps, with the contribution and how far that
                has been written; not where nothing is computed before it is written.

        Raises:
            BrokenOff: see ``stop_asked``.
        """
        if order.result_ready:
            return Work(order.round, reason="catching up")
        if not order.lease_count:
            return Work(order.round, reason="no samples were leased to this node")
        steps = self._optimizer.micro_steps(order.round)
        batches = micro_batches(order.lease_start, order.lease_count, steps)
        send_after = self._optimizer.send_after(order.round)
        if send_after:
            send_after = max(1, len(batches) * send_after // steps)
        work = Work(order.round, batches, send_after)
        if len(batches) > 1:
            self._last_progress = self._clocks.wall()
        payload = self._payload[: self._optimizer.lane.of(order.round).nbytes]
        while work.done < send_after - 1:
            self._micro_step(work)
        if not send_after:
            self._propose(work, payload)
        elif send is None:
            self._propose(work, payload, self._micro_step(work))
        else:
            filling = Filling(payload.numel())
            try:
                send(payload, filling)
                self._stream(work.round, payload, filling)
                self._propose(work, payload, self._micro_step(work, live=True))
            finally:
                filling.finish(work.payload is not None, work.reason or "the node failed")
        return work

    def _stream(self, round_index: int, payload: torch.Tensor, filling: Filling) -> None:
        """Let the optimizer work as gradients come."""
        if self._watch_gradients is not None:
            self._watch_gradients(self._optimizer, self._arrived)
            self._watch_gradients = None
        self._optimizer.start(round_index, payload, filling.advance)

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self._live:
            return
        if not self._optimizer.completes(parameter):
            self._optimizer.arrived(parameter)  # too short for a phase
            return
        mark = self._clocks.cpu()
        with self._watch.phase("propose"):
            self._optimizer.arrived(parameter)
        self._aside += self._clocks.cpu() - mark

    def finish(self, work: Work) -> None:
        """Make the micro-steps that are left, while the contribution is on its way.

        Raises:
            BrokenOff: see ``stop_asked``.
        """
        while work.unfinished:
            self._micro_step(work)
        if 0 < work.skipped < work.done:
            self._tell_skipped(work)

    def _micro_step(self, work: Work, *, live: bool = False) -> float:
        """Read a batch, compute its gradients and let the optimizer use them; returns its mean loss here."""
        index, steps = work.done, len(work.batches)
        self._set_rate(work.round + index / steps)
        ranks = self._ranks
        parts = parts_of(*work.batches[index], rank=ranks.rank, ranks=ranks.size, accumulate=self._accumulate)
        whole, predicted, usable = sum(part.share for part in parts), 0, False
        value = 0.0 if whole else math.nan
        for number, (start, count, share) in enumerate(parts):
            with self._watch.phase("data"):
                tokens = self._data.batch(start, count, self._seed).to(self._device)
            with self._watch.phase("compute"):
                mark, self._aside = self._clocks.cpu(), 0.0
                if not number:
                    self._optimizer.zero_grad(set_to_none=True)
                loss = self._model.loss(tokens)
                self._live = live and number == len(parts) - 1
                try:
                    (loss if share == 1.0 else loss * share).backward()
                finally:
                    self._live = False
                if share:
                    value += float(loss.detach()) * (share / whole)
                    predicted += tokens.shape[0] * (tokens.shape[1] - 1)
                work.compute += self._clocks.cpu() - mark - self._aside
                if number == len(parts) - 1:
                    usable = self._optimizer.local_step(work.round, index)
        work.done += 1
        if usable:
            work.count(value, predicted)
            self.ahead += steps > 1  # where there is one step, only the proposal takes its gradient in
        else:
            work.skipped += 1
        if self._stop_asked():
            raise BrokenOff
        if steps > 1:
            self._tell_progress(work, value)
        return value

    def _propose(self, work: Work, payload: torch.Tensor, loss: float = math.nan) -> None:
        with self._watch.phase("propose"):
            before, self.ahead = self.ahead, max(1, self.ahead)
            if self._optimizer.propose(work.round, payload):
                work.payload = payload
                return
        self.ahead = before
        work.abstain(_not_finite(work, loss) if work.done else "there is no gradient of an earlier round")

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
