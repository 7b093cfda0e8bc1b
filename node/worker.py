"""The worker: the training loop of a node, from the next order to the report, whatever carries the bytes.

World size 1 on a local exchange and a node among thousands run the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from node import checkpoint
from node.checkpoint import Saving
from node.clocks import Clocks, Stopwatch
from node.evaluation import Data, Evaluator, Model, Validation
from node.events import (
    Abstained,
    Evaluated,
    Listener,
    Notice,
    RoundDone,
    RoundMissed,
    Saved,
    StateLoaded,
    StateSent,
    Stopped,
    Summary,
    TransferFailed,
)
from node.exchange.base import (
    DonateOrder,
    Exchange,
    ExchangeError,
    LoadOrder,
    RoundOrder,
    RoundResult,
    StopOrder,
    WorkReport,
)
from node.exchange.in_flight import InFlight
from node.exchange.trouble import RoundLost, TransferError
from node.state import SharedState
from node.training import Training, Work
from optim.round_optimizer import RoundOptimizer
from optim.schedules import factor, set_learning_rates
from protos.runfile import RunFile

INTERRUPTED: Final = "interrupted by its user"


class Worker:
    """One node's loop.

    Args:
        runfile: of the run.
        model: on ``device``, in its initial or loaded state.
        data: the run's.
        optimizer: over the model's parameters.
        exchange: joined already.
        device: where batches go.
        round_index: the next round to train; greater than 0 after a checkpoint was loaded.
        on_event: told about everything that happens.
        saving: where checkpoints go.
        clocks: for tests.
    """

    def __init__(
        self,
        runfile: RunFile,
        model: Model,
        data: Data,
        optimizer: RoundOptimizer,
        exchange: Exchange,
        *,
        device: torch.device | str = "cpu",
        round_index: int = 0,
        on_event: Listener = lambda event: None,
        saving: Saving | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self.state = SharedState(optimizer.shared_tensors())
        self.round = round_index
        self.waiting = False  # for others: nothing is lost if the wait is interrupted
        self._consistent = True  # the shared state is that before self.round, not half of a result
        self._whole = True  # the shared state was not left half loaded
        self._saved = -1  # the round of the last checkpoint of this state
        self._runfile = runfile
        self._optimizer = optimizer
        self._exchange = exchange
        self._on_event = on_event
        self._saving = saving
        place = torch.device(device)
        self._clocks = clocks or Clocks.of(place)
        self._watch = Stopwatch(self._clocks.wall)
        self._training = Training(
            model,
            data,
            optimizer,
            seed=runfile.run.seed,
            set_rate=self._set_rate,
            device=place,
            clocks=self._clocks,
            watch=self._watch,
            on_event=lambda event: self._on_event(event),
        )
        self._evaluator = Evaluator(model, data, runfile.run.validation_windows, place)
        self.interrupted = False  # by interrupt(): the loop ends after the present round
        self._digest = ""
        self._loss = math.nan
        self._measured = Validation(math.nan, math.nan)
        self._trained = self._abstained = self._tokens = 0
        self._compute_total = self._busy_total = self._busy_mark = 0.0

    # ------------------------------------------------------------------------------- the loop

    def run(self) -> Summary:
        """Follow orders until the stop.

        Raises:
            ExchangeError: the run cannot go on with this node; the text says why.
            CheckpointError: a checkpoint could not be written.
        """
        started = self._clocks.wall()
        self._busy_mark = self._clocks.cpu()
        stop = self._follow()
        if stop.evaluate and self.round > 0:
            self._last_evaluation()
        self.save()
        self._on_event(Stopped(stop.done, stop.reason))
        up, down = self._exchange.bytes_counted()
        return Summary(
            done=stop.done,
            reason=stop.reason,
            round=self.round,
            trained=self._trained,
            abstained=self._abstained,
            tokens=self._tokens,
            loss=self._loss,
            validation_loss=self._measured.loss,
            bits_per_byte=self._measured.bits_per_byte,
            digest=self._digest or self.state.digest(),
            bytes_up=up,
            bytes_down=down,
            seconds=self._clocks.wall() - started,
            compute_share=self._compute_total / self._busy_total if self._busy_total > 0 else 0.0,
        )

    def interrupt(self) -> None:
        """Ask the loop to end after the present round; callable from signal handlers."""
        self.interrupted = True

    def save(self) -> None:
        """Write a checkpoint, if there is a place for it and the shared state is that between two rounds.

        Does nothing if that state is saved already.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._saving is None or self._saved == self.round:
            return
        if not (self._consistent and self._whole):
            self._on_event(Notice(f"nothing is saved: the state of round {self.round} is incomplete"))
            return
        if ahead := self._training.ahead:
            gradients = "one gradient" if ahead == 1 else f"{ahead} gradients"
            self._on_event(
                Notice(
                    f"the stop came within round {self.round + 1}: the saved momenta are {gradients} ahead"
                )
            )
        path = checkpoint.save(
            self._saving.folder,
            round_index=self.round,
            run_name=self._runfile.run.name,
            run_toml=self._runfile.to_toml(),
            run_digest=self._runfile.digest,
            shared=self.state.tensors,
            shared_digest=self._digest or self.state.digest(),
            local=self._optimizer.local_tensors(),
            reducer=self._exchange.reducer_tensors(),
        )
        self._saved = self.round
        self._on_event(Saved(self.round, path))

    def _follow(self) -> StopOrder:
        while True:
            if self.interrupted:
                return StopOrder(done=False, reason=INTERRUPTED, evaluate=False)
            with self._interruptible():
                order = self._exchange.next_order()
            if isinstance(order, RoundOrder):
                self._round(order)
            elif isinstance(order, DonateOrder):
                self._donate(order)
            elif isinstance(order, LoadOrder):
                self._load(order)
            else:
                return order

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    # ------------------------------------------------------------------------------- one round

    def _round(self, order: RoundOrder) -> None:
        if order.round < self.round:
            return  # offered again after a reconnect, and applied already
        if order.round > self.round or not self._whole:
            held = f"that after round {self.round}" if self._whole else "incomplete after a broken transfer"
            raise ExchangeError(
                f"the coordinator opened round {order.round + 1}, but this node's state is {held}: start the "
                "node again, it will load the present state"
            )
        self._watch.restart()
        work = self._training.begin(order)
        if work.reason and not order.result_ready:
            self._abstained += 1
            self._on_event(Abstained(order.round, work.reason))
        try:
            result = self._reduce(order, work)
        except RoundLost as lost:
            self._on_event(RoundMissed(order.round, str(lost)))
            return
        self._set_rate(order.round)
        self._consistent = False
        with self._watch.phase("apply"):
            self._optimizer.apply(order.round, result.payload, counted=result.counted)
        self.round = order.round + 1
        self._consistent, self._training.ahead = True, 0
        with self._watch.phase("digest"):
            self._digest = self.state.digest()
        self._trained += result.counted
        self._tokens += work.tokens
        self._loss = work.loss if work.tokens else self._loss
        self._compute_total += work.compute
        self._tell(work, result, self._take_busy(), self._evaluate() if order.evaluate else None)
        if self._saving is not None and self._saving.every and self.round % self._saving.every == 0:
            self.save()

    def _reduce(self, order: RoundOrder, work: Work) -> RoundResult:
        """Exchange; the micro-steps that are left run meanwhile."""
        if not work.unfinished:
            self._training.finish(work)
            with self._watch.phase("exchange"), self._interruptible():
                return self._exchange.reduce(order, work.payload, work.reason)
        payload, reason = work.payload, work.reason
        flight = InFlight(lambda: self._exchange.reduce(order, payload, reason), f"atoll-round-{order.round}")
        self._training.finish(work)
        with self._watch.phase("exchange"), self._interruptible():
            return flight.result()

    def _set_rate(self, moment: float) -> None:
        """``moment`` in rounds: a fraction is a micro-step within one."""
        run, method = self._runfile.run, self._runfile.method
        shape, warmup, final = method.schedule, method.warmup, method.final
        rate = factor(moment, run.rounds, warmup=warmup, shape=shape, final=final)
        set_learning_rates(self._optimizer, rate)

    def _tell(self, work: Work, result: RoundResult, busy: float, measured: Validation | None) -> None:
        """Report to the others, and to whoever listens here."""
        validation_loss = measured.loss if measured else None
        bits_per_byte = measured.bits_per_byte if measured else None
        self._exchange.report(
            WorkReport(
                round=result.round,
                state_digest=self._digest,
                loss=work.loss,
                tokens=work.tokens,
                compute_seconds=work.compute,
                busy_seconds=busy,
                validation_loss=validation_loss,
                bits_per_byte=bits_per_byte,
            )
        )
        up, down = self._exchange.bytes_counted()
        self._on_event(
            RoundDone(
                round=result.round,
                rounds=self._runfile.run.rounds,
                loss=work.loss,
                tokens=work.tokens,
                counted=result.counted,
                voters=result.voters,
                agreement=result.agreement,
                reason=result.reason,
                digest=self._digest,
                bytes_up=up,
                bytes_down=down,
                compute_seconds=work.compute,
                busy_seconds=busy,
                seconds=self._watch.seconds,
                validation_loss=validation_loss,
                bits_per_byte=bits_per_byte,
                micro_steps=work.done,
                skipped=work.skipped,
            )
        )

    def _take_busy(self) -> float:
        mark, self._busy_mark = self._busy_mark, self._clocks.cpu()
        busy = self._busy_mark - mark
        self._busy_total += busy
        return busy

    def _evaluate(self) -> Validation:
        """Measure the shared state; its CPU time counts neither as compute nor as overhead of a round."""
        with self._watch.phase("evaluate"), self._optimizer.evaluating():
            self._measured = self._evaluator.measure()
        self._busy_mark = self._clocks.cpu()
        return self._measured

    def _last_evaluation(self) -> None:
        measured = self._evaluate()
        report = WorkReport(
            round=self.round - 1,
            state_digest=self._digest or self.state.digest(),
            loss=self._loss,
            tokens=0,
            compute_seconds=0.0,
            busy_seconds=self._take_busy(),
            validation_loss=measured.loss,
            bits_per_byte=measured.bits_per_byte,
        )
        self._exchange.report(report)
        self._on_event(Evaluated(self.round - 1, measured.loss, measured.bits_per_byte))

    # ----------------------------------------------------------------------------- shared state

    def _donate(self, order: DonateOrder) -> None:
        start = self._clocks.wall()
        if order.round != self.round or not self._whole:
            reason = f"asked for the state of round {order.round}, this node holds that of round {self.round}"
            self._on_event(TransferFailed(order.round, reason))
            return
        digest = self._digest or self.state.digest()
        try:
            with self._interruptible():
                self._exchange.donate(order, self.state.tensors, digest)
        except TransferError as error:
            self._on_event(TransferFailed(order.round, str(error)))
            return
        self._on_event(StateSent(order.round, self.state.nbytes, self._clocks.wall() - start))

    def _load(self, order: LoadOrder) -> None:
        """Replace the shared state. Momenta and error feedback stay: they are this node's own."""
        start = self._clocks.wall()
        self._whole, self._saved = False, -1
        try:
            with self._interruptible():
                announced = self._exchange.load(order, self.state.tensors)
            digest = self.state.digest()
            if digest != announced:
                raise TransferError(
                    f"the loaded state has the digest {digest}, the donor announced {announced}"
                )
        except TransferError as error:
            self._on_event(TransferFailed(order.round, str(error)))
            return
        self._optimizer.loaded()
        self._whole = self._consistent = True
        self._digest = digest
        self.round = order.round
        self._exchange.ready(order.round, digest)
        self._on_event(StateLoaded(order.round, self.state.nbytes, digest, self._clocks.wall() - start))
