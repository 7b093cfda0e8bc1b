"""What a node, or a rank of one, is made of: the model, its data and its optimizer, from a run file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from node import checkpoint
from node.data import open_data
from node.evaluation import Data, Model
from node.events import Listener, Notice, Resumed
from node.exchange.peers.setting import PeerSetting, Transport
from node.model import ModelError, build_model, model_on_meta
from node.ranks import Alone, Ranks
from node.state import SharedState
from node.training import Arrived, watch_gradients
from node.whole_state import WholeState
from optim.methods import build_method
from optim.round_optimizer import RoundOptimizer
from protos.address import Address
from protos.buckets import TableSchedule
from protos.runfile import RunFile
from protos.tls import PINNED, ClientTls

if TYPE_CHECKING:
    from node.worker import Worker

Precision = Literal["fp32", "bf16"]


class LaunchError(RuntimeError):
    """A node that cannot start; the text says what to change."""


@dataclass(frozen=True)
class Options:
    """A user's choices for one node. Paths and addresses may be given as texts.

    Attributes:
        name: for people; empty = the host's name.
        device: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        threads: of torch on the CPU; 0 leaves torch's choice.
        save: folder of checkpoints.
        save_every: rounds between two checkpoints; 0 = only at the stop. ``None`` is as often as the
            validation loss is measured, or every :data:`~node.launch.SAVE_EVERY` rounds.
        resume: checkpoint, or folder of checkpoints, to start from. The folder of ``save`` may hold none yet:
            a node that is restarted with the same options then starts afresh the first time.
        data: text or token file to read instead of the run file's source (the digest must be the same).
        weight: of the node's vote, 1 to 65535.
        wait: seconds to wait for the coordinator, at the start and after a broken connection.
        metrics: address of the Prometheus metrics.
        accumulate: passes in which each rank reads its part of a batch.
        batch: samples of a micro-step of this node; 0 = as the run file says.
        precision: of forward and backward: ``bf16`` keeps weights, gradients' sums and optimizer in fp32.
        overlap: send contributions while they are being computed; off for measurements only.
        identity: key file that says who this node is; ``None``: the one in ``save``, or a new key.
        tls: what this node brings beside the invite, to prove who it is and to check who the coordinator is.
        transport: how other nodes reach this one in a run whose slices travel between nodes; ``None``: as the
            run file says.
        peers: the details of that; its own transport is of no meaning.
        ordered: add gradients of an island up in the order of its ranks, slower, but to the same bits as one
            process that accumulates them.
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
    accumulate: int = 1
    batch: int = 0
    precision: Precision = "fp32"
    overlap: bool = True
    ordered: bool = False
    identity: Path | None = None
    tls: ClientTls = PINNED
    transport: Transport | None = None
    peers: PeerSetting = field(default_factory=PeerSetting)

    def __post_init__(self) -> None:
        for name, kind in (("save", Path), ("resume", Path), ("identity", Path), ("metrics", Address.parse)):
            if isinstance(value := getattr(self, name), str):  # as scripts write them
                object.__setattr__(self, name, kind(value))


class Samples(Data, Protocol):
    """Data that nodes compare with each other."""

    @property
    def digest(self) -> str:
        """Equal where the data are."""
        ...


@dataclass
class Setting:
    """Everything that a worker needs but its exchange.

    Attributes:
        parameters: that are trained, of the whole model.
        state: of the whole node.
        round: the next to be trained.
        samples: first global sample index behind all that the run has leased, as far as this node knows.
        reducer: memory of a reduction, of a checkpoint made alone.
        gathered: whether weights are gathered for the passes, by ranks that hold a part of them each.
        evaluates: whether the model can be measured on validation data.
        begins: is told of the worker that is made of all this, before it runs.
    """

    runfile: RunFile
    device: torch.device
    data: Samples
    model: Model
    optimizer: RoundOptimizer
    parameters: int
    state: WholeState
    round: int = 0
    samples: int = 0
    reducer: dict[str, torch.Tensor] = field(default_factory=dict)
    gathered: bool = False
    evaluates: bool = True
    begins: Callable[[Worker], None] = lambda worker: None

    def transfers(self) -> dict[str, tuple[int, int]]:
        """See :func:`node.island.rounds.transfers_of`; nothing where no weights are gathered."""
        if not self.gathered:
            return {}
        from node.island.rounds import transfers_of

        assert isinstance(self.model, torch.nn.Module)
        return transfers_of(self.model)

    def watch_gradients(self, optimizer: RoundOptimizer, arrived: Arrived) -> None:
        """See :func:`node.training.watch_gradients`."""
        if self.gathered:
            from node.island.rounds import tell_arrivals

            assert isinstance(self.model, torch.nn.Module)
            tell_arrivals(self.model, arrived)
        else:
            watch_gradients(optimizer, arrived)


Make = Callable[[RunFile, Options, Listener, Ranks], Setting]


def build(runfile: RunFile, options: Options, emit: Listener, ranks: Ranks | None = None) -> Setting:
    """Build what ``runfile`` describes; the ranks of a node do it together.

    Raises:
        LaunchError, ModelError, DataError, CheckpointError: it cannot be built here.
        ExchangeError: a rank is gone.
    """
    ranks = ranks or Alone()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    source = (
        runfile.data if options.data is None else runfile.data.model_copy(update={"source": options.data})
    )
    data = open_data(source, runfile.model.context)
    gathered = ranks.size > 1 or options.precision != "fp32"
    try:
        make = _gathered if gathered else _whole
        model, optimizer, parameters = make(runfile, options, data.vocab, device, ranks.size)
    except ModelError:  # is a ValueError, and says itself what is wrong with the model
        raise
    except ValueError as error:
        raise LaunchError(f"[method] {runfile.method.name} cannot train this model: {error}") from error
    return assemble(
        runfile,
        options,
        emit,
        ranks,
        device=device,
        data=data,
        model=model,
        optimizer=optimizer,
        parameters=parameters,
        gathered=gathered,
    )


def assemble(
    runfile: RunFile,
    options: Options,
    emit: Listener,
    ranks: Ranks,
    *,
    device: torch.device,
    data: Samples,
    model: Model,
    optimizer: RoundOptimizer,
    parameters: int,
    gathered: bool = False,
    evaluates: bool = True,
    begins: Callable[[Worker], None] = lambda worker: None,
) -> Setting:
    """Put a setting together, in the state of the checkpoint that is to be resumed, if any.

    Raises:
        CheckpointError: that cannot be used.
        ExchangeError: a rank is gone.
    """
    path = _resumed_from(options, emit)
    if path is not None:
        optimizer.prepare_load()
        meta = checkpoint.load(
            path,
            run_digest=runfile.digest,
            shared=optimizer.shared_tensors(),
            local=optimizer.local_tensors(),
            loaded=optimizer.loaded,
            ranks=ranks,
        )
        emit(Resumed(meta.round, path))
    setting = Setting(
        runfile=runfile,
        device=device,
        data=data,
        model=model,
        optimizer=optimizer,
        parameters=parameters,
        state=WholeState(SharedState(optimizer.shared_tensors()), ranks),
        gathered=gathered,
        evaluates=evaluates,
        begins=begins,
    )
    if path is not None:
        setting.round, setting.samples = meta.round, meta.samples
        setting.reducer = _of_lane(checkpoint.load_reducer(path, meta), optimizer.lane)
    return setting


def _whole(
    runfile: RunFile, options: Options, vocab: int, device: torch.device, ranks: int
) -> tuple[Model, RoundOptimizer, int]:
    """The model, its optimizer, and how many parameters are trained: all of it in this process."""
    model = build_model(runfile.model, runfile.run.seed, vocab=vocab, device=device)
    return model, build_method(runfile.method, model), _trained(model)


def _gathered(
    runfile: RunFile, options: Options, vocab: int, device: torch.device, ranks: int
) -> tuple[Model, RoundOptimizer, int]:
    """The same, of what this rank owns."""
    from node.island.collectives import CommPolicy
    from node.island.held import held
    from node.island.rounds import BF16, shard

    shapes = model_on_meta(runfile.model, vocab=vocab)
    tables = build_method(runfile.method, shapes).tables.tables
    model = build_model(runfile.model, runfile.run.seed, vocab=vocab)
    parameters = _trained(model)
    loss = shard(
        model,
        tables,
        ranks,
        mp_policy=BF16 if options.precision == "bf16" else None,
        comm_policy=CommPolicy(ordered=options.ordered),
    )
    loss.to(device)
    with held(loss):
        optimizer = build_method(runfile.method, model)
    return loss, optimizer, parameters


def _trained(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _of_lane(reducer: dict[str, torch.Tensor], lane: TableSchedule) -> dict[str, torch.Tensor]:
    """What a reduction of this lane alone has in its memory, ``kind/tensor`` or ``kind/tensor/part``."""
    firsts = {bucket.members[0].name for table in lane.tables for bucket in table.buckets}

    def here(key: str) -> bool:
        name = key.partition("/")[2]
        return name in firsts or any(name.startswith(f"{first}/") for first in firsts)

    return {key: tensor for key, tensor in reducer.items() if here(key)}


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
    """The device that a user means by ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; for a rank of several on one
    machine ``auto`` and ``cuda`` are its own (LOCAL_RANK).

    Raises:
        LaunchError: there is no such device here.
    """
    if wanted == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if wanted in ("auto", "cuda"):
        wanted = f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"
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
