"""``fully_shard``: which parameters make a unit, and which rank holds what of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from node.island.collectives import Collectives, CommPolicy
from node.island.hooks import attach
from node.island.layout import LayoutError, Plan
from node.island.module import IslandModule
from node.island.param_group import ParamGroup, Site
from node.island.placement import BoundPlan, Granularity, Placed, Placement, Rules, from_plan, natural_units
from node.island.policies import MixedPrecisionPolicy, Schedule
from node.island.runtime import UNIT_ATTRIBUTE, units_of
from node.island.unit import Unit

Wrapped = TypeVar("Wrapped", bound="nn.Module | list[Any]")

# Elements that the ranks of a group hold of units wrapped so far, until a root is wrapped.
_loads: WeakKeyDictionary[dist.ProcessGroup, list[float]] = WeakKeyDictionary()


def fully_shard(
    module: Wrapped,
    *,
    mesh: DeviceMesh | None = None,
    placement: Placement | BoundPlan = "owner",
    granularity: Granularity = "row",
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    units: Iterable[nn.Module] = (),
    comm_policy: CommPolicy | None = None,
    schedule: Schedule | None = None,
) -> Wrapped:
    """Shard the parameters of ``module`` over the ranks of an island (ZeRO-3), in place.

    As with ``torch.distributed.fsdp.fully_shard``: wrap the blocks first and the model last, which takes the
    parameters that are left; build the optimizer afterwards. ``units`` does both in one call, and is needed
    where blocks share parameters: those go to the root, as does everything that several units hold.
    Parameters become plain ``nn.Parameter`` objects of what this rank holds
    (:class:`~node.island.param_group.ShardedParameter`). The ranks must have built the same model; with
    replicas the first replica's weights are taken.

    Args:
        module: on the CPU, a GPU, or the meta device (then :func:`init_parameters`, or ``to_empty`` and an
            initialisation of your own, on the sharded parameters). A list of modules, none within another,
            is one unit, gathered for the first of them and released after all have run.
        mesh: one dimension (shard), or two (replicate, shard) for hybrid sharding; all ranks by default, or
            this process alone where there is no process group.
        placement: ``"owner"``: every matrix whole on one rank, so that a matrix optimizer needs no
            communication; embeddings, the output head and frozen weights by rows; stacks of matrices one by
            one. ``"ragged"``: everything cut evenly at ``granularity``. A function of name and parameter
            that returns one of the two words, or a :class:`Plan` with names relative to ``module``
            (:class:`BoundPlan` for wrapping block by block).
        granularity: of ragged tensors: ``"element"``, ``"row"``, ``"rows:K"``, ``"block"``, ``"matrix"``, a
            number of elements, or a function of name and parameter that returns one of these, or the rows of
            successive unequal blocks.
        mp_policy: dtypes.
        reshard_after_forward: whether to release the weights between forward and backward; None: yes, but
            not for the root. As in FSDP2, 1 is no, and the number of ranks yes; other numbers are refused.
        ignored_params: left as they are, and not reduced.
        units: submodules to wrap first, with the same arguments.
        comm_policy: how segments travel.
        schedule: how far to run ahead; that of the root counts.

    Returns:
        ``module``, whose class is now a subclass that also derives from
        :class:`~node.island.module.IslandModule`.

    Raises:
        LayoutError: for a module wrapped twice, a recurrent layer, parameters that an earlier wrapped unit
            shares with ``module``, or a plan that does not fit.
    """
    comm, device = _comm(mesh, comm_policy or CommPolicy())
    wrapped: list[nn.Module] = [module] if isinstance(module, nn.Module) else list(module)
    around: nn.Module = wrapped[0] if isinstance(module, nn.Module) else nn.ModuleList(wrapped)
    blocks, sites = list(units), _sites(around)
    _refuse(around, blocks, wrapped, sites)
    reshard = _reshard_after_forward(reshard_after_forward, comm.ranks)
    policy = mp_policy or MixedPrecisionPolicy()
    inside = units_of(around)
    root = bool(blocks or inside)
    if blocks and not inside and comm.group is not None:
        _loads.pop(comm.group, None)  # of units outside of this model, which never had a root
    loads = _ledger(comm)
    place = _placer(around, placement, granularity, loads, root=root)
    skipped = {id(parameter) for parameter in ignored_params}
    for _, unit in inside:
        for group in unit.groups:
            skipped.update(map(id, [*group.buffer.sharded, *group.buffer.unsharded]))
    free = {name: p for name, p in around.named_parameters() if id(p) not in skipped}
    depth = {id(child): name.count(".") for name, child in around.named_modules()}

    # innermost first: a block takes what it alone holds, the module what is left
    inner = sorted(blocks, key=lambda block: -depth[id(block)])
    for members in [*([block] for block in inner), wrapped]:
        within = {id(child) for member in members for child in member.modules()}
        own = {n: p for n, p in free.items() if all(id(holder) in within for holder, _ in sites[id(p)])}
        free = {name: parameter for name, parameter in free.items() if name not in own}
        groups: list[ParamGroup] = []
        for layout, names in place(own):
            parameters = [own[name] for name in names]
            where = parameters[0].device
            if device is not None and where.type != "meta":
                where = device
            holders = [sites[id(parameter)] for parameter in parameters]
            name = f"{type(members[0]).__name__} (group {len(groups)})"
            groups.append(ParamGroup(name, layout, holders, parameters, comm, policy, where))
        unit = Unit(members, groups, comm, policy, reshard, schedule or Schedule())
        for target in members:
            target.__dict__[UNIT_ATTRIBUTE] = unit
            target.__class__ = type(f"Island{type(target).__name__}", (IslandModule, type(target)), {})
        attach(unit)
    if root and comm.group is not None:
        _loads.pop(comm.group, None)
    return module


def _ledger(comm: Collectives) -> list[float]:
    empty = [0.0] * comm.ranks
    return empty if comm.group is None else _loads.setdefault(comm.group, empty)


def _placer(
    module: nn.Module,
    placement: Placement | BoundPlan,
    granularity: Granularity,
    loads: list[float],
    *,
    root: bool,
) -> Callable[[dict[str, nn.Parameter]], list[Placed]]:
    """The function that divides the parameters of a unit among groups and ranks."""
    if isinstance(placement, (BoundPlan, Plan)):
        plan = placement.plan if isinstance(placement, BoundPlan) else placement

        def by_plan(own: dict[str, nn.Parameter]) -> list[Placed]:
            name = placement.name if isinstance(placement, BoundPlan) else None
            placed = from_plan(plan, {n: name(p) if name else n for n, p in own.items()}, own)
            for layout, _ in placed:
                if layout.ranks != len(loads):
                    raise LayoutError(
                        f"the plan was made for {layout.ranks} ranks, the mesh shards over {len(loads)}"
                    )
            return placed

        return by_plan
    return Rules(placement, granularity, loads, natural_units(module, root=root)).place


def _comm(mesh: DeviceMesh | None, policy: CommPolicy) -> tuple[Collectives, torch.device | None]:
    if mesh is None:
        return Collectives(dist.group.WORLD if dist.is_initialized() else None, None, policy), None
    if mesh.ndim > 2:
        raise LayoutError(f"a mesh of {mesh.ndim} dimensions: use one (shard) or two (replicate, shard)")
    device = None
    if mesh.device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if mesh.ndim == 1:
        return Collectives(mesh.get_group(), None, policy), device
    return Collectives(mesh.get_group(1), mesh.get_group(0), policy), device


def _sites(module: nn.Module) -> dict[int, list[Site]]:
    """All holders of every parameter, by identity."""
    found: dict[int, list[Site]] = {}
    for child in module.modules():
        for attribute, parameter in child._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((child, attribute))
    return found


def _reshard_after_forward(wanted: bool | int | None, ranks: int) -> bool | None:
    if wanted is None or isinstance(wanted, bool):
        return wanted
    if wanted in (1, ranks):
        return wanted != 1
    raise LayoutError(
        f"reshard_after_forward={wanted}: an owner's matrices are not cut, so there is no smaller group of"
        f" ranks to cut them over between forward and backward. Say False (keep the weights), True (release"
        f" them), or shard over {wanted} ranks and replicate, with a mesh of two dimensions"
    )


def _refuse(
    module: nn.Module, blocks: list[nn.Module], wrapped: list[nn.Module], sites: dict[int, list[Site]]
) -> None:
    if not wrapped:
        raise LayoutError("fully_shard was given an empty list")
    for target in [*blocks, *wrapped]:
        if isinstance(target, IslandModule):
            raise LayoutError(f"{type(target).__name__} is wrapped already")
        if any(other is not target and target in other.modules() for other in wrapped if target in wrapped):
            raise LayoutError(f"{type(target).__name__} is within another module of the list: leave it out")
    for name, child in module.named_modules():
        if isinstance(child, nn.RNNBase):
            raise LayoutError(f"{name or 'the module'}: recurrent layers keep their own list of weights")
    inside = {id(child) for child in module.modules()}
    if any(id(block) not in inside or block in wrapped for block in blocks):
        raise LayoutError("units: all of them must be submodules of the wrapped module")
    for name, unit in units_of(module):
        for group in unit.groups:
            for meta, reference in zip(group.layout.tensors, group.originals, strict=True):
                original = reference()
                if original is not None and id(original) in sites:
                    raise LayoutError(
                        f"{name}: {meta.name} is shared with a module outside of its unit: wrap all of them"
                        f" in one call, fully_shard(model, units=[…]), or ignore it in the units"
                    )
