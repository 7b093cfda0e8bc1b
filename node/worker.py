"""The worker: the training loop of a node, from the next order to the report, whatever carries the bytes.

World size 1 on a local exchange and a node among thousands run the same code, and so does every rank of a
node of several. Only rank 0, the leader, asks for orders, reports and is interrupted; it shares its orders,
and all ranks carry them out together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Final

import torch

from node.account import Account
from node.checkpoint import Saving
from node.clocks import Clocks, Stopwatch
from node.evaluation import Data, Evaluator, Model, Validation
from node.events import Abstained, Evaluated, Listener, RoundMissed, Stopped, Summary
from node.exchange.base import (
    DonateOrder,
    Exchange,
    ExchangeError,
    Lane,
    LoadOrder,
    Order,
    ReplayOrder,
    RoundOrder,
    RoundResult,
    StopOrder,
    WorkReport,
)
from node.exchange.filling import Filling
from node.exchange.in_flight import InFlight
from node.exchange.trouble import RoundLost
from node.held_state import HeldState, Results
from node.joint import Figures, gathered, settled, together
from node.ranks import Alone, Ranks
from node.training import BrokenOff, Training, Work, watch_gradients
from node.update_norm import UpdateNorm
from optim.round_optimizer import RoundOptimizer
from optim.schedules import factor, set_learning_rates
from protos.runfile import RunFile

Watch = Callable[[RoundOptimizer, Callable[[torch.Tensor], None]], None]

INTERRUPTED: Final = "interrupted by its user"


class Worker:
    """One node's loop, or that of one of its ranks.

    Args:
        runfile: of the run.
        model: on ``device``, in its initial or loaded state.
        data: the run's.
        optimizer: over what this rank holds of the model's parameters.
        exchange: joined already; ``None`` on ranks that do not lead.
        ranks: of the node.
        lane: carries what this rank holds; the exchange itself if not given.
        device: where batches go.
        round_index: the next round to train; greater than 0 after a checkpoint was loaded.
        on_event: told about everything that happens.
        saving: where checkpoints go.
        clocks: for tests.
        accumulate: passes in which a rank reads its part of a batch.
        overlap: send a contribution while it is being computed.
        watch: tells of gradients, see :func:`node.training.watch_gradients`.
        samples: first global sample index behind all that the run has leased, as far as this node knows.
        measure: how far each round moves the weights; all ranks or none.
        evaluates: whether the model can be measured on validation data.
    """

    def __init__(
        self,
        runfile: RunFile,
        model: Model,
        data: Data,
        optimizer: RoundOptimizer,
        exchange: Exchange | None,
        *,
        ranks: Ranks | None = None,
        lane: Lane | None = None,
        device: torch.device | str = "cpu",
        round_index: int = 0,
        on_event: Listener = lambda event: None,
        saving: Saving | None = None,
        clocks: Clocks | None = None,
        accumulate: int = 1,
        overlap: bool = False,
        watch: Watch = watch_gradients,
        samples: int = 0,
        measure: bool = False,
        evaluates: bool = True,
    ) -> None:
        self.waiting = False  # for others: nothing is lost if the wait is interrupted
        self.interrupted = False  # by interrupt(): the loop ends after the present round
        self._why = INTERRUPTED
        self._missed = -1  # the last round whose work was lost
        self._lost: ExchangeError | None = None  # why this leader has no more orders
        self._runfile = runfile
        self._optimizer = optimizer
        self._ranks = ranks or Alone()
        given = lane or exchange
        assert given is not None and (exchange is not None or self._ranks.rank), "the leader has an exchange"
        self._exchange, self._lane = exchange, given
        self._on_event = on_event
        self._overlap = overlap
        place = torch.device(device)
        self._clocks = clocks or Clocks.of(place)
        self._watch = Stopwatch(self._clocks.wall)
        optimizer.agree = self._ranks.agree
        self._held = HeldState(
            runfile,
            optimizer,
            self._ranks,
            exchange,
            round_index=round_index,
            samples=samples,
            saving=saving,
            clock=self._clocks.wall,
            on_event=lambda event: self._on_event(event),
        )
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
            ranks=self._ranks,
            accumulate=accumulate,
            watch_gradients=watch,
            stop_asked=self._alone_and_interrupted,
        )
        self._evaluator: Evaluator | None = None
        if evaluates:
            self._evaluator = Evaluator(model, data, runfile.run.validation_windows, place, self._ranks)
        self._account = Account(runfile.run.rounds)
        self._busy_mark = 0.0
        self._norm = UpdateNorm(self._held.weights()) if measure else None
        self._change: float | None = None  # the square of that of the last round

    @property
    def round(self) -> int:
        """The next to be trained."""
        return self._held.round

    # ------------------------------------------------------------------------------- the loop

    def run(self) -> Summary:
        """Follow orders until the stop.

        Raises:
            ExchangeError: the run cannot go on with this node; the text says why.
            CheckpointError: a checkpoint could not be written.
        """
        started = self._clocks.wall()
        self._busy_mark = self._clocks.cpu()
        with closing(self._held):
            stop = self._follow()
        if stop.evaluate and self.round > 0:
            self._last_evaluation()
        self.save()
        lanes = gathered(self._ranks, "the bytes of all lanes", self._lane.bytes_counted())
        digest = self._held.digest()
        if self._lost is not None:
            raise self._lost
        self._on_event(Stopped(stop.done, stop.reason))
        seconds = self._clocks.wall() - started
        return self._account.summary(stop, self.round, digest, lanes, seconds)

    def interrupt(self, reason: str = INTERRUPTED) -> None:
        """Ask the loop to end after the present micro-step or, with several ranks, the present round;
        callable from signal handlers, on the leader."""
        self._why, self.interrupted = reason, True

    def leave(self, reason: str) -> None:
        """The same from another thread, which is to call it until the loop has ended: a wait ends as well."""
        self.interrupt(reason)
        if self.waiting:
            self._lane.close(reason)

    def save(self) -> None:
        """Write a checkpoint, if there is a place for it and the shared state is that between two rounds.

        Does nothing if that state is saved already. All ranks of a node call it at the same moment.

        Raises:
            CheckpointError: it could not be written.
        """
        self._held.save(self._training.ahead)

    def _follow(self) -> StopOrder:
        while True:
            order = self._ranks.share(None if self._ranks.rank else self._next_order())
            if isinstance(order, StopOrder):
                return order
            with suppress(BrokenOff):  # the interrupt is the next order
                self._carry_out(order)

    def _carry_out(self, order: RoundOrder | DonateOrder | LoadOrder | ReplayOrder) -> None:
        if isinstance(order, RoundOrder):
            self._round(order)
        elif isinstance(order, DonateOrder):
            with self._interruptible_alone():
                self._held.donate(order)
        elif isinstance(order, LoadOrder):
            self._held.load(order)
        else:
            self._held.replay(order, self._lane.replay, self._next_of, self._apply)

    def _next_order(self) -> Order:
        """The leader's next order; of an interrupt, and of the loss of the run, the other ranks learn by a
        stop: all of them save."""
        assert self._exchange is not None
        if not self.interrupted:
            try:
                with self._interruptible():
                    order = self._exchange.next_order()
                    if isinstance(order, LoadOrder):
                        self._held.download(order)
                    return order
            except KeyboardInterrupt:
                if self._ranks.size == 1:
                    raise
                self.interrupted = True
            except ExchangeError as error:
                if self._ranks.size == 1:
                    raise
                self._lost = error
                return StopOrder(done=False, reason=str(error), evaluate=False)
        return StopOrder(done=False, reason=self._why, evaluate=False)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    def _alone_and_interrupted(self) -> bool:
        return self.interrupted and self._ranks.size == 1

    def _interruptible_alone(self) -> AbstractContextManager[None]:
        """Where ranks wait for each other, the leader must not leave in between."""
        return self._interruptible() if self._ranks.size == 1 else nullcontext()

    # ------------------------------------------------------------------------------- one round

    def _round(self, order: RoundOrder) -> None:
        if order.round < self.round:
            return  # offered again after a reconnect, and applied already
        if order.round > self.round:
            raise ExchangeError(
                f"the coordinator opened round {order.round + 1}, but this node's state is that after round "
                f"{self.round}: start the node again, it will catch up"
            )
        if order.round == self._missed and not order.result_ready:
            self._optimizer.loaded()  # other samples: what the former ones have moved does not stay
        self._watch.restart()
        self._held.leased(order.frontier)
        flights: list[InFlight[RoundResult]] = []

        def send(payload: torch.Tensor, filling: Filling) -> None:
            flights.append(self._fly(order, payload, "", filling))

        try:
            work = self._training.begin(order, send if self._overlap else None)
            if work.reason and not order.result_ready:
                self._account.abstained += 1
                self._on_event(Abstained(order.round, work.reason))
            result = self._reduce(order, work, flights)
        except RoundLost as lost:
            self._missed = order.round
            self._on_event(RoundMissed(order.round, str(lost)))
            return
        self._apply(result)
        with self._watch.phase("digest"):
            digests = self._held.tensors.digests()
        up, down = self._lane.bytes_counted()
        busy = self._take_busy()
        mine = Figures(digests, work.loss, work.tokens, work.compute, busy, up, down, self._change)
        figures = together(self._ranks, order.round, mine)
        self._held.know_digest(figures.digest)
        measured = self._evaluate() if order.evaluate else None
        report, done = self._account.round(work, figures, result, self._watch, measured)
        self._report(report)
        self._on_event(done)
        self._held.save_regularly(self._training.ahead)

    def _fly(
        self, order: RoundOrder, payload: torch.Tensor | None, reason: str, filling: Filling | None = None
    ) -> InFlight[RoundResult]:
        """Exchange in a thread of its own."""

        def carry() -> RoundResult:
            with self._watch.span("flight"):
                return self._lane.reduce(order, payload, reason, filling)

        return InFlight(carry, f"atoll-round-{order.round}")

    def _reduce(self, order: RoundOrder, work: Work, flights: list[InFlight[RoundResult]]) -> RoundResult:
        """Exchange, if that is not on its way; the micro-steps that are left run meanwhile.

        Raises:
            RoundLost: a lane of the node was lost.
        """
        if work.unfinished and not flights:
            flights.append(self._fly(order, work.payload, work.reason))
        self._training.finish(work)
        if flights:
            return self._settled(order.round, flights[0].result)
        return self._settled(order.round, lambda: self._lane.reduce(order, work.payload, work.reason))

    def _settled(self, round_index: int, receive: Callable[[], RoundResult]) -> RoundResult:
        """What ``receive`` waits for, once every rank has its part of it."""
        outcome: RoundResult | ExchangeError
        with self._watch.phase("exchange"):
            try:
                with self._interruptible_alone():
                    if self._alone_and_interrupted():
                        raise BrokenOff
                    outcome = receive()
            except ExchangeError as error:
                outcome = error
            counted = settled(self._ranks, round_index, outcome)
        assert isinstance(outcome, RoundResult), "settled() raises what a lane has raised"
        return replace(outcome, counted=counted)

    def _next_of(self, round_index: int, results: Results) -> RoundResult:
        """The next result of a replay, which ends where the leader has been interrupted."""

        def receive() -> RoundResult:
            if self.interrupted:
                raise RoundLost(self._why)
            return next(results)

        return self._settled(round_index, receive)

    def _apply(self, result: RoundResult) -> None:
        self._set_rate(result.round)
        with self._watch.phase("apply"):
            if self._norm is not None:
                self._norm.before()
            self._held.apply(result)
            if self._norm is not None:
                self._change = self._norm.after()
        self._training.ahead = 0

    def _set_rate(self, moment: float) -> None:
        """``moment`` in rounds: a fraction is a micro-step within one."""
        run, method = self._runfile.run, self._runfile.method
        shape, warmup, final = method.schedule, method.warmup, method.final
        rate = factor(moment, run.rounds, warmup=warmup, shape=shape, final=final)
        set_learning_rates(self._optimizer, rate)

    def _report(self, report: WorkReport) -> None:
        if self._exchange is not None:
            self._exchange.report(report)

    def _take_busy(self) -> float:
        mark, self._busy_mark = self._busy_mark, self._clocks.cpu()
        return self._busy_mark - mark

    def _evaluate(self) -> Validation | None:
        """Measure the shared state; its CPU time counts neither as compute nor as overhead of a round."""
        if self._evaluator is None:
            return None
        with self._watch.phase("evaluate"), self._optimizer.evaluating():
            measured = self._account.measured = self._evaluator.measure()
        self._busy_mark = self._clocks.cpu()
        return measured

    def _last_evaluation(self) -> None:
        measured, last = self._evaluate(), self.round - 1
        if measured is None:
            return
        self._report(self._account.evaluated(last, self._held.digest(), self._take_busy()))
        self._on_event(Evaluated(last, measured.loss, measured.bits_per_byte))
