"""Checkpoints of a sharded model and its optimizers that any number of ranks can load.

Through ``torch.distributed.checkpoint``, which reads and writes boxes of named tensors; the files
(:mod:`node.island.storage`) say nothing of who held what. Every rank writes what it holds and reads what it
needs. Names in a checkpoint:

* ``model.<name>``: parameters with their global shapes, and buffers;
* ``optimizer.<name>``: JSON text as bytes: the options of the parameter's group, and the form of its state
  (:mod:`node.island.optimizer_state`);
* ``optimizer.<name>.<key>``: tensors of the state;
* ``extra.<name>``: what the caller adds.

:func:`save` returns when the checkpoint is complete; :func:`async_save` copies the state to host memory and
writes the copy while training goes on.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.optim import Optimizer

from node.island.collectives import Collectives
from node.island.layout import LayoutError
from node.island.optimizer_state import parse, precisions, rebuild, set_options, tensors_of
from node.island.optimizers import Slot, slots_of
from node.island.ragged_tensor import RaggedTensor
from node.island.runtime import units_of
from node.island.state import sharded_parameters
from node.island.storage import CheckpointError, Reader, Writer

__all__ = ["CheckpointError", "PendingSave", "async_save", "load", "save"]

log = logging.getLogger(__name__)


def save(
    folder: Path | str,
    model: nn.Module,
    optimizers: Iterable[Optimizer] = (),
    *,
    extra: Mapping[str, Tensor] | None = None,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint; all ranks must call it, and it returns when the checkpoint is complete.

    Args:
        folder: of this checkpoint, on storage that all ranks share; must not exist.
        model: with sharded units.
        optimizers: built after ``fully_shard``.
        extra: further tensors, the same on all ranks: the step, say.
        notes: texts for people, such as a plan's hash; not read by :func:`load`.

    Raises:
        CheckpointError: on every rank, if one of them cannot write, or an optimizer's state cannot be saved.
    """
    _settle()
    scope = _Scope(model)
    scope.write(_state(scope, model, optimizers, extra), Writer(folder, notes), scope.group)


def async_save(
    folder: Path | str,
    model: nn.Module,
    optimizers: Iterable[Optimizer] = (),
    *,
    extra: Mapping[str, Tensor] | None = None,
    notes: Mapping[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Copy the state to host memory and write the copy in a thread; all ranks must call it.

    When it returns, training may go on: the checkpoint has the state of the moment of the call. One save is
    in flight at a time: a further one, of either kind, first waits until the one before is over, so that
    there is one copy in memory at most.

    Args:
        folder, model, optimizers, extra, notes: see :func:`save`.
        group: of the same ranks on gloo, for the thread alone: what it sends must not meet the collectives of
            training. By default the first call makes one for all later ones, which takes all ranks of the
            world; give one if the model is sharded over some of them.

    Returns:
        What to wait for before the checkpoint is used; a failure to write is raised there.

    Raises:
        CheckpointError: on every rank, if an optimizer's state cannot be saved, or a group has to be given.
    """
    _settle()
    scope = _Scope(model)
    group = scope.group_of_its_own() if group is None else group
    state = {name: _on_host(value) for name, value in _state(scope, model, optimizers, extra).items()}
    pending = PendingSave(Path(folder), lambda: scope.write(state, Writer(folder, notes), group))
    _in_flight.append(pending)
    return pending


class PendingSave:
    """A checkpoint that a thread writes; made by :func:`async_save`. The process does not end before it.

    Attributes:
        folder: of the checkpoint; it exists once the checkpoint is complete.
    """

    def __init__(self, folder: Path, write: Callable[[], None]) -> None:
        self.folder = folder
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"checkpoint {folder.name}")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._failure = error
            log.error("the checkpoint %s was not written: %s", self.folder, error)

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Return the folder when the checkpoint is complete on all ranks.

        Args:
            timeout: seconds; None: as long as the ranks answer each other within their group's timeout.

        Raises:
            CheckpointError: on every rank, if one of them could not write.
            TimeoutError: if it takes longer; it goes on, and one may wait again.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the checkpoint {self.folder} is not complete after {timeout} s: wait again")
        if self._failure is not None:
            raise CheckpointError(
                f"the checkpoint {self.folder} was not written: {self._failure}"
            ) from self._failure
        return self.folder


_in_flight: list[PendingSave] = []
_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _settle() -> None:
    """Wait until no save is in flight. How it went is for those who wait for it."""
    while _in_flight:
        _in_flight[-1]._thread.join()
        _in_flight.pop()


def _on_host(value: Tensor) -> Tensor:
    return value.on_host() if isinstance(value, RaggedTensor) else value.to("cpu", copy=True)


def load(folder: Path | str, model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> dict[str, Tensor]:
    """Read what :func:`save` wrote into ``model`` and ``optimizers``; all ranks must call it.

    The number of ranks, the layouts and the division of matrices may be others than when it was saved; the
    parameters must be the same, and so must the classes of optimizers. Weights and states may be partly new
    after an error.

    Args:
        folder: of the checkpoint.
        model: with sharded units, not on the meta device.
        optimizers: to be given the saved states and options; none: the weights alone are read.

    Returns:
        The ``extra`` tensors, on the CPU.

    Raises:
        CheckpointError: on every rank: for missing or damaged files, named, and for tensors that the
            checkpoint lacks or has in another shape.
    """
    scope = _Scope(model)
    texts: dict[str, Tensor] = {}
    slots: list[Slot] = []
    wanted: dict[str, Tensor] = {}
    extras: dict[str, Tensor] = {}
    reader = Reader(folder)
    with scope.agreed("loading"):
        tensors = reader.index.tensors
        wanted, slots = _model_state(model), slots_of(model, optimizers)
        for name, tensor in wanted.items():
            _expect(reader, name, tensor.size())
        for slot in slots:
            _expect(reader, f"optimizer.{slot.name}", None)
            length = tensors[f"optimizer.{slot.name}"].size
            texts[f"optimizer.{slot.name}"] = torch.zeros(length, dtype=torch.uint8)
        for name, meta in tensors.items():
            if name.startswith("extra."):
                extras[name] = torch.zeros(meta.size, dtype=meta.properties.dtype)
    scope.read(texts, reader)
    with scope.agreed("loading"):
        restored = []
        for slot in slots:
            name = f"optimizer.{slot.name}"
            form = parse(reader.folder, name, texts[name])
            state, parts = rebuild(slot, form["state"], reader.index)
            wanted.update(parts)
            restored.append((slot, state, form["group"]))
    scope.read({**wanted, **extras}, reader)
    for slot, state, options in restored:
        live = slot.optimizer.state[slot.parameter]
        live.clear()
        live.update(state())
        set_options(slot.group, options)
    return {name.removeprefix("extra."): tensor for name, tensor in extras.items()}


class _Scope:
    """The ranks that save and load together: the shard group, or all where there is more than one."""

    def __init__(self, model: nn.Module) -> None:
        entries = sharded_parameters(model)
        if not entries:
            raise CheckpointError("the model has no sharded parameters: call fully_shard first")
        comms = [entry.comm for entry in entries]
        self.comm: Collectives = comms[0]
        one = all(comm.group is comms[0].group and comm.replicas is None for comm in comms)
        self.group = comms[0].group if one else None
        self.alone = not dist.is_initialized()
        self._device = entries[0].parameter.device

    @contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Fail on all ranks if the block fails on one."""
        failure: Exception | None = None
        try:
            yield
        except (CheckpointError, LayoutError) as error:
            failure = error
        failed = self.largest(torch.tensor([failure is not None], dtype=torch.int64), what)
        if failure is not None:
            raise CheckpointError(str(failure)) from failure
        if failed.item():
            raise CheckpointError(f"another rank failed in {what} the checkpoint: its log says why")

    def largest(self, values: Tensor, what: str) -> Tensor:
        """Of each of the ``values`` the largest of all ranks, on the CPU."""
        if self.alone:
            return values
        values = values.to(self._device)
        with self.comm.guard(f"agreement on {what} a checkpoint"):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values.cpu()

    def group_of_its_own(self) -> dist.ProcessGroup | None:
        """A gloo group of the same ranks, for a thread."""
        if self.alone:
            return None
        world = dist.group.WORLD
        assert world is not None
        ranks, everyone = dist.get_world_size(self.group), dist.get_world_size()
        if ranks != everyone:  # torch's groups that only their members make can hang: they may differ in name
            raise CheckpointError(
                f"the model is sharded over {ranks} of {everyone} ranks: make a gloo group of them with"
                f" torch.distributed.new_group on all ranks, once, and give it as group"
            )
        if world not in _groups:
            with self.comm.guard("making a group for asynchronous checkpoints"):
                _groups[world] = dist.new_group(backend="gloo")
        return _groups[world]

    def read(self, into: dict[str, Tensor], reader: Reader) -> None:
        """Fill the tensors ``into``."""
        with _library(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_loader.load(into, storage_reader=reader, process_group=self.group, no_dist=self.alone)

    def write(self, state: dict[str, Tensor], writer: Writer, group: dist.ProcessGroup | None) -> None:
        """Write the checkpoint; leave nothing behind if that fails."""
        try:
            if self.alone:
                _write_alone(state, writer)
            else:
                with _library():
                    state_dict_saver.save(dict(state), storage_writer=writer, process_group=group)
        except Exception:
            writer.discard()
            raise


def _write_alone(state: dict[str, Tensor], writer: Writer) -> None:
    """What the library does in one process, but without its warning: those are not for threads to filter."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


@contextmanager
def _library() -> Iterator[None]:
    """Turn the failures that the library collects from all ranks into the first that says something."""
    try:
        yield
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
        ours = {rank: c for rank, c in causes.items() if isinstance(c, CheckpointError)}
        rank, cause = next(iter((ours or causes).items()))
        raise CheckpointError(f"{cause} (rank {rank})") from cause


def _state(
    scope: _Scope, model: nn.Module, optimizers: Iterable[Optimizer], extra: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """All that this rank has to save, by name; the memory is that of the model and the optimizers."""
    names = [entry.name for entry in sharded_parameters(model)]
    with scope.agreed("saving"):
        slots = slots_of(model, optimizers)
        held = precisions(slots, names)
    plain, block = scope.largest(held, "saving").tolist()
    mixed = {name: size for name, full, size in zip(names, plain, block, strict=True) if full and size}
    with scope.agreed("saving"):
        state = _model_state(model)
        for slot in slots:
            state.update(tensors_of(slot, mixed.get(slot.name, 0)))
        state.update({f"extra.{name}": tensor.detach() for name, tensor in (extra or {}).items()})
    return state


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for entry in sharded_parameters(model):
        if entry.meta.numel:
            start = entry.piece.start if entry.piece is not None else 0
            state[f"model.{entry.name}"] = RaggedTensor.of(entry.parameter, entry.meta.shape, start)
    groups = [group for _, unit in units_of(model) for group in unit.groups]
    ours = {id(p) for group in groups for p in (*group.buffer.sharded, *group.buffer.unsharded)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in ours and isinstance(tensor, Tensor) and tensor.numel():
            state[f"model.{name}"] = tensor.detach()
    return state


def _expect(reader: Reader, name: str, size: torch.Size | None) -> None:
    tensors = reader.index.tensors
    if name not in tensors:
        raise CheckpointError(
            f"{reader.folder} lacks {name}: it was saved of another model, or of other optimizers"
        )
    if size is not None and tensors[name].size != size:
        raise CheckpointError(
            f"{name} has shape {tuple(tensors[name].size)} in {reader.folder}, here {tuple(size)}"
        )
