"""The state of a sharded model: its parameters by name, whole copies, initialisation, the gradients' norm."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from node.island.collectives import Collectives
from node.island.layout import LayoutError
from node.island.param_group import ParamGroup, ShardedParameter
from node.island.runtime import units_of

Initializer = Callable[[str, Tensor, torch.Generator], Any]


def _names(model: nn.Module) -> dict[tuple[int, str], str]:
    """Name of every (module, attribute) that holds a parameter."""
    return {
        (id(child), attribute): f"{prefix}.{attribute}" if prefix else attribute
        for prefix, child in model.named_modules()
        for attribute in child._parameters
    }


def _entries(model: nn.Module) -> list[tuple[ShardedParameter, ParamGroup, int]]:
    names = _names(model)
    found = []
    for group in _groups(model):
        for index, sites in enumerate(group.sites):
            name = next(names[id(m), a] for m, a in sites if (id(m), a) in names)
            parameter = group.buffer.sharded[index]
            found.append((ShardedParameter(name, parameter, group.layout, index, group.comm), group, index))
    return found


def sharded_parameters(model: nn.Module) -> list[ShardedParameter]:
    """Every sharded parameter of ``model``, held by this rank or not, under its first name, in the order of
    units and layouts. It is the sharded form even while the weights are gathered."""
    return [entry for entry, _, _ in _entries(model)]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all sharded gradients so that their global norm is at most ``max_norm``.

    Every element lives on one rank of the shard group and is counted there; replicas hold the same and are
    not added. One scalar is reduced for each shard group. ``torch.nn.utils.clip_grad_norm_`` would see the
    gradients of one rank only.

    Args:
        model: with sharded units; gradients of ignored parameters are not counted.
        max_norm: upper bound.
        norm_type: p of the p-norm; ``inf`` for the largest magnitude.

    Returns:
        The norm before clipping, fp64, the same on all ranks.
    """
    by_comm: dict[int, tuple[Collectives, list[Tensor], torch.device]] = {}
    for group in _groups(model):
        entry = by_comm.setdefault(id(group.comm.group), (group.comm, [], group.buffer.device))
        entry[1].extend(p.grad for p in group.buffer.sharded if p.grad is not None)
    largest = norm_type == float("inf")
    total: Tensor | None = None
    for comm, gradients, device in by_comm.values():
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=_wide(g.dtype)).double() for g in gradients]
        mine = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
        share = comm.combine(
            "clipping", mine.max() if largest else mine.pow(norm_type).sum(), largest=largest
        )
        total = share if total is None else torch.maximum(total, share) if largest else total + share
    if total is None:
        return torch.zeros((), dtype=torch.float64)
    norm = total if largest else total.pow(1.0 / norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for _, gradients, _ in by_comm.values():
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
    return norm


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _groups(model: nn.Module) -> list[ParamGroup]:
    return [group for _, unit in units_of(model) for group in unit.groups]


def _gather(group: ParamGroup) -> Tensor:
    """The group's whole buffer in the master dtype, in memory of its own."""
    shard, layout = group.buffer.shard, group.layout
    what = f"gather of {group.name} for the state"
    return group.comm.gather(what, layout, shard, lambda: shard.new_empty(layout.total)).wait()


def full_state_dict(model: nn.Module, *, rank: int | None = None) -> dict[str, Tensor]:
    """Whole tensors on the CPU, in the master dtype, with the names of ``model.state_dict()``.

    One group is gathered at a time. A collective: all ranks must call it.

    Args:
        model: with sharded units.
        rank: the only rank (of each shard group) to keep the result; the others return nothing.
    """
    names = _names(model)
    state: dict[str, Tensor] = {}
    for group in _groups(model):
        layout, gathered = group.layout, _gather(group)
        if rank in (None, group.comm.rank):
            for meta, offset, sites in zip(layout.tensors, layout.offsets, group.sites, strict=True):
                whole = gathered[offset : offset + meta.numel].view(meta.shape).cpu().clone()
                state.update({names[id(m), a]: whole for m, a in sites if (id(m), a) in names})
    if rank is not None and rank not in {group.comm.rank for group in _groups(model)}:
        return {}
    own = model.state_dict()
    return {name: state.get(name, tensor) for name, tensor in own.items()}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Take this rank's part of whole tensors. No communication.

    Args:
        model: with sharded units, not on the meta device.
        state: as :func:`full_state_dict` gives it; a tied parameter may have any of its names.
        strict: demand every tensor, and no others.

    Raises:
        LayoutError: for missing, unknown or misshapen tensors.
    """
    names = _names(model)
    rest = dict(model.state_dict())
    known, missing = set(rest), []
    for group in _groups(model):
        for index, sites in enumerate(group.sites):
            aliases = [names[id(m), a] for m, a in sites if (id(m), a) in names]
            found = next((name for name in aliases if name in state), None)
            if found is None:
                missing.append(aliases[0])
            else:
                group.buffer.fill(index, state[found])
            for name in aliases:
                rest.pop(name, None)
    for name, tensor in rest.items():
        if name not in state:
            missing.append(name)
        elif tensor.shape != state[name].shape:
            raise LayoutError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(state[name].shape)}")
        else:
            tensor.copy_(state[name])
    unknown = sorted(set(state) - known)
    if strict and (missing or unknown):
        raise LayoutError(f"the state lacks {missing[:5]} and has {unknown[:5]}, which the model has not")


@torch.no_grad()
def init_parameters(
    model: nn.Module, init: Initializer, *, seed: int, device: torch.device | str | None = None
) -> None:
    """Initialise sharded parameters one by one, with a result that does not depend on the ranks.

    Every parameter has a generator seeded by ``seed`` and its name, so only the ranks that hold a part of it
    draw it: in place on an owner, through one temporary tensor for a part.

    Args:
        model: with sharded units, perhaps on the meta device.
        init: fills a whole tensor in place, given the parameter's name, the tensor and a generator on its
            device.
        seed: of the run.
        device: where a model on the meta device is to live. Its other buffers are then uninitialised too.
    """
    if any(group.buffer.device.type == "meta" for group in _groups(model)):
        if device is None:
            raise LayoutError("the model is on the meta device: say on which device it is to live")
        model.to_empty(device=device)
        for group in _groups(model):
            group.buffer.zero_()
    for entry, group, index in _entries(model):
        piece, buffer = entry.piece, group.buffer
        if piece is None:
            continue
        word = hashlib.sha256(f"{seed} {entry.name}".encode()).digest()[:8]
        generator = torch.Generator(buffer.device).manual_seed(int.from_bytes(word, "little") >> 1)
        if piece.numel == entry.meta.numel:
            init(entry.name, buffer.shard_view(index), generator)
        else:
            whole = torch.zeros(entry.meta.shape, dtype=buffer.dtype, device=buffer.device)
            init(entry.name, whole, generator)
            buffer.fill(index, whole)
