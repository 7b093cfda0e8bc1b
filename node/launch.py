"""Launching a node, or a rank of one: from an invite or a run file to a worker, and back out cleanly."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from node import checkpoint
from node.checkpoint import Saving
from node.events import Event, Joined, Listener, Notice, Started, Summary
from node.exchange.base import Exchange, ExchangeError, Lane
from node.exchange.hub import HubExchange
from node.exchange.lane import LaneExchange
from node.exchange.lanes.place import LeaderPlace
from node.exchange.link import Limits
from node.exchange.local import LocalExchange
from node.exchange.news import Publish, SessionNews
from node.exchange.peers.setting import PeerSetting
from node.exchange.session import Claim
from node.identity import key_of
from node.joint import gathered
from node.metrics import NodeMetrics
from node.ranks import Alone, Ranks
from node.setting import LaunchError, Make, Options, Setting, build, choose_device
from node.signals import PoliteSignals, reason_of
from node.torchrun import host_of_leader, leads, ranks_here
from node.worker import Worker
from optim.bits import backend
from protos.buckets import TableSchedule
from protos.exporting import MetricsServer
from protos.invite import Invite
from protos.runfile import RunFile
from protos.waits import longest_round

if TYPE_CHECKING:
    from node.island.ranks import IslandRanks

__all__ = ["SAVE_EVERY", "LaunchError", "Options", "choose_device", "join", "train"]

SAVE_EVERY: Final = 50  # rounds, in a run that measures no validation loss before its end
INSECURE_WORDS: Final = (
    "INSECURE: this run's coordinator was started with --insecure: everybody on the way can read and change "
    "what travels, and take its place"
)
_MAX_NAME: Final = 128
_TOGETHER_SECONDS: Final = 600.0  # for the ranks of a node that trains alone
_OUTLAST_SECONDS: Final = 10.0


def join(
    invite: Invite, options: Options, on_event: Listener = lambda event: None, *, make: Make = build
) -> Summary:
    """Take part in the run of a coordinator until it stops; under torchrun as one node of several ranks.

    ``make`` makes what the run file describes.

    Raises:
        ExchangeError: the coordinator is not there, refuses this node, or is gone for good; or a rank is.
        KeyFileError: the key that says who this node is cannot be used.
        LaunchError, ModelError, DataError, RunFileError, CheckpointError: this node cannot be set up.
        KeyboardInterrupt: after leaving cleanly.
    """
    with ExitStack() as stack:
        metrics, emit = _observed(stack, options, on_event)
        relay = _Relay()
        exchange = HubExchange(
            invite,
            say=lambda text: emit(Notice(text)),
            limits=Limits(wait=options.wait, reconnect=options.wait),
            tls=options.tls,
            publish=relay.publish,
        )
        farewell = _Farewell(stack, exchange.close)
        runfile, table_digest = _described(exchange)
        if invite.insecure:
            emit(Notice(INSECURE_WORDS))
        limits = exchange.limits = _limits(runfile, options)
        island = _meet(farewell, options, limits.round + 2 * limits.reconnect + 60.0)
        if leads():
            exchange.identify(key_of(options.identity, options.save, stack))
        ranks: Ranks = island or Alone()
        signals = PoliteSignals(stack, ranks)
        if island is not None and island.rank == 0:
            relay.to = island.news.publish
        setting = make(runfile, options, emit, ranks)
        tables, lane = setting.optimizer.tables, setting.optimizer.lane
        if tables.digest != table_digest:
            raise ExchangeError(
                "this node lays the model out differently from the coordinator: its bucket table is "
                f"{tables.digest}, the coordinator's {table_digest}: install the same "
                "version of Atoll (and of transformers, for hf: models) on both"
            )
        if metrics is not None:
            metrics.watch(exchange.meter.traffic, exchange.connections, setting.transfers)
            if island is not None:
                metrics.lanes_of_others(tables.part(_names(tables) - _names(lane)))
        emit(_started(setting, ranks))
        claim = _claim(setting, options, ranks)
        place, lanes = _lanes(exchange, runfile, setting, ranks)
        if island is not None and island.rank:
            exchange.close("the leader of this node joins")
            own = LaneExchange(
                invite,
                island.news,
                tables,
                lane,
                weight=options.weight,
                say=lambda text: emit(Notice(f"rank {island.rank}: {text}")),
                meter=exchange.meter,
                limits=limits,
                tls=options.tls,
                leader=place,
                rank=island.rank,
            )
            farewell.first(own.close)
            return _work(setting, None, own, ranks, options, emit, farewell, signals)
        peers = None if island and not lanes else _peers(runfile, options)
        backend()  # a second or two to load kernels, for which no round has to wait
        admission = exchange.join(claim, tables, lane if island else None, peers, lanes)
        emit(Joined(admission.node, exchange.address, admission.needs_state))
        gc.collect()
        gc.freeze()  # or each full collection looks through all that torch has imported, for 0.2 s in a round
        return _work(setting, exchange, exchange, ranks, options, emit, farewell, signals)


def train(
    runfile: RunFile, options: Options, on_event: Listener = lambda event: None, *, make: Make = build
) -> Summary:
    """Train without a coordinator: the same worker at world size 1, of any number of ranks.

    ``make`` makes what the run file describes.

    Raises:
        LaunchError, ModelError, DataError, CheckpointError: this node cannot be set up.
        ExchangeError: a rank is gone.
        KeyboardInterrupt: after the round in progress and its checkpoint.
    """
    with ExitStack() as stack:
        metrics, emit = _observed(stack, options, on_event)
        farewell = _Farewell(stack)
        ranks = _meet(farewell, options, _TOGETHER_SECONDS) or Alone()
        signals = PoliteSignals(stack, ranks)
        setting = make(runfile, options, emit, ranks)
        if metrics is not None:
            metrics.watch(transfers=setting.transfers)
        emit(_started(setting, ranks))
        exchange = LocalExchange(
            setting.optimizer.lane,
            rounds=runfile.run.rounds,
            batch=options.batch or runfile.data.batch,
            micro_steps=setting.optimizer.micro_steps,
            evaluate_every=runfile.run.evaluate_every,
            start=setting.round,
            samples=setting.samples,
            reducer=setting.reducer,
        )
        farewell.first(exchange.close)
        return _work(
            setting, exchange, exchange, ranks, replace(options, overlap=False), emit, farewell, signals
        )


class _Relay:
    """What the leader's session tells goes to the other ranks, once there are any."""

    def __init__(self) -> None:
        self.to: Publish | None = None

    def publish(self, news: SessionNews) -> None:
        if self.to is not None:
            self.to(news)


class _Farewell:
    """Closes what speaks with others on every way out, with the reason known by then."""

    def __init__(self, stack: ExitStack, *closing: Callable[[str], None]) -> None:
        self.reason = "the node has come to its end"
        self._closing = list(closing)
        stack.push(self._leave)

    def first(self, close: Callable[[str], None]) -> None:
        """Close this before all else."""
        self._closing.insert(0, close)

    def last(self, close: Callable[[str], None]) -> None:
        """Close this after all else."""
        self._closing.append(close)

    def _leave(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            self.reason = reason_of(error)
        elif error is not None:
            self.reason = f"{type(error).__name__}: {error}"[:200]
        with _deaf_to_termination(), ExitStack() as stack:
            for close in reversed(self._closing):
                stack.callback(close, self.reason)


@contextmanager
def _deaf_to_termination() -> Iterator[None]:
    """When a rank ends, torchrun ends the others: they are to take their leave all the same."""
    if threading.current_thread() is not threading.main_thread() or ranks_here() == 1:
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _meet(farewell: _Farewell, options: Options, seconds: float) -> IslandRanks | None:
    """The ranks that torchrun has started, which wait so many seconds for each other; None for one alone."""
    island = None
    if ranks_here() > 1:
        from node.island.ranks import IslandRanks

        island = IslandRanks.from_environment(device=choose_device(options.device), seconds=seconds)
        farewell.last(island.close)
    if options.save is not None and leads():
        checkpoint.prepare(options.save)  # not after the training, if nothing can be saved
    return island


def _described(exchange: HubExchange) -> tuple[RunFile, str]:
    """The run file of the coordinator and the digest of its tables."""
    run = exchange.describe()
    runfile = RunFile.parse(run.run_file, name=f"the run file from {exchange.address}")
    if runfile.digest != run.run_digest:
        raise ExchangeError(
            f"the coordinator's run file has the digest {run.run_digest}, read here it is "
            f"{runfile.digest}: install the same version of Atoll on both"
        )
    return runfile, run.table_digest


def _work(
    setting: Setting,
    exchange: Exchange | None,
    lane: Lane,
    ranks: Ranks,
    options: Options,
    emit: Listener,
    farewell: _Farewell,
    signals: PoliteSignals,
) -> Summary:
    every = options.save_every
    if every is None:
        every = setting.runfile.run.evaluate_every or SAVE_EVERY
    worker = Worker(
        setting.runfile,
        setting.model,
        setting.data,
        setting.optimizer,
        exchange,
        ranks=ranks,
        lane=lane,
        device=setting.device,
        round_index=setting.round,
        samples=setting.samples,
        on_event=emit,
        saving=Saving(options.save, every) if options.save else None,
        accumulate=options.accumulate,
        overlap=options.overlap,
        watch=setting.watch_gradients,
        measure=options.metrics is not None,
        evaluates=setting.evaluates,
    )
    setting.begins(worker)
    alone = ranks.size == 1  # several save together or not at all
    try:
        with signals.wait_for(worker):
            summary = worker.run()
    except (KeyboardInterrupt, SystemExit):
        if alone and not worker.interrupted:  # else it is asked for the second time: at once
            worker.save()
        raise
    except BaseException as error:
        if alone and isinstance(error, ExchangeError):  # the run is lost to this node, its state is not
            worker.save()
        elif ranks.rank:
            _outlast(ranks)
        raise
    farewell.reason = summary.reason
    if signals.first is not None:
        raise signals.first
    if worker.interrupted:
        raise KeyboardInterrupt(summary.reason)
    return summary


def _outlast(ranks: Ranks) -> None:
    """A rank that failed lets the leader find out and take leave before torchrun ends all of them."""

    def listen() -> None:
        with suppress(ExchangeError):
            while True:
                ranks.share(None)

    dist.destroy_process_group()
    thread = threading.Thread(target=listen, name="atoll-outlast", daemon=True)
    thread.start()
    thread.join(_OUTLAST_SECONDS)


def _observed(stack: ExitStack, options: Options, on_event: Listener) -> tuple[NodeMetrics | None, Listener]:
    """Serve metrics, if wanted, on the rank that leads; returns them and a listener that feeds both."""
    if options.metrics is None or not leads():
        return None, on_event
    metrics = NodeMetrics()
    try:
        server = MetricsServer(metrics.registry, options.metrics)
    except OSError as error:
        raise LaunchError(
            f"metrics cannot be served on {options.metrics}: {error.strerror or error}; give --metrics an "
            "address of this machine and a port that is free (0 takes one)"
        ) from error
    stack.callback(server.close)

    def emit(event: Event) -> None:
        metrics.observe(event)
        on_event(event)

    emit(Notice(f"metrics are served at http://{server.address}/metrics"))
    return metrics, emit


def _names(tables: TableSchedule) -> set[str]:
    return {bucket.name for table in tables.tables for bucket in table.buckets}


def _lanes(
    exchange: HubExchange, runfile: RunFile, setting: Setting, ranks: Ranks
) -> tuple[LeaderPlace | None, list[TableSchedule]]:
    """Where the leader takes the lanes of an island's ranks, and all of these, in a run that may have rounds
    whose slices travel between nodes. A collective."""
    if ranks.size == 1 or runfile.exchange.transport == "hub":
        return None, []
    tables = setting.optimizer.tables
    place = None if ranks.rank else asdict(exchange.lead(runfile.digest, host_of_leader()))
    told = gathered(ranks, "the lanes of all ranks", [place, sorted(_names(setting.optimizer.lane))])
    return LeaderPlace(**told[0][0]), [tables.part(set(names)) for _, names in told]


def _limits(runfile: RunFile, options: Options) -> Limits:
    """Deadlines that follow from the run's own."""
    longest = longest_round(runfile.round.deadline, runfile.round.start_timeout)
    return Limits(wait=options.wait, reconnect=options.wait, round=longest, order=max(3600.0, 2 * longest))


def _peers(runfile: RunFile, options: Options) -> PeerSetting:
    """How other nodes reach this one: not at all where all goes through the coordinator."""
    transport = runfile.exchange.transport
    if transport != "hub" and options.transport is not None:
        transport = options.transport
    return replace(options.peers, transport=transport)


def _started(setting: Setting, ranks: Ranks) -> Started:
    tables = setting.optimizer.tables
    return Started(
        run=setting.runfile.run.name,
        method=setting.runfile.method.name,
        parameters=setting.parameters,
        payload_bytes=round(tables.mean_nbytes[0]),
        result_bytes=round(tables.mean_nbytes[1]),
        device=str(setting.device),
        threads=torch.get_num_threads(),
        round=setting.round,
        ranks=ranks.size,
    )


def _claim(setting: Setting, options: Options, ranks: Ranks) -> Claim:
    return Claim(
        name=(options.name or socket.gethostname())[:_MAX_NAME],
        run_digest=setting.runfile.digest,
        table_digest=setting.optimizer.tables.digest,
        data_digest=setting.data.digest,
        dtype=setting.state.dtype,
        state_digest=setting.state.digest(),
        round=setting.round,
        weight=options.weight,
        ranks=ranks.size,
        batch=options.batch,
        samples=setting.samples,
        state_bytes=setting.state.nbytes,
    )
