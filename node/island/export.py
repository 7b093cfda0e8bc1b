"""One ``safetensors`` file with whole tensors under the model's own names, and back.

Export streams: one group of parameters is whole at a time, on one rank, and written where the file's header
says. Import reads on every rank the parts that it holds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from node.island.param_group import ParamGroup
from node.island.runtime import units_of
from node.island.storage import CheckpointError
from node.tensor_file import Entry, FileLayout, cast


def export_safetensors(
    model: nn.Module,
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    prefix: str = "",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write all parameters and persistent buffers to one file; all ranks must call it.

    A tied parameter is written once, under its first name, as ``transformers`` expects.

    Args:
        model: with sharded units, all in one shard group.
        path: of the file; replaced when the new one is complete.
        dtype: of the floating-point tensors in the file; None: their own.
        prefix: taken off the names that begin with it (``"inner."`` of a wrapped ``transformers`` model).
        metadata: of the file, beside ``format: pt``.

    Raises:
        CheckpointError: on every rank of the shard group, if the first cannot write.
    """
    target, groups = Path(path), _groups(model)
    comm = groups[0].comm
    if any(group.comm.group is not comm.group for group in groups):
        raise CheckpointError(
            "the model is sharded over several groups of ranks: export the parts one by one"
        )
    aliases, rest = _aliases(model), _unsharded(model, groups)
    entries = {
        name: Entry(_strip(name, prefix), tuple(t.shape), cast(t.dtype, dtype)) for name, t in rest.items()
    }
    for group in groups:
        for meta, sites in zip(group.layout.tensors, group.sites, strict=True):
            name = aliases[id(sites[0][0]), sites[0][1]]
            entries[name] = Entry(_strip(name, prefix), meta.shape, cast(group.buffer.dtype, dtype))
    try:
        plan = FileLayout(entries.values(), {"format": "pt", **(metadata or {})})
    except ValueError as error:
        raise CheckpointError(f"{error}: use another prefix or dtype") from error
    writes = comm.rank == 0 and (comm.replicas is None or dist.get_rank(comm.replicas) == 0)
    failure: str | None = None
    with ExitStack() as stack:
        file: BinaryIO | None = None
        draft = target.with_name(f".{target.name}.partial")
        if writes:
            try:
                file = stack.enter_context(open(draft, "wb"))
                plan.begin(file)
                for name, tensor in rest.items():
                    plan.write(file, entries[name].name, tensor)
            except OSError as error:
                failure = str(error)
        for group in groups:
            shard, layout = group.buffer.shard, group.layout
            gathered = comm.gather(
                f"gather of {group.name} for the export", layout, shard, _allocator(shard, layout.total)
            ).wait()
            if file is None or failure is not None:
                continue
            try:
                for meta, offset, sites in zip(layout.tensors, layout.offsets, group.sites, strict=True):
                    name = aliases[id(sites[0][0]), sites[0][1]]
                    plan.write(file, entries[name].name, gathered[offset : offset + meta.numel])
            except OSError as error:
                failure = str(error)
        if file is not None and failure is None:
            try:
                file.flush()
                os.fsync(file.fileno())
                os.replace(draft, target)
            except OSError as error:
                failure = str(error)
    if failure is not None:
        draft.unlink(missing_ok=True)
    failed = torch.tensor([failure is not None], dtype=torch.uint8, device=groups[0].buffer.device)
    if comm.union("end of the export", failed).item():
        raise CheckpointError(f"{target} cannot be written: {failure or 'the first rank says why'}")


@torch.no_grad()
def import_safetensors(
    model: nn.Module, path: Path | str, *, prefix: str = "", strict: bool = True
) -> tuple[list[str], list[str]]:
    """Read parameters and buffers from whole tensors; every rank reads its part. No communication.

    Args:
        model: with sharded units, not on the meta device.
        path: a file, or a folder as ``transformers`` saves it: with ``model.safetensors``, or with several
            files and ``model.safetensors.index.json``.
        prefix: put before the names in the file.
        strict: demand every tensor, and no others; tied parameters under one of their names.

    Returns:
        Names that the file lacks, and names that the model has not; empty where ``strict``.

    Raises:
        CheckpointError: for files that are missing or damaged, other shapes, and names if ``strict``.
    """
    groups, aliases = _groups(model), _aliases(model)
    used: set[str] = set()
    missing: list[str] = []
    with ExitStack() as stack:
        places = _open(stack, Path(path), prefix)
        for group in groups:
            for index, (meta, sites) in enumerate(zip(group.layout.tensors, group.sites, strict=True)):
                names = [aliases[id(m), a] for m, a in sites if (id(m), a) in aliases]
                found = [name for name in names if name in places]
                used.update(found)
                if not found:
                    missing.append(names[0])
                    continue
                file, key, where = places[found[0]]
                source = file.get_slice(key)
                _same_shape(where, key, tuple(source.get_shape()), meta.shape)
                local = group.buffer.sharded[index].detach().view(-1)
                position = 0
                for box in group.layout.boxes(index, group.comm.rank):
                    size = math.prod(box.lengths)
                    cuts = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
                    part = source[cuts] if cuts else file.get_tensor(key)
                    local[position : position + size].copy_(part.reshape(-1))
                    position += size
        for name, tensor in _unsharded(model, groups).items():
            if name not in places:
                missing.append(name)
                continue
            used.add(name)
            file, key, where = places[name]
            value = file.get_tensor(key)
            _same_shape(where, key, tuple(value.shape), tuple(tensor.shape))
            tensor.copy_(value)
        unknown = sorted(set(places) - used)
    if strict and (missing or unknown):
        raise CheckpointError(
            f"{path} lacks {missing[:5]} and has {unknown[:5]}, which the model has not:"
            f" see prefix and strict"
        )
    return missing, unknown


def _groups(model: nn.Module) -> list[ParamGroup]:
    groups = [group for _, unit in units_of(model) for group in unit.groups]
    if not groups:
        raise CheckpointError("the model has no sharded parameters: call fully_shard first")
    return groups


def _aliases(model: nn.Module) -> dict[tuple[int, str], str]:
    return {
        (id(child), attribute): f"{name}.{attribute}" if name else attribute
        for name, child in model.named_modules()
        for attribute in child._parameters
    }


def _unsharded(model: nn.Module, groups: Sequence[ParamGroup]) -> dict[str, Tensor]:
    """Persistent buffers and ignored parameters; a tensor of several names once."""
    ours = {id(p) for group in groups for p in (*group.buffer.sharded, *group.buffer.unsharded)}
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in ours:
            ours.add(id(tensor))
            found[name] = tensor.detach()
    return found


def _allocator(shard: Tensor, total: int) -> Any:
    return lambda: shard.new_empty(total)


def _strip(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)


def _open(stack: ExitStack, path: Path, prefix: str) -> dict[str, tuple[Any, str, Path]]:
    """File, key and path of every tensor, by its name in the model."""
    files = [path]
    listing = path / "model.safetensors.index.json"
    if path.is_dir() and listing.is_file():
        try:
            names = json.loads(listing.read_text(encoding="utf-8"))["weight_map"].values()
            files = [path / os.path.basename(name) for name in sorted(set(names))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{listing} is damaged: {error}") from error
    elif path.is_dir():
        files = [path / "model.safetensors"]
    places: dict[str, tuple[Any, str, Path]] = {}
    for one in files:
        try:
            file = stack.enter_context(safe_open(one, framework="pt"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{one} is missing") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{one} is damaged, or no safetensors file: {error}") from error
        places.update({prefix + key: (file, key, one) for key in file.keys()})  # noqa: SIM118
    return places


def _same_shape(where: Path, key: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CheckpointError(f"{key} in {where} has shape {found}, in the model {wanted}")
