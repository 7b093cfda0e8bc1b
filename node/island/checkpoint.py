"""Checkpoints of a sharded model and its optimizers that any number of ranks can load.

Through ``torch.distributed.checkpoint``, which reads and writes boxes of named tensors; the files
(:mod:`node.island.storage`) say nothing of who held what. Every rank writes what it holds and reads what it
needs. Names in a checkpoint:

* ``model.<name>``: parameters with their global shapes, and buffers;
* ``optimizer.<name>``: JSON text as bytes: the options of the parameter's group, and the form of its state;
* ``optimizer.<name>.<key>``: tensors of the state. Those of the parameter's shape are cut as it is; others
  (steps, factors of Shampoo and SOAP) are whole;
* ``extra.<name>``: what the caller adds.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from node.island.collectives import Collectives
from node.island.layout import LayoutError
from node.island.optimizers import Slot, slots_of
from node.island.ragged_tensor import RaggedTensor
from node.island.runtime import units_of
from node.island.state import sharded_parameters
from node.island.storage import CheckpointError, Index, Reader, Writer

__all__ = ["CheckpointError", "load", "save"]

_OWN: Final = ("params", "param_names", "fan_in", "role")  # of a group, and not options


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
    scope = _Scope(model)
    state: dict[str, Tensor] = {}
    with scope.agreed("saving"):
        state = _model_state(model)
        for slot in slots_of(model, optimizers):
            state.update(_slot_state(slot))
        state.update({f"extra.{name}": tensor.detach() for name, tensor in (extra or {}).items()})
    with scope.library():
        writer = Writer(folder, notes)
        state_dict_saver.save(state, storage_writer=writer, process_group=scope.group, no_dist=scope.alone)


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
            form = _parse(reader, name, texts[name])
            state, parts = _rebuild(slot, form["state"], reader.index)
            wanted.update(parts)
            restored.append((slot, state, form["group"]))
    scope.read({**wanted, **extras}, reader)
    for slot, state, options in restored:
        live = slot.optimizer.state[slot.parameter]
        live.clear()
        live.update(state)
        _set_options(slot.group, options)
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
        failed = torch.tensor([failure is not None], dtype=torch.int32, device=self._device)
        if not self.alone:
            with self.comm.guard(f"agreement on {what} a checkpoint"):
                dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.group)
        if failure is not None:
            raise CheckpointError(str(failure)) from failure
        if failed.item():
            raise CheckpointError(f"another rank failed in {what} the checkpoint: its log says why")

    def read(self, into: dict[str, Tensor], reader: Reader) -> None:
        """Fill the tensors ``into``."""
        with self.library():
            state_dict_loader.load(into, storage_reader=reader, process_group=self.group, no_dist=self.alone)

    @contextmanager
    def library(self) -> Iterator[None]:
        """Turn the failures that the library collects from all ranks into the first that says something."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
        except CheckpointException as error:
            causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
            ours = {rank: c for rank, c in causes.items() if isinstance(c, CheckpointError)}
            rank, cause = next(iter((ours or causes).items()))
            raise CheckpointError(f"{cause} (rank {rank})") from cause


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


# ---- optimizer state


def _slot_state(slot: Slot) -> dict[str, Tensor]:
    parts: dict[str, Tensor] = {}
    state = {str(key): value for key, value in slot.optimizer.state.get(slot.parameter, {}).items()}
    form = {"state": _form(slot, "", state, parts), "group": _options(slot.group)}
    text = bytearray(json.dumps(form).encode())
    return {f"optimizer.{slot.name}": torch.frombuffer(text, dtype=torch.uint8), **parts}


def _form(slot: Slot, path: str, value: object, parts: dict[str, Tensor]) -> Any:
    """The JSON form of a state; its tensors go to ``parts``."""
    if hasattr(value, "codes") and hasattr(value, "scale"):
        parts.update(_blocks(slot, path, value))
        return {"blocks": path, "signed": bool(getattr(value, "signed", True))}
    if isinstance(value, Tensor):
        key = f"optimizer.{slot.name}{path}"
        parts[key] = _part(slot, key, value)
        away = value.device.type == "cpu" and slot.parameter.device.type != "cpu"
        return {"tensor": path, "cpu": away}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _form(slot, f"{path}.{key}", item, parts) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        items = [_form(slot, f"{path}.{number}", item, parts) for number, item in enumerate(value)]
        return {type(value).__name__: items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise CheckpointError(
        f"the state {path.lstrip('.')} of {slot.name} is a {type(value).__name__}:"
        f" {type(slot.optimizer).__name__} keeps what a checkpoint cannot hold"
    )


def _blocks(slot: Slot, path: str, value: Any) -> dict[str, Tensor]:
    """Codes and scales of a state that is quantised in blocks (torchao's 8-bit optimizers)."""
    block, numel = value.codes.numel() // value.scale.numel(), prod(slot.shape)
    if slot.start % block or numel % block:
        raise CheckpointError(
            f"{slot.name} is cut inside a quantisation block of {block}: give fully_shard"
            f" granularity=quantisation_units({block})"
        )
    key = f"optimizer.{slot.name}{path}"
    scales = RaggedTensor.of(value.scale, (numel // block,), slot.start // block)
    return {f"{key}.codes": RaggedTensor.of(value.codes, slot.shape, slot.start), f"{key}.scale": scales}


def _part(slot: Slot, key: str, value: Tensor) -> Tensor:
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        raise CheckpointError(f"{key} is a {type(value).__name__}: only plain tensors can be saved")
    if value.shape == slot.parameter.shape:
        return RaggedTensor.of(value.contiguous(), slot.shape, slot.start)
    if value.numel() > 1 and slot.parameter.numel() != prod(slot.shape):
        raise CheckpointError(
            f"{key} has shape {tuple(value.shape)}, its parameter {tuple(slot.parameter.shape)}: the state of"
            f" a divided parameter must be elementwise"
        )
    return value.detach()


def _rebuild(slot: Slot, form: Any, index: Index) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state that ``form`` describes, with empty tensors, and these as the library wants them."""
    parts: dict[str, Tensor] = {}

    def build(node: Any) -> Any:
        kind, value = next(iter(node.items()))
        if kind == "tensor":
            return tensor(value, bool(node["cpu"]))
        if kind == "blocks":
            return blocks(value, bool(node["signed"]))
        if kind == "dict":
            return {key: build(item) for key, item in value.items()}
        if kind in ("list", "tuple"):
            items = [build(item) for item in value]
            return tuple(items) if kind == "tuple" else items
        return value

    def tensor(path: str, cpu: bool) -> Tensor:
        key = f"optimizer.{slot.name}{path}"
        if key not in index.tensors:
            raise CheckpointError(f"the checkpoint lacks {key}")
        size, dtype = index.tensors[key].size, index.tensors[key].properties.dtype
        device = torch.device("cpu") if cpu else slot.parameter.device
        if tuple(size) == slot.shape:
            local = torch.zeros(slot.parameter.shape, dtype=dtype, device=device)
            parts[key] = RaggedTensor.of(local, slot.shape, slot.start)
            return local
        if size.numel() > 1 and slot.parameter.numel() != prod(slot.shape):
            raise CheckpointError(f"{key} of shape {tuple(size)} needs the whole of {slot.name} on one rank")
        parts[key] = torch.zeros(size, dtype=dtype, device=device)
        return parts[key]

    def blocks(path: str, signed: bool) -> Any:
        make = getattr(slot.optimizer, "_new_buffer", None)
        buffer = make(slot.parameter, signed) if make is not None else None
        if not hasattr(buffer, "codes"):
            raise CheckpointError(
                f"{slot.name} has a quantised state, and {type(slot.optimizer).__name__} does not quantise"
                f" the {slot.parameter.numel()} elements of it that are here: load with larger pieces"
            )
        found = _blocks(slot, path, buffer)
        for name, piece in found.items():
            if name not in index.tensors or index.tensors[name].size != piece.size():
                raise CheckpointError(f"the checkpoint lacks {name}, or has it for blocks of another size")
        parts.update(found)
        return buffer

    state = build(form)
    return state, parts


def _parse(reader: Reader, name: str, text: Tensor) -> dict[str, Any]:
    try:
        form = json.loads(bytes(text.tolist()))
        if not isinstance(form["state"]["dict"], dict) or not isinstance(form["group"], dict):
            raise TypeError("it is not an object")
        return dict(form)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name} in {reader.folder} does not describe a state: {error}") from error


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


# ---- options of parameter groups


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those that JSON can hold; the others stay as the optimizer was built."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key in _OWN:
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, tuple) and all(isinstance(item, (int, float)) for item in value):
            value = list(value)
        if value is None or isinstance(value, (bool, int, float, str, list)):
            found[key] = value
    return found


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        present = group.get(key)
        if isinstance(present, Tensor):
            present.fill_(value)
        elif isinstance(present, tuple):
            group[key] = tuple(value)
        else:
            group[key] = value
