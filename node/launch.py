"""Launching a node: from an invite or a run file to a running worker, and back out cleanly."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from node import checkpoint
from node.checkpoint import Saving
from node.data import Dataset, open_data
from node.events import Event, Joined, Listener, Notice, Resumed, Started, Summary
from node.exchange.base import Exchange, ExchangeError
from node.exchange.hub import HubExchange
from node.exchange.link import Limits
from node.exchange.local import LocalExchange
from node.exchange.meter import Meter
from node.exchange.session import Claim
from node.metrics import MetricsServer, NodeMetrics
from node.model import LanguageModel, build_model
from node.state import SharedState
from node.worker import INTERRUPTED, Worker
from optim.methods import build_method
from optim.round_optimizer import RoundOptimizer
from protos.address import Address
from protos.invite import Invite
from protos.runfile import RunFile

SAVE_EVERY: Final = 50  # rounds, in a run that measures no validation loss before its end
_MAX_NAME: Final = 128


class LaunchError(RuntimeError):
    """A node that cannot start; the text says what to change."""


@dataclass(frozen=True)
class Options:
    """A user's choices for one node.

    Attributes:
        name: for people; empty = the host's name.
        device: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        threads: of torch on the CPU; 0 leaves torch's choice.
        save: folder of checkpoints.
        save_every: rounds between two checkpoints; 0 = only at the stop. ``None`` is as often as the
            validation loss is measured, or every :data:`SAVE_EVERY` rounds.
        resume: checkpoint, or folder of checkpoints, to start from. The folder of ``save`` may hold none yet:
            a node that is restarted with the same options then starts afresh the first time.
        data: text or token file to read instead of the run file's source (the digest must be the same).
        weight: of the node's vote, 1 to 65535.
        wait: seconds to wait for the coordinator, at the start and after a broken connection.
        metrics: address of the Prometheus metrics.
    """

    name: str = ""
    device: str = "auto"
    threads: int = 0
    save: Path | None = None
    save_every: int | None = None
    resume: Path | None = None
    data: str | None = None
    weight: int = 1
    wait: float = 120.0
    metrics: Address | None = None


@dataclass
class _Parts:
    """What a node is made of."""

    runfile: RunFile
    device: torch.device
    data: Dataset
    model: LanguageModel
    optimizer: RoundOptimizer
    round: int = 0
    reducer: dict[str, torch.Tensor] = field(default_factory=dict)  # of a checkpoint made alone
    state: SharedState = field(init=False)

    def __post_init__(self) -> None:
        self.state = SharedState(self.optimizer.shared_tensors())


def join(invite: Invite, options: Options, on_event: Listener = lambda event: None) -> Summary:
    """Take part in the run of a coordinator until it stops.

    Raises:
        ExchangeError: the coordinator is not there, refuses this node, or is gone for good.
        LaunchError, ModelError, DataError, RunFileError, CheckpointError: this node cannot be set up.
        KeyboardInterrupt: after leaving cleanly.
    """
    _prepare(options)
    with ExitStack() as stack:
        metrics, emit = _observed(stack, options, on_event)
        exchange = HubExchange(
            invite,
            say=lambda text: emit(Notice(text)),
            meter=Meter(metrics.count_bytes if metrics else None),
            limits=Limits(wait=options.wait, reconnect=options.wait),
        )
        farewell = _Farewell(stack, exchange)
        run = exchange.describe()
        runfile = RunFile.parse(run.run_file, name=f"the run file from {exchange.address}")
        if runfile.digest != run.run_digest:
            raise ExchangeError(
                f"the coordinator's run file has the digest {run.run_digest}, read here it is "
                f"{runfile.digest}: install the same version of Atoll on both"
            )
        parts = _build(runfile, options, emit)
        tables = parts.optimizer.tables
        if tables.digest != run.table_digest:
            raise ExchangeError(
                "this node lays the model out differently from the coordinator: its bucket table is "
                f"{tables.digest}, the coordinator's {run.table_digest}: install the same "
                "version of Atoll (and of transformers, for hf: models) on both"
            )
        exchange.limits = _limits(runfile, options)
        emit(_started(parts))
        admission = exchange.join(_claim(parts, options), tables)
        emit(Joined(admission.node, exchange.address, admission.needs_state))
        return _work(parts, exchange, options, emit, farewell)


def train(runfile: RunFile, options: Options, on_event: Listener = lambda event: None) -> Summary:
    """Train alone, without a coordinator: the same worker at world size 1.

    Raises:
        LaunchError, ModelError, DataError, CheckpointError: this node cannot be set up.
        KeyboardInterrupt: after the round in progress and its checkpoint.
    """
    _prepare(options)
    with ExitStack() as stack:
        _, emit = _observed(stack, options, on_event)
        parts = _build(runfile, options, emit)
        emit(_started(parts))
        exchange = LocalExchange(
            parts.optimizer.tables,
            rounds=runfile.run.rounds,
            batch=runfile.data.batch,
            micro_steps=parts.optimizer.micro_steps,
            evaluate_every=runfile.run.evaluate_every,
            start=parts.round,
            reducer=parts.reducer,
        )
        return _work(parts, exchange, options, emit, _Farewell(stack, exchange))


def _prepare(options: Options) -> None:
    """Find out before the training, not after it, that nothing can be saved."""
    if options.save is not None:
        checkpoint.prepare(options.save)


class _Farewell:
    """Closes an exchange on every way out, with the reason known by then."""

    def __init__(self, stack: ExitStack, exchange: Exchange) -> None:
        self.reason = "the node failed"
        stack.callback(lambda: exchange.close(self.reason))


def _work(
    parts: _Parts, exchange: Exchange, options: Options, emit: Listener, farewell: _Farewell
) -> Summary:
    every = options.save_every
    if every is None:
        every = parts.runfile.run.evaluate_every or SAVE_EVERY
    saving = Saving(options.save, every) if options.save else None
    worker = Worker(
        parts.runfile,
        parts.model,
        parts.data,
        parts.optimizer,
        exchange,
        device=parts.device,
        round_index=parts.round,
        on_event=emit,
        saving=saving,
    )
    try:
        with _polite_interrupts(worker):
            summary = worker.run()
    except (KeyboardInterrupt, SystemExit) as signalled:
        farewell.reason = INTERRUPTED if isinstance(signalled, KeyboardInterrupt) else "terminated"
        worker.save()
        raise
    except BaseException as error:
        farewell.reason = f"{type(error).__name__}: {error}"[:200]
        if isinstance(error, ExchangeError):  # the run is lost to this node, its state is not
            worker.save()
        raise
    farewell.reason = summary.reason
    if worker.interrupted:
        raise KeyboardInterrupt
    return summary


@contextmanager
def _polite_interrupts(worker: Worker) -> Iterator[None]:
    """The first Ctrl-C ends a wait at once and a computation after its round; the second ends anything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield  # whoever starts us has an arrangement of its own
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if worker.waiting or worker.interrupted:
            raise KeyboardInterrupt
        worker.interrupt()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _observed(stack: ExitStack, options: Options, on_event: Listener) -> tuple[NodeMetrics | None, Listener]:
    """Serve metrics if they are wanted; returns them and a listener that feeds both."""
    if options.metrics is None:
        return None, on_event
    metrics = NodeMetrics()
    try:
        server = MetricsServer(metrics, options.metrics)
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


def _build(runfile: RunFile, options: Options, emit: Listener) -> _Parts:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    source = (
        runfile.data if options.data is None else runfile.data.model_copy(update={"source": options.data})
    )
    data = open_data(source, runfile.model.context)
    model = build_model(runfile.model, runfile.run.seed, vocab=data.vocab, device=device)
    try:
        optimizer = build_method(runfile.method, model)
    except ValueError as error:
        raise LaunchError(f"[method] {runfile.method.name} cannot train this model: {error}") from error
    path = _resumed_from(options, emit)
    if path is None:
        return _Parts(runfile, device, data, model, optimizer)
    optimizer.prepare_load()
    meta = checkpoint.load(
        path,
        run_digest=runfile.digest,
        shared=optimizer.shared_tensors(),
        local=optimizer.local_tensors(),
        loaded=optimizer.loaded,
    )
    reducer = checkpoint.load_reducer(path, meta)
    emit(Resumed(meta.round, path))
    return _Parts(runfile, device, data, model, optimizer, meta.round, reducer)


def _resumed_from(options: Options, emit: Listener) -> Path | None:
    """The checkpoint to start from, ``None`` to start afresh."""
    resume, save = options.resume, options.save
    if resume is None:
        return None
    if save is None or save.resolve() != resume.resolve():
        return checkpoint.find(resume)
    found = checkpoint.newest(save)
    if found is None:
        emit(Notice(f"there is no checkpoint in {save} yet: this node starts afresh"))
    return found


def choose_device(wanted: str) -> torch.device:
    """The device that a user means by ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        LaunchError: there is no such device here.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise LaunchError(f"device {wanted!r} is none of auto, cpu, cuda, cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LaunchError(
            f"device {wanted!r} is not there: torch {torch.__version__} sees {torch.cuda.device_count()} "
            "CUDA devices; use --device cpu, or install a CUDA build of torch"
        )
    return device


def _limits(runfile: RunFile, options: Options) -> Limits:
    """Deadlines that follow from the run's own: a round may wait for start, deadline and quorum."""
    longest = 2 * runfile.round.start_timeout + runfile.round.deadline + 60.0
    return Limits(wait=options.wait, reconnect=options.wait, round=longest, order=max(3600.0, 2 * longest))


def _started(parts: _Parts) -> Started:
    return Started(
        run=parts.runfile.run.name,
        method=parts.runfile.method.name,
        parameters=sum(
            parameter.numel() for parameter in parts.model.parameters() if parameter.requires_grad
        ),
        payload_bytes=round(parts.optimizer.tables.mean_nbytes[0]),
        result_bytes=round(parts.optimizer.tables.mean_nbytes[1]),
        device=str(parts.device),
        threads=torch.get_num_threads(),
        round=parts.round,
    )


def _claim(parts: _Parts, options: Options) -> Claim:
    return Claim(
        name=(options.name or socket.gethostname())[:_MAX_NAME],
        run_digest=parts.runfile.digest,
        table_digest=parts.optimizer.tables.digest,
        data_digest=parts.data.digest,
        dtype=parts.state.dtype,
        state_digest=parts.state.digest(),
        round=parts.round,
        weight=options.weight,
    )
